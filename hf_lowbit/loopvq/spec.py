"""What LoopVQ needs to know of a looped model, read once from the loaded model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class LoopSpec:
    """Sizes and modules of a looped decoder.

    Attributes:
        layers: L attention modules, in order; a code table of layer ``i`` lives on the device of ``layers[i]``.
        steps: T, times the layers are applied.
        kv_heads: H.
        query_heads: Hq, a multiple of H.
        head_dim: D.
        rotary: the model's rotary embedding (half-split), with ``inv_freq`` [D/2] and ``attention_scaling``.
    """

    layers: tuple[nn.Module, ...]
    steps: int
    kv_heads: int
    query_heads: int
    head_dim: int
    rotary: nn.Module

    @classmethod
    def of(cls, model: nn.Module) -> LoopSpec:
        """Read the spec of a looped model.

        Raises:
            TypeError: the model is not a looped model that hands over keys before RoPE.
            ValueError: its rotary embedding changes with the sequence length, so stored keys could not be rotated later.
        """
        base = getattr(model, "base_model", model)
        config = getattr(model, "config", None)
        steps = getattr(config, "total_ut_steps", None)
        layers = getattr(base, "layers", None)
        if not getattr(base, "hands_over_keys_before_rope", False) or None in (steps, layers):
            raise TypeError(
                f"LoopVQ works on looped models with a KVAttention hook (model_type 'ouro'), not on "
                f"{type(model).__name__}. See docs/adding_a_looped_model.md for what another model needs."
            )
        rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(
                f"rope_type={rope_type!r} rescales frequencies as the sequence grows; LoopVQ keeps keys before RoPE "
                "and needs fixed frequencies (default, linear, llama3 or yarn)."
            )
        heads = config.num_attention_heads
        return cls(
            layers=tuple(layer.self_attn for layer in layers),
            steps=steps,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            query_heads=heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rotary=base.rotary_emb,
        )

    @property
    def slots(self) -> int:
        """Key/value pairs per token in a full-precision cache, L * T."""
        return len(self.layers) * self.steps

    def inv_freq(self) -> torch.Tensor:
        """RoPE frequencies ``[D/2]``, fp32."""
        return self.rotary.inv_freq.detach().float()


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split RoPE as the models apply it, in the dtype of ``states``.

    Args:
        states: ``[B, heads, n, D]`` before RoPE.
        cos, sin: ``[B or 1, n, D]``.
    """
    half = states.shape[-1] // 2
    rotated = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return states * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)
