"""The encoder: nearest entry of the rounded tables, under the artifact's metric.

The one place that decides which code a token gets, used by serving, by fine-tuning and by tests of both. Decode steps do
the same, with the same metric, tables and norms, in one kernel (`vq_encode_pages`).
"""

from __future__ import annotations

import torch

from hf_lowbit_kernels import half_norms, vq_encode

from .grouping import Grouping


METRIC_FLOOR = 1e-3  # of the mean weight in a group: a coordinate no gradient reached still counts a little


def encode(
    states: torch.Tensor, tables: torch.Tensor, norms: torch.Tensor, metric: torch.Tensor | None
) -> torch.Tensor:
    """Codes of one block's states: ``argmin_r sum_i metric_i * (x_i - e_ri)^2`` over the coordinates of each group.

    Args:
        states: model dtype ``[T_c, N, H, D]``, keys before RoPE.
        tables: fp16 ``[T_c, H, NG, 256, c]``.
        norms: from :func:`entry_norms`, of the same tables and metric.
        metric: fp32 ``[T_c, H, D]``, or None for the plain distance.

    Returns:
        uint8 ``[N, H, NG]``, the lowest index on ties.
    """
    if metric is not None:
        metric = metric.contiguous()
    return vq_encode(states, tables, norms, metric)


def entry_norms(tables: torch.Tensor, metric: torch.Tensor | None) -> torch.Tensor:
    """fp32 ``[H, NG, 256]``: half the squared length of each rounded entry under the metric."""
    if metric is None:
        return half_norms(tables)
    weights = metric.unflatten(-1, (tables.shape[2], -1)).unsqueeze(-2)  # [T_c, H, NG, 1, c]
    return 0.5 * (tables.float().square() * weights).sum(dim=(0, -1))


def fisher_metric(sensitivity: torch.Tensor, grouping: Grouping) -> torch.Tensor:
    """Weights of the coordinates from their squared gradients: mean 1 within each group, rounded to fp16.

    Args:
        sensitivity: ``[T, H, D]``, squared loss gradient of each coordinate, averaged over tokens.

    Returns:
        fp32 ``[T, H, D]`` with values that fp16 holds exactly.
    """
    shape = (grouping.blocks, grouping.steps_per_code)
    groups = grouping.couple(sensitivity.float().unflatten(0, shape).transpose(0, 1))  # [nB, H, NG, G]
    mean = groups.mean(-1, keepdim=True)
    groups = torch.where(mean > 0, groups / mean.clamp_min(1e-38), torch.ones_like(groups)).clamp_min(METRIC_FLOOR)
    return grouping.separate(groups).transpose(0, 1).flatten(0, 1).half().float()
