"""Hybrid models on codes, packed states, or both: the hook, an independent loop, rows, chunks, refusals."""

import copy
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache


sys.path.insert(0, str(Path(__file__).parent))  # hybrid_models.py, whatever pytest's import mode

from hybrid_models import NAMES, build_model, hybrid_model, oracle_of, tokens  # noqa: E402

from hf_lowbit import DAMPStateCache, LoopVQCache  # noqa: E402
from hf_lowbit.compat import CACHE_ARG  # noqa: E402
from hf_lowbit.damp.cache import DampStateLayer  # noqa: E402
from hf_lowbit.errors import FallbackError  # noqa: E402
from hf_lowbit.evaluation.storage import tensor_bytes  # noqa: E402
from hf_lowbit.generation import make_cache  # noqa: E402
from hf_lowbit.hybrid import HybridCache  # noqa: E402
from hf_lowbit.loopvq.capture import PlainAttention, StateCapture  # noqa: E402
from hf_lowbit.loopvq.spec import LoopSpec  # noqa: E402
from hf_lowbit.loopvq.stock import hand_over_keys, handing_over_keys, keep_keys, spread  # noqa: E402


interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
METHODS = {"codes": ("loopvq",), "both": ("loopvq", "damp")}


@torch.no_grad()
def feed(model, cache, ids, pieces):
    """Logits ``[B, sum(pieces), vocab]`` of ``ids`` fed in pieces of the given lengths."""
    return torch.cat([model(piece, **{CACHE_ARG: cache}).logits for piece in ids.split(pieces, 1)], 1)


def generate(model, rows, new_tokens, cache=None, **options):
    """Greedy continuation [B, new] of a list of token rows, left-padded; logits and cache too."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
    cache = make_cache(model, **options) if cache is None else cache
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True, **{CACHE_ARG: cache},
    )  # fmt: skip
    return out.sequences[:, longest:], torch.stack(out.logits, 1), cache


# -- the hook ----------------------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("name", [*NAMES, "no positions"])
def test_the_hook_is_the_models_own_attention_and_changes_nothing_else(name):
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": None}} if name == "no positions" else {}
    model = build_model("olmo_hybrid" if changes else name, **changes)
    ids, stock = tokens(40, rows=2), {type(module) for module in model.modules()}
    with torch.no_grad():
        plain, cached = model(ids).logits, feed(model, DynamicCache(config=model.config), ids, [37, 1, 2])
        hand_over_keys(model)
        hand_over_keys(model)  # again: nothing more
        assert torch.equal(model(ids).logits, plain)
        assert torch.equal(feed(model, DynamicCache(config=model.config), ids, [37, 1, 2]), cached)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other.model) is type(model.model)
            assert torch.equal(other(ids).logits, plain)
        out = model(ids, use_cache=True, output_hidden_states=True, **{CACHE_ARG: PlainAttention()})
        own = model(ids, use_cache=False, output_hidden_states=True)
        torch.testing.assert_close(out.logits, plain, atol=2e-5, rtol=1e-5)
        for a, b in zip(out.hidden_states, own.hidden_states, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
        keep_keys(model)
        assert {type(module) for module in model.modules()} == stock
        with pytest.raises(AttributeError):  # a stock model knows nothing of such objects
            model(ids, use_cache=True, **{CACHE_ARG: PlainAttention()})


def test_the_hook_works_under_the_hooks_of_a_device_map():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model, ids = build_model(), tokens(20)
    for module in (model.model, model.model.layers[2].self_attn):
        add_hook_to_module(module, ModelHook())
    with torch.no_grad():
        plain = model(ids).logits
        with handing_over_keys(model):
            out = model(ids, use_cache=True, **{CACHE_ARG: PlainAttention()}).logits
            assert torch.equal(model(ids).logits, plain)
        assert torch.equal(model(ids).logits, plain)
    torch.testing.assert_close(out, plain, atol=2e-5, rtol=1e-5)


def test_keys_are_handed_over_after_their_norm_and_before_rope():
    model = build_model()
    capture, ids = StateCapture(LoopSpec.of(model)), tokens(12)
    seen = {}
    attention = model.model.layers[2].self_attn
    handle = attention.k_norm.register_forward_hook(lambda module, args, out: seen.update(key=out.transpose(1, 2)))
    with torch.no_grad(), handing_over_keys(model):
        model(ids, use_cache=True, **{CACHE_ARG: capture})
    handle.remove()
    assert torch.equal(capture.states["key"][0][0], spread(seen["key"], 8))  # a quarter of 32 channels turns
    assert not torch.equal(seen["key"], spread(seen["key"], 8))
    expected = [0, 1, 2, 3, *range(8, 20), 4, 5, 6, 7, *range(20, 32)]
    assert spread(torch.arange(32), 8).tolist() == expected
    assert not hasattr(model.model, "hands_over_keys_before_rope")


def test_models_that_do_not_fit_are_refused():
    with pytest.raises(TypeError, match="hybrid text models .*not on KimiLinearForCausalLM"):
        LoopSpec.of(build_model("kimi_linear"))
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024, rope_theta=10000.0)
    with pytest.raises(ValueError, match="scales only them"):
        LoopSpec.of(build_model(rope_parameters={**yarn, "partial_rotary_factor": 0.25}))
    LoopSpec.of(build_model("olmo_hybrid", rope_parameters=yarn))  # over all channels
    with pytest.raises(ValueError, match="rescales frequencies"):
        LoopSpec.of(build_model(rope_parameters={**yarn, "rope_type": "dynamic"}))


def test_a_model_that_also_sees_images_is_refused():
    from damp_models import _COMMON, _GROUPED
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = dict(
        depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, num_position_embeddings=16
    )
    ids = dict(image_token_id=85, video_token_id=86, vision_start_token_id=87, vision_end_token_id=88)
    config = Qwen3_5Config(text_config={**_COMMON, **_GROUPED}, vision_config=vision, tie_word_embeddings=False, **ids)
    with pytest.raises(TypeError, match="load the text model alone"):
        LoopSpec.of(Qwen3_5ForConditionalGeneration(config))


# -- against an independent loop, and full precision -------------------------------------------------------------------

CASES = {
    "two bits": dict(),
    "one bit, plain distance": dict(bits=1, encoder_metric="none"),
    "grouped heads": dict(num_attention_heads=4),
    "all channels turn": dict(
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_equals_the_independent_loop(methods, case):
    model, ids = hybrid_model(methods, **case), tokens(90)
    pieces = [50, 10] + [1] * 30
    expected = oracle_of(model).feed(ids[0], pieces)
    cache = make_cache(model)
    ours = feed(model, cache, ids, pieces)[0]
    assert cache.coded_tokens == [64]
    stock = feed(model, DynamicCache(config=model.config), ids, pieces)[0]
    effect = (expected - stock).abs().mean()
    assert effect > 5e-3
    if "damp" in methods:  # sums in another order move a state's code here and there, by one
        assert (ours - expected).abs().mean() < 0.04 * effect
    else:
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


@pytest.fixture
def interpreter(monkeypatch):
    """Triton 3.6's interpreter calls int() on one-element arrays, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@interpreted
def test_the_triton_kernels_equal_the_reference(interpreter):
    model, ids = hybrid_model(), tokens(60)
    pieces = [56] + [1] * 4
    caches = {backend: make_cache(model, backend=backend) for backend in ("reference", "triton")}
    logits = {backend: feed(model, cache, ids, pieces) for backend, cache in caches.items()}
    assert caches["triton"].backend == caches["triton"].states.backend == "triton"
    torch.testing.assert_close(logits["triton"], logits["reference"], atol=2e-3, rtol=1e-3)


@pytest.mark.compat
@pytest.mark.parametrize("name", NAMES)
def test_without_coded_tokens_or_rounding_it_is_the_stock_cache(name):
    model = hybrid_model(("loopvq",), name)
    rows = [tokens(n, seed=n)[0] for n in (60, 41)]
    expected, logits, _ = generate(model, rows, 20, cache=DynamicCache(config=model.config))
    ours, own, cache = generate(model, rows, 20, recent_window=80)
    assert torch.equal(ours, expected) and cache.coded_tokens == [0, 0]
    torch.testing.assert_close(own, logits, atol=2e-4, rtol=1e-4)
    both = hybrid_model(name=name)
    _, own, cache = generate(both, rows, 20, recent_window=80)
    _, damp, _ = generate(both, rows, 20, name="damp")
    torch.testing.assert_close(own, damp, atol=5e-3, rtol=1e-3)


def test_states_stay_in_full_precision_without_tables_and_attention_without_codebooks():
    model = hybrid_model()
    _, _, codes = generate(model, [tokens(60)[0]], 4, name="loopvq")
    _, _, states = generate(model, [tokens(60)[0]], 4, name="damp")
    assert type(codes) is LoopVQCache and codes.layers[0].recurrent_states[0].dtype == torch.float32
    assert type(states) is DAMPStateCache and states.layers[2].keys.shape[2] == 63
    _, _, both = generate(model, [tokens(60)[0]], 4)
    assert type(both) is HybridCache and both.coded_tokens == codes.coded_tokens == [32]
    assert isinstance(both.layers[0], DampStateLayer) and both.layers[0] is both.states.layers[0]


# -- rows, chunks, turns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [2048, 40])
@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_left_padded_rows_get_what_they_get_alone(methods, chunk):
    model = hybrid_model(methods)
    rows = [tokens(n, seed=n)[0] for n in (130, 97, 30, 1)]
    together, logits, cache = generate(model, rows, 30, prefill_chunk_size=chunk)
    for i, row in enumerate(rows):
        alone, own, single = generate(model, [row], 30, prefill_chunk_size=chunk)
        assert cache.coded_tokens[i] == single.coded_tokens[0]
        assert torch.equal(together[i], alone[0]), f"row of {len(row)} tokens"
        # Quantization moves these logits by 2e-2; sums in another order may move a state's code, and later a key's.
        assert (logits[i] - own[0]).abs().mean() < (4e-3 if "damp" in methods else 1e-4)


def test_prompts_are_cut_from_their_end():
    model, ids = hybrid_model(), tokens(100)
    _, logits, _ = generate(model, [ids[0]], 1, prefill_chunk_size=40)
    expected = oracle_of(model).feed(ids[0], [20, 40, 40])
    assert (logits[0, 0] - expected[-1]).abs().mean() < 5e-4
    from_the_start = oracle_of(model).feed(ids[0], [40, 40, 20])
    assert (logits[0, 0] - from_the_start[-1]).abs().mean() > 2e-3


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_rows_can_be_repeated_selected_and_reordered(methods):
    model = hybrid_model(methods)
    prompts, more = tokens(50, rows=2), tokens(12, rows=4, seed=7)
    cache = make_cache(model)
    feed(model, cache, prompts, [50])
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 0, 3, 1]))
    ours = feed(model, cache, more, [1] * 12)
    other = make_cache(model)
    feed(model, other, prompts[[1, 0, 1, 0]], [50])
    torch.testing.assert_close(ours, feed(model, other, more, [1] * 12), atol=5e-3, rtol=1e-3)
    kept = torch.tensor([True, False, False, True])
    cache.batch_select_indices(kept)
    other.batch_select_indices(kept.nonzero().flatten())
    tail = tokens(3, rows=2, seed=8)
    torch.testing.assert_close(
        feed(model, cache, tail, [1] * 3), feed(model, other, tail, [1] * 3), atol=5e-3, rtol=1e-3
    )
    assert cache.batch_size == 2


def test_beams_run():
    model = hybrid_model()
    out = model.generate(tokens(40, rows=2), num_beams=3, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert out.shape == (2, 52)


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_copies_and_reset(methods):
    model, ids = hybrid_model(methods), tokens(60, rows=2)
    cache = make_cache(model)
    feed(model, cache, ids[:, :50], [50])
    twin = copy.deepcopy(cache)
    assert twin.codebooks[0] is cache.codebooks[0]
    assert all(a is b for a, b in zip(twin.layers, twin.states.layers) if hasattr(a, "conv_states"))
    after = feed(model, cache, ids[:, 50:], [1] * 10)
    assert twin.get_seq_length() == 50
    assert torch.equal(feed(model, twin, ids[:, 50:], [1] * 10), after)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.memory_report().per_request == 0
    assert torch.equal(feed(model, cache, ids[:1, :50], [50]), feed(model, make_cache(model), ids[:1, :50], [50]))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(cache)


def test_a_second_turn_goes_on_from_the_first():
    model, ids = hybrid_model(), tokens(90)
    cache = make_cache(model)
    ours = feed(model, cache, ids, [40, 1, 1, 30, 1, 17])
    expected = oracle_of(model).feed(ids[0], [40, 1, 1, 30, 1, 17])
    stock = feed(model, DynamicCache(config=model.config), ids, [90])
    assert (ours[0] - expected).abs().mean() < 0.04 * (stock[0] - expected).abs().mean()


# -- names, options, refusals ------------------------------------------------------------------------------------------


@pytest.mark.compat
def test_generate_knows_the_names():
    model, ids = hybrid_model(), tokens(60)
    types = {None: HybridCache, "lowbit": HybridCache, "loopvq": LoopVQCache, "damp": DAMPStateCache,
             "dynamic": DynamicCache}  # fmt: skip
    for name, kind in types.items():
        out = model.generate(
            ids, max_new_tokens=4, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
            cache_implementation=name,
        )  # fmt: skip
        assert type(getattr(out, CACHE_ARG)) is kind, name
    codes = hybrid_model(("loopvq",))
    assert type(make_cache(codes)) is LoopVQCache
    with pytest.raises(ValueError, match="is calibrated for 'loopvq'"):
        codes.generate(ids, cache_implementation="damp", max_new_tokens=1)


def test_options_reach_their_part():
    model = hybrid_model()
    cache = make_cache(
        model, recent_window=24, rounding="stochastic", seed=5, prefill_chunk_size=64, backend="reference"
    )
    assert (cache.window, cache.prefill_chunk_size, cache.states.rounding) == (24, 64, "stochastic")
    assert (cache.backend, cache.states.backend) == ("reference", "reference")
    assert cache.states.layers[0].state.seed == 5
    cache.verify(model)
    assert cache.forced_schedule() == (64, 1, 64) and cache.forced_schedule(100) == (100, 1, 100)
    for options, error, message in (
        (dict(low_bits=8), ValueError, "knows recent_window, .*rounding"),
        (dict(backend="cuda"), ValueError, "both kinds"),
        (dict(rounding="up"), ValueError, "rounding='up'"),
        (dict(recent_window=12), ValueError, "multiple of 8"),
        (dict(strict=True), FallbackError, "strict=True"),
        (dict(cuda_graphs=True), FallbackError, "cuda_graphs=True"),
    ):
        with pytest.raises(error, match=message):
            make_cache(model, **options)
    with pytest.raises(ValueError, match="rounding"):
        make_cache(model, "loopvq", rounding="nearest")


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_what_cannot_be_done_is_refused(methods):
    model, ids = hybrid_model(methods), tokens(30, rows=2)
    cache = make_cache(model)
    feed(model, cache, ids, [30])
    for refused in (lambda: cache.crop(-1), cache.activate_past_recording):
        with pytest.raises(RuntimeError, match="cannot drop tokens"):
            refused()
    assert cache.get_seq_length() == 30
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, output_attentions=True, **{CACHE_ARG: make_cache(model)})
    with pytest.raises(ValueError, match="2-D attention mask"):
        model(ids, attention_mask=torch.ones(2, 1, 30, 30), **{CACHE_ARG: make_cache(model)})
    with pytest.raises(ValueError, match="holds 2 rows and got 1"):
        model(ids[:1], **{CACHE_ARG: cache})
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1] = 0
    with pytest.raises(ValueError, match=r"rows \[1\] of the batch hold no token"):
        model(ids, attention_mask=mask, **{CACHE_ARG: make_cache(model)})
    with pytest.raises(ValueError, match="made for another model"):
        feed(hybrid_model(methods, seed=1), make_cache(model), ids, [30])
    with pytest.raises(ValueError, match="exactly one"):
        model.model(**{CACHE_ARG: make_cache(model)})


def test_a_looped_model_takes_no_cache_of_states():
    from loopvq_models import build_model as build_looped
    from loopvq_models import random_codebooks

    from hf_lowbit import LoopVQConfig

    model = random_codebooks(build_looped(num_hidden_layers=1), LoopVQConfig())
    with pytest.raises(ValueError, match="for hybrid models"):
        LoopVQCache(model, states=lambda: DynamicCache())


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("bits", [2, 1])
def test_the_report_counts_what_exists(bits, methods):
    model = hybrid_model(methods, bits=bits)
    _, _, cache = generate(model, [tokens(70, seed=i)[0] for i in range(2)], 20)
    report = cache.memory_report()
    assert report.bits_per_element == bits
    layers = cache._stores + [cache._rope, cache._step]
    states = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    kept = [getattr(layer, name) for layer in states for name in ("recurrent_states", "conv_states")]
    if "damp" in methods:
        assert report.state_bits_per_value == 10.0  # 2 of 16 rows in FP16, the others in INT8 with a scale for 32
        kept = [(layer.state.tensors, layer.state._slots, layer.conv_states) for layer in states]
        assert report.attention.states == report.recurrent.attention_bytes == 0
        assert report.to_dict()["per_request"] == report.per_request
    else:
        assert report.states == tensor_bytes(kept)
    assert report.per_request == pytest.approx(tensor_bytes(kept) + tensor_bytes(layers), rel=0.02)
    assert report.total > report.per_request and "states" in str(report)
