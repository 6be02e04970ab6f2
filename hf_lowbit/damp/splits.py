"""Disjoint, domain-balanced parts of the calibration sequences (paper, appendix A.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


SPLITS = ("fitting", "selection", "validation")


def deal(domains: Sequence[str], parts: int, seed: int) -> list[list[int]]:
    """Deal sequences into disjoint parts, each domain as evenly as it goes, in an order drawn with the seed.

    Args:
        domains: label of each sequence.
        parts: how many parts.
        seed: same seed, same parts.

    Returns:
        Indices of each part, ascending.
    """
    generator = torch.Generator().manual_seed(seed)
    hands: list[list[int]] = [[] for _ in range(parts)]
    dealt = 0  # goes on from domain to domain, so that parts differ by one sequence at most
    for domain in sorted(set(domains)):
        members = [i for i, label in enumerate(domains) if label == domain]
        for i in torch.randperm(len(members), generator=generator).tolist():
            hands[dealt % parts].append(members[i])
            dealt += 1
    return [sorted(hand) for hand in hands]


def split(domains: Sequence[str], seed: int) -> dict[str, list[int]]:
    """Sequences of the fitting, selection and validation splits.

    Raises:
        ValueError: a domain has fewer than 3 sequences, so that a split would go without it.
    """
    for domain in sorted(set(domains)) or ["all"]:
        count = list(domains).count(domain)
        if count < len(SPLITS):
            where = "" if len(set(domains)) < 2 else f" of domain {domain!r}"
            raise ValueError(
                f"calibration needs at least 3 sequences{where}, one for each of the splits {', '.join(SPLITS)}; got "
                f"{count}. Give more sequences or merge domains."
            )
    return dict(zip(SPLITS, deal(domains, len(SPLITS), seed)))
