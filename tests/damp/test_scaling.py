"""Column scales and orders of the candidates."""

import pytest
import torch

from hf_lowbit.damp import scaling
from hf_lowbit.damp.risk import row_errors
from hf_lowbit.damp.scaling import IDENTITY, Candidate
from hf_lowbit_kernels import DampLayout, DampPlan


RMS = torch.tensor([[8.0, 1.0, 0.5, 0.25], [1.0, 1.0, 1.0, 1.0]])


def test_candidates_start_with_plain_columns():
    found = scaling.candidates()
    assert found[0] == IDENTITY and found[0].name == "none" and found[1].name == "order"
    assert len({candidate.name for candidate in found}) == len(found) == 14


def test_identity():
    order, scale = scaling.tables(IDENTITY, RMS)
    assert order.tolist() == [[0, 1, 2, 3]] * 2 and (scale == 1).all()


def test_order_only_sorts_by_rms():
    order, scale = scaling.tables(Candidate(0.0), RMS.flip(1))
    assert order.tolist() == [[3, 2, 1, 0], [0, 1, 2, 3]] and (scale == 1).all()


@pytest.mark.parametrize("candidate", scaling.candidates(), ids=lambda candidate: candidate.name)
def test_tables_of_every_candidate(candidate):
    rms = torch.rand(5, 48, generator=torch.Generator().manual_seed(0)) ** 4 + 1e-3
    order, scale = scaling.tables(candidate, rms)
    assert torch.equal(order.sort(1).values, torch.arange(48).expand(5, 48))
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale.log().mean(1), torch.zeros(5), rtol=0, atol=1e-6)
    if candidate.reorder:
        assert ((rms / scale).gather(1, order).diff(dim=1) <= 1e-6).all()
    spread = scale.amax(1) / scale.amin(1)
    assert (spread <= candidate.limit**2 * 1.0001).all()
    DampPlan.from_rows(torch.empty(5, 0, dtype=torch.long), 8, 48, perm_v=order, column_scale=scale)


def test_alpha_between_none_and_full():
    _, half = scaling.tables(Candidate(0.5), RMS)
    _, full = scaling.tables(Candidate(1.0), RMS)
    torch.testing.assert_close(half.square(), full)
    torch.testing.assert_close(RMS / full, torch.ones(2, 4))  # geometric mean of both rows is 1


def test_columns_scaled_alike_keep_their_order():
    rms = torch.rand(2, 40, generator=torch.Generator().manual_seed(2)) + 0.5  # all within a limit of 4
    for limit in (4.0, float("inf")):
        order, _ = scaling.tables(Candidate(1.0, limit), rms)
        assert torch.equal(order, torch.arange(40).expand(2, 40))
    rms[:, 30] = 100
    assert scaling.tables(Candidate(1.0, 4.0), rms)[0][0].tolist() == [30, *range(30), *range(31, 40)]


def test_channels_that_are_never_written():
    rms = torch.tensor([[0.0, 4.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    for candidate in scaling.candidates():
        order, scale = scaling.tables(candidate, rms)
        assert scale.isfinite().all() and (scale > 0).all()
        assert scale[0, 0] == scale[0, 3] == 1 and (scale[1] == 1).all()
        assert order.sort(1).values.tolist() == [[0, 1, 2, 3]] * 2


def test_scaling_lowers_the_error_of_uneven_columns():
    generator = torch.Generator().manual_seed(1)
    columns = torch.exp2(torch.randint(-6, 7, (1, 64), generator=generator).float())
    states = torch.randn(4, 1, 16, 64, generator=generator) * columns
    errors = {}
    for candidate in (IDENTITY, Candidate(0.5)):
        order, scale = scaling.tables(candidate, states.square().mean((0, 2)).sqrt())
        plan = DampPlan.from_rows(torch.empty(1, 0, dtype=torch.long), 16, 64, perm_v=order, column_scale=scale)
        errors[candidate] = row_errors(states, plan, DampLayout(16, 64, 0, 8)).mean().item()
    assert errors[Candidate(0.5)] < 0.5 * errors[IDENTITY]
