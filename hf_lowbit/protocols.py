"""The one hook between a looped model and anything that stores or replaces its keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch


ForwardChunk = Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]


@runtime_checkable
class KVAttention(Protocol):
    """A cache that receives keys *before* RoPE and computes the attention itself.

    Stock caches receive rotated keys in ``update`` and hand back full-precision K and V; a cache over codes can do
    neither. Looped models therefore ask ``isinstance(cache, KVAttention)`` and, if so, let the cache drive.
    """

    def run(
        self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, forward_chunk: ForwardChunk
    ) -> dict[str, torch.Tensor]:
        """Run ``forward_chunk(inputs_embeds [B, n, h], position_ids [B, n])`` over the prompt, in one chunk or several.

        Args:
            inputs_embeds: ``[B, q, h]``.
            attention_mask: 2-D ``[B, past + q]``, 1 for real tokens, or None when nothing is padded.
            forward_chunk: runs every loop over one chunk and returns tensors ``[B, n, ...]``.

        Returns:
            The chunks' tensors concatenated along dimension 1, in the order of ``inputs_embeds``.
        """
        ...

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        layer: int,
        step: int,
        module: torch.nn.Module,
    ) -> torch.Tensor:
        """Store key and value of (layer, step) and return the attention output ``[B, n, Hq, D]``.

        Args:
            query: ``[B, Hq, n, D]`` before RoPE.
            key, value: ``[B, H, n, D]``, the key before RoPE.
            cos, sin: ``[B or 1, n, D]`` of the chunk's positions, model dtype.
            layer: physical layer, 0-based.
            step: loop step, 0-based.
            module: the attention module (``scaling``, ``num_key_value_groups``).
        """
        ...
