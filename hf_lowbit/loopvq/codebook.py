"""The codebooks of one attention layer, as buffers of the model."""

from __future__ import annotations

from typing import Literal

import torch
from hf_lowbit_kernels import half_norms
from torch import nn

from .grouping import Grouping

Side = Literal["key", "value"]
SIDES: tuple[Side, Side] = ("key", "value")


class LoopVQCodebook(nn.Module):
    """Codebooks of one layer: for K and V, one table per loop step, head and group.

    The only stored truth is ``key_table`` / ``value_table``: the bit patterns (int16) of fp16 entries
    ``[T, H, NG, 256, c]``. They are kept as integers because transformers and ``model.to(dtype)`` cast every floating
    buffer to the model's dtype, and bf16 would round the entries away from those the encoder was built for.
    Everything the encoder needs is derived from these bits, so encoder and decoder cannot disagree.
    """

    key_table: torch.Tensor
    value_table: torch.Tensor

    def __init__(self, grouping: Grouping, kv_heads: int, device: torch.device | str | None = None):
        super().__init__()
        self.grouping = grouping
        shape = (grouping.steps, kv_heads, grouping.groups, 256, grouping.channels)
        for side in SIDES:
            self.register_buffer(f"{side}_table", torch.zeros(shape, dtype=torch.int16, device=device))
        self._norms: dict[tuple[Side, int], tuple[tuple, torch.Tensor]] = {}

    @property
    def device(self) -> torch.device:
        return self.key_table.device

    def table(self, side: Side, step: int) -> torch.Tensor:
        """fp16 ``[H, NG, 256, c]``, the entries that loop step ``step`` reads."""
        return getattr(self, f"{side}_table")[step].view(torch.float16)

    def block_tables(self, side: Side, block: int) -> torch.Tensor:
        """fp16 ``[T_c, H, NG, 256, c]``, the tables of all steps in a block."""
        size = self.grouping.steps_per_code
        return getattr(self, f"{side}_table")[block * size : (block + 1) * size].view(torch.float16)

    def half_norms(self, side: Side, block: int) -> torch.Tensor:
        """fp32 ``[H, NG, 256]``: half the squared norm of each rounded entry over the block's steps.

        Kept until the table changes (another tensor, or written in place), so it can never be stale.
        """
        table = getattr(self, f"{side}_table")
        # Inference tensors carry no version counter; nothing can write them in place under autograd's eyes either.
        version = (table.data_ptr(), table.device, 0 if table.is_inference() else table._version)
        kept = self._norms.get((side, block))
        if kept is None or kept[0] != version:
            kept = (version, half_norms(self.block_tables(side, block)))
            self._norms[side, block] = kept
        return kept[1]

    @torch.no_grad()
    def store(self, side: Side, entries: torch.Tensor) -> None:
        """Round fitted entries to fp16 and keep them.

        Args:
            side: "key" or "value".
            entries: fp32 ``[nB, H, NG, 256, G]``.

        Raises:
            ValueError: entries are not finite, or too large for fp16.
        """
        if not torch.isfinite(entries).all():
            raise ValueError(f"the {side} codebook holds NaN or Inf; the calibration went wrong and is not stored.")
        if entries.abs().max() >= 65504:
            raise ValueError(
                f"the {side} codebook reaches {entries.abs().max().item():.3g}, beyond fp16 (65504); this model's "
                f"{side}s need a smaller scale than LoopVQ's fp16 tables can hold."
            )
        tables = self.grouping.step_tables(entries)  # [T_c, nB, H, NG, 256, c]
        tables = tables.transpose(0, 1).flatten(0, 1).to(torch.float16).contiguous()
        getattr(self, f"{side}_table").copy_(tables.view(torch.int16))

    def entries(self, side: Side) -> torch.Tensor:
        """fp32 ``[nB, H, NG, 256, G]``: the stored entries, joined over the steps of each block."""
        grouping = self.grouping
        tables = getattr(self, f"{side}_table").view(torch.float16).float()
        tables = tables.unflatten(0, (grouping.blocks, grouping.steps_per_code)).transpose(0, 1)
        return grouping.join_tables(tables)

    def nbytes(self) -> int:
        """Bytes of both tables and of the norms derived so far."""
        derived = sum(norms.nbytes for _, norms in self._norms.values())
        return self.key_table.nbytes + self.value_table.nbytes + derived

    def extra_repr(self) -> str:
        g = self.grouping
        return f"steps={g.steps}, steps_per_code={g.steps_per_code}, group_size={g.group_size}, bits={8 / g.group_size}"

    def _apply(self, fn, recurse=True):
        self._norms = {}
        return super()._apply(fn, recurse)
