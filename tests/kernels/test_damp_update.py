"""`damp_update`: kernel and reference against an fp64 recurrence, against each other, and their promises."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from damp_cases import BASE, CASES, FP32_SUM, Case, make_inputs, make_plan, oracle_state, oracle_step
from kernel_cases import ON_GPU, ROUNDING

import hf_lowbit_kernels
from hf_lowbit_kernels import (
    DampLayout,
    DampPlan,
    ErrorFeedback,
    StochasticRounding,
    damp_backend,
    damp_pack,
    damp_unpack,
    damp_update,
)


# The interpreter's NumPy, on NaN and on results that a tl.where discards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.triton)]


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    """The interpreter needs minutes for blocks of 8 rows: there all tests but those of block sizes take 64."""
    damp_triton = sys.modules.get("hf_lowbit_kernels.damp_triton")
    if damp_triton and not ON_GPU:
        monkeypatch.setattr(damp_triton, "damp_launch", lambda layout: damp_triton.DampLaunch(rows=64))


def noise(case, device, **changes):
    """Stochastic rounding for a case's rows."""
    batch = len(case.slots)
    options = dict(seed=2**40 + 7, steps=torch.arange(5, 5 + batch, device=device), layer=3)
    return StochasticRounding(**(options | changes))


ROUNDINGS = ["nearest", "stochastic", "feedback"]


def make_rounding(name, case, device, slots=5):
    """Rounding of a name, for a pool of ``slots``; residuals are as large as a rounding error may be."""
    if name == "nearest" or (name == "feedback" and case.low_bits == 32):
        return None
    if name == "stochastic":
        return noise(case, device)
    generator = torch.Generator().manual_seed(3)
    residual = torch.rand(case.layout.residual_shape(slots, case.heads), generator=generator) - 0.5
    width = torch.arange(32 * case.layout.tiles).view(case.layout.tiles, 1, 32) < case.dv
    return ErrorFeedback((residual * 2.0**-6 * width).to(torch.float16).to(device))


def twin(rounding):
    """The same rounding for another pool."""
    return ErrorFeedback(rounding.residual.clone()) if isinstance(rounding, ErrorFeedback) else rounding


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_step_is_the_fp64_recurrence(case, backend, device):
    records, arguments, plan = make_inputs(case, device)
    before = records.clone()
    out = damp_update(records, *arguments, plan, case.layout, normalize=case.normalize, backend=backend)
    assert out.dtype == case.dtype and out.shape == (len(case.slots), case.heads, case.dv)
    for b, slot in enumerate(case.slots):
        if slot < 0:
            assert not out[b].any()
            continue
        for head in range(case.heads):
            old, _ = oracle_state(before[slot, head], case, plan, head)
            state, read = oracle_step(old, arguments, case, b, head)
            stored, unit = oracle_state(records[slot, head], case, plan, head)
            size = max(np.abs(state).max(), np.abs(old).max(), 1.0)
            # Half a code, or half a unit in the last place of fp16.
            excess = np.abs(stored - state) - 0.5001 * unit
            assert excess.max() <= FP32_SUM * size
            error = np.abs(out[b, head].double().cpu().numpy() - read)
            assert (error <= FP32_SUM * size + ROUNDING[case.dtype] * np.abs(read)).all()
    unused = [slot for slot in range(records.shape[0]) if slot not in case.slots]
    assert torch.equal(records[unused], before[unused])


def assert_kernel_matches_the_reference(case, name, device, backend="triton", **launch):
    """The order of sums differs, so a value next to a rounding border may take the neighbouring code."""
    records, arguments, plan = make_inputs(case, device)
    other, rounding = records.clone(), make_rounding(name, case, device)
    second = twin(rounding)
    options = dict(normalize=case.normalize, scale=case.dk**-0.5)
    if launch:
        damp_triton = sys.modules["hf_lowbit_kernels.damp_triton"]
        launch = dict(launch=damp_triton.DampLaunch(**launch))
        out = damp_triton.damp_update_triton(
            records, *arguments, plan, case.layout, **options, rounding=rounding, **launch
        )  # fmt: skip
    else:
        out = damp_update(records, *arguments, plan, case.layout, **options, rounding=rounding, backend=backend)
    expected = damp_update(other, *arguments, plan, case.layout, **options, rounding=second, backend="reference")
    torch.testing.assert_close(out, expected, rtol=2 * ROUNDING[case.dtype], atol=2e-5)
    used = [slot for slot in case.slots if slot >= 0]
    a, b = (damp_unpack(pool[used], plan, case.layout) for pool in (records, other))
    units = torch.tensor(
        np.array([[oracle_state(other[s, h], case, plan, h)[1] for h in range(case.heads)] for s in used])
    ).to(a)
    difference = (a - b).abs() - FP32_SUM * b.abs().max()
    assert (difference <= 1.0001 * units).all()
    assert (difference > 0.5 * units).float().mean() <= 0.003
    if isinstance(rounding, ErrorFeedback):
        residual, expected = (x.residual[used].float() for x in (rounding, second))
        # Equal but where a code differs, by fp32 sums and one rounding to fp16.
        close = (residual - expected).abs() <= FP32_SUM * b.abs().max() + 2.0**-10 * expected.abs()
        assert (~close).sum() <= 0.003 * close.numel()
        unused = [slot for slot in range(records.shape[0]) if slot not in case.slots]
        assert torch.equal(rounding.residual[unused], make_rounding(name, case, device).residual[unused])


@pytest.mark.triton
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_kernel_matches_the_reference(case, rounding, device):
    assert_kernel_matches_the_reference(case, rounding, device)


@pytest.mark.triton
@pytest.mark.parametrize("launch", [dict(rows=8), dict(rows=16, num_warps=2), dict(rows=32, streaming=True)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        replace(BASE, dk=32, dv=40, high_rows=8, heads=1, slots=(1,)),
        replace(
            BASE, dk=60, dv=32, high_rows=12, heads=1, slots=(1,), channel_decay=True, low_bits=4, zero_point=True
        ),
    ],
    ids=lambda case: case.id,
)
def test_block_sizes(case, launch, device):
    assert_kernel_matches_the_reference(case, "nearest", device, **launch)


def exact_problem(case, device):
    """Small integers times powers of two: every product and sum is exact, so bytes do not depend on their order."""
    generator = torch.Generator().manual_seed(case.dk)
    draw = lambda low, high, *size: torch.randint(low, high, size, generator=generator).float()  # noqa: E731
    plan = make_plan(case, device, generator, power_of_two=True)
    limit = 7 if case.low_bits == 4 else 127
    batch = len(case.slots)
    stored = draw(-limit, limit + 1, batch, case.heads, case.dk, 32 * case.layout.tiles)
    # The scale of every group is a power of two.
    stored[..., ::32] = limit + case.zero_point
    stored[..., 1::32] = -limit
    stored *= torch.exp2(draw(-1, 2, batch, case.heads, case.dk, 1))
    # To model coordinates, by definition.
    state = torch.zeros(batch, case.heads, case.dk, case.dv)
    for h in range(case.heads):
        c = plan.column_scale[h].cpu()
        for j, w in enumerate(plan.perm_v[h].tolist()):
            state[:, h, plan.perm_k[h].long().cpu(), w] = stored[:, h, :, j] * c[w]
    records = case.layout.zeros(5, case.heads, device)
    records[list(case.slots)] = damp_pack(state.to(device), plan, case.layout)
    key_heads = case.heads // case.ratio
    g = torch.zeros(batch, case.heads, case.dk) if case.channel_decay else torch.zeros(batch, case.heads)
    c = plan.column_scale.cpu()
    arguments = [
        torch.tensor(case.slots, dtype=case.index_dtype),
        draw(-1, 2, batch, key_heads, case.dk),
        draw(-1, 2, batch, key_heads, case.dk),
        draw(-9, 10, batch, case.heads, case.dv) * c,
        g,
        torch.full((batch, case.heads), 0.5),
    ]
    return records, [x.to(device) for x in arguments], plan


@pytest.mark.triton
@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize(
    "case",
    [
        replace(BASE, dk=60, dv=40, high_rows=5, heads=2, ratio=2),
        replace(BASE, dk=96, dv=64, channel_decay=True, slots=(4, 2, 0)),
        replace(BASE, dk=60, dv=40, high_rows=3, low_bits=4),
        replace(BASE, dk=60, dv=40, high_rows=3, low_bits=4, zero_point=True),
        replace(BASE, dk=32, dv=40, high_rows=32),
        replace(BASE, dk=32, dv=40, high_rows=4, low_bits=32),
    ],
    ids=lambda case: case.id,
)
def test_bytes_are_equal_where_sums_are_exact(case, name, device):
    records, arguments, plan = exact_problem(case, device)
    rounding = make_rounding(name, case, device)
    second = twin(rounding)
    if second is not rounding:  # few bits, so that sums with the state are exact
        for x in (rounding, second):
            x.residual.copy_((x.residual * 2.0**10).round() * 2.0**-10)
    other, before = records.clone(), records.clone()
    options = dict(scale=0.25, normalize=False)
    out = damp_update(records, *arguments, plan, case.layout, **options, rounding=rounding, backend="triton")
    expected = damp_update(other, *arguments, plan, case.layout, **options, rounding=second, backend="reference")
    assert torch.equal(out, expected)
    assert torch.equal(records, other) and not torch.equal(records, before)
    if second is not rounding:
        assert torch.equal(rounding.residual, second.residual)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("low_bits, zero_point", [(8, False), (4, True)], ids=["b8", "b4z"])
def test_error_feedback_loses_nothing(low_bits, zero_point, backend, device):
    """What is stored and what is carried on add up to the new state and what was carried before."""
    case = replace(BASE, dk=32, dv=40, high_rows=4, low_bits=low_bits, zero_point=zero_point, slots=(1,), heads=1)
    _, arguments, plan = make_inputs(case, device)
    rounding = ErrorFeedback(torch.zeros(case.layout.residual_shape(2, 1), dtype=torch.float16, device=device))
    low, columns = plan.perm_k[0, 4:].long(), plan.perm_v.long().expand(28, -1)

    def carried():
        """fp64 ``[28, 40]`` in model coordinates."""
        stored = rounding.residual[1, 0].transpose(0, 1).flatten(1)[:, :40].double()
        return (torch.zeros_like(stored).scatter_(1, columns, stored) * plan.column_scale).cpu().numpy()

    state = torch.randn(1, 1, 32, 40, generator=torch.Generator().manual_seed(2)).to(device)
    records = case.layout.zeros(2, 1, device)
    records[1:] = damp_pack(state, plan, case.layout, rounding=ErrorFeedback(rounding.residual[1:]))
    whole = state[0, 0, low].double().cpu().numpy()
    largest = 0.0
    for _ in range(6):
        decoded = damp_unpack(records[1:], plan, case.layout)[0, 0].double()
        residual = carried()
        error = np.abs(decoded[low].cpu().numpy() + residual - whole)
        assert (error <= 2.0**-11 * np.abs(residual) + 1e-5).all()
        largest = max(largest, np.abs(residual).max())
        new, _ = oracle_step(decoded.cpu().numpy(), arguments, case, 0, 0)
        whole = new[low.cpu().numpy()] + residual
        damp_update(records, *arguments, plan, case.layout, rounding=rounding, backend=backend)
    assert largest > 100 * 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("low_bits", [8, 4])
def test_a_row_alone_equals_the_row_in_any_batch(low_bits, stochastic, backend, device):
    case = replace(BASE, dk=60, dv=40, high_rows=7, low_bits=low_bits, slots=(4, 0, 3, 1), heads=2, ratio=2)
    records, arguments, plan = make_inputs(case, device)
    rounding = noise(case, device) if stochastic else None
    together = records.clone()
    out = damp_update(together, *arguments, plan, case.layout, rounding=rounding, backend=backend)
    order = [2, 0, 3, 1]
    parts = [order, [1], [3, 0]]
    for part in parts:
        pool = records.clone()
        mine = noise(case, device, steps=rounding.steps[part]) if stochastic else None
        some = damp_update(pool, *(x[part] for x in arguments), plan, case.layout, rounding=mine, backend=backend)
        assert torch.equal(some, out[part])
        slots = [case.slots[i] for i in part]
        assert torch.equal(pool[slots], together[slots])


@pytest.mark.parametrize("backend", BACKENDS)
def test_streams_free_a_sequence_from_its_slot(backend, device):
    case = replace(BASE, dk=32, dv=40, high_rows=2, slots=(1,), heads=1)
    records, arguments, plan = make_inputs(case, device)
    results = []
    for slot, stream in [(1, 0), (4, 0), (4, 9), (1, None), (4, None)]:
        pool = records.clone()
        pool[4] = pool[1]
        streams = None if stream is None else torch.tensor([stream], device=device)
        indices = torch.tensor([slot], dtype=torch.int32, device=device)
        rounding = noise(case, device, streams=streams)
        damp_update(pool, indices, *arguments[1:], plan, case.layout, rounding=rounding, backend=backend)
        results.append(pool[slot])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2]) and not torch.equal(results[3], results[4])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_states_stay_in_their_row_and_head(value, backend, device):
    case = replace(BASE, dk=32, dv=64, high_rows=4, slots=(2, 1))
    records, arguments, plan = make_inputs(case, device)
    clean = records.clone()
    expected = damp_update(clean, *arguments, plan, case.layout, backend=backend)
    bad = arguments[3].clone()
    bad[1, 0, 5] = value
    out = damp_update(records, *arguments[:3], bad, *arguments[4:], plan, case.layout, backend=backend)
    assert torch.equal(out[0], expected[0]) and torch.equal(out[1, 1], expected[1, 1])
    assert torch.equal(records[2], clean[2]) and torch.equal(records[1, 1], clean[1, 1])
    assert not out[1, 0, 5].isfinite()
    place = plan.perm_v[0].tolist().index(5)
    columns = plan.perm_v[0, place // 32 * 32 : place // 32 * 32 + 32].long()
    state = damp_unpack(records[1:2], plan, case.layout)[0, 0]
    high, low = (rows.long() for rows in plan.perm_k[0].split([4, 28]))
    assert state[high, 5].isnan().all() and state[low][:, columns].isnan().all()
    others = torch.ones(64, dtype=torch.bool, device=device)
    others[columns] = False
    assert state[:, others].isfinite().all() and state[high][:, columns].isnan().sum() == 4
    codes = records[1, 0, place // 32, case.layout.low_offset : case.layout.scale_offset]
    assert not codes.any()
    # The next step still shows it.
    again = damp_update(records, *arguments, plan, case.layout, backend=backend)
    assert again[1, 0, 5].isnan() and again[0].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_high_rows_saturate_and_tiny_groups_are_zero(backend, device):
    layout = DampLayout(4, 40, 2)
    plan = DampPlan.identity(1, 4, 40, device)
    state = torch.zeros(1, 1, 4, 40, device=device)
    state[:, :, :2] = 6e4
    state[:, :, 2:] = 3.0
    records = damp_pack(state, plan, layout)
    inputs = [torch.zeros(1, 1, n, device=device) for n in (4, 4, 40)]
    index, beta = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, 1, device=device)
    g = torch.tensor([[[1.0, 0, -71.5, 0]]], device=device)  # 3 exp(-71.5) = 2.7e-31
    damp_update(records, index, *inputs, g, beta, plan, layout, backend=backend)
    new = damp_unpack(records, plan, layout)[0, 0]
    assert (new[0] == 65504).all() and (new[1] == 6e4).all() and not new[2].any() and (new[3] == 3).all()
    codes = records[0, 0, :, layout.low_offset : layout.scale_offset].view(torch.int8).unflatten(-1, (2, 32))
    assert not codes[:, 0].any() and (codes[0, 1] == 127).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_indices_outside_the_pool_and_empty_batches(backend, device):
    case = replace(BASE, dk=32, dv=40, slots=(1, -7, 5, 99))
    records, arguments, plan = make_inputs(case, device)
    before = records.clone()
    out = damp_update(records, *arguments, plan, case.layout, backend=backend)
    assert out[0].isfinite().all() and out[0].any() and not out[1].any() and out[2:].isnan().all()
    assert torch.equal(records[[0, 2, 3, 4]], before[[0, 2, 3, 4]]) and not torch.equal(records[1], before[1])
    empty = damp_update(records, *(x[:0] for x in arguments), plan, case.layout, backend=backend)
    assert empty.shape == (0, case.heads, 40)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pool_may_be_one_layer_of_a_larger_tensor(backend, device):
    case = replace(BASE, dk=32, dv=40, high_rows=3)
    records, arguments, plan = make_inputs(case, device)
    pool = torch.stack([torch.full_like(records, 9), records, torch.full_like(records, 7)], 1)
    out = damp_update(pool[:, 1], *arguments, plan, case.layout, backend=backend)
    assert torch.equal(out, damp_update(records, *arguments, plan, case.layout, backend=backend))
    assert torch.equal(pool[:, 1], records) and (pool[:, 0] == 9).all() and (pool[:, 2] == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("channel_decay", [False, True], ids=["gdn", "kda"])
def test_many_steps_follow_the_unquantized_recurrence(channel_decay, backend, device):
    """24 steps: fp16 rows drift by roundings only, INT8 by far more, unquantized rows by fp32 sums."""
    errors = {}
    arms = {
        "fp32": dict(high_rows=0, low_bits=32),
        "fp16": dict(high_rows=32),
        "damp": dict(high_rows=8),
        "int4": dict(high_rows=0, low_bits=4),
        "zero point": dict(high_rows=0, low_bits=4, zero_point=True),
        "feedback": dict(high_rows=0, low_bits=4),
    }
    for name, options in arms.items():
        case = Case(32, 32, **options, heads=1, channel_decay=channel_decay, slots=(0,))
        rounding = None
        if name == "feedback":
            rounding = ErrorFeedback(torch.zeros(case.layout.residual_shape(5, 1), dtype=torch.float16, device=device))
        records, arguments, _ = make_inputs(case, device)
        plan = DampPlan.identity(1, 32, 32, device)  # random column scales would spoil the groups
        records.zero_()
        generator = torch.Generator().manual_seed(1)
        state, worst, size = np.zeros((32, 32)), 0.0, 0.0
        for _ in range(24):
            index, q, k, v, g, beta = arguments
            step = [torch.randn(x.shape, generator=generator).to(device) for x in (q, k, v)]
            step = (index, *step, g, beta)
            out = damp_update(records, *step, plan, case.layout, rounding=rounding, backend=backend)
            state, read = oracle_step(state, step, case, 0, 0)
            worst = max(worst, np.abs(out[0, 0].double().cpu().numpy() - read).max())
            size = max(size, np.abs(read).max())
        errors[name] = worst / size
    assert errors["fp32"] < 3e-6 and errors["fp16"] < 3e-3 and errors["damp"] < 3e-2
    assert errors["fp32"] < errors["fp16"] < errors["damp"] < errors["zero point"] < errors["int4"]
    assert errors["feedback"] < errors["int4"]


def test_dispatch(device):
    case = replace(BASE, dk=32, dv=40)
    records, arguments, plan = make_inputs(case, device)
    name, reason = damp_backend(device, torch.float32)
    assert (name, reason) == (("triton", "Triton kernel on cuda") if ON_GPU else ("reference", reason))
    other = records.clone()
    out = damp_update(records, *arguments, plan, case.layout)
    assert torch.equal(out, damp_update(other, *arguments, plan, case.layout, backend=name))
    assert torch.equal(records, other)
    assert damp_backend(device, torch.float64)[0] == "reference"
    with pytest.raises(ValueError, match='backend must be "auto"'):
        damp_update(records, *arguments, plan, case.layout, backend="fast")
    with pytest.raises(ValueError, match='backend="cuda" is not possible'):
        damp_update(records, *arguments, plan, case.layout, backend="cuda")


def test_errors_say_what_is_allowed(device):
    case = replace(BASE, dk=32, dv=40, heads=2)
    records, arguments, plan = make_inputs(case, device)
    index, query, key, value, g, beta = arguments

    def call(pool=records, index=index, query=query, key=key, value=value, g=g, beta=beta, plan=plan, **options):
        return damp_update(pool, index, query, key, value, g, beta, plan, case.layout, **options)

    with pytest.raises(ValueError, match=r"value has shape .* expected \[B, 2, 40\]"):
        call(value=value[..., :39])
    with pytest.raises(ValueError, match="no multiple of the 3 key heads"):
        call(query=query.repeat(1, 2, 1)[:, :3], key=key.repeat(1, 2, 1)[:, :3])
    with pytest.raises(ValueError, match="one per key channel"):
        call(g=g[:, :1])
    with pytest.raises(ValueError, match="state_indices must be int32 or int64"):
        call(index=index.float())
    with pytest.raises(ValueError, match="packed states are torch.uint8"):
        call(pool=records.view(torch.int8))
    with pytest.raises(ValueError, match="Allocate with DampLayout.zeros"):
        call(pool=records.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="allowed are bfloat16"):
        call(value=value.double())
    with pytest.raises(ValueError, match="the last dimension must be contiguous"):
        call(key=key.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="calibrated for this layer"):
        call(plan=DampPlan.identity(2, 33, 40, device))
    with pytest.raises(ValueError, match=r"rounding.steps must be contiguous \[2\]"):
        call(rounding=StochasticRounding(0, torch.arange(3, device=device)))
    residual = torch.zeros(case.layout.residual_shape(4, 2), dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"rounding.residual has shape .* expected \[5, 2, 2, 16, 32\]"):
        call(rounding=ErrorFeedback(residual))
    with pytest.raises(ValueError, match="rounds nothing"):
        layout = DampLayout(32, 40, low_bits=32)
        damp_update(layout.zeros(4, 2, device), *arguments, plan, layout, rounding=ErrorFeedback(residual))


def test_reference_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None; import hf_lowbit_kernels as k, torch;"
        "assert k.damp_backend('cpu', torch.float32) == ('reference', 'triton is not installed');"
        "l = k.DampLayout(8, 8, 2); p = k.DampPlan.identity(1, 8, 8); z = torch.zeros;"
        "x = [z(1, 1, 8)] * 3 + [z(1, 1)] * 2;"
        "assert not k.damp_update(l.zeros(1, 1), z(1, dtype=torch.int32), *x, p, l).any()"
    )
    path = str(Path(hf_lowbit_kernels.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
