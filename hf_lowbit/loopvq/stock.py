"""Attention layers of transformers' own hybrid models behind the `KVAttention` hook.

To LoopVQ a hybrid model is a looped model with one loop step, whose other layers hold recurrent states. Its classes know
nothing of the hook, so :func:`hand_over_keys` turns the decoder and its attention modules into instances of subclasses
that do. With any cache but a `KVAttention` they run transformers' own code, untouched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers.cache_utils import Cache

from ..compat import CACHE_ARG, cache_from_kwargs, make_output
from ..protocols import KVAttention
from ..subclassing import mix_in, take_out


# The models turn channel i of a head with channel i + r/2 and leave the channels from r on alone. With the channels in
# another order, the same for queries and keys, that is half-split RoPE over all D: channel i turns with i + D/2, and the
# pairs from r/2 on have frequency 0. Everything behind the hook then needs to know one kind of RoPE only.


def spread(states: torch.Tensor, turned: int) -> torch.Tensor:
    """``[..., D]`` with the first ``turned`` = r channels under RoPE, in the order where channel i turns with i + D/2."""
    half, rest = turned // 2, (states.shape[-1] - turned) // 2
    if not half or not rest:
        return states
    first, second, third, fourth = states.split([half, half, rest, rest], dim=-1)
    return torch.cat([first, third, second, fourth], dim=-1)


def widen(cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., D]`` for :func:`spread` states, from the model's own ``[..., r]``."""
    rest = (head_dim - cos.shape[-1]) // 2
    if not rest:
        return cos, sin
    ones = cos.new_ones(*cos.shape[:-1], rest)
    zeros = torch.zeros_like(ones)
    (cos_a, cos_b), (sin_a, sin_b) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
    return torch.cat([cos_a, ones, cos_b, ones], dim=-1), torch.cat([sin_a, zeros, sin_b, zeros], dim=-1)


def no_rotation(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin ``[1, n, D]`` of a model without positions, for states ``[..., n, D]``."""
    ones = like.new_ones(1, *like.shape[-2:])
    return ones, torch.zeros_like(ones)


@dataclass(frozen=True)
class HybridRotary:
    """What a cache asks of a rotary embedding, for :func:`spread` keys.

    Attributes:
        rotary: the model's own; None for a model without positions (OLMo-hybrid).
        head_dim: D.
    """

    rotary: nn.Module | None
    head_dim: int

    @property
    def inv_freq(self) -> torch.Tensor:
        """fp32 ``[D/2]``."""
        known = torch.zeros(0) if self.rotary is None else self.rotary.inv_freq.detach().float()
        return torch.cat([known, known.new_zeros(self.head_dim // 2 - len(known))])

    @property
    def attention_scaling(self) -> float:
        return float(getattr(self.rotary, "attention_scaling", 1.0))

    def __call__(self, like: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[B or 1, n, D]`` of ``position_ids [B, n]``."""
        if self.rotary is None:
            return no_rotation(like.new_empty(position_ids.shape[1], self.head_dim))
        if hasattr(self.rotary, "mrope_section"):  # time, height and width: the same for text
            position_ids = position_ids.expand(3, -1, -1)
        return widen(*self.rotary(like, position_ids), self.head_dim)


# -- what the attention modules compute before and after RoPE and softmax ----------------------------------------------


def _gated(attention: nn.Module, hidden: torch.Tensor):
    """Qwen: norms over the channels of a head, and an output gate out of the query projection."""
    heads = (*hidden.shape[:-1], -1, attention.head_dim)
    query, gate = attention.q_proj(hidden).view(*hidden.shape[:-1], -1, 2 * attention.head_dim).chunk(2, dim=-1)
    key = attention.k_norm(attention.k_proj(hidden).view(heads))
    return attention.q_norm(query), key, attention.v_proj(hidden).view(heads), gate.flatten(-2)


def _plain(attention: nn.Module, hidden: torch.Tensor):
    """OLMo-hybrid: norms over all heads at once, no gate."""
    heads = (*hidden.shape[:-1], -1, attention.head_dim)
    query = attention.q_norm(attention.q_proj(hidden)).view(heads)
    key = attention.k_norm(attention.k_proj(hidden)).view(heads)
    return query, key, attention.v_proj(hidden).view(heads), None


# Class of an attention module -> its query, key and value [B, n, heads, D] before RoPE, and its gate [B, n, Hq * D].
# Named one by one: a class that merely looks alike may compute something else.
ATTENTION_CLASSES = {
    "Qwen3_5Attention": _gated,
    "Qwen3_5MoeAttention": _gated,
    "Qwen3NextAttention": _gated,
    "OlmoHybridAttention": _plain,
}


class HandsOverKeys:
    """Mixed into an attention module: hands keys before RoPE to the `KVAttention` that comes in place of a mask."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, *args, **kwargs):
        if not isinstance(attention_mask, KVAttention):
            return super().forward(hidden_states, position_embeddings, attention_mask, *args, **kwargs)
        query, key, value, gate = ATTENTION_CLASSES[type(self).__name__](self, hidden_states)
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        if position_embeddings is None:
            cos, sin = no_rotation(query)
        else:
            turned = position_embeddings[0].shape[-1]
            query, key = spread(query, turned), spread(key, turned)
            cos, sin = widen(*position_embeddings, self.head_dim)
        layer = self.config.layer_types[: self.layer_idx].count("full_attention")
        out = attention_mask.attend(query, key, value, cos, sin, layer=layer, step=0, module=self).flatten(-2)
        return self.o_proj(out if gate is None else out * torch.sigmoid(gate)), None


class LetsCacheDrive:
    """Mixed into the decoder: a `KVAttention` cache runs the layers over one chunk of the text after the other.

    The object reaches the attention modules as their mask, since it does its own masking: an argument of the layers
    comes back when activation checkpointing runs them again.
    """

    hands_over_keys_before_rope = True  # see hf_lowbit.protocols.KVAttention

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, *args, **kwargs):
        """As the decoder's own; with a `KVAttention`, positions come from the mask and ``position_ids`` is ignored.

        Raises:
            ValueError: a mask that is not 2-D, attention weights or router logits asked of a `KVAttention`.
        """
        others = dict(kwargs)
        cache = cache_from_kwargs(others)
        if not isinstance(cache, KVAttention):
            return super().forward(input_ids, attention_mask, position_ids, *args, **kwargs)
        _refuse(cache, attention_mask, self.config, others)
        embeds = others.pop("inputs_embeds", None)
        if (input_ids is None) == (embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if embeds is None:
            embeds = self.embed_tokens(input_ids)
        # Objects of the calibration are no caches: recurrent layers then start from nothing and keep nothing.
        states = cache if isinstance(cache, Cache) else None
        others |= {"use_cache": states is not None, CACHE_ARG: states}
        forward = super().forward
        padding = None if attention_mask is None else attention_mask[:, -embeds.shape[1] :]
        if padding is not None and (embeds.shape[1] == 1 or bool(padding.all())):
            padding = None
        done = 0

        def forward_chunk(chunk: torch.Tensor, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            nonlocal done
            # The columns in their order: a cache of recurrent layers may not move any.
            columns = slice(done, done + chunk.shape[1])
            mask = {"full_attention": cache, "linear_attention": None if padding is None else padding[:, columns]}
            output = forward(attention_mask=mask, position_ids=position_ids, inputs_embeds=chunk, **others)
            done = columns.stop
            self._output_class = type(output)
            layers = output.hidden_states or ()
            return {
                "last_hidden_state": output.last_hidden_state,
                **{f"hidden_states.{i}": state for i, state in enumerate(layers)},
            }

        if self._is_static(others):
            forward_chunk.graph_key = (self,)
        fields = cache.run(embeds, attention_mask, forward_chunk)
        hidden = fields.pop("last_hidden_state")
        if fields:
            fields = {"hidden_states": tuple(fields[f"hidden_states.{i}"] for i in range(len(fields)))}
        # The class that the last real pass gave: a replayed one runs nothing of the model's Python.
        return make_output(self._output_class, states, last_hidden_state=hidden, **fields)

    def _is_static(self, arguments: dict) -> bool:
        """Whether one token runs the same operations every time; see ``graph_key`` in the protocol."""
        asked = {name for name, value in arguments.items() if value is not None and value is not False}
        if not asked <= {"use_cache", CACHE_ARG, "return_dict"} or getattr(self.config, "output_hidden_states", False):
            return False
        # Such experts are looked up on the host. transformers marks the classes that have any by this method.
        eager = getattr(self.config, "_experts_implementation", None) == "eager"
        return not (eager and any(hasattr(module, "_apply_gate") for module in self.modules()))


def _refuse(cache: KVAttention, mask, config, options: dict) -> None:
    name = type(cache).__name__
    if isinstance(mask, dict) or (mask is not None and mask.dim() != 2):
        shape = "a dict" if isinstance(mask, dict) else f"shape {tuple(mask.shape)}"
        raise ValueError(
            f"{name} takes a 2-D attention mask [batch, past + new] or None, got {shape}. It does its own masking: pass "
            "the tokenizer's attention_mask."
        )
    for option in ("output_attentions", "output_router_logits"):
        asked = options.get(option)
        if getattr(config, option, False) if asked is None else asked:
            raise ValueError(f"{option}=True is not available with {name}; use a stock cache to look at them.")


# -- putting it on a model ---------------------------------------------------------------------------------------------


def attention_modules(decoder: nn.Module) -> list[nn.Module] | None:
    """The attention modules of a hybrid decoder in order, or None if it is not one of a known kind."""
    kinds = getattr(getattr(decoder, "config", None), "layer_types", None) or []
    layers = getattr(decoder, "layers", None)
    if layers is None or "linear_attention" not in kinds:
        return None
    found = [layer.self_attn for layer, kind in zip(layers, kinds) if kind == "full_attention"]
    known = found and all(type(attention).__name__ in ATTENTION_CLASSES for attention in found)
    return found if known else None


def hand_over_keys(model: nn.Module) -> None:
    """Let a hybrid model call the hook, until :func:`keep_keys`. Nothing for looped models, which do so by themselves."""
    decoder = getattr(model, "base_model", model)
    for attention in attention_modules(decoder) or []:
        mix_in(attention, HandsOverKeys)
        mix_in(decoder, LetsCacheDrive)


def keep_keys(model: nn.Module) -> None:
    """Undo :func:`hand_over_keys`."""
    decoder = getattr(model, "base_model", model)
    for attention in attention_modules(decoder) or []:
        take_out(attention, HandsOverKeys)
    take_out(decoder, LetsCacheDrive)
    vars(decoder).pop("_output_class", None)


@contextmanager
def handing_over_keys(model: nn.Module) -> Iterator[None]:
    """:func:`hand_over_keys` for the time of a calibration."""
    before = getattr(getattr(model, "base_model", model), "hands_over_keys_before_rope", False)
    hand_over_keys(model)
    try:
        yield
    finally:
        if not before:
            keep_keys(model)
