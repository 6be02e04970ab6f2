"""Which key rows of a head stay in FP16: DAMP's rule, what the paper compares it with (sections 5.1 and 6.4), and an
extension, "readout", that weights errors by what later queries read of them instead of by decay alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .risk import RowStats


def _retention(stats: RowStats, generator: torch.Generator | None) -> torch.Tensor:
    if stats.retention.dim() == 1:
        raise ValueError(NO_RETENTION)
    return stats.retention


def _readout(stats: RowStats, generator: torch.Generator | None) -> torch.Tensor:
    if stats.readout is None:
        raise ValueError(NO_READOUT)
    return stats.readout


def _random(stats: RowStats, generator: torch.Generator | None) -> torch.Tensor:
    if generator is None:
        raise ValueError('selector "random" needs a torch.Generator.')
    return torch.rand(stats.error.shape, generator=generator)


NO_RETENTION = (
    'selector "retention" cannot rank the rows of a Gated DeltaNet head: all of them share one decay. '
    'Use "readout" or "damp" (or "error", "energy", "random").'
)

NO_READOUT = (
    'selector "readout" needs W^out, which this capture does not have: make it with '
    "capture.collect(..., readout=True)."
)

# name -> score [HV, dk] of each row; the highest are protected.
SELECTORS: dict[str, Callable[[RowStats, torch.Generator | None], torch.Tensor]] = {
    "damp": lambda stats, generator: stats.risk,
    "error": lambda stats, generator: stats.error,
    "retention": _retention,
    "energy": lambda stats, generator: stats.energy,
    "random": _random,
    "readout": _readout,
}


def weights_of(selector: str) -> str:
    """What a selector's errors are weighted with in C and J: "readout" (W^out) for its namesake, else "retention" (W)."""
    return "readout" if selector == "readout" else "retention"


def check_selector(name: str, kind: str) -> None:
    """Say no before a long capture.

    Args:
        name: of the selector.
        kind: "gdn" or "kda", of a layer.

    Raises:
        ValueError: there is no such selector, or it cannot rank the rows of such a layer.
    """
    if name not in SELECTORS:
        raise ValueError(f"selector={name!r} is not supported; choose one of {list(SELECTORS)}.")
    if name == "retention" and kind == "gdn":
        raise ValueError(NO_RETENTION)


def select(name: str, stats: RowStats, k: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """The ``k`` rows of each head with the highest score; of equal ones the lower index.

    Args:
        name: a key of ``SELECTORS``.
        stats: of one layer.
        k: K_hi, 0 to dk.
        generator: CPU generator for "random".

    Returns:
        int64 ``[HV, k]``, ascending in each head.

    Raises:
        ValueError: no such selector; "retention" on a Gated DeltaNet; "random" without a generator; "readout" without
            W^out; ``k`` out of range.
    """
    check_selector(name, "kda")
    return top_rows(SELECTORS[name](stats, generator), k)


def top_rows(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` highest of each row of ``[HV, dk]``, int64 ``[HV, k]``, ascending; of equal ones the lower index.

    Raises:
        ValueError: ``k`` is out of range.
    """
    if not 0 <= k <= scores.shape[1]:
        raise ValueError(f"k={k} rows cannot be chosen from {scores.shape[1]}.")
    # A stable sort, as topk leaves the order of ties open.
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
