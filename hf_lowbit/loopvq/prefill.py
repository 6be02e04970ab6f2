"""One forward pass over a chunk of a prompt, the usual case: rows of equal lengths, no padding.

What is encoded and what stays are then slices of the tokens in order of their positions, and all indices are known on the
host: nothing is gathered but the window's ring, and nothing waits for the device.
"""

from __future__ import annotations

import torch

from ..config import PAGE
from .codebook import LoopVQCodebook
from .prefill_attention import Layout, Once, Span
from .store import LayerStore


class EvenChunk:
    """A chunk of ``count`` real tokens in each row.

    Args:
        layout: of the cache.
        batch: B.
        count: n, new tokens of a row.
        start, coded, coded_after: tokens of a row before the pass, coded ones before and after.
        device: of the embeddings.

    Attributes:
        positions: int64 ``[B, n]``.
    """

    def __init__(
        self, layout: Layout, batch: int, count: int, start: int, coded: int, coded_after: int, device: torch.device
    ):
        self.layout, self.start, self.end = layout, start, start + count
        self.coded, self.coded_after = coded, coded_after
        self.positions = torch.arange(start, self.end, device=device).expand(batch, count)
        # Layer -> keys before RoPE and values [B, H, n, D] of a block's steps so far, as the layers left them.
        self._states: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._span = Span(layout, slice(None), slice(None), start, coded)
        self._once = Once()

    def attend(
        self,
        store: LayerStore,
        codebook: LoopVQCodebook,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        layer: int,
        step: int,
        scale: float,
    ) -> torch.Tensor:
        """Of one layer and loop step; ``query``, ``key`` and ``value`` before RoPE. Returns ``[B, n, Hq, D]``."""
        self._states.setdefault(layer, []).append((key, value))
        out = self._span.attend(store, codebook, query, key, value, cos, sin, step=step, scale=scale)
        return out.transpose(1, 2)

    def commit(self, store: LayerStore, codebook: LoopVQCodebook, *, layer: int, block: int) -> None:
        """After a block's last step: encode the pages that leave the window, then put the chunk's tail in the window."""
        size = self.layout.grouping.steps_per_code
        keys, values = zip(*self._states.pop(layer))
        window = store.window[block * size : (block + 1) * size]  # [T_c, 2, B, H, S + R, D]
        device = window.device
        if self.coded_after > self.coded:
            # The oldest tokens to encode may still be in the window, and come before those of the chunk.
            oldest = self.layout.sinks + self.coded
            lead = self._once("lead", device, lambda: self._slots(min(oldest, self.start), self.start, device))
            pages = slice(self.coded // PAGE, self.coded_after // PAGE)
            first = max(0, oldest - self.start)
            codebook.encode_chunk(block, keys, values, window, lead, first, store.codes[block, :, :, pages])
        for slots, columns in self._once("tail", device, lambda: self._tail(device)):
            tail = torch.stack([states[:, :, columns] for pair in zip(keys, values) for states in pair])
            window.flatten(0, 1).index_copy_(3, slots, tail)

    def _slots(self, first: int, end: int, device: torch.device) -> torch.Tensor:
        return self.layout.window_index(torch.arange(first, end, device=device))

    def _tail(self, device: torch.device) -> list[tuple[torch.Tensor, slice]]:
        """Window indices and columns of the chunk's tokens that stay in model dtype: new sinks, and recent ones."""
        sinks = self.layout.sinks
        recent = min(self.end, max(self.start, sinks + self.coded_after))
        parts = [(self.start, min(sinks, recent)), (recent, self.end)]
        return [
            (self._slots(first, end, device), slice(first - self.start, end - self.start))
            for first, end in parts
            if first < end
        ]
