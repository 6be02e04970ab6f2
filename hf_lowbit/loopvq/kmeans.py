"""Fisher-weighted k-means for many small problems at once (paper eq. 3).

Every (block, head, group) of a layer is one problem: ``n`` vectors of ``G`` elements, one weight each, 256 entries.
All arithmetic is fp32 and in a fixed order, so the same seed on the same machine gives the same entries.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch


ENTRIES = 256
SCORE_BYTES = 1 << 30  # scratch for one batch of problems' [n, 256] scores on a GPU; a sixteenth of it on a CPU


@dataclass
class KMeansResult:
    """Attributes:
    entries: fp32 ``[P, 256, G]``.
    objective: per iteration, the weighted squared error summed over all problems.
    reseeded: entries that were empty and moved, over all iterations.
    duplicates: problems in which some entry serves no vector (too few distinct vectors, say).
    """

    entries: torch.Tensor
    objective: list[float]
    reseeded: int
    duplicates: int


@contextmanager
def exact_matmul():
    """fp32 matrix products without TF32: rounding scores to 10 bits would move assignments."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _scores(vectors: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """``<x, e> - |e|^2 / 2``, ``[P, n, 256]``; its argmax is the nearest entry."""
    return torch.baddbmm(-0.5 * entries.square().sum(-1).unsqueeze(1), vectors, entries.transpose(1, 2))


def assign(vectors: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest entry of each vector, the lowest index on ties.

    Args:
        vectors: fp32 ``[P, n, G]``.
        entries: fp32 ``[P, 256, G]``.

    Returns:
        Indices int64 ``[P, n]`` and squared distances fp32 ``[P, n]``.
    """
    best, index = _scores(vectors, entries).max(dim=-1)
    return index, (vectors.square().sum(-1) - 2 * best).clamp_min_(0)


def _weighted_sums(vectors: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``[P, 256, G + 1]``: per entry the weighted sum of its vectors, and in the last column of their weights."""
    weighted = torch.cat([vectors * weights.unsqueeze(-1), weights.unsqueeze(-1)], dim=-1)
    problems, count, width = weighted.shape
    if weighted.is_cuda:
        # Float atomics would add in a different order each run; a one-hot product is as fast and always the same.
        one_hot = torch.zeros(problems, count, ENTRIES, device=weighted.device)
        one_hot.scatter_(2, index.unsqueeze(-1), 1.0)
        return torch.bmm(one_hot.transpose(1, 2), weighted)
    flat = index + ENTRIES * torch.arange(problems, device=index.device).unsqueeze(1)
    sums = torch.zeros(problems * ENTRIES, width, device=weighted.device)
    return sums.index_add_(0, flat.flatten(), weighted.flatten(0, 1)).view(problems, ENTRIES, width)


def _draw(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One index per problem with probability proportional to ``weights`` ``[P, n]``; uniform where all are zero."""
    weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, torch.ones_like(weights))
    total = weights.double().cumsum(-1)  # fp32 sums over 32768 weights would round small ones away
    point = torch.rand(weights.shape[0], 1, dtype=torch.float64, generator=generator).to(weights.device)
    return torch.searchsorted(total, point * total[:, -1:], right=True).squeeze(-1).clamp_max_(weights.shape[1] - 1)


def _plus_plus(vectors: torch.Tensor, weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """k-means++ with the Fisher weight in the draw: P ~ w for the first entry, then P ~ w * dist^2."""
    rows = torch.arange(vectors.shape[0], device=vectors.device)
    norms = vectors.square().sum(-1)
    entries = torch.empty(vectors.shape[0], ENTRIES, vectors.shape[2], device=vectors.device)
    nearest = torch.full_like(norms, float("inf"))
    draw = weights
    for k in range(ENTRIES):
        entry = vectors[rows, _draw(draw, generator)]
        entries[:, k] = entry
        cross = torch.bmm(vectors, entry.unsqueeze(-1)).squeeze(-1)
        distance = (norms - 2 * cross + entry.square().sum(-1, keepdim=True)).clamp_min_(0)
        nearest = torch.minimum(nearest, distance)
        draw = weights * nearest
    return entries


def _reseed(entries, sums, vectors, weights, distance) -> int:
    """Move each empty entry to a different point of largest ``w * dist^2``; returns how many moved."""
    empty = sums[..., -1] <= 0  # [P, 256]
    most = int(empty.sum(-1).max())
    if most == 0:
        return 0
    cost = weights * distance
    top = cost.topk(min(most, cost.shape[1]), dim=-1)
    rank = (empty.cumsum(-1) - 1).clamp(0, top.indices.shape[1] - 1)
    # A point of zero cost already equals an entry: moving there would only make a copy of it, so the entry stays.
    move = empty & (top.values.gather(1, rank) > 0)
    points = vectors.gather(1, top.indices.gather(1, rank).unsqueeze(-1).expand(-1, -1, vectors.shape[2]))
    entries[move] = points[move]
    return int(move.sum())


@torch.no_grad()
def weighted_kmeans(
    vectors: torch.Tensor,
    weights: torch.Tensor,
    *,
    iterations: int = 100,
    tolerance: float = 1e-5,
    generator: torch.Generator,
) -> KMeansResult:
    """Solve a batch of weighted k-means problems.

    Args:
        vectors: fp32 ``[P, n, G]``; problems are taken in batches that fit :data:`SCORE_BYTES`.
        weights: fp32 ``[P, n]``, non-negative; only their ratios within a problem matter.
        iterations: upper bound.
        tolerance: a batch stops once its objective falls by less than this fraction.
        generator: CPU generator; all randomness is drawn from it.

    Raises:
        ValueError: NaN or Inf in the input, or negative weights.
    """
    if vectors.ndim != 3 or weights.shape != vectors.shape[:2] or vectors.shape[1] == 0:
        raise ValueError(
            f"vectors {tuple(vectors.shape)} and weights {tuple(weights.shape)} must be [P, n, G], [P, n]."
        )
    if not torch.isfinite(vectors).all() or not torch.isfinite(weights).all():
        raise ValueError("k-means got NaN or Inf; check the model's activations on the calibration data.")
    if (weights < 0).any():
        raise ValueError("k-means weights must not be negative.")
    budget = SCORE_BYTES if vectors.is_cuda else SCORE_BYTES // 16
    batch = max(1, budget // (vectors.shape[1] * ENTRIES * 4))
    parts = [
        _solve(vectors[i : i + batch], weights[i : i + batch], iterations, tolerance, generator)
        for i in range(0, vectors.shape[0], batch)
    ]
    longest = max(len(part.objective) for part in parts)
    return KMeansResult(
        entries=torch.cat([part.entries for part in parts]),
        objective=[sum(p.objective[min(i, len(p.objective) - 1)] for p in parts) for i in range(longest)],
        reseeded=sum(part.reseeded for part in parts),
        duplicates=sum(part.duplicates for part in parts),
    )


def _solve(vectors, weights, iterations, tolerance, generator) -> KMeansResult:
    # Mean weight 1 per problem: a constant factor does not move the optimum, but keeps sums well inside fp32.
    mean = weights.mean(-1, keepdim=True)
    weights = torch.where(mean > 0, weights / mean.clamp_min(1e-38), torch.ones_like(weights))
    objective: list[float] = []
    reseeded = 0
    with exact_matmul():
        entries = _plus_plus(vectors, weights, generator)
        index, distance = assign(vectors, entries)
        for _ in range(iterations):
            sums = _weighted_sums(vectors, weights, index)
            mass = sums[..., -1:]
            entries = torch.where(mass > 0, sums[..., :-1] / mass.clamp_min(1e-38), entries)
            moved = _reseed(entries, sums, vectors, weights, distance)
            reseeded += moved
            index, distance = assign(vectors, entries)
            objective.append(float((weights * distance).double().sum()))
            if moved == 0 and len(objective) > 1 and objective[-2] - objective[-1] < tolerance * objective[-2]:
                break
        used = torch.zeros(vectors.shape[0], ENTRIES, dtype=torch.bool, device=vectors.device)
        used.scatter_(1, index, True)
    return KMeansResult(entries, objective, reseeded, int((~used.all(-1)).sum()))
