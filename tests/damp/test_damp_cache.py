"""`DAMPStateCache` under forward passes: equality with stock caches, an independent loop, storage, rows, copies."""

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch
from damp_models import ARCHITECTURES, build_model, identity_plans, layouts, random_plans, tokens
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.config import DAMPConfig, LowBitConfig
from hf_lowbit.damp.attach import attach_damp
from hf_lowbit.damp.cache import DAMPStateCache, DampStateLayer
from hf_lowbit.damp.functions import is_patched, unpatch_delta_rules
from hf_lowbit.damp.spec import FUNCTIONS, DeltaSpec
from hf_lowbit.damp.state import PackedState
from hf_lowbit.errors import FallbackError
from hf_lowbit_kernels import DampLayout, DampPlan, damp_pack, damp_unpack


interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

SHARED = Path(os.environ.get("HF_LOWBIT_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "models"


@torch.no_grad()
def feed(model, cache, ids, pieces):
    """Logits ``[B, sum(pieces), vocab]`` of ``ids`` fed in pieces of the given lengths."""
    out, at = [], 0
    for count in pieces:
        out.append(model(ids[:, at : at + count], **{CACHE_ARG: cache}).logits)
        at += count
    return torch.cat(out, 1)


def exact_cache(model):
    """Quantization off: FP32 low rows, no high rows, identity tables, the model's own recurrence."""
    return DAMPStateCache(model, plans=identity_plans(model), layouts=layouts(model, 0, 32), backend="model")


def packed_cache(model, rows=2, low_bits=8, seed=0, **options):
    return DAMPStateCache(
        model, plans=random_plans(model, rows, seed), layouts=layouts(model, rows, low_bits), **options
    )


def records(cache):
    return [layer.state.tensors["records"].clone() for layer in cache.delta_layers]


def all_equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- quantization off --------------------------------------------------------------------------------------------------

PIECES = {
    "one piece": [70] + [1] * 6,
    "chunks": [64, 3, 30] + [1] * 6 + [9, 1],
    "1 token": [1, 1, 1],
    "2 tokens": [2, 1, 5, 1],
    "5 tokens": [5, 1, 1],
}


@pytest.mark.compat
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_with_quantization_off_the_logits_are_the_stock_caches(name, pieces):
    model = build_model(name)
    ids = tokens(sum(pieces), rows=2)
    stock = feed(model, DynamicCache(config=model.config), ids, pieces)
    assert torch.equal(feed(model, exact_cache(model), ids, pieces), stock)


@pytest.mark.shared
@pytest.mark.compat
@pytest.mark.parametrize("name", ["gdn-mini", "kda-mini"])
def test_with_quantization_off_a_trained_model_is_unchanged(name):
    if not (SHARED / name).is_dir():
        pytest.skip(f"{SHARED / name} is not here (set HF_LOWBIT_SHARED)")
    model = AutoModelForCausalLM.from_pretrained(SHARED / name).eval()
    assert model.dtype == torch.bfloat16
    ids = torch.randint(1, 4096, (2, 110), generator=torch.Generator().manual_seed(0))
    for pieces in ([80] + [1] * 10, [40, 30] + [1] * 5 + [20, 1]):
        stock = feed(model, DynamicCache(config=model.config), ids, pieces)
        assert torch.equal(feed(model, exact_cache(model), ids, pieces), stock)


# -- quantization on ---------------------------------------------------------------------------------------------------


class RoundingLoop:
    """The delta rule and the rounding of its states written down once more, on FP32 tensors in a stock cache.

    Stands in for both functions of a modeling file. The model calls its layers in order, so the plans go round.
    """

    def __init__(self, plans, layouts):
        self.plans, self.layouts, self.calls = plans, layouts, 0

    def __call__(self, query, key, value, g, beta, initial_state=None, **kwargs):
        at = self.calls % len(self.plans)
        self.calls += 1
        rows, count, heads, dv = value.shape
        query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
        query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        state = torch.zeros(rows, heads, key.shape[-1], dv) if initial_state is None else initial_state
        out = []
        for t in range(count):
            k, q, v = key[:, t], query[:, t] / key.shape[-1] ** 0.5, value[:, t]
            decay = g[:, t].exp()
            state = (decay if decay.ndim == 3 else decay[..., None])[..., None] * state
            error = v - torch.einsum("bhkv,bhk->bhv", state, k)
            state = state + torch.einsum("bhk,bhv,bh->bhkv", k, error, beta[:, t])
            out.append(torch.einsum("bhkv,bhk->bhv", state, q))
        plan, layout = self.plans[at], self.layouts[at]
        return torch.stack(out, 1), damp_unpack(damp_pack(state, plan, layout), plan, layout)


@pytest.mark.parametrize(
    "name, backend",
    [(name, backend) for name in ARCHITECTURES for backend in ("reference", "model")]
    + [pytest.param(name, "triton", marks=interpreted) for name in ("qwen3_5", "kimi_linear")],
)
def test_a_quantized_cache_follows_an_independent_loop(name, backend, monkeypatch):
    model = build_model(name)
    pieces = [30, 12] + [1] * (2 if backend == "triton" else 8)
    ids = tokens(sum(pieces), rows=2)
    stock = feed(model, DynamicCache(config=model.config), ids, pieces)
    plans, sizes = random_plans(model), layouts(model)
    ours = feed(model, DAMPStateCache(model, plans=plans, layouts=sizes, backend=backend), ids, pieces)
    loop = RoundingLoop(plans, sizes)
    for modeling, kind in DeltaSpec.of(model).modelings:
        for function in FUNCTIONS[kind]:
            monkeypatch.setattr(modeling, function, loop)
    expected = feed(model, DynamicCache(config=model.config), ids, pieces)
    assert loop.calls == 3 * len(pieces)
    effect = (expected - stock).abs()[:, 30:].mean()  # nothing was rounded before the first piece's end
    # Sums in another order move a code here and there, by one.
    assert (ours - expected).abs().mean() < 0.02 * effect
    assert (ours - stock).abs()[:, :30].max() < 1e-4 and effect > 1e-3


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("key_heads, channel_decay", [(2, False), (4, False), (4, True)], ids=["gva", "gdn", "kda"])
def test_the_recurrence_in_transformed_coordinates_is_the_original(key_heads, channel_decay, backend):
    """Paper, appendix A.3: permuted rows, scaled and permuted columns, undone at the output. Nothing is rounded here."""
    heads, dk, dv, rows, steps = 4, 24, 40, 2, 4 if backend == "triton" else 40
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    order = torch.rand(heads, dv, generator=generator).argsort(1)
    chosen = torch.rand(heads, dk, generator=generator).argsort(1)[:, :5]
    plan = DampPlan.from_rows(chosen, dk, dv, perm_v=order, column_scale=torch.exp(random(heads, dv)))
    packed = PackedState(plan, DampLayout(dk, dv, high_rows=0, low_bits=32), backend=backend)
    start = random(rows, heads, dk, dv)
    packed.encode(start)
    q, k = random(2, rows, steps, key_heads, dk)
    v, beta = random(rows, steps, heads, dv), torch.rand(rows, steps, heads, generator=generator)
    g = -0.2 * torch.rand(*(rows, steps, heads, dk) if channel_decay else (rows, steps, heads), generator=generator)

    identity = DampPlan.identity(heads, dk, dv)
    loop = RoundingLoop([identity], [DampLayout(dk, dv, high_rows=0, low_bits=32)])  # rounds nothing
    expected, final = loop(q, k, v, g, beta, initial_state=start)
    out = torch.stack(
        [packed.update(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], normalize=True) for t in range(steps)], 1
    )
    assert (out - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (packed.decode() - final).abs().max() < 1e-5 * final.abs().max()


def test_states_are_bytes_of_the_promised_size():
    sizes = dict(linear_key_head_dim=128, linear_value_head_dim=128)
    model = build_model("qwen3_5", **sizes)
    cache = DAMPStateCache(model, plans=random_plans(model, 16), layouts=layouts(model, 16))
    assert cache.memory_report().state_bits_per_value is None and cache.batch_size == -1
    feed(model, cache, tokens(12, rows=3), [10, 1, 1])
    tensors = [layer.state.tensors["records"] for layer in cache.delta_layers]
    assert [(t.dtype, tuple(t.shape)) for t in tensors] == 3 * [(torch.uint8, (3, 4, 4, 5056))]
    assert not any(
        isinstance(x, torch.Tensor) for layer in cache.delta_layers for x in layer.recurrent_states.values()
    )
    report = cache.memory_report()
    assert report.state_bytes == sum(t.untyped_storage().nbytes() for t in tensors) == 3 * 3 * 4 * 20224
    assert report.bits_per_element == report.state_bits_per_value == 9.875 == layouts(model, 16)[0].bits_per_value
    assert report.full_state_bytes == 3 * 3 * 4 * 128 * 128 * 4
    assert report.conv_bytes == 3 * 3 * (2 * 2 * 128 + 4 * 128) * 4 * 4  # layers, rows, channels, kernel, fp32
    assert report.attention_bytes == 2 * 3 * 2 * 12 * 32 * 4  # k and v, rows, heads, tokens, head_dim, fp32
    assert report.table_bytes == 3 * 4 * (128 + 2 * 128 + 4 * 128)
    assert report.per_request == report.state_bytes + report.conv_bytes + report.attention_bytes + report.scratch
    assert report.to_dict()["total"] == report.per_request + report.table_bytes
    assert "9.875 bits a value" in str(report)


def test_the_conv_state_keeps_the_models_dtype_and_address():
    model = build_model("kimi_linear").to(torch.bfloat16)
    cache = packed_cache(model)
    feed(model, cache, tokens(6), [5, 1])
    conv = cache.delta_layers[0].conv_states[0]
    before, address = conv.clone(), conv.data_ptr()
    feed(model, cache, tokens(1, seed=1), [1])
    assert conv.dtype == torch.bfloat16 and cache.delta_layers[0].conv_states[0].data_ptr() == address
    assert torch.equal(conv[..., :-1], before[..., 1:]) and not torch.equal(conv, before)


# -- rounding ----------------------------------------------------------------------------------------------------------


def rounded_steps(rows, seed, rounding="stochastic", layer=0):
    """Records after a prefill and 4 steps of the given rows of a fixed batch."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 2, 8, 64), (5, 4, 2, 8), (5, 4, 2, 8), (5, 4, 2, 64))
    start, q, k, v = (torch.randn(*shape, generator=generator) for shape in shapes)
    plan, layout = DampPlan.identity(2, 8, 64), DampLayout(8, 64, high_rows=2)
    state = PackedState(plan, layout, rounding=rounding, seed=seed, layer=layer)
    state.encode(start[rows])
    g, beta = torch.full((len(rows), 2), -0.1), torch.full((len(rows), 2), 0.5)
    for t in range(4):
        state.update(q[t, rows], k[t, rows], v[t, rows], g, beta, normalize=True)
    return state.tensors["records"]


def test_stochastic_rounding_is_reproducible_and_blind_to_the_batch():
    batch = rounded_steps([0, 1, 2, 3], seed=7)
    assert torch.equal(rounded_steps([0, 1, 2, 3], seed=7), batch)
    assert torch.equal(rounded_steps([2], seed=7)[0], batch[2])
    assert torch.equal(rounded_steps([3, 1], seed=7), batch[[3, 1]])
    assert not torch.equal(rounded_steps([0, 1, 2, 3], seed=8), batch)
    assert not torch.equal(rounded_steps([0, 1, 2, 3], seed=7, layer=1), batch)
    assert not torch.equal(rounded_steps([0, 1, 2, 3], seed=7, rounding="nearest"), batch)


def test_the_write_counter_moves_with_its_row():
    state = PackedState(DampPlan.identity(1, 4, 32), DampLayout(4, 32, high_rows=0), rounding="stochastic")
    state.encode(torch.ones(2, 1, 4, 32))
    state.tensors["steps"][1] = 9
    state.select(torch.tensor([1, 1, 0]))
    assert state.tensors["steps"].tolist() == [9, 9, 1]


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_a_seed_decides_about_stochastic_rounding_in_a_model(name):
    model, ids, pieces = build_model(name), tokens(16), [12, 1, 1, 1, 1]

    def logits(**options):
        return feed(model, packed_cache(model, **options), ids, pieces)

    first = logits(rounding="stochastic", seed=1)
    assert torch.equal(logits(rounding="stochastic", seed=1), first)
    assert not torch.equal(logits(rounding="stochastic", seed=2), first)
    assert not torch.equal(logits(rounding="nearest"), first)


def test_error_feedback_keeps_what_rounding_took():
    """With the residual added back, the state is the unrounded one up to FP16; the residual's bytes are counted."""
    model = build_model("qwen3_5")
    ids, pieces = tokens(40), [20] + [1] * 20
    feedback, nearest, exact = (
        packed_cache(model, low_bits=4, rounding=r) for r in ("error_feedback", "nearest", "nearest")
    )
    stock = feed(model, DynamicCache(config=model.config), ids, pieces)
    errors = [(feed(model, cache, ids, pieces) - stock).abs().mean().item() for cache in (feedback, nearest)]
    assert errors[0] < 0.7 * errors[1]
    residual = feedback.delta_layers[0].state.tensors["residual"]
    assert residual.dtype == torch.float16 and residual.abs().max() > 0
    more = feedback.memory_report().state_bytes - nearest.memory_report().state_bytes
    assert more == 3 * residual.nbytes == 3 * 4 * 14 * 32 * 2


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_rows_are_moved_bit_for_bit(rounding):
    model = build_model("qwen3_next")
    cache = packed_cache(model, rounding=rounding)
    feed(model, cache, tokens(9, rows=3), [8, 1])
    before = records(cache)
    conv = [layer.conv_states[0].clone() for layer in cache.delta_layers]
    keys = cache.layers[2].keys.clone()

    def check(rows):
        assert all_equal(records(cache), [x[rows] for x in before])
        assert all_equal([layer.conv_states[0] for layer in cache.delta_layers], [x[rows] for x in conv])
        assert torch.equal(cache.layers[2].keys, keys[rows]) and cache.batch_size == len(rows)

    address = cache.delta_layers[0].state.tensors["records"].data_ptr()
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    check([2, 0, 0])
    assert cache.delta_layers[0].state.tensors["records"].data_ptr() == address
    cache.batch_repeat_interleave(2)
    check([2, 2, 0, 0, 0, 0])
    cache.batch_select_indices(torch.tensor([0, 3]))
    check([2, 0])
    cache.batch_select_indices(torch.tensor([False, True]))
    check([0])
    assert feed(model, cache, tokens(1), [1]).isfinite().all()  # and it goes on


def test_rows_do_not_see_each_other():
    model = build_model("kimi_linear")
    ids, pieces = tokens(30, rows=3), [20] + [1] * 10
    together = feed(model, packed_cache(model), ids, pieces)
    alone = torch.cat([feed(model, packed_cache(model), ids[b : b + 1], pieces) for b in range(3)])
    assert (together - alone).abs().mean() < 1e-3 * alone.abs().mean()


def test_another_number_of_rows_is_refused():
    model = build_model("qwen3_5")
    cache = packed_cache(model)
    feed(model, cache, tokens(5, rows=2), [5])
    with pytest.raises(ValueError, match="holds 2 rows and got 3"):
        feed(model, cache, tokens(4, rows=3), [4])
    state = cache.delta_layers[0].state
    with pytest.raises(ValueError, match="holds 2 rows"):
        state.encode(torch.zeros(5, 4, 16, 32))


def test_reset_forgets_everything():
    model = build_model("olmo_hybrid")
    cache = packed_cache(model, rounding="stochastic")
    ids, pieces = tokens(14, rows=2), [10, 1, 1, 1, 1]
    first = feed(model, cache, ids, pieces)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1 and cache.memory_report().per_request == 0
    assert torch.equal(feed(model, cache, ids, pieces), first)
    cache.reset()
    assert feed(model, cache, tokens(3, rows=5), [3]).shape[0] == 5


# -- copies, files, devices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_copies_and_pickles_go_on_where_the_cache_was(name, rounding):
    model = build_model(name)
    cache = packed_cache(model, rounding=rounding)
    feed(model, cache, tokens(9), [8, 1])
    shared, stored = copy.deepcopy(cache), pickle.dumps(cache)
    assert shared.delta_layers[0].state.plan is cache.delta_layers[0].state.plan  # tables are the model's
    more = tokens(6, seed=1)
    expected = feed(model, cache, more, [1, 1, 4])
    assert not all_equal(records(shared), records(cache))
    assert torch.equal(feed(model, shared, more, [1, 1, 4]), expected)
    [(modeling, kind)] = DeltaSpec.of(model).modelings
    unpatch_delta_rules(modeling, kind)
    loaded = pickle.loads(stored)
    assert is_patched(modeling, kind)
    assert torch.equal(feed(model, loaded, more, [1, 1, 4]), expected)


def test_damaged_tables_in_a_pickle_are_found():
    model = build_model("qwen3_5")
    state = packed_cache(model).__getstate__()
    state["layers"] = copy.deepcopy(state["layers"])
    packed = state["layers"][0].state
    packed.plan = copy.deepcopy(packed.plan)
    packed.plan.perm_k[0] = packed.plan.perm_k[0].flip(0)
    with pytest.raises(ValueError, match="damaged"):
        object.__new__(DAMPStateCache).__setstate__(state)


def test_offloaded_layers_come_back():
    model = build_model("qwen3_5")
    cache, ids = packed_cache(model, rounding="stochastic"), tokens(8)
    feed(model, cache, ids, [7, 1])
    before = records(cache)
    for layer in cache.layers:
        layer.offload()
    for layer in cache.layers:
        layer.prefetch()
    assert all_equal(records(cache), before) and feed(model, cache, ids[:, :1], [1]).isfinite().all()
    layer = cache.delta_layers[0]
    layer.device = torch.device("meta")  # stands for the GPU
    layer.prefetch()
    assert {t.device.type for t in (*layer.state.tensors.values(), layer.conv_states[0])} == {"meta"}


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_crop_is_refused_before_anything_changes():
    model = build_model("qwen3_5")
    cache = packed_cache(model)
    feed(model, cache, tokens(8), [8])
    for count in (-1, 0):
        with pytest.raises(RuntimeError, match="cannot drop tokens"):
            cache.crop(count)
        with pytest.raises(RuntimeError, match="cannot drop tokens"):
            cache.delta_layers[0].crop(count)
    with pytest.raises(RuntimeError, match="cannot drop tokens"):
        cache.activate_past_recording()
    with pytest.raises(RuntimeError, match="cannot drop tokens"):
        cache.delta_layers[0].activate_past_recording()
    assert cache.get_seq_length() == 8
    assert not cache.is_compileable and not cache.delta_layers[0].is_croppable


def test_states_that_are_not_finite_raise_after_the_prefill():
    model = build_model("qwen3_5")
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = float("inf")
    cache, ids = packed_cache(model), tokens(10).masked_fill(tokens(10) == 5, 6)
    feed(model, cache, ids, [9, 1])
    ids[0, 3] = 5
    with pytest.raises(ValueError, match=r"layers \[0, 1, 3\] hold NaN"):
        feed(model, cache, ids, [10])
    cache.reset()
    ids[0, 3] = 6
    assert feed(model, cache, ids, [9, 1]).isfinite().all()


def test_an_fp32_state_after_a_one_token_step_is_noticed():
    plan, layout = DampPlan.identity(2, 8, 32), DampLayout(8, 32, high_rows=1)
    state = torch.randn(1, 2, 8, 32, generator=torch.Generator().manual_seed(0))
    for strict in (False, True):
        layer = DampStateLayer(PackedState(plan, layout), strict)
        layer.update_conv_state(torch.zeros(1, 6, 4))
        layer.update_recurrent_state(state)
        if strict:
            with pytest.raises(FallbackError, match="does not run on the packed state"):
                layer.update_recurrent_state(state)
        else:
            with pytest.warns(UserWarning, match="does not run on the packed state"):
                layer.update_recurrent_state(2 * state)
            assert (layer.state.decode() - 2 * state).abs().max() < 0.05


@torch.no_grad()
def test_a_cache_serves_the_model_it_was_made_for_and_its_copies():
    def calibrated(seed):
        model, config = build_model("qwen3_5"), DAMPConfig(rows=3)
        attach_damp(model, config, random_plans(model, rows=3, seed=seed))
        model.config.quantization_config = LowBitConfig(damp=config)
        return model

    model, other = calibrated(0), build_model("qwen3_5")
    cache = DAMPStateCache(model)
    ids = tokens(12)
    model(ids, **{CACHE_ARG: cache})
    length = cache.get_seq_length()
    for stranger in (other, calibrated(1)):
        with pytest.raises(ValueError, match="made for another model"):
            stranger(ids[:, :1], **{CACHE_ARG: cache})
    assert cache.get_seq_length() == length
    expected = model(ids[:, :1], **{CACHE_ARG: copy.deepcopy(cache)}).logits
    found = copy.deepcopy(model)(ids[:, :1], **{CACHE_ARG: cache}).logits
    assert torch.equal(found, expected)


def test_what_cannot_work_is_refused_when_the_cache_is_made():
    model = build_model("qwen3_5")
    plans, sizes = random_plans(model), layouts(model)

    def make(model=model, **changes):
        return DAMPStateCache(model, **{"plans": plans, "layouts": sizes, **changes})

    with pytest.raises(ValueError, match="carries no DAMP tables"):
        DAMPStateCache(model)
    with pytest.raises(ValueError, match="carries no DAMP tables"):
        make(layouts=None)
    with pytest.raises(ValueError, match="2 plans for 3"):
        make(plans=plans[:2])
    with pytest.raises(ValueError, match="its plan is for 3 heads of 32 x 32"):
        make(plans=random_plans(build_model("kimi_linear")))
    with pytest.raises(ValueError, match="its layout is for 16 x 64"):
        make(layouts=DampLayout(16, 64, high_rows=2))
    with pytest.raises(ValueError, match="backend='gpu'"):
        make(backend="gpu")
    with pytest.raises(ValueError, match="backend='cuda' is not possible here .*no kernel for cpu"):
        make(backend="cuda")
    with pytest.raises(ValueError, match="rounding='up'"):
        make(rounding="up")
    with pytest.raises(ValueError, match="strict='no' must be True or False"):
        make(strict="no")
    with pytest.raises(ValueError, match="cuda_graphs=1 must be True or False, or None"):
        make(cuda_graphs=1)
    with pytest.raises(ValueError, match="below 2"):
        make(seed=2**63)
    with pytest.raises(TypeError, match="pass a loaded one"):
        make(model="qwen")
    with pytest.raises(ValueError, match="prefill_chunk_size=0"):
        make(prefill_chunk_size=0)
    for backend in ("auto", "reference", "model"):
        with pytest.raises(FallbackError, match="slow path"):
            make(backend=backend, strict=True)
    with pytest.raises(ValueError, match="allowed is 1 to 256"):  # perm_k is uint8
        layouts(build_model("qwen3_5", linear_key_head_dim=264))
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=8, vocab_size=8))
    with pytest.raises(TypeError, match="has none"):
        make(model=llama)
    model._use_kernels = True
    with pytest.raises(ValueError, match="use_kernels=True"):
        make()


# -- the model's own tables --------------------------------------------------------------------------------------------


def test_a_calibrated_model_needs_no_options():
    model = build_model("qwen3_5")
    config = DAMPConfig(low_bits=8, rows=3, rounding="stochastic", seed=5)
    attach_damp(model, config, random_plans(model, rows=3))
    model.config.quantization_config = LowBitConfig(damp=config)
    cache = DAMPStateCache(model)
    assert (cache.rounding, cache.delta_layers[0].state.seed, cache.backend) == ("stochastic", 5, "reference")
    assert [layer.state.layout.high_rows for layer in cache.delta_layers] == [3, 3, 3]
    given = DAMPStateCache(
        model, plans=random_plans(model, rows=3), layouts=layouts(model, 3), rounding="stochastic", seed=5
    )
    ids, pieces = tokens(12), [9, 1, 1, 1]
    assert torch.equal(feed(model, cache, ids, pieces), feed(model, given, ids, pieces))
    assert DAMPStateCache(model, rounding="nearest").rounding == "nearest"
    cache.verify(model)
    other = build_model("qwen3_5")
    attach_damp(other, config, random_plans(other, rows=3, seed=1))
    other.config.quantization_config = LowBitConfig(damp=config)
    with pytest.raises(ValueError, match="other tables"):
        cache.verify(other)


def test_evaluation_feeds_single_tokens():
    pytest.importorskip("hf_lowbit.protocols")
    cache = packed_cache(build_model("qwen3_5"))
    assert tuple(cache.forced_schedule()) == (64, 1, 64)
    assert tuple(cache.forced_schedule(prompt_tokens=10)) == (10, 1, 10)
