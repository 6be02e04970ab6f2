"""Tiny random models with gated delta-rule layers; everything is seeded. Used by tests/damp and tests/gpu."""

import torch
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from hf_lowbit.damp.spec import DeltaSpec
from hf_lowbit_kernels import DampLayout, DampPlan


VOCAB = 89

# Attention in the middle: slot 0 is a recurrent layer, as in the released models.
_LAYERS = dict(
    num_hidden_layers=4,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)
_COMMON = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=4096, pad_token_id=0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False, **_LAYERS,
)  # fmt: skip
_GROUPED = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)

# name -> (model class, configuration class, its arguments). Value heads: 4 to 2 key heads where a model can group them.
ARCHITECTURES = {
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {**_COMMON, **_GROUPED}),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, {**_COMMON, **_GROUPED, **_EXPERTS}),
    # dv is no multiple of 32: the last tile has padding columns.
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {**_COMMON, **_GROUPED, **_EXPERTS, "linear_value_head_dim": 40, "mlp_only_layers": [0, 1, 2]},
    ),
    "kimi_linear": (
        KimiLinearForCausalLM,
        KimiLinearConfig,
        dict(
            **_COMMON, linear_num_heads=3, linear_head_dim=32, linear_conv_kernel_dim=4, kv_lora_rank=16,
            q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, num_experts=4,
            num_experts_per_token=2, moe_intermediate_size=32, num_shared_experts=1,
            mlp_layer_types=["dense", "dense", "dense", "sparse"],
        ),
    ),
    "olmo_hybrid": (
        OlmoHybridForCausalLM,
        OlmoHybridConfig,
        dict(
            **_COMMON, linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=24,
            linear_value_head_dim=48,
        ),
    ),
}  # fmt: skip


def build_model(name="qwen3_5", seed=0, **changes):
    """A random fp32 model of an architecture: 4 layers, 3 of them recurrent. ``changes`` go to its configuration.

    Decays are spread over heads (and key channels, for KDA) from forgetting within a few tokens to hardly any, and the
    projections are large enough for states, protected rows and greedy tokens to differ.
    """
    model_class, config_class, sizes = ARCHITECTURES[name]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**sizes, **changes}))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.copy_(torch.linspace(-3, 1, parameter.numel()).view_as(parameter))
            elif key.endswith("dt_bias"):
                parameter.copy_(torch.randn_like(parameter) * 2 - 1)
            elif "norm" in key:
                # Qwen's own norms store the weight minus one.
                centre = parameter.mean().round()
                parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
            elif parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.float().eval()


def random_plans(model, rows=2, seed=0):
    """One random `DampPlan` per delta layer: other rows, column orders and scales in every head."""
    generator = torch.Generator().manual_seed(seed)
    plans = []
    for layer in DeltaSpec.of(model).layers:
        heads, dk, dv = layer.value_heads, layer.dk, layer.dv
        chosen = torch.rand(heads, dk, generator=generator).argsort(1)[:, :rows]
        order = torch.rand(heads, dv, generator=generator).argsort(1)
        scale = 2.0 ** (2 * torch.rand(heads, dv, generator=generator) - 1)
        plan = DampPlan.from_rows(chosen, dk, dv, perm_v=order, column_scale=scale)
        plans.append(plan.to(next(layer.module.parameters()).device))
    return plans


def identity_plans(model):
    """One `DampPlan` without permutation or scaling per delta layer."""
    return [
        DampPlan.identity(layer.value_heads, layer.dk, layer.dv, device=next(layer.module.parameters()).device)
        for layer in DeltaSpec.of(model).layers
    ]


def layouts(model, high_rows=2, low_bits=8, **options):
    """One `DampLayout` per delta layer."""
    return [
        DampLayout(layer.dk, layer.dv, high_rows=high_rows, low_bits=low_bits, **options)
        for layer in DeltaSpec.of(model).layers
    ]


def tokens(count, rows=1, seed=0):
    """Seeded token ids ``[rows, count]``, none of them padding."""
    return torch.randint(1, VOCAB, (rows, count), generator=torch.Generator().manual_seed(1000 + seed))
