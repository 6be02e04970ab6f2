"""`DampLayout`, `DampPlan`, `damp_pack`, `damp_unpack` and the random numbers of stochastic rounding."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from damp_cases import BASE, CASES, make_plan, oracle_state

from hf_lowbit_kernels import (
    DampLayout,
    DampPlan,
    ErrorFeedback,
    StochasticRounding,
    damp_pack,
    damp_unpack,
    damp_update_reference,
)


reference = sys.modules[damp_update_reference.__module__]


@pytest.mark.parametrize(
    "dk, dv, high_rows, low_bits, bits",
    [
        (128, 128, 16, "4z", 7.25),
        (128, 128, 8, "4z", 6.625),
        (128, 128, 32, "4z", 8.5),
        (128, 128, 0, "4z", 6.0),
        (128, 128, 16, 8, 9.875),
        (128, 128, 8, 8, 9.4375),
        (128, 128, 32, 8, 10.75),
        (128, 128, 0, 8, 9.0),
        (128, 128, 128, 8, 16.0),
        (128, 128, 16, 4, 6.375),
        (128, 128, 32, 4, 7.75),
        (128, 128, 0, 4, 5.0),
        (128, 128, 0, 32, 32.0),
        (96, 192, 12, 8, 9.875),
    ],
)
def test_bits_per_value_are_the_paper_s(dk, dv, high_rows, low_bits, bits):
    layout = DampLayout(dk, dv, high_rows, 4 if low_bits == "4z" else low_bits, zero_point=low_bits == "4z")
    pool = layout.zeros(3, 5)
    assert 8 * pool.numel() * pool.element_size() / (3 * 5 * dk * dv) == pytest.approx(bits, rel=1e-9)
    assert layout.bits_per_value == pytest.approx(bits, rel=1e-9)
    assert layout.record_bytes % 16 == 0 and layout.scale_offset % 16 == 0


def test_bytes_of_the_paper_s_configuration():
    layout = DampLayout(128, 128, 16)
    assert (layout.low_offset, layout.scale_offset, layout.record_bytes) == (1024, 1024 + 3584, 5056)
    assert layout.state_bytes == 20224


def random_state(case, device):
    generator = torch.Generator().manual_seed(case.dk + case.dv)
    plan = make_plan(case, device, generator)
    state = torch.randn(3, case.heads, case.dk, case.dv, generator=generator)
    return (state * torch.exp2(3 * torch.randn(3, case.heads, case.dk, 1, generator=generator))).to(device), plan


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_packing_rounds_to_the_nearest_code(case, device):
    state, plan = random_state(case, device)
    records = damp_pack(state, plan, case.layout)
    assert records.dtype == torch.uint8 and records.shape == case.layout.pool_shape(3, case.heads)
    decoded = damp_unpack(records, plan, case.layout)
    for n in range(3):
        for head in range(case.heads):
            expected, unit = oracle_state(records[n, head], case, plan, head)
            got = decoded[n, head].double().cpu().numpy()
            cancelled = 3e-6 * unit if case.zero_point else 0.0  # code * scale + zero point
            assert (np.abs(got - expected) <= 2e-7 * np.abs(expected) + cancelled).all()
            exact = state[n, head].double().cpu().numpy()
            assert (np.abs(got - exact) <= 0.5001 * unit + 3e-7 * np.abs(exact)).all()
    assert not records[..., case.layout.used_bytes :].any()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_repacking_changes_no_code(case, device):
    state, _ = random_state(case, device)
    plan = DampPlan.from_rows(
        torch.arange(case.dk - case.high_rows, case.dk, device=device).expand(case.heads, -1), case.dk, case.dv
    )
    records = damp_pack(state, plan, case.layout)
    again = damp_pack(damp_unpack(records, plan, case.layout), plan, case.layout)
    codes = case.layout.scale_offset
    assert torch.equal(again[..., :codes], records[..., :codes])
    zero = damp_unpack(case.layout.zeros(2, case.heads, device), plan, case.layout)
    assert zero.shape == (2, case.heads, case.dk, case.dv) and not zero.any()


def test_non_finite_states(device):
    layout, plan = DampLayout(4, 64, 1), DampPlan.identity(1, 4, 64, device)
    state = torch.ones(1, 1, 4, 64, device=device)
    state[0, 0, 0, 3], state[0, 0, 2, 40] = torch.inf, torch.nan
    with pytest.raises(ValueError, match="overflowed before it was packed"):
        damp_pack(state, plan, layout, check_finite=True)
    decoded = damp_unpack(damp_pack(state, plan, layout), plan, layout)[0, 0]
    expected = torch.ones(4, 64, dtype=torch.bool, device=device)
    expected[0, 3] = False
    expected[2, 32:] = False
    assert torch.equal(decoded.isfinite(), expected) and decoded[~expected].isnan().all()


def test_philox_known_answers():
    """Vectors of the Random123 distribution for philox4x32-10."""
    tensor = lambda *words: tuple(torch.tensor([w]) for w in words)  # noqa: E731
    zeros = reference.philox(tensor(0, 0, 0, 0), 0)
    assert [int(x) for x in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = reference.philox(tensor(*[0xFFFFFFFF] * 4), 2**64 - 1)
    assert [int(x) for x in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits = tensor(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    out = reference.philox(digits, 0x299F31D0A4093822)
    assert [int(x) for x in out] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_noise_is_the_documented_one(device):
    """Row 9, column 45 of head 1: octet 45 // 8, its half 45 % 8."""
    layout = DampLayout(16, 70, 2)
    rounding = StochasticRounding(5, torch.tensor([11, 12], device=device), layer=7)
    noise = reference._noise(rounding, torch.tensor([3, 4], device=device), 2, layout)
    words = reference.philox((torch.tensor(9 * 12 + 5), *map(torch.tensor, (1 + (7 << 16), 12, 4))), 5)
    half = (int(words[2]) >> 16) & 0xFFFF
    assert noise.shape == (2, 2, 3, 14, 32) and noise[1, 1, 1, 7, 13] == (half + 0.5) / 65536 - 0.5
    assert noise.abs().max() < 0.5 and abs(noise.mean()) < 0.02 and abs(noise.std() - 12**-0.5) < 0.01


@pytest.mark.parametrize("low_bits", [8, 4])
def test_stochastic_rounding_is_unbiased_and_reproducible(low_bits, device):
    layout, plan = DampLayout(16, 40, 2, low_bits), DampPlan.identity(1, 16, 40, device)
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(1, 1, 16, 40, generator=generator).to(device).expand(512, -1, -1, -1)
    steps = torch.arange(512, device=device)
    streams = torch.zeros_like(steps)
    rounding = StochasticRounding(11, steps, streams)
    records = damp_pack(state, plan, layout, rounding=rounding)
    decoded = damp_unpack(records, plan, layout)
    unit = state[0, 0].abs().amax() / (127 if low_bits == 8 else 7)
    assert (decoded - state).abs().max() <= 1.0001 * unit
    # A mean of 512 values of standard deviation at most half a unit: 5 sigma.
    assert (decoded.mean(0) - state[0])[0].abs().max() <= 5 * 0.5 * unit / 512**0.5
    assert torch.equal(records, damp_pack(state, plan, layout, rounding=rounding))
    some = StochasticRounding(11, steps[7:9], streams[7:9])
    assert torch.equal(records[7:9], damp_pack(state[7:9], plan, layout, rounding=some))
    for other in (StochasticRounding(12, steps, streams), StochasticRounding(11, steps, streams, layer=1)):
        assert not torch.equal(records, damp_pack(state, plan, layout, rounding=other))
    assert len(records.flatten(1).unique(dim=0)) == 512


def test_plan_from_rows(device):
    plan = DampPlan.from_rows(torch.tensor([[5, 2], [0, 7]], device=device), 8, 3)
    assert plan.perm_k.tolist() == [[2, 5, 0, 1, 3, 4, 6, 7], [0, 7, 1, 2, 3, 4, 5, 6]]
    assert plan.perm_v.tolist() == [[0, 1, 2]] * 2 and (plan.column_scale == 1).all() and plan.heads == 2


def test_errors_say_what_is_allowed():
    for options, message in [
        (dict(dk=257, dv=8), "allowed is 1 to 256"),
        (dict(dk=8, dv=0), "dv is 0"),
        (dict(dk=8, dv=8, high_rows=9), "0 to dk = 8"),
        (dict(dk=8, dv=8, high_rows=1, low_bits=6), "8, 4 or 32"),
        (dict(dk=8, dv=8, high_rows=1, zero_point=True), "zero_point=True is for low_bits=4"),
    ]:
        with pytest.raises(ValueError, match=message):
            DampLayout(**options)
    good = DampPlan.identity(2, 8, 4)
    with pytest.raises(ValueError, match="permutation of 0 to 7"):
        replace(good, perm_k=torch.zeros(2, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="perm_v must be a contiguous torch.int16"):
        replace(good, perm_v=good.perm_v.long())
    with pytest.raises(ValueError, match="positive and finite"):
        replace(good, column_scale=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="with the HV = 2"):
        replace(good, column_scale=torch.ones(1, 4))
    with pytest.raises(ValueError, match="repeat an index"):
        DampPlan.from_rows(torch.tensor([[1, 1]]), 8, 4)
    with pytest.raises(ValueError, match="indices from 0 to 7"):
        DampPlan.from_rows(torch.tensor([[8]]), 8, 4)
    with pytest.raises(ValueError, match="state has shape"):
        damp_pack(torch.zeros(1, 2, 8, 5), good, DampLayout(8, 4, 2))
    with pytest.raises(ValueError, match="floating-point"):
        damp_pack(torch.zeros(1, 2, 8, 4, dtype=torch.int32), good, DampLayout(8, 4, 2))
    with pytest.raises(ValueError, match="records has shape"):
        damp_unpack(torch.zeros(1, 2, 1, 64, dtype=torch.uint8), good, DampLayout(8, 4, 2))
    with pytest.raises(ValueError, match="seed is -1"):
        StochasticRounding(-1, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="residual must be float16"):
        ErrorFeedback(torch.zeros(1, 2, 1, 6, 32))
    assert BASE.layout.high_rows == 16
