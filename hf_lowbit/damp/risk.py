"""How much a key row's quantization error matters: E[e W] (paper, section 5.1, eqs. 14-15)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_lowbit_kernels import DampLayout, DampPlan, damp_pack, damp_unpack


@dataclass(frozen=True)
class RowStats:
    """Means over anchors (stratified) of one layer's rows, fp64; what selectors choose from.

    Attributes:
        energy: ``[HV, dk]``, E[||S_u||^2].
        error: ``[HV, dk]``, E[e_u] of the low-precision format, in squared state units.
        retention: E[W_u]: ``[HV, dk]`` (KDA), or ``[HV]`` where all rows of a head share their decay (GDN).
        risk: ``[HV, dk]``, C_u = E[e_u W_u].
        readout: ``[HV, dk]``, E[e_u W^out_u], in squared output units; None where W^out was not captured.
    """

    energy: torch.Tensor
    error: torch.Tensor
    retention: torch.Tensor
    risk: torch.Tensor
    readout: torch.Tensor | None = None


def retention(g: torch.Tensor) -> torch.Tensor:
    """W = 1 + sum_j prod_{s <= j} a_s^2: the energy an error of size 1 has left now and after each later update.

    Args:
        g: log decays of the H updates after an anchor, ``[B, H, ...]``; a = exp(g).

    Returns:
        fp32 ``[B, ...]``, between 1 and 1 + H.

    Example:
        >>> retention(torch.full((1, 256), 0.5).log()).item()  # 1 / (1 - a^2), up to the horizon
        1.3333333730697632
    """
    start = g.new_zeros(g[:, 0].shape, dtype=torch.float32)
    return extend_retention(start, torch.ones_like(start), g)[1]


def extend_retention(
    log_kept: torch.Tensor, weight: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`retention` in pieces: add the updates ``g`` to what earlier pieces gave.

    Args:
        log_kept: fp32 ``[B, ...]``, sum of the log decays so far (zeros at the anchor).
        weight: fp32 ``[B, ...]``, W so far (ones at the anchor).
        g: log decays, ``[B, T, ...]``.

    Returns:
        The new ``(log_kept, weight)``.
    """
    kept = log_kept[:, None] + g.float().cumsum(1)
    return kept[:, -1], weight + (2 * kept).exp().sum(1)


def row_errors(states: torch.Tensor, plan: DampPlan, layout: DampLayout) -> torch.Tensor:
    """e_u = sum_v (S^_uv - S_uv)^2 in model coordinates, through the real bytes (paper, eq. 14).

    Args:
        states: fp32 ``[A, HV, dk, dv]``.
        plan, layout: the format.

    Returns:
        fp32 ``[A, HV, dk]``.
    """
    return (damp_unpack(damp_pack(states, plan, layout), plan, layout) - states).square().sum(-1)


def risk(errors: torch.Tensor, weights: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """C = E[e W]; the product comes before the mean, as error and decay vary together (paper, section 5.1).

    Args:
        errors: ``[A, HV, dk]``, e at each anchor.
        weights: W or W^out, ``[A, HV, dk]``, or ``[A, HV]`` for a decay common to the rows of a head.
        share: ``[A]``, weight of each anchor in the mean (:func:`stratified_shares`).

    Returns:
        fp64 ``[HV, dk]``.
    """
    if weights.dim() == 2:
        weights = weights[..., None]
    return mean(errors.double() * weights, share)


def mean(values: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """``sum_a share[a] values[a]`` in fp64."""
    return torch.tensordot(share.to(values.device), values.double(), dims=1)


def stratified_shares(domains: Sequence[str], per_sequence: int = 1) -> torch.Tensor:
    """Weights of a mean in which domains count alike, in a domain its sequences, in a sequence its anchors.

    Every sequence has the same number of windows, and every window of anchors, so weighting windows alike needs
    nothing more (paper, appendix A.2).

    Args:
        domains: the domain of each sequence.
        per_sequence: anchors of a sequence, which lie next to each other.

    Returns:
        fp64 ``[len(domains) * per_sequence]``, sums to 1.
    """
    count = Counter(domains)
    shares = torch.tensor([1 / (len(count) * count[domain]) for domain in domains], dtype=torch.float64)
    return shares.repeat_interleave(per_sequence) / per_sequence
