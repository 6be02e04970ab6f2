"""The DAMP update kernel, compiled, against the reference at the sizes of real models, and in a CUDA graph."""

import pytest
import torch

from hf_lowbit_kernels import (
    DampLayout,
    DampPlan,
    ErrorFeedback,
    StochasticRounding,
    damp_pack,
    damp_unpack,
    damp_update,
)


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# dk, dv, protected rows, key heads, value heads: Qwen3.5, Kimi-Linear, OLMo-hybrid (fewer heads), odd sizes, the largest.
SIZES = {
    "qwen": (128, 128, 16, 2, 4),
    "kimi": (128, 128, 16, 4, 4),
    "olmo": (96, 192, 12, 3, 3),
    "odd": (60, 40, 7, 1, 3),
    "large": (256, 64, 32, 1, 1),
}
STORAGE = {
    "int8": dict(),
    "int4": dict(low_bits=4),
    "int4z": dict(low_bits=4, zero_point=True),
    "fp32": dict(low_bits=32),
}
# Relative norm of an output: fp32 sums, then one rounding to the dtype.
OUTPUT_ERROR = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def problem(size, storage, channel_decay, dtype, batch=5, slots=7):
    """(records, arguments of damp_update behind them, plan, layout) with states whose rows differ in size."""
    dk, dv, high, key_heads, heads = SIZES[size]
    layout = DampLayout(dk, dv, high, **STORAGE[storage])
    generator = torch.Generator("cuda").manual_seed(dk + dv)
    randn = lambda *shape: torch.randn(shape, generator=generator, device="cuda")  # noqa: E731
    rows = randn(heads, dk).argsort(1)[:, :high]
    plan = DampPlan.from_rows(
        rows, dk, dv, perm_v=randn(heads, dv).argsort(1), column_scale=torch.exp2(randn(heads, dv))
    )  # fmt: skip
    state = randn(slots, heads, dk, dv) * torch.exp2(2 * randn(1, heads, dk, 1))
    qk = randn(batch, 2 * key_heads, dk).to(dtype)
    g = -0.1 * randn(*((batch, heads, dk) if channel_decay else (batch, heads))).exp()
    slot = torch.randperm(slots, generator=generator, device="cuda")[:batch].int()
    inputs = (slot, qk[:, :key_heads], qk[:, key_heads:], randn(batch, heads, dv).to(dtype), g)
    return damp_pack(state, plan, layout), (*inputs, randn(batch, heads).sigmoid().to(dtype)), plan, layout


def make_rounding(name, layout, heads, batch, slots):
    if name == "stochastic":
        return StochasticRounding(2**40 + 1, torch.arange(batch, device="cuda") + 3, layer=2)
    if name == "feedback":
        residual = torch.rand(layout.residual_shape(slots, heads), device="cuda") * 0.01
        columns = torch.arange(32 * layout.tiles, device="cuda").view(layout.tiles, 1, 32)
        return ErrorFeedback((residual * (columns < layout.dv)).half())
    return None


# Every case is another version of the kernel, which takes seconds to compile.
CASES = [
    ("qwen", "int8", "nearest", torch.bfloat16),
    ("qwen", "int8", "stochastic", torch.bfloat16),
    ("qwen", "int8", "feedback", torch.bfloat16),
    ("qwen", "int4", "nearest", torch.bfloat16),
    ("qwen", "int4z", "feedback", torch.bfloat16),
    ("qwen", "fp32", "nearest", torch.float32),
    ("kimi", "int8", "nearest", torch.bfloat16),
    ("kimi", "int4z", "stochastic", torch.bfloat16),
    ("olmo", "int8", "nearest", torch.float16),
    ("olmo", "int4z", "nearest", torch.float32),
    ("odd", "int4z", "feedback", torch.float32),
    ("odd", "int8", "stochastic", torch.float32),
    ("large", "int8", "nearest", torch.float32),
]


@pytest.mark.parametrize(
    "size, storage, rounding, dtype", CASES, ids=lambda value: str(value).removeprefix("torch.")
)  # fmt: skip
def test_kernel_equals_the_reference(size, storage, rounding, dtype):
    records, arguments, plan, layout = problem(size, storage, size == "kimi", dtype)
    first = make_rounding(rounding, layout, plan.heads, 5, 7)
    second = ErrorFeedback(first.residual.clone()) if rounding == "feedback" else first
    other = records.clone()
    out = damp_update(records, *arguments, plan, layout, rounding=first, backend="triton")
    expected = damp_update(other, *arguments, plan, layout, rounding=second, backend="reference")
    assert (out.float() - expected.float()).norm() <= OUTPUT_ERROR[dtype] * expected.float().norm()
    new, expected_new = (damp_unpack(pool, plan, layout) for pool in (records, other))
    # The order of sums differs: next to a rounding border a code may be the neighbouring one, elsewhere values agree.
    difference = (new - expected_new).abs()
    largest = expected_new.abs().amax(-1, keepdim=True)
    moved = difference > 1e-3 * largest
    assert moved.float().mean() <= 2e-3
    step = {"int8": 127, "int4": 7, "int4z": 7.5, "fp32": 1000}[storage]
    c = plan.column_scale.amax(1) / plan.column_scale.amin(1)
    assert (difference <= 1.1 * c[:, None, None] * largest / step).all()
    assert (difference[~moved].norm() / expected_new.norm()) <= 1e-4
    untouched = [slot for slot in range(7) if slot not in arguments[0].tolist()]
    assert torch.equal(records[untouched], other[untouched]) and not torch.equal(new, new.roll(1, 0))
    if rounding == "feedback":
        error = (first.residual.float() - second.residual.float()).abs()
        assert (error > 2e-3 * second.residual.float().abs() + 1e-4).float().mean() <= 2e-3


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "feedback"])
def test_a_row_alone_equals_the_row_in_any_batch(rounding):
    records, arguments, plan, layout = problem("qwen", "int8", False, torch.bfloat16, batch=33, slots=40)
    full = make_rounding(rounding, layout, plan.heads, 33, 40)
    results = []
    for rows in (list(range(33)), [7], [20, 7, 3]):
        pool, some = records.clone(), full
        if rounding == "stochastic":
            some = StochasticRounding(full.seed, full.steps[rows], layer=full.layer)
        elif rounding == "feedback":
            some = ErrorFeedback(full.residual.clone())
        out = damp_update(pool, *(x[rows] for x in arguments), plan, layout, rounding=some, backend="triton")
        slot = int(arguments[0][7])
        results.append((out[rows.index(7)], pool[slot], some.residual[slot] if rounding == "feedback" else pool[slot]))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_cuda_graph_replays_are_steps():
    records, arguments, plan, layout = problem("kimi", "int8", True, torch.bfloat16)
    expected = records.clone()
    damp_update(records.clone(), *arguments, plan, layout)  # compiles
    for _ in range(3):
        out = damp_update(expected, *arguments, plan, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = damp_update(records, *arguments, plan, layout)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(records, expected) and torch.equal(result, out)
