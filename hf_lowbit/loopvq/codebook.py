"""The codebooks of one attention layer, as buffers of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from hf_lowbit_kernels import PageCoder, vq_encode_chunk, vq_encode_pages

from .encoder import encode, entry_norms
from .grouping import Grouping


Side = Literal["key", "value"]
SIDES: tuple[Side, Side] = ("key", "value")


class LoopVQCodebook(nn.Module):
    """Codebooks of one layer: for K and V, one table per loop step, head and group.

    The only stored truth is ``key_table`` / ``value_table``: the bit patterns (int16) of fp16 entries
    ``[T, H, NG, 256, c]``. They are kept as integers because transformers and ``model.to(dtype)`` cast every floating
    buffer to the model's dtype, and bf16 would round the entries away from those the encoder was built for.
    With a metric there are also ``key_metric`` / ``value_metric``, fp16 bit patterns ``[T, H, D]``: the weights of the
    coordinates in the encoder's distance. Everything else the encoder needs is derived from these bits, so encoder and
    decoder cannot disagree.
    """

    key_table: torch.Tensor
    value_table: torch.Tensor

    def __init__(
        self, grouping: Grouping, kv_heads: int, metric: bool = False, device: torch.device | str | None = None
    ):
        super().__init__()
        self.grouping = grouping
        self.has_metric = metric
        shape = (grouping.steps, kv_heads, grouping.groups, 256, grouping.channels)
        for side in SIDES:
            self.register_buffer(f"{side}_table", torch.zeros(shape, dtype=torch.int16, device=device))
            if metric:
                ones = torch.ones((grouping.steps, kv_heads, grouping.head_dim), dtype=torch.float16, device=device)
                self.register_buffer(f"{side}_metric", ones.view(torch.int16))
        self._derived: dict[tuple[Side, int | str], tuple] = {}

    @property
    def device(self) -> torch.device:
        return self.key_table.device

    def table(self, side: Side, step: int) -> torch.Tensor:
        """fp16 ``[H, NG, 256, c]``, the entries that loop step ``step`` reads."""
        return getattr(self, f"{side}_table")[step].view(torch.float16)

    def staged_table(self, side: Side, step: int) -> torch.Tensor:
        """:meth:`table` in the entry-major layout that CUDA kernels copy as one piece; kept like :meth:`_encoder`."""
        table = getattr(self, f"{side}_table")
        version = (table.data_ptr(), table.device, 0 if table.is_inference() else table._version)
        kept = self._derived.get((side, "staged"))
        if kept is None or kept[0] != version:
            # Of all steps at once: one address for the life of the table.
            kept = (version, table.view(torch.float16).transpose(2, 3).contiguous())  # [T, H, 256, NG, c]
            if table.is_cuda and not torch.cuda.is_current_stream_capturing():
                # An attention kernel may read tables before the kernel ahead of it, this copy, has ended.
                torch.cuda.current_stream(table.device).synchronize()
            self._derived[side, "staged"] = kept
        return kept[1][step].transpose(1, 2)

    def block_tables(self, side: Side, block: int) -> torch.Tensor:
        """fp16 ``[T_c, H, NG, 256, c]``, the tables of all steps in a block."""
        size = self.grouping.steps_per_code
        return getattr(self, f"{side}_table")[block * size : (block + 1) * size].view(torch.float16)

    def metric(self, side: Side, block: int) -> torch.Tensor | None:
        """fp32 ``[T_c, H, D]``, the weights of the block's coordinates, or None."""
        if not self.has_metric:
            return None
        size = self.grouping.steps_per_code
        return getattr(self, f"{side}_metric")[block * size : (block + 1) * size].view(torch.float16).float()

    def encode(self, side: Side, block: int, states: torch.Tensor) -> torch.Tensor:
        """Codes uint8 ``[N, H, NG]`` of one block's states ``[T_c, N, H, D]`` (keys before RoPE)."""
        metric, norms = self._encoder(side, block)
        return encode(states, self.block_tables(side, block), norms, metric)

    def encode_pages(
        self,
        block: int,
        window: torch.Tensor,
        codes: torch.Tensor,
        rows: torch.Tensor,
        pages: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """:meth:`encode` of pages of keys and values where they lie, in one kernel.

        Args:
            block: whose steps the window's are.
            window: ``[T_c, 2, B, H, S + R, D]``.
            codes: ``[2, B, pages, H, 8, NG]``, of the block; changed in place.
            rows, pages: int64 ``[n]``.
            slots: int64 ``[n, 8]``, window indices of a page's tokens.
        """
        vq_encode_pages(window, codes, *self._coders(block), rows, pages, slots)

    def encode_chunk(
        self,
        block: int,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        window: torch.Tensor,
        slots: torch.Tensor,
        first: int,
        codes: torch.Tensor,
    ) -> None:
        """:meth:`encode` of the oldest tokens of a window and a chunk, where they lie; see `vq_encode_chunk`.

        Args:
            block: whose steps these are.
            keys, values: ``[B, H, n, D]`` of each step, the chunk's; keys before RoPE.
            window: ``[T_c, 2, B, H, S + R, D]``.
            slots: int64 ``[lead]``, window indices of the tokens before the chunk.
            first: which of these and the chunk's tokens is the first to encode.
            codes: ``[2, B, P, H, 8, NG]``, pages of the block; changed in place.
        """
        vq_encode_chunk(keys, values, window, slots, first, codes, *self._coders(block))

    def _coders(self, block: int) -> list[PageCoder]:
        """Of keys and of values."""
        coders = []
        for side in SIDES:
            metric, norms = self._encoder(side, block)
            coders.append(PageCoder(self.block_tables(side, block), norms, metric))
        return coders

    def _encoder(self, side: Side, block: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Metric and norms, kept until a buffer changes (another tensor, or written in place): never stale."""
        buffers = [getattr(self, f"{side}_table")] + ([getattr(self, f"{side}_metric")] if self.has_metric else [])
        # Inference tensors carry no version counter; nothing can write them in place under autograd's eyes either.
        version = tuple((b.data_ptr(), b.device, 0 if b.is_inference() else b._version) for b in buffers)
        kept = self._derived.get((side, block))
        if kept is None or kept[0] != version:
            metric = self.metric(side, block)
            kept = (version, metric, entry_norms(self.block_tables(side, block), metric))
            self._derived[side, block] = kept
        return kept[1], kept[2]

    @torch.no_grad()
    def store(self, side: Side, entries: torch.Tensor, metric: torch.Tensor | None = None) -> None:
        """Round fitted entries to fp16 and keep them.

        Args:
            side: "key" or "value".
            entries: fp32 ``[nB, H, NG, 256, G]``.
            metric: fp32 ``[T, H, D]``, if the codebook has one.

        Raises:
            ValueError: entries are not finite, or too large for fp16.
        """
        if (metric is not None) != self.has_metric:
            raise ValueError("a codebook with a metric needs one to store, and one without takes none.")
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
        if metric is not None:
            getattr(self, f"{side}_metric").copy_(metric.to(torch.float16).view(torch.int16))

    def entries(self, side: Side) -> torch.Tensor:
        """fp32 ``[nB, H, NG, 256, G]``: the stored entries, joined over the steps of each block."""
        grouping = self.grouping
        tables = getattr(self, f"{side}_table").view(torch.float16).float()
        tables = tables.unflatten(0, (grouping.blocks, grouping.steps_per_code)).transpose(0, 1)
        return grouping.join_tables(tables)

    def derived(self) -> list[tuple]:
        """What was derived from the buffers so far, for a CUDA graph to keep alive: a changed buffer drops it here."""
        return list(self._derived.values())

    def nbytes(self) -> int:
        """Bytes of the buffers and of what was derived from them so far."""
        derived = sum(t.nbytes for _, *tensors in self._derived.values() for t in tensors if t is not None)
        return sum(buffer.nbytes for buffer in self.buffers()) + derived

    def extra_repr(self) -> str:
        g = self.grouping
        return (
            f"steps={g.steps}, steps_per_code={g.steps_per_code}, group_size={g.group_size}, bits={8 / g.group_size}"
        )

    def _apply(self, fn, recurse=True):
        self._derived = {}
        return super()._apply(fn, recurse)
