"""`DAMPStateCache` with its Triton path, inside models, on a real GPU."""

import copy
import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "damp"))

from damp_models import build_model, layouts, random_plans, tokens  # noqa: E402

from hf_lowbit.compat import CACHE_ARG  # noqa: E402
from hf_lowbit.damp.cache import DAMPStateCache  # noqa: E402


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Mean difference of logits, relative to what quantization itself changes (fp32) or to the logits (bf16). Sums in another
# order move a code here and there, by one; a bf16 model rounds each layer's output besides.
TOLERANCE = {torch.float32: 0.02, torch.bfloat16: 1e-2}
HEADS = {
    "qwen3_5": dict(linear_key_head_dim=128, linear_value_head_dim=128),
    "kimi_linear": dict(linear_head_dim=64),
    "olmo_hybrid": {},
}


def gpu_model(name, dtype):
    return build_model(name, **HEADS[name]).to("cuda", dtype)


def cache_of(model, backend, rounding="nearest", low_bits=8, rows=8):
    options = dict(backend=backend, rounding=rounding, seed=1, strict=backend == "triton")
    return DAMPStateCache(model, plans=random_plans(model, rows), layouts=layouts(model, rows, low_bits), **options)


@torch.no_grad()
def logits_of(model, ids, cache, pieces):
    out, at = [], 0
    for count in pieces:
        out.append(model(ids[:, at : at + count], **{CACHE_ARG: cache}).logits.float())
        at += count
    return torch.cat(out, 1)


@pytest.mark.parametrize(
    "low_bits, rounding, dtype",
    [
        (8, "nearest", torch.float32),
        (8, "nearest", torch.bfloat16),
        (8, "stochastic", torch.float32),
        (4, "nearest", torch.float32),
        (4, "error_feedback", torch.float32),
    ],
)
@pytest.mark.parametrize("name", HEADS)
def test_triton_decoding_equals_the_reference(name, low_bits, rounding, dtype):
    model = gpu_model(name, dtype)
    pieces = [40, 30] + [1] * 12
    ids = tokens(sum(pieces), rows=3).cuda()
    reference, triton = (
        logits_of(model, ids, cache_of(model, backend, rounding, low_bits), pieces)
        for backend in ("reference", "triton")
    )
    scale = reference.abs().mean()
    if dtype == torch.float32:
        exact = DAMPStateCache(model, plans=random_plans(model, 8), layouts=layouts(model, 0, 32), backend="reference")
        scale = (reference - logits_of(model, ids, exact, pieces)).abs()[:, 40:].mean()
    assert (triton - reference).abs().mean() < TOLERANCE[dtype] * scale


@pytest.mark.parametrize("name", HEADS)
def test_the_kernel_is_the_default_and_strict_accepts_it(name):
    model = gpu_model(name, torch.bfloat16)
    cache = DAMPStateCache(model, plans=random_plans(model), layouts=layouts(model), strict=True)
    assert cache.backend in ("cuda", "triton")
    ids = tokens(20, rows=2).cuda()
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, num_beams=3)
    out = model.generate(ids, **{CACHE_ARG: cache}, **options)
    assert out.shape == (2, 32) and cache.batch_size == 6
    assert {layer.state.tensors["records"].device.type for layer in cache.delta_layers} == {"cuda"}


def test_a_row_does_not_depend_on_its_neighbours():
    """Bit for bit in the packed state; the model's own products of matrices are not that careful, so tokens are compared."""
    model = gpu_model("qwen3_5", torch.float32)
    ids = tokens(30, rows=4).cuda()
    options = dict(max_new_tokens=10, do_sample=False, eos_token_id=None)
    together = model.generate(ids, **{CACHE_ARG: cache_of(model, "triton")}, **options)
    for row in range(4):
        alone = model.generate(ids[row : row + 1], **{CACHE_ARG: cache_of(model, "triton")}, **options)
        assert torch.equal(alone[0], together[row])


def test_offloaded_states_come_back_and_copies_stay_apart():
    model = gpu_model("kimi_linear", torch.bfloat16)
    cache, ids = cache_of(model, "triton", "stochastic"), tokens(20).cuda()
    logits_of(model, ids, cache, [16, 1, 1])
    kept = copy.deepcopy(cache)
    for layer in cache.layers:
        layer.offload()
    assert {t.device.type for layer in cache.delta_layers for t in layer.state.tensors.values()} == {"cpu"}
    for layer in cache.layers:
        layer.prefetch()
    torch.cuda.synchronize()
    more = tokens(3, seed=1).cuda()
    assert torch.equal(logits_of(model, more, cache, [1, 1, 1]), logits_of(model, more, kept, [1, 1, 1]))


@torch.no_grad()
def test_decoding_reads_nothing_back():
    """A step that waits for the GPU would cost more than the kernel saves."""
    model = gpu_model("qwen3_5", torch.bfloat16)
    cache = cache_of(model, "triton", "stochastic")
    ids = tokens(24, rows=2).cuda()
    logits_of(model, ids, cache, [20, 1])
    layer = cache.delta_layers[0]
    state, shape = layer.state, (2, 2, 128)
    q, k, v = (
        torch.randn(*shape, device="cuda"),
        torch.randn(*shape, device="cuda"),
        torch.randn(2, 4, 128, device="cuda"),
    )
    g, beta = -torch.rand(2, 4, device="cuda"), torch.rand(2, 4, device="cuda")
    state.update(q, k, v, g, beta, normalize=True)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.update(q, k, v, g, beta, normalize=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
