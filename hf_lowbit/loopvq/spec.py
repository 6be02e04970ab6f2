"""What LoopVQ needs to know of a model, read once from the loaded model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .stock import ATTENTION_CLASSES, HybridRotary, attention_modules


@dataclass(frozen=True)
class LoopSpec:
    """Sizes and modules of a looped decoder, or of the attention layers of a hybrid one (one loop step).

    Attributes:
        layers: L attention modules, in order; a code table of layer ``i`` lives on the device of ``layers[i]``.
        steps: T, times the layers are applied.
        kv_heads: H.
        query_heads: Hq, a multiple of H.
        head_dim: D.
        rotary: the model's rotary embedding (half-split), with ``inv_freq`` [D/2] and ``attention_scaling``.
        cache_slots: of a hybrid model, which of the decoder's layers ``layers[i]`` is; the others have recurrent states.
            None for a looped model.
    """

    layers: tuple[nn.Module, ...]
    steps: int
    kv_heads: int
    query_heads: int
    head_dim: int
    rotary: Any
    cache_slots: tuple[int, ...] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> LoopSpec:
        """Read the spec of a model.

        Raises:
            TypeError: the model is neither a looped model that hands over keys before RoPE nor a known hybrid one.
            ValueError: its rotary embedding changes with the sequence length, so stored keys could not be rotated later.
        """
        base = getattr(model, "base_model", model)
        attention = attention_modules(base)
        if attention is None:
            return cls._of_looped(model, base)
        config, head_dim = base.config, attention[0].head_dim
        rotary = HybridRotary(base.rotary_emb, head_dim)
        _check_rope(config)
        if rotary.attention_scaling != 1.0 and 2 * len(rotary.rotary.inv_freq) < head_dim:
            raise ValueError(
                f"this {type(model).__name__} rotates a part of each key's channels and scales only them (rope_type="
                f"{config.rope_parameters['rope_type']!r}); LoopVQ's decode kernels scale all channels alike. Use "
                "rope_type='default'."
            )
        return cls(
            layers=tuple(attention),
            steps=1,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            query_heads=config.num_attention_heads,
            head_dim=head_dim,
            rotary=rotary,
            cache_slots=tuple(module.layer_idx for module in attention),
        )

    @classmethod
    def _of_looped(cls, model: nn.Module, base: nn.Module) -> LoopSpec:
        config = getattr(model, "config", None)
        steps = getattr(config, "total_ut_steps", None)
        layers = getattr(base, "layers", None)
        if not getattr(base, "hands_over_keys_before_rope", False) or None in (steps, layers):
            raise TypeError(
                f"LoopVQ works on looped models with a KVAttention hook (model_type 'ouro') and on the attention layers of "
                f"hybrid text models ({', '.join(ATTENTION_CLASSES)}), not on {type(model).__name__}"
                + (
                    ": load the text model alone (AutoModelForCausalLM)."
                    if hasattr(base, "language_model")
                    else ". See docs/adding_a_looped_model.md for what another model needs."
                )
            )
        _check_rope(config)
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
    turned = states * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)
    return turned.to(states.dtype)  # a model's cos and sin may be fp32 (OLMo-hybrid)


def _check_rope(config) -> None:
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f"rope_type={rope_type!r} rescales frequencies as the sequence grows; LoopVQ keeps keys before RoPE and needs "
            "fixed frequencies (default, linear, llama3 or yarn)."
        )
