"""Configuration of Ouro."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters


@strict
class OuroConfig(PreTrainedConfig):
    r"""Configuration of an Ouro model: `num_hidden_layers` physical layers, run `total_ut_steps` times.

    Loads the `config.json` of the public checkpoints unchanged. Field names and defaults are those of the hub class;
    sizes are physical (`num_hidden_layers` is the number of layers with weights), the number of K/V slots is
    [`~OuroConfig.num_cache_slots`].

    Saved files differ from the hub's in three points:

    - `auto_map` is dropped on load and never written: the model needs no remote code.
    - RoPE settings are in `rope_parameters` (transformers 5). `rope_theta` and `rope_scaling` are written as well,
      because the hub's transformers-4 code reads only those and would fall back to theta 10000.
    - `dtype` replaces `torch_dtype`.

    Args:
        total_ut_steps (`int`, defaults to 4): T, how often the layer stack runs. 1 is a plain transformer.
        early_exit_threshold (`float`, defaults to 1.0): a token stops at the first loop where the cumulative exit
            probability reaches this; 1.0 and above always take the last loop.
        early_exit_step (`int`, *optional*): 0-based loop whose hidden state is used for every token.
        sliding_window, use_sliding_window, max_window_layers: kept for the hub's files. Only full attention is
            implemented, so `use_sliding_window=True` is an error; an unused `sliding_window` becomes None.
        layer_types (`list[str]`, *optional*): one `"full_attention"` per physical layer; filled in when None.
        num_key_value_heads (`int`, *optional*): `num_attention_heads` when None (the hub class says 32, which is the same
            for its default of 32 heads).
        rope_parameters (`dict`, *optional*): transformers-5 RoPE settings; hub `rope_theta` and `rope_scaling` are
            merged into it.

    Raises:
        ValueError: sliding window attention is asked for, `num_attention_heads` is no multiple of
            `num_key_value_heads`, or `total_ut_steps` is below 1.

    ```python
    >>> from hf_lowbit.models.ouro import OuroConfig
    >>> OuroConfig(num_hidden_layers=24, total_ut_steps=4).num_cache_slots
    96
    ```
    """

    model_type = "ouro"
    keys_to_ignore_at_inference = ["past_key_values", "cache", "loop_hidden_states", "exit_gates"]

    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    # No base_model_pp_plan: hidden states go round the whole stack T times, which is not a pipeline.

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    # transformers 5 has no default for this; undeclared it would silently mean "untied" (the hub's value, by luck)
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict | None = None
    attention_dropout: int | float | None = 0.0
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    total_ut_steps: int = 4
    early_exit_threshold: int | float = 1.0
    early_exit_step: int | None = None

    def __post_init__(self, **kwargs):
        # The hub's auto_map would be written back by save_pretrained and bring the remote code along.
        kwargs.pop("auto_map", None)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            # Must be filled: a declared None breaks the masks that generate() builds for static caches.
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Called by `@strict`. Refuses what the model does not implement, with the value that would work."""
        if self.use_sliding_window or self.sliding_window is not None or "sliding_attention" in self.layer_types:
            raise ValueError(
                f"Ouro with sliding window attention is not implemented (use_sliding_window={self.use_sliding_window}, "
                f"sliding_window={self.sliding_window}, layer_types={sorted(set(self.layer_types))}). All public "
                "checkpoints use full attention: set use_sliding_window=False, sliding_window=None, layer_types=None."
            )
        if set(self.layer_types) - {"full_attention"}:
            raise ValueError(f"layer_types may hold only 'full_attention', got {sorted(set(self.layer_types))}.")
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})."
            )
        if self.total_ut_steps < 1:
            raise ValueError(f"total_ut_steps must be at least 1 (1 = no looping), got {self.total_ut_steps}.")

    @property
    def num_cache_slots(self) -> int:
        """Number of K/V slots: `total_ut_steps * num_hidden_layers`; slot = step * num_hidden_layers + layer."""
        return self.total_ut_steps * self.num_hidden_layers

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        output.pop("auto_map", None)
        rope = output.get("rope_parameters")
        if rope:
            output["rope_theta"] = rope.get("rope_theta", self.default_theta)
            scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
            output["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
        return output


__all__ = ["OuroConfig"]
