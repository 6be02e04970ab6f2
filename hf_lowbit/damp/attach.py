"""Where a model keeps its DAMP tables: one module inside each gated delta-rule layer, on the layer's device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from hf_lowbit_kernels import DampLayout, DampPlan

from ..config import DAMPConfig, lowbit_config
from .spec import DeltaLayer, DeltaSpec


NAME = "damp"  # of the table module inside a delta-rule layer


class DampTables(nn.Module):
    """Tables of one layer as buffers; read them as a :class:`~hf_lowbit_kernels.DampPlan` through :meth:`plan`.

    Buffers:
        perm_k: uint8 ``[HV, dk]``, protected key channels first.
        perm_v: int16 ``[HV, dv]``.
        column_scale: int32 ``[HV, dv]``, the bits of the fp32 scales: transformers casts floating buffers to the model's
            dtype when a checkpoint is loaded, and rounded scales would no longer belong to the permutation.
    """

    def __init__(self, layer: DeltaLayer, plan: DampPlan | None = None):
        super().__init__()
        device = next(layer.module.parameters()).device
        heads, dk, dv = layer.value_heads, layer.dk, layer.dv
        self.register_buffer("perm_k", torch.zeros(heads, dk, dtype=torch.uint8, device=device))
        self.register_buffer("perm_v", torch.zeros(heads, dv, dtype=torch.int16, device=device))
        self.register_buffer("column_scale", torch.zeros(heads, dv, dtype=torch.int32, device=device))
        if plan is not None:
            self.perm_k.copy_(plan.perm_k)
            self.perm_v.copy_(plan.perm_v)
            self.column_scale.copy_(plan.column_scale.view(torch.int32))

    def plan(self) -> DampPlan:
        """The tables as the kernels take them.

        Raises:
            ValueError: the tables are damaged (no permutation, or a scale that is not positive and finite).
        """
        return DampPlan(self.perm_k, self.perm_v, self.column_scale.view(torch.float32))


def attach_damp(model, config: DAMPConfig, plans: Sequence[DampPlan] | None = None) -> None:
    """Put tables on the delta-rule layers: the given ones, or empty ones for a checkpoint to fill."""
    spec = DeltaSpec.of(model)
    for layer in spec.layers:
        damp_layout(layer, config)  # says no to impossible sizes
    given = [None] * len(spec.layers) if plans is None else plans
    for layer, plan in zip(spec.layers, given, strict=True):
        layer.module.add_module(NAME, DampTables(layer, plan))


def damp_layout(layer: DeltaLayer, config: DAMPConfig) -> DampLayout:
    """Bytes of the layer's states."""
    return layout_of(layer.dk, layer.dv, config)


def layout_of(dk: int, dv: int, config: DAMPConfig) -> DampLayout:
    """Bytes of states of ``dk`` x ``dv``."""
    return DampLayout(
        dk, dv, config.high_rows(dk), config.low_bits, zero_point=config.low_bits == 4 and config.zero_point
    )


def check_rows(plan: DampPlan, rows: int) -> None:
    """Check that a plan was made for so many protected rows: both parts of ``perm_k`` ascend.

    Raises:
        ValueError: they do not, so that other rows than the risky ones would be protected.
    """
    for part in (plan.perm_k[:, :rows], plan.perm_k[:, rows:]):
        if bool((part.int().diff(dim=1) <= 0).any()):
            raise ValueError(f"perm_k was not made for rows={rows} protected key rows a head")


def stored_bytes(layout: DampLayout, rounding: str) -> int:
    """Bytes of one (row, value head), the residual of error feedback included."""
    residual = 2 * math.prod(layout.residual_shape(1, 1)) if rounding == "error_feedback" else 0
    return layout.state_bytes + residual


def detach_damp(model) -> None:
    """Remove the tables."""
    for module in list(model.modules()):
        if isinstance(getattr(module, NAME, None), DampTables):
            delattr(module, NAME)


def has_damp(model) -> bool:
    """Whether the model carries DAMP tables."""
    return any(isinstance(module, DampTables) for module in model.modules())


def damp_tables(model) -> list[DampTables]:
    """The tables in layer order.

    Raises:
        ValueError: the model carries none.
    """
    if not has_damp(model):
        raise ValueError(
            f"this {type(model).__name__} carries no DAMP tables. Calibrate it (hf_lowbit.calibrate) or load a "
            "calibrated checkpoint with `import hf_lowbit` before from_pretrained."
        )
    return [getattr(layer.module, NAME) for layer in DeltaSpec.of(model).layers]


def damp_config(model) -> DAMPConfig:
    """The settings the model's tables were made with."""
    damp_tables(model)
    return lowbit_config(model).damp
