"""Column scaling and reordering (SR, paper section 4.1 and appendix A.2): which columns share a quantization scale.

A group is 32 neighbouring stored columns of one row with one scale. Dividing columns by ``c_v`` lessens the
differences between them, and sorting them by what is left puts like beside like. The paper says that scales come from
the RMS of the fitting split and does not list its candidates; the grid below is ours (inferred).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
LIMITS = (4.0, 16.0, float("inf"))


@dataclass(frozen=True)
class Candidate:
    """``c_v = clamp((m_v / GM(m))^alpha, 1/limit, limit)``, brought back to a geometric mean of 1.

    Attributes:
        alpha: 0 (no scaling) to 1 (all columns get the same RMS, where ``limit`` lets them).
        limit: kappa, bound of the scales.
        reorder: sort columns by ``m_v / c_v``, largest first.
    """

    alpha: float
    limit: float = float("inf")
    reorder: bool = True

    @property
    def name(self) -> str:
        """ "none", "order", or "alpha 0.5, limit 4"."""
        if self.alpha == 0:
            return "order" if self.reorder else "none"
        return f"alpha {self.alpha:g}, limit {self.limit:g}"


#: Columns as they are.
IDENTITY = Candidate(0.0, reorder=False)


def candidates() -> tuple[Candidate, ...]:
    """The candidates that J(c) is taken over, plain columns first (ties go to the first)."""
    scaled = tuple(Candidate(alpha, limit) for alpha in ALPHAS if alpha for limit in LIMITS)
    return IDENTITY, Candidate(0.0), *scaled


def tables(candidate: Candidate, rms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Column order and scales of a candidate.

    Args:
        candidate: the rule.
        rms: m_v, ``[HV, dv]``, root mean square of each value channel over anchors and key rows. Zero for a channel
            that is never written; it gets scale 1.

    Returns:
        ``perm_v`` int64 and ``column_scale`` fp32, both ``[HV, dv]``, as in :class:`~hf_lowbit_kernels.DampPlan`.
    """
    rms = rms.double()
    live = rms > 0
    count = live.sum(-1, keepdim=True).clamp(min=1)
    log = torch.where(live, rms, 1.0).log()
    log = torch.where(live, log - log.sum(-1, keepdim=True) / count, 0.0)
    bound = math.log(candidate.limit)
    exponent = (candidate.alpha * log).clamp(-bound, bound)
    order = torch.arange(rms.shape[-1], device=rms.device).expand(rms.shape)
    if candidate.reorder:
        # In logarithms, so that columns scaled to the same RMS are exactly equal and keep their order.
        scaled = torch.where(live, log - exponent, -math.inf)
        order = scaled.sort(dim=-1, descending=True, stable=True).indices
    # A common factor changes no INT8 code; a geometric mean of 1 keeps FP16 rows in FP16's range.
    exponent = torch.where(live, exponent - exponent.sum(-1, keepdim=True) / count, 0.0)
    return order.contiguous(), exponent.exp().float()
