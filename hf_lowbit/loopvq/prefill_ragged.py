"""One forward pass over a chunk of a prompt, the general case: rows of different lengths, or padding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from hf_lowbit_kernels import vq_decode

from ..config import PAGE
from .codebook import SIDES, LoopVQCodebook
from .prefill_attention import Layout, Once, Span
from .spec import rotate
from .store import LayerStore


# On CUDA chunks of at least that many columns attend row by row: a masked attention of all rows runs on a kernel several
# times slower than flash attention, but a row of its own costs some launches.
APART = 256


@dataclass
class RaggedChunk:
    """A chunk of ``count`` columns.

    Attributes:
        layout: of the cache.
        valid: bool ``[B, count]``, or None when every column is a real token.
        positions: int64 ``[B, count]`` among the row's real tokens (padding: any).
        start, coded, coded_after: per row, on the host: tokens before, coded tokens before and after.
        columns: per row, where its real tokens are; None where other columns stand between them.
    """

    layout: Layout
    count: int
    valid: torch.Tensor | None
    positions: torch.Tensor
    start: list[int]
    coded: list[int]
    coded_after: list[int]
    columns: list[slice | None]
    _pending: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(
        init=False, default_factory=dict, repr=False
    )
    _once: Once = field(init=False, default_factory=Once, repr=False)

    def __post_init__(self):
        self._spans = None
        if None not in self.columns:
            self._spans = [
                Span(self.layout, slice(row, row + 1), columns, start, coded)
                for row, (columns, start, coded) in enumerate(zip(self.columns, self.start, self.coded))
                if columns.start < columns.stop
            ]

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
        self._pending[layer, step] = (key, value)
        if self._apart(query.device):
            return self._row_by_row(store, codebook, query, key, value, cos, sin, step, scale)
        return self._masked(store, codebook, query, key, value, cos, sin, step, scale).transpose(1, 2)

    def _apart(self, device: torch.device) -> bool:
        return self._spans is not None and device.type == "cuda" and self.count >= APART

    def _row_by_row(self, store, codebook, query, key, value, cos, sin, step: int, scale: float) -> torch.Tensor:
        out = query.new_zeros(query.shape[0], self.count, *query.shape[1::2])  # padding: finite
        for span in self._spans:
            part = span.attend(store, codebook, query, key, value, cos, sin, step, scale)
            out[span.rows, span.columns] = part.transpose(1, 2)
        return out

    def _masked(self, store, codebook, query, key, value, cos, sin, step: int, scale: float) -> torch.Tensor:
        """All rows over codes, window and the chunk, in one softmax."""
        keys, values = [rotate(key, cos, sin)], [value]
        mask, window_angles, code_angles = self._once("attention", query.device, lambda: self._angles_and_mask(key))
        if window_angles is not None:
            keys.append(rotate(store.window[step, 0], *window_angles))
            values.append(store.window[step, 1])
        if code_angles is not None:
            most = max(self.coded)
            keys.append(rotate(self._reconstruct(store, codebook, 0, step, most, key.dtype), *code_angles))
            values.append(self._reconstruct(store, codebook, 1, step, most, key.dtype))
        return F.scaled_dot_product_attention(
            rotate(query, cos, sin), torch.cat(keys, dim=2), torch.cat(values, dim=2), attn_mask=mask, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip

    def _angles_and_mask(self, like: torch.Tensor) -> tuple[torch.Tensor, tuple | None, tuple | None]:
        """Of a chunk's attention over itself, the window and the codes, in this order: bool mask ``[B, 1, n, total]``, and
        cos and sin of the window's and of the codes' positions, None where there are none."""
        device, sinks = like.device, self.layout.sinks
        masks, window_angles, code_angles = [self._chunk_mask(device)], None, None
        if max(self.start) > 0:
            start = torch.tensor(self.start, device=device).unsqueeze(1)
            coded = torch.tensor(self.coded, device=device).unsqueeze(1)
            positions = self._window_positions(start, coded)  # [B, S + R]
            held = (positions >= 0) & ((positions < sinks) | (positions >= sinks + coded))
            window_angles = self.layout.angles(positions.clamp_min(0), like)
            masks.append(held.unsqueeze(1).expand(-1, self.count, -1))
            most = max(self.coded)
            if most:
                positions = sinks + torch.arange(most, device=device).unsqueeze(0)
                code_angles = self.layout.angles(positions, like)
                masks.append((positions < sinks + coded).unsqueeze(1).expand(-1, self.count, -1))
        return torch.cat(masks, dim=-1).unsqueeze(1), window_angles, code_angles

    def _chunk_mask(self, device: torch.device) -> torch.Tensor:
        """Causal within the chunk, real tokens only; bool ``[B, n, n]``. Padding sees itself: an empty row is NaN."""
        causal = torch.ones(self.count, self.count, dtype=torch.bool, device=device).tril()
        if self.valid is None:
            return causal.expand(len(self.start), -1, -1)
        itself = torch.eye(self.count, dtype=torch.bool, device=device)
        return (causal & self.valid.to(device).unsqueeze(1)) | itself

    def _window_positions(self, start: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
        """Position held by each window index before this chunk, -1 for none; ``[B, S + R]``."""
        sinks, ring = self.layout.sinks, self.layout.ring
        sink = torch.arange(sinks, device=start.device).unsqueeze(0)
        sink = torch.where(sink < start, sink, -1)
        first = sinks + coded  # oldest recent position
        slot = torch.arange(ring, device=start.device).unsqueeze(0)
        recent = first + (slot - (first - sinks)) % ring
        return torch.cat([sink, torch.where(recent < start, recent, -1)], dim=1)

    def _reconstruct(self, store, codebook, side: int, step: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``[B, H, count, D]`` from codes; rows with fewer coded tokens hold noise beyond theirs (masked)."""
        block = step // self.layout.grouping.steps_per_code
        codes = store.codes[block, side][:, : count // PAGE]  # [B, pages, H, 8, NG]
        codes = codes.transpose(2, 3).flatten(1, 2)  # [B, count, H, NG]
        return vq_decode(codes, codebook.table(SIDES[side], step)).transpose(1, 2).to(dtype)

    # -- encoding ----------------------------------------------------------------------------------------------------

    def commit(self, store: LayerStore, codebook: LoopVQCodebook, *, layer: int, block: int) -> None:
        """After a block's last step: encode the pages that leave the window, then put the chunk's tail in the window."""
        size, device = self.layout.grouping.steps_per_code, store.window.device
        steps = range(block * size, (block + 1) * size)
        pending = [self._pending.pop((layer, step)) for step in steps]
        if self.coded_after != self.coded:
            rows, page, index = self._once("pages", device, lambda: self._due_index(device))
            for i, side in enumerate(SIDES):
                # The window, followed by the chunk.
                sources = [torch.cat([store.window[step, i], new[i]], dim=2) for step, new in zip(steps, pending)]
                states = torch.stack([source[rows.unsqueeze(1), :, index] for source in sources])
                codes = codebook.encode(side, block, states.flatten(1, 2))  # states [T_c, pages * 8, H, D]
                codes = codes.unflatten(0, (-1, PAGE)).transpose(1, 2)  # [pages, H, 8, NG]
                store.codes[block, i, rows, page] = codes
        row, column, index = self._once("tail", device, lambda: self._tail(device))
        for step, new in zip(steps, pending):
            for i, states in enumerate(new):
                store.window[step, i, row, :, index] = states[row, :, column]

    def _due_index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows and pages ``[pages]`` that the chunk encodes, and where their tokens are in the window followed by the
        chunk, ``[pages, 8]``."""
        where = torch.tensor(due_pages(self.coded, self.coded_after), device=device)
        rows, page = where[:, 0], where[:, 1]
        positions = self.layout.sinks + PAGE * page.unsqueeze(1) + torch.arange(PAGE, device=device)
        start = torch.tensor(self.start, device=device)[rows].unsqueeze(1)
        column = (positions - start).clamp_min(0)
        if self.valid is not None:
            # The j-th real token of a row sits in the j-th real column.
            order = (~self.valid.to(device)).to(torch.int8).argsort(dim=1, stable=True)
            column = order[rows].gather(1, column.clamp_max(self.count - 1))
        after_window = self.layout.sinks + self.layout.ring + column
        return rows, page, torch.where(positions < start, self.layout.window_index(positions), after_window)

    def _tail(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, columns and window indices of the chunk's tokens that stay in model dtype."""
        positions, sinks = self.positions.to(device), self.layout.sinks
        coded = torch.tensor(self.coded_after, device=device).unsqueeze(1)
        stays = (positions < sinks) | (positions >= sinks + coded)
        if self.valid is not None:
            stays &= self.valid.to(device)
        row, column = stays.nonzero(as_tuple=True)
        return row, column, self.layout.window_index(positions[row, column])


def due_pages(coded: list[int], coded_after: list[int]) -> list[tuple[int, int]]:
    """(row, page) of the pages that become codes."""
    return [
        (row, page)
        for row, (before, after) in enumerate(zip(coded, coded_after))
        if after > before
        for page in range(before // PAGE, after // PAGE)
    ]


def real_columns(valid: torch.Tensor) -> tuple[list[int], list[slice | None]]:
    """Real tokens of each row of bool ``[B, n]``, and their columns, None where others stand between them.

    Waits for the device once.
    """
    count = valid.shape[1]
    marks = valid.to(torch.uint8)
    numbers = torch.stack([valid.sum(1), marks.argmax(1), count - marks.flip(1).argmax(1)])
    added, first, last = numbers.tolist()
    columns = [slice(0, 0) if not n else slice(a, b) if b - a == n else None for n, a, b in zip(added, first, last)]
    return added, columns
