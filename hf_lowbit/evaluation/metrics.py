"""Pure functions over token lists: divergence of two generations, repetition, accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from ..data import Task


@dataclass(frozen=True)
class Divergence:
    """Where generations leave their reference, over a set of prompts.

    ``mean`` and the quantiles are over the index of the first differing token (0 = the first generated one). Identical
    generations count with their length, which is the number of tokens that agreed, so ``mean`` is a lower bound of
    how long the two would stay together; ``identical`` is their share.
    """

    mean: float
    identical: float
    p10: float
    p25: float
    p50: float
    p75: float
    p90: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def first_divergence(reference: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token that differs; the common length if one is a prefix of the other or both are equal."""
    for index, (a, b) in enumerate(zip(reference, other)):
        if a != b:
            return index
    return min(len(reference), len(other))


def divergence(references: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Divergence:
    """Summary of :func:`first_divergence` over pairs of generations."""
    if len(references) != len(others) or not references:
        raise ValueError(f"need equally many generations on both sides, got {len(references)} and {len(others)}")
    indices = sorted(first_divergence(a, b) for a, b in zip(references, others))
    identical = sum(list(a) == list(b) for a, b in zip(references, others))

    def quantile(q: float) -> float:
        return float(indices[round(q * (len(indices) - 1))])

    return Divergence(
        mean=sum(indices) / len(indices),
        identical=identical / len(indices),
        **{f"p{round(100 * q)}": quantile(q) for q in (0.1, 0.25, 0.5, 0.75, 0.9)},
    )


def repeats(tokens: Sequence[int], max_period: int = 32, min_repeats: int = 4, min_length: int = 16) -> bool:
    """Whether ``tokens`` contain a stretch that only repeats itself: the usual face of a damaged cache ("!!!").

    A stretch counts when it has a period of at most ``max_period`` tokens, at least ``min_repeats`` periods and at
    least ``min_length`` tokens.
    """
    for period in range(1, max_period + 1):
        needed = max(min_repeats * period, min_length) - period  # equal pairs (i, i - period) in a row
        run = 0
        for index in range(period, len(tokens)):
            run = run + 1 if tokens[index] == tokens[index - period] else 0
            if run >= needed:
                return True
    return False


def accuracy(tasks: Sequence[Task], generations: Iterable[str]) -> dict[str, float]:
    """Share of right answers by task, in order of first appearance; tasks without targets are left out."""
    right: dict[str, list[bool]] = {}
    for task, generation in zip(tasks, generations, strict=True):
        correct = task.is_correct(generation)
        if correct is not None:
            right.setdefault(task.task, []).append(correct)
    return {name: sum(values) / len(values) for name, values in right.items()}
