"""W, e and C against plain loops; C finds what error and retention alone do not."""

import math

import pytest
import torch

from hf_lowbit.damp.risk import RowStats, extend_retention, mean, retention, risk, row_errors, stratified_shares
from hf_lowbit.damp.selectors import select
from hf_lowbit_kernels import DampLayout, DampPlan


def slow_retention(decays):
    """W of one channel from its decays, as eq. 15 is written."""
    total = 1.0
    for j in range(1, len(decays) + 1):
        product = 1.0
        for s in range(j):
            product *= decays[s] ** 2
        total += product
    return total


def slow_errors(row, columns, scales):
    """e of one row in INT8, from the definition: groups of 32 stored columns, codes to nearest even."""
    error = 0.0
    for start in range(0, len(columns), 32):
        group = columns[start : start + 32]
        stored = [float(torch.tensor(row[v]) / torch.tensor(scales[v])) for v in group]
        step = max(abs(x) for x in stored) / 127
        for v, x in zip(group, stored):
            error += (round(x / step) * step * scales[v] - row[v]) ** 2
    return error


@pytest.mark.parametrize("decay, expected", [(0.5, 1.333), (0.99, 49.964), (1.0, 257.0), (0.0, 1.0)])
def test_retention_of_constant_decay(decay, expected):
    g = torch.full((1, 256), decay).log()
    assert retention(g).item() == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("shape", [(2, 37, 3), (2, 37, 3, 4)], ids=["gdn", "kda"])
def test_retention_against_the_definition(shape):
    g = -torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 0.4
    found = retention(g)
    assert found.shape == (shape[0], *shape[2:])
    flat = g.double().exp().movedim(1, -1).reshape(-1, shape[1])
    expected = [slow_retention(decays.tolist()) for decays in flat]
    torch.testing.assert_close(
        found.flatten().double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0
    )


def test_retention_in_pieces_is_the_same():
    g = -torch.rand(3, 50, 2, generator=torch.Generator().manual_seed(1))
    log_kept, weight = torch.zeros(3, 2), torch.ones(3, 2)
    for piece in g.split([1, 30, 19], 1):
        log_kept, weight = extend_retention(log_kept, weight, piece)
    torch.testing.assert_close(weight, retention(g), rtol=1e-6, atol=0)
    torch.testing.assert_close(log_kept, g.sum(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("weights", ["gdn", "kda"])
def test_error_and_risk_against_plain_loops(weights):
    generator = torch.Generator().manual_seed(2)
    anchors, heads, dk, dv = 3, 2, 4, 40
    states = torch.randn(anchors, heads, dk, dv, generator=generator) * torch.rand(dv, generator=generator)
    w = 1 + 9 * torch.rand((anchors, heads, dk)[: 2 if weights == "gdn" else 3], generator=generator)
    order = torch.rand(heads, dv, generator=generator).argsort(1)
    scale = torch.rand(heads, dv, generator=generator) + 0.5
    plan = DampPlan.from_rows(torch.empty(heads, 0, dtype=torch.long), dk, dv, perm_v=order, column_scale=scale)
    share = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    errors = row_errors(states, plan, DampLayout(dk, dv, 0, 8))
    found = risk(errors, w, share)
    for h in range(heads):
        for u in range(dk):
            expected = 0.0
            for a in range(anchors):
                e = slow_errors(states[a, h, u].tolist(), order[h].tolist(), scale[h].tolist())
                assert errors[a, h, u].item() == pytest.approx(e, rel=1e-4)
                expected += share[a].item() * e * (w[a, h] if weights == "gdn" else w[a, h, u]).item()
            assert found[h, u].item() == pytest.approx(expected, rel=1e-4)


def test_the_product_comes_before_the_mean():
    # Rows 0 and 1 have the same E[e], and W is common to both; row 1 errs when errors last.
    errors = torch.tensor([[[4.0, 1.0]], [[1.0, 4.0]]])
    weights = torch.tensor([[1.0], [50.0]])
    share = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert risk(errors, weights, share).tolist() == [[27.0, 100.5]]


def test_a_planted_risky_row_is_found_by_risk_only():
    generator = torch.Generator().manual_seed(3)
    anchors, heads, dk, dv = 6, 1, 8, 32
    states = torch.randn(anchors, heads, dk, dv, generator=generator)
    weights = torch.full((anchors, heads, dk), 2.0)
    states[:, :, 3] *= 6  # the largest error, soon forgotten
    weights[:, :, 3] = 1.0
    weights[:, :, 6] = 200.0  # lasts longest, hardly any error
    states[:, :, 6] *= 0.01
    states[:, :, 5] *= 4  # neither, but both matter
    weights[:, :, 5] = 100.0
    plan, layout = DampPlan.identity(heads, dk, dv), DampLayout(dk, dv, 0, 8)
    share = stratified_shares(["a"] * anchors)
    e = row_errors(states, plan, layout)
    stats = RowStats(
        mean(states.square().sum(-1), share), mean(e, share), mean(weights, share), risk(e, weights, share)
    )
    chosen = {name: select(name, stats, 1).item() for name in ("damp", "error", "retention", "energy")}
    assert chosen == {"damp": 5, "error": 3, "retention": 6, "energy": 3}


def test_shares_are_equal_within_each_level():
    shares = stratified_shares(["math", "code", "math", "math"], per_sequence=2)
    assert shares.sum().item() == pytest.approx(1)
    assert shares[2:4].sum().item() == pytest.approx(0.5)  # code, one sequence
    assert shares[[0, 1, 4, 5, 6, 7]].tolist() == pytest.approx([1 / 12] * 6)
    assert math.isclose(mean(torch.arange(8.0), shares).item(), (2.5 + (0 + 1 + 4 + 5 + 6 + 7) / 6) / 2)
