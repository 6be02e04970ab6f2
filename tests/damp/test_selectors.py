"""Selectors: one interface, ties to the lower index, and a clear no where a rule cannot rank."""

from dataclasses import replace

import pytest
import torch

from hf_lowbit.damp.risk import RowStats
from hf_lowbit.damp.selectors import SELECTORS, check_selector, select, top_rows, weights_of


def stats(heads=3, dk=16, per_row=True):
    generator = torch.Generator().manual_seed(0)
    energy, error, kept, risk, read = torch.rand(5, heads, dk, generator=generator, dtype=torch.float64)
    return RowStats(energy, error, kept if per_row else kept[:, 0], risk, read)


@pytest.mark.parametrize("name", SELECTORS)
def test_the_highest_scores_are_chosen(name):
    given = stats()
    rows = select(name, given, 4, torch.Generator().manual_seed(5))
    assert rows.shape == (3, 4) and rows.dtype == torch.int64
    assert (rows.diff(dim=1) > 0).all()
    scores = {"damp": given.risk, "error": given.error, "retention": given.retention, "energy": given.energy}
    scores["readout"] = given.readout
    if name in scores:
        for head, chosen in enumerate(rows.tolist()):
            others = [u for u in range(16) if u not in chosen]
            assert scores[name][head, chosen].min() > scores[name][head, others].max()


def test_ties_go_to_the_lower_index():
    assert top_rows(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 1.0]] * 2), 4).tolist() == [[0, 1, 2, 3]] * 2
    assert top_rows(torch.zeros(1, 256), 3).tolist() == [[0, 1, 2]]


def test_random_is_seeded_and_spreads():
    given = stats(heads=64, dk=16)

    def draw(seed):
        return select("random", given, 4, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    counts = draw(1).flatten().bincount(minlength=16)
    assert counts.min() > 0 and counts.max() < 40  # 16 each on average
    with pytest.raises(ValueError, match="Generator"):
        select("random", given, 4)


def test_none_and_all_rows():
    assert select("damp", stats(), 0).shape == (3, 0)
    assert select("damp", stats(), 16).tolist() == [list(range(16))] * 3


def test_refusals():
    with pytest.raises(ValueError, match="Gated DeltaNet head: all of them share one decay"):
        select("retention", stats(per_row=False), 4)
    with pytest.raises(ValueError, match="Gated DeltaNet"):
        check_selector("retention", "gdn")
    check_selector("retention", "kda")
    with pytest.raises(ValueError, match="needs W.out, which this capture does not have"):
        select("readout", replace(stats(), readout=None), 4)
    with pytest.raises(ValueError, match="choose one of"):
        select("decay", stats(), 4)
    with pytest.raises(ValueError, match="17 rows cannot be chosen from 16|k=17"):
        select("damp", stats(), 17)


def test_only_readout_weights_errors_in_its_own_way():
    assert {name: weights_of(name) for name in SELECTORS} == dict.fromkeys(SELECTORS, "retention") | {
        "readout": "readout"
    }
