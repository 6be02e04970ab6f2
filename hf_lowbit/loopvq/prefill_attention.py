"""Attention of a prompt's chunk without a mask: rows that hold equally many tokens.

Every query of a chunk sees all tokens that were there before it, so their order does not matter. With the chunk's own tokens
last the mask is the lower-right causal one, which flash attention computes without reading any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from hf_lowbit_kernels import rope_copy, vq_decode_pages

from ..config import PAGE
from .codebook import LoopVQCodebook
from .grouping import Grouping
from .spec import rotate
from .store import LayerStore


@dataclass(frozen=True)
class Layout:
    """What a chunk has to know of the cache and the model: S, R, the model's rotary embedding, and who shares codes.

    staged: tables are read in the layout that the CUDA kernels take; a cache that decodes with them keeps it anyway.
    """

    sinks: int
    ring: int
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    grouping: Grouping
    staged: bool = False

    def window_index(self, positions: torch.Tensor) -> torch.Tensor:
        """Where a position lives in the window: sinks first, then a ring."""
        return torch.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % self.ring)

    def angles(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own cos and sin ``[B or 1, n, D]``: a key rotated late is bit for bit the key of a stock cache."""
        return self.rotary(like, position_ids=positions)


class Once:
    """Results that are the same in all layers and loop steps of a pass, made for the first of them.

    Index tensors come from the host or from counting, which waits for the device: once a pass, not in each layer.
    """

    def __init__(self):
        self._kept: dict[tuple, Any] = {}

    def __call__(self, name: str, device: torch.device, make: Callable[[], Any]) -> Any:
        key = (name, device)
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


@dataclass
class Span:
    """Rows of a chunk that hold equally many tokens, and the columns of their new ones.

    Attributes:
        rows: of the batch.
        columns: of the chunk, all of them real tokens of these rows.
        start, coded: tokens and coded tokens of each row before the chunk.
    """

    layout: Layout
    rows: slice
    columns: slice
    start: int
    coded: int
    _once: Once = field(init=False, default_factory=Once, repr=False)

    def attend(
        self,
        store: LayerStore,
        codebook: LoopVQCodebook,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: int,
        scale: float,
    ) -> torch.Tensor:
        """Of the span's part of a whole batch and chunk.

        Args:
            store, codebook: of the layer.
            query: ``[B, Hq, n, D]`` before RoPE.
            key, value: ``[B, H, n, D]``, keys before RoPE.
            cos, sin: ``[B or 1, n, D]``.
            step: loop step.
            scale: of the scores.

        Returns:
            ``[rows, Hq, columns, D]``.
        """
        query, key, value = (states[self.rows, :, self.columns] for states in (query, key, value))
        cos, sin = ((table if len(table) == 1 else table[self.rows])[:, self.columns] for table in (cos, sin))
        # With the keys, in one launch, unless a gradient flows through the query.
        turned: dict[str, torch.Tensor] = {}
        if torch.is_grad_enabled() and query.requires_grad:
            query = rotate(query, cos, sin)
        else:
            turned = {"query": query, "queries": torch.empty_like(query)}
            query = turned["queries"]
        if self.start == 0:
            keys = torch.empty_like(key)
            rope_copy(key, cos, sin, keys, **turned)
            return self._softmax(query, keys, value, scale)
        slots, window_angles, code_angles = self._once("past", key.device, lambda: self._past(key))
        coded, past = self.coded, self.coded + len(slots)
        batch, heads, count, head_dim = key.shape
        keys, values = key.new_empty(2, batch, heads, past + count, head_dim)
        if coded:
            codes = store.codes[step // self.layout.grouping.steps_per_code, :, self.rows, : coded // PAGE]
            table = codebook.staged_table if self.layout.staged else codebook.table
            tables = table("key", step), table("value", step)
            vq_decode_pages(*codes, *tables, *code_angles, keys[:, :, :coded], values[:, :, :coded])
        window = store.window[step, :, self.rows]
        rope_copy(window[0], *window_angles, keys[:, :, coded:past], window[1], values[:, :, coded:past], slots)
        rope_copy(key, cos, sin, keys[:, :, past:], value, values[:, :, past:], **turned)
        return self._softmax(query, keys, values, scale)

    def _past(self, like: torch.Tensor) -> tuple[torch.Tensor, tuple, tuple | None]:
        """Window indices of the tokens that are not coded, their cos and sin, and those of the coded ones."""
        sinks, device = self.layout.sinks, like.device
        recent = torch.arange(sinks + self.coded, max(sinks + self.coded, self.start), device=device)
        positions = torch.cat([torch.arange(min(sinks, self.start), device=device), recent])
        code_angles = None
        if self.coded:
            code_positions = torch.arange(sinks, sinks + self.coded, device=device)
            code_angles = self.layout.angles(code_positions.unsqueeze(0), like)
        return self.layout.window_index(positions), self.layout.angles(positions.unsqueeze(0), like), code_angles

    def _softmax(self, query, keys, values, scale: float) -> torch.Tensor:
        """Query i of n sees all keys but the last n - 1 - i."""
        gqa = query.shape[1] != keys.shape[1]
        masks = {"is_causal": True}
        if query.shape[2] != keys.shape[2]:
            masks = {"attn_mask": self._once("mask", query.device, lambda: lower_right(query, keys, values, gqa))}
        return F.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=gqa, **masks)


def lower_right(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, gqa: bool) -> torch.Tensor:
    """The mask as PyTorch's kernels know it where one of them takes these tensors, else bool ``[n, total]``."""
    count, total = query.shape[2], keys.shape[2]
    if query.is_cuda and torch.version.hip is None:  # on ROCm kernels differ in where they align the diagonal
        asked = SDPAParams(query, keys, values, None, 0.0, False, gqa)
        if can_use_flash_attention(asked) or can_use_efficient_attention(asked):
            return causal_lower_right(count, total)
    return torch.ones(count, total, dtype=torch.bool, device=query.device).tril(total - count)
