"""Steps of a DAMP cache as graphs, without a GPU: a capture records the operations, a replay repeats them.

As with a real graph nothing of the model's Python runs in a replay, tensors stay where they were recorded, and reading a
tensor on the host breaks a capture off.
"""

import copy
import pickle

import pytest
import torch
from damp_models import ARCHITECTURES, build_model, identity_plans, layouts, random_plans, tokens
from tape import TapeGraphs, record_as_one
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from hf_lowbit import generation
from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.config import DAMPConfig, LowBitConfig
from hf_lowbit.damp import decode, state
from hf_lowbit.damp.attach import attach_damp
from hf_lowbit.damp.cache import DAMPStateCache
from hf_lowbit.damp.decode import find_decoder, places_for
from hf_lowbit.damp.full_precision import FullStateCache
from hf_lowbit.errors import FallbackError
from hf_lowbit.evaluation.storage import _tensors


class HostGraphs(TapeGraphs):
    def held(self):
        return self.cache.step_tensors()

    def addresses(self):
        owners = (self.cache.layers, self.cache._step, self._embeds)
        return {t.data_ptr() for owner in owners for t in _tensors(owner, set()) if t.numel()}


def play(cache, model, wanted=None):
    cache._graphs = HostGraphs(find_decoder(model), wanted)
    cache._graphs.cache = cache
    return cache


def packed_cache(model, low_bits=8, **options):
    return DAMPStateCache(model, plans=random_plans(model), layouts=layouts(model, 2, low_bits), **options)


def with_graphs(model, wanted=None, **options):
    return play(packed_cache(model, **options), model, wanted)


def generate(model, ids, cache, count, **options):
    out = model.generate(
        ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, **{CACHE_ARG: cache}, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits, 1)


@pytest.fixture(autouse=True)
def one_operation(monkeypatch):
    record_as_one(monkeypatch, state, "damp_update")


@pytest.fixture
def small_places(monkeypatch):
    monkeypatch.setattr(decode, "SMALLEST", 16)


def left_padded(*lengths):
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for i, n in enumerate(lengths):
        ids[i, max(lengths) - n :] = tokens(n, seed=i)[0]
    return ids, (ids != 0).long()


@pytest.mark.compat
@pytest.mark.parametrize("low_bits", [8, 32])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_generate_gives_the_tokens_of_eager_steps(name, low_bits, small_places):
    model = build_model(name)
    ids, mask = left_padded(21, 9, 1)
    eager, graphs = packed_cache(model, low_bits), with_graphs(model, True, low_bits=low_bits)
    expected, logits = generate(model, ids, eager, 24, attention_mask=mask)
    found, new = generate(model, ids, graphs, 24, attention_mask=mask)
    assert torch.equal(found, expected)
    # Sums over more places differ in the last bits. That moves a code of 8 bits here and there, and nothing at 32.
    assert (new - logits).abs().max() < (0.05 if low_bits == 8 else 1e-4)
    assert graphs.get_seq_length() == eager.get_seq_length() == 44
    for a, b in zip(graphs.attention_slots, eager.attention_slots, strict=True):
        assert a.keys.shape == b.keys.shape and (a.keys - b.keys).abs().mean() < 1e-3
        assert a.values.shape == b.values.shape and (a.values - b.values).abs().mean() < 1e-3
    # 23 steps: 24, 32 and 48 places, a graph for each; the room for 64 tokens at once.
    assert graphs.graph_replays >= 23 - 3 and graphs._graphs.captures <= 3 and eager.graph_replays == 0


def test_one_row_without_a_mask_and_with_stochastic_rounding(small_places):
    """Counters of writes go on inside of the graph."""
    model, ids = build_model("qwen3_5"), tokens(20)
    eager, graphs = (make(model, rounding="stochastic", seed=3) for make in (packed_cache, with_graphs))
    logits = []
    with torch.no_grad():
        for cache in (eager, graphs):
            model(ids, **{CACHE_ARG: cache})
            logits.append(torch.cat([model(ids[:, i : i + 1], **{CACHE_ARG: cache}).logits for i in range(12)]))
    torch.testing.assert_close(*logits, atol=1e-2, rtol=1e-2)
    steps = [cache.delta_layers[0].state.tensors["steps"].tolist() for cache in (eager, graphs)]
    assert steps == [[13], [13]] and graphs.graph_replays >= 9
    for a, b in zip(graphs.delta_layers, eager.delta_layers, strict=True):
        assert (a.state.decode() - b.state.decode()).abs().mean() < 1e-3 * b.state.decode().abs().mean()


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_beams_replay(name):
    model = build_model(name)
    ids, mask = left_padded(12, 5)
    eager, graphs = packed_cache(model), with_graphs(model)
    expected, found = (
        generate(model, ids, cache, 16, attention_mask=mask, num_beams=3)[0] for cache in (eager, graphs)
    )
    assert torch.equal(found, expected)
    # Reordering moves rows in place, so that one capture serves all steps.
    assert graphs._graphs.captures == 1 and graphs.graph_replays >= 13


def test_two_turns_and_everything_that_changes_a_cache_between_steps(small_places):
    model = build_model("qwen3_5")

    @torch.no_grad()
    def conversation(cache):
        logits = []

        def steps(rows, count):
            for i in range(count):
                token = (torch.arange(rows) * 7 + i).remainder(80)[:, None] + 1
                logits.append(model(token, **{CACHE_ARG: cache}).logits)

        def turn(rows, count):
            logits.append(model(tokens(count, rows, seed=count), **{CACHE_ARG: cache}).logits)

        turn(3, 10)
        steps(3, 4)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        steps(3, 4)
        turn(3, 5)
        steps(3, 4)
        turn(3, 60)  # more than there is room for
        steps(3, 4)
        cache.batch_select_indices(torch.tensor([2, 1]))
        steps(2, 4)
        cache.batch_repeat_interleave(2)
        steps(4, 4)
        for layer in cache.layers:
            layer.offload()
            layer.prefetch()
        steps(4, 4)
        for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            if isinstance(cache._graphs, HostGraphs):
                play(other, model)
            kept, cache = cache, other
            steps(4, 4)
            assert cache.get_seq_length() == kept.get_seq_length() + 4
            cache = kept
        assert all(torch.equal(a, b) for a, b in zip(logits[-8:-4], logits[-4:], strict=True))
        cache.reset()
        turn(1, 7)
        steps(1, 5)
        return logits

    expected = conversation(packed_cache(model))
    cache = with_graphs(model)
    found = conversation(cache)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=1e-2)
    assert sum((a - b).abs().mean() for a, b in zip(found, expected)) / len(found) < 1e-3
    assert cache.graph_replays >= 14


@torch.no_grad()
def test_room_grows_and_is_what_generate_needs(small_places):
    model, ids = build_model("kimi_linear"), tokens(30)
    cache = with_graphs(model)
    model(ids, **{CACHE_ARG: cache})
    assert [slot.capacity for slot in cache.attention_slots] == [0]  # nothing is reserved before a step needs it
    for i in range(40):
        model(ids[:, i % 30 : i % 30 + 1], **{CACHE_ARG: cache})
    assert (
        cache.attention_slots[0].capacity == 128 and cache._graphs.captures == 4
    )  # 64, then 128; 32, 48, 64, 96 places
    report = cache.memory_report()
    assert report.attention_bytes == sum(t.nbytes for t in cache.attention_slots[0].room)
    assert report.scratch > cache.step_bytes > 128

    announced, fixed = with_graphs(model), with_graphs(model, max_cache_len=700)
    announced.expect_length(300)
    for kept in (announced, fixed):
        model(tokens(260), **{CACHE_ARG: kept})
        model(ids[:, :1], **{CACHE_ARG: kept})
    # In 64s. A step attends to 384 places, but no more will come than 300.
    assert announced.attention_slots[0].capacity == 320 and fixed.attention_slots[0].capacity == 704
    for wrong in (0, 1.5):
        with pytest.raises(ValueError, match=f"max_cache_len={wrong}"):
            packed_cache(model, max_cache_len=wrong)


def test_generate_of_a_calibrated_model_announces_its_length(small_places):
    model = build_model("qwen3_5")
    config = DAMPConfig(rows=2)
    attach_damp(model, config, random_plans(model))
    model.config.quantization_config = LowBitConfig(damp=config)
    generation.enable(model)
    cache = play(generation.make_cache(model, max_cache_len=50), model)
    generate(model, tokens(30), cache, 100)
    assert cache.attention_slots[0].capacity == 192 and cache.graph_replays >= 90  # 129 tokens, in 64s
    with pytest.raises(FallbackError, match="graphs need CUDA"):
        generate(model, tokens(30), None, 4, cache_implementation="damp", cache_config={"cuda_graphs": True})


def test_a_model_that_also_sees_images(small_places):
    """Its positions have three axes."""
    sizes = ARCHITECTURES["qwen3_5"][2]
    vision = dict(
        depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, num_position_embeddings=16
    )
    ids = dict(image_token_id=85, video_token_id=86, vision_start_token_id=87, vision_end_token_id=88)
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=sizes, vision_config=vision, **ids)).eval()
    prompt = tokens(9, rows=2) % 80 + 1
    eager, graphs = packed_cache(model), with_graphs(model, True)
    assert find_decoder(model) is model.model.language_model
    expected, found = (generate(model, prompt, cache, 12) for cache in (eager, graphs))
    assert torch.equal(found[0], expected[0]) and graphs.graph_replays >= 7
    torch.testing.assert_close(found[1], expected[1], atol=1e-3, rtol=1e-3)


def test_places_grow_by_a_half_and_a_third():
    assert [places_for(n) for n in (1, 256, 257, 384, 385, 513, 2049, 6000)] == [
        256,
        256,
        384,
        384,
        512,
        768,
        3072,
        6144,
    ]


@torch.no_grad()
def test_outputs_are_not_overwritten_and_a_decoder_may_be_called_itself():
    model, cache = build_model("qwen3_5"), None
    cache = with_graphs(model)
    model(tokens(20), **{CACHE_ARG: cache})
    outs = [model.model(torch.tensor([[i + 1]]), **{CACHE_ARG: cache}).last_hidden_state for i in range(6)]
    copies = [out.clone() for out in outs]
    embeds = model.model.embed_tokens(torch.tensor([[9]]))
    model.model(torch.tensor([[9]]), torch.ones(1, 27, dtype=torch.long), torch.tensor([[26]]), cache)
    model.model(inputs_embeds=embeds, **{CACHE_ARG: cache})
    assert cache.graph_replays == 7
    assert all(torch.equal(a, b) for a, b in zip(outs, copies, strict=True)) and not torch.equal(outs[4], outs[5])


@torch.no_grad()
@pytest.mark.parametrize(
    "asked, reason",
    [
        (dict(output_hidden_states=True), "output_hidden_states"),
        (dict(attention_mask=torch.ones(1, 1, 1, 21, dtype=torch.bool)), "no matrix with 21 columns"),
        (dict(position_bias=torch.zeros(1)), "argument position_bias"),
    ],
    ids=["hidden_states", "mask", "argument"],
)
def test_what_a_graph_cannot_give_runs_eagerly_or_is_refused_when_asked_for(asked, reason):
    model = build_model("qwen3_5")
    eager, cache, strict = packed_cache(model), with_graphs(model), with_graphs(model, wanted=True)
    for kept in (eager, cache, strict):
        model(tokens(20), **{CACHE_ARG: kept})
    token = torch.tensor([[5]])
    if "position_bias" not in asked:
        a, b = (model(token, **asked, **{CACHE_ARG: kept}) for kept in (eager, cache))
        torch.testing.assert_close(a.logits, b.logits)
        assert cache.graph_replays == 0 and cache.get_seq_length() == 21
    with pytest.raises(FallbackError, match=reason):
        model(token, **asked, **{CACHE_ARG: strict})
    assert strict.get_seq_length() == 20
    with torch.enable_grad(), pytest.raises(FallbackError, match="no_grad"):
        model(token, **{CACHE_ARG: strict})


@torch.no_grad()
def test_experts_that_are_looked_up_on_the_host_are_not_captured():
    model = build_model("qwen3_5_moe")
    cache, strict = with_graphs(model), with_graphs(model, wanted=True)
    assert cache.uses_cuda_graphs
    model.set_experts_implementation("eager")
    assert not cache.uses_cuda_graphs and "experts_implementation='eager'" in cache.graph_problem
    for kept in (cache, strict):
        model(tokens(20), **{CACHE_ARG: kept})
    for _ in range(3):
        model(torch.tensor([[5]]), **{CACHE_ARG: cache})
    assert cache.graph_replays == 0 and cache.get_seq_length() == 23
    with pytest.raises(FallbackError, match="grouped_mm"):
        model(torch.tensor([[5]]), **{CACHE_ARG: strict})


def test_a_failed_capture_is_told_once_and_costs_nothing_but_speed(monkeypatch):
    model, ids = build_model("qwen3_5"), tokens(20)
    expected = generate(model, ids, packed_cache(model), 10)[0]

    def fail(self, forward):
        raise RuntimeError("out of handles")

    monkeypatch.setattr(HostGraphs, "_capture", fail)
    cache = with_graphs(model)
    with pytest.warns(UserWarning, match="without CUDA graphs.*out of handles") as caught:
        found = generate(model, ids, cache, 10)[0]
    assert len([w for w in caught if "CUDA graphs" in str(w.message)]) == 1
    assert torch.equal(found, expected) and not cache.uses_cuda_graphs
    with pytest.raises(FallbackError, match="out of handles"):
        generate(model, ids, with_graphs(model, wanted=True), 10)


def test_without_a_gpu_nothing_changes():
    model = build_model("qwen3_5")
    cache = packed_cache(model)
    generate(model, tokens(9), cache, 4)
    assert not cache.uses_cuda_graphs and "cuda_graphs=False" in repr(cache)
    assert cache.attention_slots[0].room is None  # transformers' own growing tensors
    forward = type(model.model).forward
    assert packed_cache(model) and type(model.model).forward is forward  # wrapped once
    with pytest.raises(FallbackError, match="on cpu, and graphs need CUDA"):
        packed_cache(model, cuda_graphs=True)
    assert "asked for" in packed_cache(model, cuda_graphs=False)._graphs.problem


def test_gradients_reach_keys_of_the_pass_as_in_a_stock_cache():
    model, ids = build_model("qwen3_5"), tokens(20)
    eager, graphs = packed_cache(model), with_graphs(model)
    found = []
    for cache in (eager, graphs):
        with torch.no_grad():
            for piece in (ids[:, :12], ids[:, 12:13], ids[:, 13:14]):
                model(piece, **{CACHE_ARG: cache})
        model.zero_grad()
        model(ids[:, 14:], **{CACHE_ARG: cache}).logits.logsumexp(-1).sum().backward()
        found.append(model.model.layers[2].self_attn.k_proj.weight.grad.clone())
    assert found[0].abs().max() > 0
    torch.testing.assert_close(*found, atol=1e-2, rtol=1e-2)


@pytest.mark.compat
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_fp32_states_replay_in_the_same_way(name, small_places):
    """The other side of a comparison of speed: transformers' states and recurrence."""
    model = build_model(name)
    ids, mask = left_padded(20, 3)
    exact = DAMPStateCache(model, plans=identity_plans(model), layouts=layouts(model, 0, 32), backend="model")
    expected = generate(model, ids, exact, 16, attention_mask=mask)
    full = play(FullStateCache(model), model, True)
    found = generate(model, ids, full, 16, attention_mask=mask)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-4)
    assert full.graph_replays >= 12
    full.reset()
    again = generate(model, ids, full, 16, attention_mask=mask)[0]
    assert torch.equal(again, found[0])
