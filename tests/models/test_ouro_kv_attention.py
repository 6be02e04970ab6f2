"""The KVAttention hook: a cache that gets keys before RoPE and attends itself."""

import pytest
import torch

from hf_lowbit.compat import cache_kwargs, get_cache
from hf_lowbit.models.ouro.modeling_ouro import apply_rotary_pos_emb
from hf_lowbit.protocols import KVAttention


pytestmark = pytest.mark.compat

TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}


class PlainKVAttention:
    """Stores keys before RoPE and their angles, per (step, layer); any chunk size; right for left-padded rows."""

    def __init__(self, chunk_size: int = 1000):
        self.chunk_size = chunk_size
        self.slots: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.mask: torch.Tensor | None = None
        self.chunks: list[int] = []

    def run(self, inputs_embeds, attention_mask, forward_chunk):
        batch, new, _ = inputs_embeds.shape
        if attention_mask is None:
            past = 0 if self.mask is None else self.mask.shape[1]
            attention_mask = torch.ones(batch, past + new, dtype=torch.long)
        past = attention_mask.shape[1] - new
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        outputs = []
        for start in range(0, new, self.chunk_size):
            stop = min(start + self.chunk_size, new)
            self.mask = attention_mask[:, : past + stop]
            self.chunks.append(stop - start)
            outputs.append(forward_chunk(inputs_embeds[:, start:stop], positions[:, past + start : past + stop]))
        return {name: torch.cat([out[name] for out in outputs], dim=1) for name in outputs[0]}

    def attend(self, query, key, value, cos, sin, *, layer, step, module):
        old = self.slots.get((step, layer))
        batch = query.shape[0]
        cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
        new = [key, value, cos, sin]
        if old is not None:
            new = [torch.cat([a, b], dim=-2) for a, b in zip(old, new)]
        self.store(step, layer, new)
        key, value, all_cos, all_sin = new
        query, _ = apply_rotary_pos_emb(query, query, cos, sin)
        _, key = apply_rotary_pos_emb(key, key, all_cos, all_sin)
        groups = module.num_key_value_groups
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        length, total = query.shape[2], key.shape[2]
        allowed = torch.ones(length, total).tril(total - length).bool() & self.mask[:, None, None].bool()
        scores = (query @ key.transpose(-1, -2) * module.scaling).masked_fill(~allowed, -1e9)
        return (scores.softmax(-1) @ value).transpose(1, 2)

    def store(self, step, layer, tensors):
        self.slots[step, layer] = tensors

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.mask is None else self.mask.shape[1]


class StatelessKVAttention(PlainKVAttention):
    """Nothing is stored, so a layer may be replayed by gradient checkpointing."""

    def store(self, step, layer, tensors):
        pass


def test_the_test_object_is_a_kv_attention():
    assert isinstance(PlainKVAttention(), KVAttention)


@pytest.mark.parametrize("chunk_size", [1000, 5, 1], ids=lambda c: f"chunk{c}")
@pytest.mark.parametrize("kv_heads", [4, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("steps", [1, 3], ids=lambda t: f"T{t}")
def test_equals_the_stock_path(make_model, ids, steps, kv_heads, chunk_size):
    model = make_model(total_ut_steps=steps, num_key_value_heads=kv_heads)
    cache = PlainKVAttention(chunk_size)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        first = model(ids[:, :9], cache=cache)
        rest = model(ids[:, 9:], past_key_values=cache)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), expected, **TOLERANCE)
    assert get_cache(first) is cache
    assert sorted(cache.slots) == [(u, i) for u in range(steps) for i in range(2)]
    key, value, _, _ = cache.slots[0, 0]
    assert key.shape == value.shape == (2, kv_heads, 13, 16)


def test_left_padding(make_model, ids):
    model = make_model(total_ut_steps=2)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, cache=PlainKVAttention(4)).logits
        alone = model(ids[:1, 5:], use_cache=False).logits
    torch.testing.assert_close(logits[:1, 5:], alone, **TOLERANCE)


@pytest.mark.parametrize(
    "arguments",
    [{"exit_at_step": 1}, {"exit_threshold": 0.5}, {"use_weighted_exit": True}, {"labels": True}],
    ids=["step", "threshold", "weighted", "labels"],
)
def test_exits_across_chunks(make_model, ids, arguments):
    model = make_model(total_ut_steps=3)
    if "labels" in arguments:
        arguments = {"labels": ids}
    with torch.no_grad():
        expected = model(ids, use_cache=False, **arguments)
        out = model(ids, cache=PlainKVAttention(4), **arguments)
    torch.testing.assert_close(out.logits, expected.logits, **TOLERANCE)
    if expected.loss is not None:
        torch.testing.assert_close(out.loss, expected.loss, **TOLERANCE)


def test_chunks_return_only_what_was_asked_for(make_model, ids):
    model = make_model(total_ut_steps=3).model
    seen = []

    class Spy(PlainKVAttention):
        def run(self, inputs_embeds, attention_mask, forward_chunk):
            fields = super().run(inputs_embeds, attention_mask, forward_chunk)
            seen.append({name: tuple(value.shape) for name, value in fields.items()})
            return fields

    with torch.no_grad():
        plain = model(ids, use_cache=False, output_loop_states=True, output_hidden_states=True)
        model(ids, cache=Spy())
        model(ids, cache=Spy(), exit_threshold=0.5)
        out = model(ids, cache=Spy(4), output_loop_states=True)
        hidden = model(ids, cache=Spy(4), output_hidden_states=True).hidden_states
    last = {"last_hidden_state": (2, 13, 48)}
    assert seen[:2] == [last, last]
    assert seen[2] == {**last, "loop_hidden_states": (2, 13, 3, 48), "exit_gates": (2, 13, 3)}
    torch.testing.assert_close(out.loop_hidden_states, plain.loop_hidden_states, **TOLERANCE)
    torch.testing.assert_close(out.exit_gates, plain.exit_gates, **TOLERANCE)
    assert len(hidden) == len(plain.hidden_states) == 7
    for got, expected in zip(hidden, plain.hidden_states):
        torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_gradients_through_all_loops(make_model, ids, checkpointing):
    model = make_model(total_ut_steps=3).train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = []

    class Counting(StatelessKVAttention):
        def attend(self, *args, layer, step, module):
            calls.append((step, layer))
            return super().attend(*args, layer=layer, step=step, module=module)

    model(ids, labels=ids, cache=Counting()).loss.backward()
    # with checkpointing every layer is replayed, through the KVAttention and with the step it had
    assert sorted(calls) == sorted([(u, i) for u in range(3) for i in range(2)] * (2 if checkpointing else 1))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_generate_with_a_kv_attention_object(make_model, ids):
    from transformers import DynamicCache

    class GenerateCache(PlainKVAttention, DynamicCache):
        """generate() needs a Cache; its layers stay unused."""

        def __init__(self):
            DynamicCache.__init__(self)
            PlainKVAttention.__init__(self, chunk_size=4)

    model = make_model(total_ut_steps=2)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for attention_mask in (torch.ones_like(ids), mask):
        options = {"attention_mask": attention_mask, "do_sample": False, "max_new_tokens": 6}
        cache = GenerateCache()
        out = model.generate(ids, **cache_kwargs(cache), **options)
        assert torch.equal(out, model.generate(ids, use_cache=False, **options))
        assert cache.layers == [] and cache.chunks[:4] == [4, 4, 4, 1]


def test_errors_say_what_to_do(make_model, ids):
    model = make_model()
    with pytest.raises(ValueError, match="2-D attention mask .* got shape"):
        model(ids, attention_mask=torch.zeros(2, 1, 13, 13), cache=PlainKVAttention())
    with pytest.raises(ValueError, match="2-D attention mask .* got a dict"):
        model(ids, attention_mask={"full_attention": None}, cache=PlainKVAttention())
    with pytest.raises(ValueError, match="output_attentions=True is not available"):
        model(ids, output_attentions=True, cache=PlainKVAttention())
