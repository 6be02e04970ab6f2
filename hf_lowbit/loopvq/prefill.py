"""One forward pass over a chunk of a prompt, the usual case: rows of equal lengths, no padding.

What is encoded and what stays are then slices of the tokens in order of their positions, and all indices are known on the
host: nothing is gathered but the window's ring, and nothing waits for the device.
"""

from __future__ import annotations

import torch

from ..config import PAGE
from .codebook import SIDES, LoopVQCodebook
from .prefill_attention import Layout, Once, Span, rotated
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
        # Tokens of the window that may be encoded together with those of the chunk, and come before them.
        self._lead = max(0, start - layout.sinks - coded) if coded_after > coded else 0
        self._states: dict[int, torch.Tensor] = {}  # layer -> [2, T_c, lead + n, B, H, D], keys before RoPE and values
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
        place = step % self.layout.grouping.steps_per_code
        if place == 0:
            batch, heads, count, head_dim = key.shape
            shape = (2, self.layout.grouping.steps_per_code, self._lead + count, batch, heads, head_dim)
            self._states[layer] = key.new_empty(shape)
        for kept, states in zip(self._states[layer][:, place, self._lead :], (key, value)):
            kept.copy_(states.permute(2, 0, 1, 3))
        out = self._span.attend(
            store, codebook, rotated(query, cos, sin), key, value, cos, sin, step=step, scale=scale
        )
        return out.transpose(1, 2)

    def commit(self, store: LayerStore, codebook: LoopVQCodebook, *, layer: int, block: int) -> None:
        """After a block's last step: encode the pages that leave the window, then put the chunk's tail in the window."""
        states, size = self._states.pop(layer), self.layout.grouping.steps_per_code
        window = store.window[block * size : (block + 1) * size]  # [T_c, 2, B, H, S + R, D]
        first = self.start - self._lead  # position of states[:, :, 0]
        if self.coded_after > self.coded:
            if self._lead:
                slots = self._once("lead", window.device, lambda: self._slots(first, self.start, window.device))
                states[:, :, : self._lead] = window.index_select(4, slots).permute(1, 0, 4, 2, 3, 5)
            oldest = self.layout.sinks + self.coded - first
            due = states[:, :, oldest : oldest + self.coded_after - self.coded]
            pages = slice(self.coded // PAGE, self.coded_after // PAGE)
            for i, side in enumerate(SIDES):
                codes = codebook.encode(side, block, due[i].flatten(1, 2))  # [pages * 8 * B, H, NG]
                codes = codes.unflatten(0, (-1, PAGE, states.shape[3]))
                store.codes[block, i, :, pages] = codes.permute(2, 0, 3, 1, 4)
        slots, columns = self._once("tail", window.device, lambda: self._tail(window.device))
        states = states[:, :, self._lead :]
        tail = states[:, :, columns] if isinstance(columns, slice) else states.index_select(2, columns)
        window.index_copy_(4, slots, tail.permute(1, 0, 3, 4, 2, 5))

    def _slots(self, first: int, end: int, device: torch.device) -> torch.Tensor:
        return self.layout.window_index(torch.arange(first, end, device=device))

    def _tail(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | slice]:
        """Window indices and columns of the chunk's tokens that stay in model dtype."""
        sinks = self.layout.sinks
        recent = min(self.end, max(self.start, sinks + self.coded_after))
        if self.start >= sinks:
            return self._slots(recent, self.end, device), slice(recent - self.start, None)
        new_sinks = torch.arange(self.start, min(sinks, recent), device=device)
        positions = torch.cat([new_sinks, torch.arange(recent, self.end, device=device)])
        return self.layout.window_index(positions), positions - self.start
