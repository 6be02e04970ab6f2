"""Stock caches: one slot per (loop step, layer), whichever way the cache was made."""

import importlib.util

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_lowbit.compat import CACHE_ARG, cache_kwargs, get_cache
from hf_lowbit.models import extend_cache


pytestmark = pytest.mark.compat

TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}
GREEDY = {"do_sample": False, "max_new_tokens": 9}


def static_cache(model, length=64):
    return StaticCache(config=model.config, max_cache_len=length)


def dynamic_cache(model):
    return DynamicCache(config=model.config)


CACHES = {"dynamic": dynamic_cache, "lazy": lambda model: DynamicCache(), "static": static_cache}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("steps", [1, 2, 4], ids=lambda t: f"T{t}")
def test_chunks_with_cache_equal_one_pass_without(make_model, ids, steps, kind):
    model = make_model(total_ut_steps=steps)
    cache = CACHES[kind](model)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        parts = [model(chunk, cache=cache).logits for chunk in ids.split([6, 1, 1, 5], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, **TOLERANCE)
    assert len(cache.layers) == model.config.num_cache_slots == steps * 2
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {13}


@pytest.mark.parametrize("kv_heads", [4, 2], ids=["mha", "gqa"])
def test_70_single_steps_equal_one_prefill(make_model, kv_heads):
    model = make_model(total_ut_steps=3, num_key_value_heads=kv_heads)
    ids = torch.randint(1, 61, (2, 70), generator=torch.Generator().manual_seed(5))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        steps = [model(ids[:, i : i + 1], cache=cache).logits for i in range(70)]
    torch.testing.assert_close(torch.cat(steps, 1), expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_argument_names_work_on_every_release(make_model, ids, name):
    model = make_model()
    for forward in (model, model.model):
        cache = DynamicCache()
        with torch.no_grad():
            out = forward(ids, **{name: cache})
        assert cache.get_seq_length() == 13
        assert get_cache(out) is cache
    with pytest.raises(TypeError, match="two different caches"):
        model(ids, cache=DynamicCache(), past_key_values=DynamicCache())


def test_use_cache_false_and_positional_cache(make_model, ids):
    model = make_model()
    with torch.no_grad():
        assert get_cache(model(ids, use_cache=False)) is None
        assert get_cache(model(ids)).get_seq_length() == 13
        cache = DynamicCache()
        model(ids, None, None, cache)  # fourth, as in every transformers model
    assert cache.get_seq_length() == 13


def test_generate_equals_generate_without_cache(make_model, ids):
    for steps in (1, 3):
        model = make_model(total_ut_steps=steps)
        expected = model.generate(ids, use_cache=False, **GREEDY)
        assert torch.equal(model.generate(ids, **GREEDY), expected)
        assert torch.equal(model.generate(ids, cache_implementation="dynamic", **GREEDY), expected)


def test_static_equals_dynamic(make_model, ids):
    model = make_model(total_ut_steps=3)
    expected = model.generate(ids, **GREEDY)
    for _ in range(2):  # the second call reuses the model's static cache
        assert torch.equal(model.generate(ids, cache_implementation="static", **GREEDY), expected)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(ids, attention_mask=mask, cache_implementation="static", **GREEDY), expected)


@pytest.mark.parametrize("kind", CACHES)
def test_user_cache_and_next_turn(make_model, ids, kind):
    model = make_model(total_ut_steps=2)
    cache = CACHES[kind](model)
    first = model.generate(ids, **cache_kwargs(cache), **GREEDY)
    assert torch.equal(first, model.generate(ids, use_cache=False, **GREEDY))
    follow_up = torch.cat([first, ids[:, :5]], dim=1)
    second = model.generate(follow_up, **cache_kwargs(cache), **GREEDY)
    assert torch.equal(second, model.generate(follow_up, use_cache=False, **GREEDY))


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("implementation", [None, "static"], ids=["dynamic", "static"])
def test_left_padded_row_equals_the_row_alone(make_model, ids, attn, implementation):
    model = make_model(total_ut_steps=3, attn=attn)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, :6], mask[0, :6] = 0, 0
    together = model.generate(padded, attention_mask=mask, cache_implementation=implementation, **GREEDY)
    alone = model.generate(ids[:1, 6:], cache_implementation=implementation, **GREEDY)
    assert torch.equal(together[0, 13:], alone[0, 7:])


@pytest.mark.parametrize("remove", [1, 5, 12])
def test_crop_then_continue(make_model, ids, remove):
    model = make_model(total_ut_steps=2)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(ids).logits
        model(ids, cache=cache)
        cache.crop(-remove)
        assert {layer.get_seq_length() for layer in cache.layers} == {13 - remove}
        rest = model(ids[:, 13 - remove :], cache=cache).logits
    torch.testing.assert_close(rest, expected[:, 13 - remove :], **TOLERANCE)


@pytest.mark.parametrize("implementation", [None, "static"], ids=["dynamic", "static"])
def test_beams(make_model, ids, implementation):
    model = make_model(total_ut_steps=3)
    beams = {"num_beams": 3, "num_return_sequences": 2, **GREEDY}
    expected = model.generate(ids, use_cache=False, **beams)
    assert torch.equal(model.generate(ids, cache_implementation=implementation, **beams), expected)


def test_prompt_lookup(make_model, ids):
    model = make_model(total_ut_steps=2)
    repetitive = ids[:1].repeat(1, 3)
    expected = model.generate(repetitive, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(repetitive, prompt_lookup_num_tokens=3, **GREEDY), expected)


def test_assisted_by_a_shallower_model(make_model, ids):
    model, assistant = make_model(total_ut_steps=3), make_model(total_ut_steps=1)
    expected = model.generate(ids[:1], use_cache=False, **GREEDY)
    assert torch.equal(model.generate(ids[:1], assistant_model=assistant, **GREEDY), expected)


@pytest.mark.parametrize("implementation", [None, "static"], ids=["dynamic", "static"])
def test_chunked_prefill(make_model, ids, implementation):
    model = make_model(total_ut_steps=2)
    expected = model.generate(ids, use_cache=False, **GREEDY)
    chunked = model.generate(ids, prefill_chunk_size=4, cache_implementation=implementation, **GREEDY)
    assert torch.equal(chunked, expected)


def backend_is_there(backend: str) -> bool:
    if backend == "fp8":
        return CACHE_ARG == "cache"  # built in, since transformers 5.24
    try:
        return importlib.util.find_spec({"quanto": "optimum.quanto", "hqq": "hqq"}[backend]) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("backend", ["quanto", "hqq", "fp8"])
def test_quantized_cache(make_model, ids, backend):
    if not backend_is_there(backend):
        pytest.skip(f"the {backend} cache is not installed")
    model = make_model(total_ut_steps=2)
    config = {"backend": backend}
    if backend != "fp8":
        config |= {"nbits": 4, "q_group_size": 16, "residual_length": 64}
    if backend == "hqq":
        config |= {"axis_key": 1, "axis_value": 1}
    out = model.generate(
        ids, cache_implementation="quantized", cache_config=config, return_dict_in_generate=True, **GREEDY
    )
    # These caches lose precision, except in the prefill, which attends to exact keys: the first new token is the same.
    assert torch.equal(out.sequences[:, :14], model.generate(ids, **GREEDY)[:, :14])
    assert len(get_cache(out).layers) == 4
    assert {int(layer.get_seq_length()) for layer in get_cache(out).layers} == {21}


def test_extend_cache(make_model, ids):
    model = make_model(total_ut_steps=3)
    cache = static_cache(model, 32)
    extend_cache(cache, 6)
    extend_cache(cache, 6)
    assert len(cache.layers) == 6 and len({id(layer) for layer in cache.layers}) == 6
    assert {layer.max_cache_len for layer in cache.layers} == {32}

    lazy = DynamicCache()
    extend_cache(lazy, 6)
    assert len(lazy.layers) == 0  # grows by itself


def test_filled_short_cache_is_refused(make_model, ids):
    shallow, deep = make_model(total_ut_steps=1), make_model(total_ut_steps=2)
    cache = DynamicCache(config=shallow.config)
    with torch.no_grad():
        shallow(ids, cache=cache)
    with pytest.raises(ValueError, match="already holds tokens, but this model needs 4 slots"):
        deep(ids, cache=cache)
    with pytest.raises(ValueError, match="already holds tokens"):
        deep.generate(torch.cat([ids, ids], 1), **cache_kwargs(cache), **GREEDY)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_filled_cache_with_gradient_checkpointing_is_refused(make_model, ids):
    model = make_model()
    with torch.no_grad():
        cache = get_cache(model(ids))
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        model(ids, cache=cache)
    assert get_cache(model(ids, cache=DynamicCache())) is None


def test_gradients_flow_through_a_stock_cache(make_model, ids):
    model = make_model(total_ut_steps=2)
    out = model(ids, labels=ids)
    assert getattr(out, CACHE_ARG).get_seq_length() == 13
    out.loss.backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_static_cache_compiles(make_model, ids):
    # What generate() does on GPUs: the decoding step is compiled, so the cache must be extended before it.
    model = make_model(total_ut_steps=2)
    cache = static_cache(model)
    extend_cache(cache, model.config.num_cache_slots)
    step = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        model(ids[:, :12], cache=cache)
        mask = {"full_attention": (torch.arange(64) <= 12)[None, None, None].expand(2, 1, 1, 64)}
        logits = step(ids[:, 12:], attention_mask=mask, position_ids=torch.tensor([[12]]), cache=cache).logits
    torch.testing.assert_close(logits, expected[:, 12:], **TOLERANCE)


@pytest.mark.parametrize("implementation", [None, "static"], ids=["dynamic", "static"])
def test_generate_extends_before_the_first_forward(make_model, ids, implementation):
    # On GPUs forward is compiled for static caches: the list of slots must not grow inside it.
    model = make_model(total_ut_steps=3)
    slots = []
    model.register_forward_pre_hook(lambda m, a, kwargs: slots.append(len(kwargs[CACHE_ARG].layers)), with_kwargs=True)
    model.generate(ids, cache_implementation=implementation, **GREEDY)
    assert set(slots) == {6} and len(slots) == 9
