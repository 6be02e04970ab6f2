"""What a LoopVQ cache holds of one layer."""

from __future__ import annotations

import torch

from ..config import PAGE
from .codebook import LoopVQCodebook


class LayerStore:
    """Tensors of one layer, on its device.

    pages: uint8 ``[nB, 2, B, P + 1, H, NG, 8]``, the order that the CUDA kernel reads; the last page belongs to nobody
    (see :meth:`DecodeStep.refresh`). codes: the same as ``[nB, 2, B, P + 1, H, 8, NG]``; window: model dtype
    ``[T, 2, B, H, S + R, D]``.
    """

    def __init__(self, codebook: LoopVQCodebook, batch: int, pages: int, slots: int, heads: int, dtype: torch.dtype):
        g = codebook.grouping
        device = codebook.device
        shape = (g.blocks, 2, batch, pages + 1, heads, g.groups, PAGE)
        with torch.inference_mode(False):  # a later call without inference mode must be able to write to them
            self.pages = torch.empty(shape, dtype=torch.uint8, device=device)
            self.window = torch.zeros((g.steps, 2, batch, heads, slots, g.head_dim), dtype=dtype, device=device)

    @property
    def codes(self) -> torch.Tensor:
        return self.pages.transpose(-1, -2)

    def grow(self, pages: int) -> None:
        shape = list(self.pages.shape)
        kept, shape[3] = shape[3] - 1, pages + 1
        with torch.inference_mode(False):
            larger = torch.empty(shape, dtype=torch.uint8, device=self.pages.device)
            larger[:, :, :, :kept] = self.pages[:, :, :, :kept]
        self.pages = larger

    def select(self, rows: torch.Tensor, pages: int) -> None:
        """Keep these rows and their first ``pages`` pages; in place, if their number stays the same."""
        rows = rows.to(self.pages.device)
        with torch.inference_mode(False):
            if len(rows) == self.pages.shape[2]:
                used = self.pages[:, :, :, :pages]
                used.copy_(used.index_select(2, rows))
                self.window.copy_(self.window.index_select(2, rows))
            else:
                self.pages = self.pages.index_select(2, rows)
                self.window = self.window.index_select(2, rows)
