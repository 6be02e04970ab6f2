"""PyTorch Ouro: a stack of L layers that runs T times over the same hidden states ("loops").

Follows transformers' Llama model. What is different:

- `slot = step * L + layer` addresses the cache: every loop step has its own keys and values. The step is an argument
  of the layers, never a counter, so checkpointing, compilation and several threads are safe.
- Four norms per layer (before *and* after attention and MLP), and the final norm after every loop, feeding the next.
- An exit gate per loop. `OuroModel` picks or mixes the loops' hidden states per token; see [`OuroModel.forward`].
- A cache with `run` and `attend` ([`~hf_lowbit.protocols.KVAttention`]) takes over storage and attention and gets its
  keys before RoPE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils import can_return_tuple, logging
from transformers.utils.output_capturing import capture_outputs

from ...compat import CACHE_ARG, accepts_both_cache_names, cache_kwargs, get_cache, make_output, update_cache
from ...compat import slice_logits_to_keep as _slice_logits_to_keep
from ...generation import LowBitGenerationMixin
from ...protocols import KVAttention
from ..looped_cache import extend_cache
from .configuration_ouro import OuroConfig
from .fused import FusedDecode


logger = logging.get_logger(__name__)


@dataclass
class OuroModelOutputWithPast(BaseModelOutputWithPast):
    """Output of [`OuroModel`]: the base class's fields, then what is special to loops.

    Args:
        last_hidden_state: `[B, n, hidden]`, what the LM head reads: the last loop, or the loop (or mixture) chosen by
            the exit arguments.
        cache (`past_key_values` before transformers 5.24): the cache, if one was used.
        hidden_states: with `output_hidden_states=True` T*L + 1 tensors `[B, n, hidden]`: the embeddings, then the
            output of every layer of every loop. As in other models the last one is replaced by `last_hidden_state`.
            The normed states *between* loops are in `loop_hidden_states`.
        attentions: with `output_attentions=True` T*L tensors `[B, heads, n, keys]` (eager attention only).
        loop_hidden_states: with `output_loop_states=True` `[B, n, T, hidden]`, every loop's normed hidden state.
        exit_gates: with `output_loop_states=True` `[B, n, T]`, gate logits (before the sigmoid), model dtype.
    """

    loop_hidden_states: torch.Tensor | None = None
    exit_gates: torch.Tensor | None = None


@dataclass
class OuroCausalLMOutputWithPast(CausalLMOutputWithPast):
    """Output of [`OuroForCausalLM`]: as `CausalLMOutputWithPast`, with `OuroModelOutputWithPast`'s loop fields."""

    loop_hidden_states: torch.Tensor | None = None
    exit_gates: torch.Tensor | None = None


def exit_distribution(gates: torch.Tensor) -> torch.Tensor:
    """Probability of leaving after each loop, in the dtype of `gates`.

    lam_u = sigmoid(g_u); p_u = lam_u * prod_{j<u} (1 - lam_j); the last loop takes the remaining mass, so its own gate
    has no effect.

    Args:
        gates: `[..., T]` gate logits.

    Returns:
        `[..., T]`, summing to one along the last dimension.
    """
    probabilities = []
    remaining = torch.ones_like(gates[..., 0])
    for lam in torch.sigmoid(gates[..., :-1]).unbind(-1):
        probabilities.append(lam * remaining)
        remaining = remaining * (1.0 - lam)
    return torch.stack([*probabilities, remaining], dim=-1)


@dataclass(frozen=True)
class ExitRule:
    """The resolved exit arguments of one forward pass: which loop's hidden state each token uses."""

    num_steps: int
    step: int | None
    threshold: float | None
    weighted: bool
    hub: bool

    @classmethod
    def resolve(
        cls,
        config: OuroConfig,
        exit_at_step: int | None,
        exit_threshold: float | None,
        use_weighted_exit: bool,
        use_hub_exit_rule: bool,
    ) -> ExitRule:
        step = config.early_exit_step if exit_at_step is None else exit_at_step
        threshold = config.early_exit_threshold if exit_threshold is None else exit_threshold
        # At 1.0 the hub code still compares, and in bf16 a cumulative probability above ~0.998 *is* 1.0, so some tokens
        # leave early although "1.0" reads as "never". Unless asked for, 1.0 means the last loop.
        if threshold >= 1.0 and not use_hub_exit_rule:
            threshold = None
        if step is not None and not 0 <= step < config.total_ut_steps:
            step = None  # ignored, as upstream
        return cls(config.total_ut_steps, step, threshold, use_weighted_exit, use_hub_exit_rule)

    @property
    def needs_gates(self) -> bool:
        return self.step is None and (self.threshold is not None or self.weighted)

    @property
    def needs_all_steps(self) -> bool:
        """Whether hidden states of earlier loops must be kept (otherwise only the last one is in memory)."""
        return self.needs_gates or (self.step is not None and self.step != self.num_steps - 1)

    def select(self, hidden_states: list[torch.Tensor], gates: torch.Tensor | None) -> torch.Tensor:
        """`[B, n, hidden]` from the loops' hidden states (T tensors `[B, n, hidden]`) and gates `[B, n, T]`."""
        if self.step is not None:
            return hidden_states[self.step - self.num_steps]  # from the end: earlier loops may not be kept
        if not self.needs_gates:
            return hidden_states[-1]
        probabilities = exit_distribution(gates if self.hub else gates.float())
        if self.threshold is not None:
            reached = probabilities.cumsum(-1) >= self.threshold  # [B, n, T]
            # argmax of equal values is the first; a row that never reaches the threshold takes the last loop
            step = torch.where(reached.any(-1), reached.int().argmax(-1), self.num_steps - 1)[..., None]
            selected = hidden_states[-1]
            for u, hidden in enumerate(hidden_states[:-1]):
                selected = torch.where(step == u, hidden, selected)
            return selected
        # fp32 sum: T roundings to bf16 would cost more than the mixture's own differences
        mixed = sum(hidden.float() * p[..., None] for hidden, p in zip(hidden_states, probabilities.unbind(-1)))
        return mixed.to(hidden_states[-1].dtype)


class OuroRMSNorm(LlamaRMSNorm):
    """RMSNorm with fp32 statistics: `weight * normalized.to(input dtype)`."""


class OuroRotaryEmbedding(LlamaRotaryEmbedding):
    """cos and sin `[B, n, head_dim]`, rotate-half layout. The same for all loops, so computed once per forward.

    `inv_freq` (fp32 `[head_dim / 2]`) and `attention_scaling` are what a cache needs to rotate stored keys itself.
    """


class OuroMLP(nn.Module):
    def __init__(self, config: OuroConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class OuroAttention(nn.Module):
    """Multi-head attention without biases. One module serves every loop step; only the cache slot changes."""

    def __init__(self, config: OuroConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_layers = config.num_hidden_layers
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True

        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        step: int = 0,
        slot_cache: Cache | None = None,
        kv_attention: KVAttention | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention output `[B, n, hidden]` and weights `[B, heads, n, keys]` (None unless eager)."""
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        cos, sin = position_embeddings

        if kv_attention is not None:
            # Keys go over before RoPE; the object stores them and attends.
            attn_output = kv_attention.attend(
                query, key, value, cos, sin, layer=self.layer_idx, step=step, module=self
            )
            attn_weights = None
        else:
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            if slot_cache is not None:
                key, value = update_cache(slot_cache, key, value, step * self.num_layers + self.layer_idx, kwargs)
            attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation, eager_attention_forward
            )
            attn_output, attn_weights = attention_interface(
                self,
                query,
                key,
                value,
                attention_mask,
                dropout=0.0 if not self.training else self.attention_dropout,
                scaling=self.scaling,
                **kwargs,
            )

        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        return self.o_proj(attn_output), attn_weights


class OuroDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP with a norm before and after each ("sandwich").

    The cache travels as `slot_cache` or `kv_attention`, names that `GradientCheckpointingLayer` does not know: it would
    replace `past_key_values` (5.17) or `cache` (5.24) by None. `OuroModel.forward` drops stock caches itself when a
    backward pass would replay the layer; a KVAttention stays, because calibration trains through it.
    """

    def __init__(self, config: OuroConfig, layer_idx: int):
        super().__init__()
        self.self_attn = OuroAttention(config=config, layer_idx=layer_idx)
        self.mlp = OuroMLP(config)
        self.input_layernorm = OuroRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm_2 = OuroRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = OuroRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm_2 = OuroRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        step: int = 0,
        slot_cache: Cache | None = None,
        kv_attention: KVAttention | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[B, n, hidden]` to `[B, n, hidden]`, as loop step `step` (0-based)."""
        residual = hidden_states
        hidden_states, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            step=step,
            slot_cache=slot_cache,
            kv_attention=kv_attention,
            **kwargs,
        )
        hidden_states = residual + self.input_layernorm_2(hidden_states)

        residual = hidden_states
        hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))
        return residual + self.post_attention_layernorm_2(hidden_states)


class OuroPreTrainedModel(PreTrainedModel):
    config_class = OuroConfig
    config: OuroConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["OuroDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache", "slot_cache", "kv_attention"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": OuroDecoderLayer, "attentions": OuroAttention}


class OuroModel(OuroPreTrainedModel):
    """The looped stack without a head."""

    hands_over_keys_before_rope = True  # the KVAttention hook, see hf_lowbit.protocols

    def __init__(self, config: OuroConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [OuroDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = OuroRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = OuroRotaryEmbedding(config=config)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.gradient_checkpointing = False
        self.fused_decode = FusedDecode(replaces=(OuroDecoderLayer, OuroAttention, OuroMLP, OuroRMSNorm))

        self.post_init()

    @accepts_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | KVAttention | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        exit_at_step: int | None = None,
        exit_threshold: float | None = None,
        use_weighted_exit: bool = False,
        use_hub_exit_rule: bool = False,
        output_loop_states: bool = False,
        **kwargs: Any,
    ) -> OuroModelOutputWithPast:
        """Run all T loops and choose each token's hidden state.

        All loops always run and write their keys and values; an exit changes only which hidden state is returned. In
        order of precedence:

        1. `exit_at_step`: that loop for every token.
        2. `exit_threshold` below 1.0: per token the first loop where the cumulative exit probability reaches it.
        3. `use_weighted_exit`: sum_u p_u * H[u], `p` from [`exit_distribution`].
        4. The last loop (the default of all public checkpoints).

        Args:
            input_ids: `[B, n]`; or `inputs_embeds` `[B, n, hidden]`, not both.
            attention_mask: `[B, past + n]` with 1 for real tokens, a prepared 4-D mask, or the dict
                `{"full_attention": mask}` that `generate()` builds for static caches. With a KVAttention cache only
                the 2-D form (or None).
            position_ids: `[B, n]` or `[1, n]`; counted from the cache's length if None. A KVAttention cache derives
                positions from `attention_mask` and ignores these.
            cache: a stock cache (extended to T*L slots if it is empty and shorter) or a
                [`~hf_lowbit.protocols.KVAttention`]. `past_key_values` is accepted as a second name.
            use_cache: build a `DynamicCache` if no cache is given; `config.use_cache` if None.
            exit_at_step: 0-based; `config.early_exit_step` if None. Out of range (for example -1) means "not set".
            exit_threshold: `config.early_exit_threshold` if None.
            use_weighted_exit: see above.
            use_hub_exit_rule: choose as the hub code does: probabilities in the gate's dtype instead of fp32, and the
                threshold branch is taken at 1.0 too. In bf16 some tokens then leave early although the threshold is
                1.0, and `use_weighted_exit` has no effect.
            output_loop_states: also return every loop's hidden state and gate (T times the memory).
            kwargs: `output_hidden_states`, `output_attentions`, and whatever the attention function takes.

        Raises:
            ValueError: neither or both of `input_ids` and `inputs_embeds`; a filled cache with too few slots; a 4-D
                mask or `output_attentions` with a KVAttention cache; a filled stock cache with gradient checkpointing.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        exit_rule = ExitRule.resolve(self.config, exit_at_step, exit_threshold, use_weighted_exit, use_hub_exit_rule)
        if isinstance(cache, KVAttention):
            return self._forward_kv_attention(
                inputs_embeds, attention_mask, cache, exit_rule, output_loop_states, **kwargs
            )

        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # The backward pass runs every layer again, which would append to the cache a second time.
            if cache is not None and int(cache.get_seq_length()) > 0:
                raise ValueError(
                    "A filled cache cannot be used with gradient checkpointing: the backward pass would write to it "
                    "again. Call model.gradient_checkpointing_disable(), or run under torch.no_grad()."
                )
            if use_cache:
                logger.warning_once("use_cache=True does not work with gradient checkpointing; no cache is returned.")
            use_cache, cache = False, None
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if isinstance(cache, Cache):
            extend_cache(cache, self.config.num_cache_slots)

        if position_ids is None:
            past_seen_tokens = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)

        # One mask serves all loops: when it is built, all slots have the same length.
        if isinstance(attention_mask, dict):
            causal_mask = attention_mask["full_attention"]
        else:
            causal_mask = create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **cache_kwargs(cache),
            )
        return self._forward_stock(
            inputs_embeds,
            position_ids,
            exit_rule,
            output_loop_states,
            attention_mask=causal_mask,
            slot_cache=cache,
            use_cache=use_cache,
            **kwargs,
        )

    @capture_outputs
    def _forward_stock(
        self,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        exit_rule: ExitRule,
        output_loop_states: bool,
        slot_cache: Cache | None,
        **kwargs: Any,
    ) -> OuroModelOutputWithPast:
        # A method of its own because `capture_outputs` collects hidden states and attentions through hooks, which is
        # right for one pass over the layers but not for the chunks of the KVAttention path.
        fields = self._run_loops(
            inputs_embeds, position_ids, exit_rule, output_loop_states, slot_cache=slot_cache, **kwargs
        )
        return make_output(OuroModelOutputWithPast, cache=slot_cache, **fields)

    def _forward_kv_attention(
        self,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: KVAttention,
        exit_rule: ExitRule,
        output_loop_states: bool,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> OuroModelOutputWithPast:
        if isinstance(attention_mask, dict) or (attention_mask is not None and attention_mask.dim() != 2):
            shape = "a dict" if isinstance(attention_mask, dict) else f"shape {tuple(attention_mask.shape)}"
            raise ValueError(
                f"{type(cache).__name__} takes a 2-D attention mask [batch, past + new] or None, got {shape}. It does "
                "its own masking: pass the tokenizer's attention_mask."
            )
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError(
                f"{type(cache).__name__} computes attention without materializing the weights: output_attentions=True "
                "is not available. Use a stock cache and attn_implementation='eager' to look at them."
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        self.fused_decode.prepare(self, inputs_embeds)

        def forward_chunk(chunk_embeds: torch.Tensor, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            layer_states: list[torch.Tensor] | None = [] if output_hidden_states else None
            fields = self._run_loops(
                chunk_embeds,
                position_ids,
                exit_rule,
                output_loop_states,
                kv_attention=cache,
                layer_states=layer_states,
                fused=self.fused_decode.weights(self, chunk_embeds),
            )
            if layer_states is not None:
                layer_states[-1] = fields["last_hidden_state"]
                fields |= {f"hidden_states.{i}": state for i, state in enumerate(layer_states)}
            return fields

        # No exit rule reads anything on the host, so that every one of them can be captured in a CUDA graph.
        options = (exit_rule, output_loop_states, bool(output_hidden_states))
        forward_chunk.graph_key = (self, *options, *self.fused_decode.key)
        fields = cache.run(inputs_embeds, attention_mask, forward_chunk)
        if output_hidden_states:
            names = [f"hidden_states.{i}" for i in range(self.config.num_cache_slots + 1)]
            fields["hidden_states"] = tuple(fields.pop(name) for name in names)
        return make_output(OuroModelOutputWithPast, cache=cache, **fields)

    def _run_loops(
        self,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        exit_rule: ExitRule,
        output_loop_states: bool,
        layer_states: list[torch.Tensor] | None = None,
        fused: dict[nn.Module, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """All T loops over `[B, n, hidden]` embeddings.

        Args:
            layer_states: if a list, the embeddings and every layer's output are appended to it.
            fused: run the layers through `fused_decode`, with these weights; `kwargs` hold `kv_attention`.

        Returns:
            `last_hidden_state` `[B, n, hidden]`; with `output_loop_states` also `loop_hidden_states`
            `[B, n, T, hidden]` and `exit_gates` `[B, n, T]`. Earlier loops are kept in memory only if they are needed.
        """
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        keep_steps = output_loop_states or exit_rule.needs_all_steps
        keep_gates = output_loop_states or exit_rule.needs_gates
        loops: list[torch.Tensor] = []
        gates: list[torch.Tensor] = []
        if layer_states is not None:
            layer_states.append(hidden_states)

        layers = self.layers[: self.config.num_hidden_layers]
        for step in range(self.config.total_ut_steps):
            if fused is not None:
                hidden_states = self.fused_decode.loop(
                    fused, layers, self.norm, hidden_states, position_embeddings, step, kwargs["kv_attention"], layer_states
                )  # fmt: skip
            else:
                for decoder_layer in layers:
                    hidden_states = decoder_layer(
                        hidden_states,
                        position_embeddings=position_embeddings,
                        position_ids=position_ids,
                        step=step,
                        **kwargs,
                    )
                    if layer_states is not None:
                        layer_states.append(hidden_states)
                hidden_states = self.norm(hidden_states)
            if not keep_steps:
                loops.clear()
            loops.append(hidden_states)
            if keep_gates:
                gates.append(self.early_exit_gate(hidden_states))

        exit_gates = torch.cat(gates, dim=-1) if keep_gates else None
        fields = {"last_hidden_state": exit_rule.select(loops, exit_gates)}
        if output_loop_states:
            fields |= {"loop_hidden_states": torch.stack(loops, dim=2), "exit_gates": exit_gates}
        return fields


class OuroForCausalLM(OuroPreTrainedModel, LowBitGenerationMixin, GenerationMixin):
    """Ouro with a language modeling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # only if config.tie_word_embeddings
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: OuroConfig):
        super().__init__(config)
        self.model = OuroModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        self.post_init()

    @accepts_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | KVAttention | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        exit_at_step: int | None = None,
        exit_threshold: float | None = None,
        use_weighted_exit: bool = False,
        use_hub_exit_rule: bool = False,
        output_loop_states: bool = False,
        use_expected_loss: bool = True,
        **kwargs: Any,
    ) -> OuroCausalLMOutputWithPast:
        """Logits `[B, n, vocab]`, and the loss if `labels` are given. Other arguments as in [`OuroModel.forward`].

        Args:
            labels: `[B, n]` token ids, -100 to ignore; shifted inside, as in every causal LM.
            logits_to_keep: compute only the last so many logits (0: all), or those at the given positions.
            use_expected_loss: what `labels` do to the logits. True (upstream's behaviour): logits and loss are the
                expectation sum_u p_u * lm_head(H[u]) over the exit distribution, and the other exit arguments are
                ignored. So `model(ids, labels=ids).logits` differ from `model(ids).logits`. False: logits and loss are
                those of the chosen loop, the last one by default; use this to measure the model that generates.

        The expectation is computed as lm_head(sum_u p_u * H[u]), which is the same because the head is linear, with
        the sum in fp32: one head evaluation instead of T.

        ```python
        >>> import hf_lowbit.models  # registers Ouro
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer

        >>> model = AutoModelForCausalLM.from_pretrained("ByteDance/Ouro-1.4B")
        >>> tokenizer = AutoTokenizer.from_pretrained("ByteDance/Ouro-1.4B")
        >>> inputs = tokenizer("The capital of France is", return_tensors="pt")
        >>> tokenizer.decode(model.generate(**inputs, max_new_tokens=5)[0])
        ```
        """
        if labels is not None and use_expected_loss:
            # These values switch off every rule that would come before the mixture, whatever the config says.
            exit_at_step, exit_threshold, use_weighted_exit, use_hub_exit_rule = -1, 1.0, True, False

        outputs: OuroModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            exit_at_step=exit_at_step,
            exit_threshold=exit_threshold,
            use_weighted_exit=use_weighted_exit,
            use_hub_exit_rule=use_hub_exit_rule,
            output_loop_states=output_loop_states,
            **kwargs,
        )
        logits = self.lm_head(_slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)

        return make_output(
            OuroCausalLMOutputWithPast,
            cache=get_cache(outputs),
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            loop_hidden_states=outputs.loop_hidden_states,
            exit_gates=outputs.exit_gates,
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs: dict[str, Any], *args, **kwargs):
        """Extend the cache that `generate()` built (or the user passed) to T*L slots.

        `forward` would do it too, but for static caches `forward` is compiled on GPUs, and a list that grows inside the
        compiled region makes the graph break.
        """
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get(CACHE_ARG)
        if isinstance(cache, Cache) and not isinstance(cache, KVAttention):
            extend_cache(cache, self.config.num_cache_slots)
        return result


__all__ = [
    "ExitRule",
    "OuroCausalLMOutputWithPast",
    "OuroForCausalLM",
    "OuroModel",
    "OuroModelOutputWithPast",
    "OuroPreTrainedModel",
    "exit_distribution",
]
