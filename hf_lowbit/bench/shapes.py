"""Shapes of the models that the tables run, and models of these shapes with random weights.

Speed does not depend on what weights, codes and states hold, so nothing is downloaded or calibrated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import hf_lowbit

from .. import generation
from ..damp.attach import attach_damp
from ..damp.spec import DeltaSpec
from ..loopvq.attach import attach_loopvq, detach_loopvq
from ..loopvq.codebook import SIDES, LoopVQCodebook
from ..loopvq.grouping import Grouping
from ..loopvq.spec import LoopSpec
from ..models.ouro import OuroConfig, OuroForCausalLM


@dataclass(frozen=True)
class LoopedShape:
    """Sizes of an Ouro model. The defaults are those that Ouro-1.4B and Ouro-2.6B share (their public config.json)."""

    layers: int
    loops: int = 4
    heads: int = 16
    head_dim: int = 128
    hidden: int = 2048
    intermediate: int = 5632
    vocab: int = 49152

    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in bf16, all loop steps."""
        return self.loops * self.layers * 2 * self.heads * self.head_dim * 2


LOOPED = {
    "ouro1.4b": LoopedShape(layers=24),
    "ouro2.6b": LoopedShape(layers=48),
    "tiny": LoopedShape(layers=2, heads=2, head_dim=32, hidden=64, intermediate=96, vocab=97),
}

_QWEN = dict(
    vocab_size=248320, hidden_size=2560, intermediate_size=9216, num_hidden_layers=32, num_attention_heads=16,
    num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, tie_word_embeddings=True,
)  # fmt: skip
_KIMI_LAYERS = ["full_attention" if i in (3, 7, 11, 15, 19, 23, 26) else "linear_attention" for i in range(27)]
_TINY = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, tie_word_embeddings=False)

# name -> (model type of transformers, its configuration)
HYBRID = {
    # The text model of Qwen3.5-4B: three Gated DeltaNet layers, then one of attention.
    "qwen3.5-4b": ("qwen3_5", _QWEN),
    # Kimi-Linear-48B with 64 of its 256 experts, so that weights and states of 256 requests fit one card. The rest is as
    # published: 20 of 27 layers have KDA, 32 heads of 128 x 128.
    "kimi-linear-scaled": ("kimi_linear", dict(num_experts=64, layer_types=_KIMI_LAYERS)),
    "tiny": (
        "qwen3_5",
        _TINY
        | dict(
            num_attention_heads=2, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32,
        ),
    ),
}  # fmt: skip


def build_looped(shape: LoopedShape, device: str, tokens: int) -> OuroForCausalLM:
    """An Ouro model in bf16 for contexts of up to ``tokens`` tokens."""
    config = OuroConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
        head_dim=shape.head_dim, total_ut_steps=shape.loops, rope_theta=1e6, max_position_embeddings=tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return OuroForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def attach_random_codebooks(model, bits: float) -> None:
    """Codebooks and metric of random numbers, in place of those the model has."""
    config = hf_lowbit.LoopVQConfig(bits=bits)
    spec = LoopSpec.of(model)
    grouping = Grouping.of(config, spec.steps, spec.head_dim)
    shape = (grouping.blocks, spec.kv_heads, grouping.groups, 256, grouping.group_size)
    device = spec.layers[0].k_proj.weight.device
    codebooks = []
    for _ in spec.layers:
        codebook = LoopVQCodebook(grouping, spec.kv_heads, metric=True, device=device)
        for side in SIDES:
            metric = torch.rand((spec.steps, spec.kv_heads, spec.head_dim), device=device) + 0.1
            codebook.store(side, torch.randn(shape, device=device), metric)
        codebooks.append(codebook)
    detach_loopvq(model)
    attach_loopvq(model, config, codebooks)
    model.config.quantization_config = hf_lowbit.LowBitConfig(loopvq=config, fingerprint="random weights")


def build_hybrid(name: str, device: str):
    """A model with gated delta-rule layers in bf16, and random DAMP tables of the default layout (9.875 bits)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, sizes = HYBRID[name]
    config = AutoConfig.for_model({"qwen3_5": "qwen3_5_text"}.get(model_type, model_type), **sizes)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    attach_random_tables(model)
    return model


def attach_random_tables(model) -> None:
    """Random protected rows in every head, columns as they are."""
    from hf_lowbit_kernels import DampPlan

    config, plans = hf_lowbit.DAMPConfig(), []
    generator = torch.Generator().manual_seed(0)
    for layer in DeltaSpec.of(model).layers:
        rows = torch.rand(layer.value_heads, layer.dk, generator=generator).argsort(1)[:, : config.high_rows(layer.dk)]
        plan = DampPlan.from_rows(rows, layer.dk, layer.dv)
        plans.append(plan.to(next(layer.module.parameters()).device))
    attach_damp(model, config, plans)
    model.config.quantization_config = hf_lowbit.LowBitConfig(damp=config, fingerprint="random weights")
    generation.enable(model)
