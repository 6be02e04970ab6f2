"""Fisher-weighted k-means against a plain loop, and the properties that come for free."""

import pytest
import torch

from hf_lowbit.loopvq import kmeans


def problem(problems=2, count=1500, size=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(problems, count, size, generator=generator)
    weights = torch.rand(problems, count, generator=generator) ** 3
    return vectors, weights


def solve(vectors, weights, seed=0, **options):
    return kmeans.weighted_kmeans(vectors, weights, generator=torch.Generator().manual_seed(seed), **options)


def cost(vectors, weights, entries):
    return float((weights * torch.cdist(vectors.double(), entries.double()).square().min(-1).values).sum())


def test_entries_are_weighted_means_of_their_vectors():
    vectors, weights = problem()
    entries = solve(vectors, weights, iterations=100, tolerance=0).entries
    index = torch.cdist(vectors.double(), entries.double()).argmin(-1)
    for p in range(2):
        for k in range(256):
            mine = index[p] == k
            if mine.any():
                mean = (vectors[p, mine] * weights[p, mine, None]).sum(0) / weights[p, mine].sum()
                torch.testing.assert_close(entries[p, k], mean, atol=1e-4, rtol=1e-4)


def test_objective_never_rises():
    result = solve(*problem(), iterations=50)
    falls = zip(result.objective, result.objective[1:])
    assert all(after <= before * (1 + 1e-5) for before, after in falls)
    assert result.reseeded == 0 and len(result.objective) > 3


def test_weights_pull_entries_to_heavy_vectors():
    vectors, weights = problem(problems=1)
    heavy = weights.clone()
    heavy[:, :200] *= 1000
    weighted, plain = solve(vectors, heavy).entries, solve(vectors, torch.ones_like(weights)).entries
    assert cost(vectors, heavy, weighted) < 0.5 * cost(vectors, heavy, plain)


def test_a_constant_factor_on_the_weights_changes_nothing():
    vectors, weights = problem()
    a, b = solve(vectors, weights), solve(vectors, weights * 1024)
    torch.testing.assert_close(a.entries, b.entries, atol=1e-5, rtol=0)


def test_same_seed_same_entries_other_seed_others():
    vectors, weights = problem()
    assert torch.equal(solve(vectors, weights).entries, solve(vectors, weights).entries)
    assert not torch.equal(solve(vectors, weights).entries, solve(vectors, weights, seed=1).entries)


def test_batches_of_problems_do_not_touch_each_other(monkeypatch):
    vectors, weights = problem(problems=3)
    whole = solve(vectors, weights, iterations=30)
    assert cost(vectors[0], weights[0], whole.entries[0]) < 0.5 * cost(vectors[0], weights[0], whole.entries[1])
    monkeypatch.setattr(kmeans, "SCORE_BYTES", 1)
    one_by_one = solve(vectors, weights, iterations=30)
    for p in range(3):
        ratio = cost(vectors[p], weights[p], one_by_one.entries[p]) / cost(vectors[p], weights[p], whole.entries[p])
        assert 0.95 < ratio < 1.05


def test_empty_entries_move_to_distinct_costly_points():
    vectors, weights = problem(problems=1, count=600)
    entries = torch.full((1, 256, 6), 100.0)
    entries[:, :4] = vectors[:, :4]
    index, distance = kmeans.assign(vectors, entries)
    sums = kmeans._weighted_sums(vectors, weights, index)
    moved = kmeans._reseed(entries, sums, vectors, weights, distance)
    assert moved >= 252
    assert len(torch.unique(entries[0], dim=0)) == 256


def test_fewer_distinct_vectors_than_entries():
    vectors = torch.randn(1, 40, 4).repeat(1, 20, 1)
    result = solve(vectors, torch.ones(1, 800))
    assert result.duplicates == 1
    assert cost(vectors, torch.ones(1, 800), result.entries) < 1e-6


def test_ties_take_the_lowest_index():
    entries = torch.zeros(1, 256, 4)
    entries[:, 7:] = 5.0
    index, _ = kmeans.assign(torch.tensor([[[0.0] * 4, [5.0] * 4]]), entries)
    assert index.tolist() == [[0, 7]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_are_refused(bad):
    vectors, weights = problem()
    vectors[0, 3, 1] = bad
    with pytest.raises(ValueError, match="NaN or Inf"):
        solve(vectors, weights)
    with pytest.raises(ValueError, match="negative"):
        solve(problem()[0], -weights)
