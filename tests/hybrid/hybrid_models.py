"""Tiny hybrid models with random codebooks, DAMP tables, or both, as calibrations would leave them."""

import sys
from pathlib import Path

import torch


for folder in ("damp", "loopvq"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from damp_models import VOCAB, build_model, random_plans, tokens  # noqa: E402
from hybrid_oracle import HybridOracle  # noqa: E402
from loopvq_models import random_codebooks  # noqa: E402

from hf_lowbit import DAMPConfig, LoopVQConfig, LowBitConfig, artifact, generation  # noqa: E402
from hf_lowbit.damp.attach import attach_damp, damp_tables, has_damp  # noqa: E402
from hf_lowbit.loopvq.attach import has_loopvq  # noqa: E402
from hf_lowbit.quantizer import mark_quantized  # noqa: E402


__all__ = ["VOCAB", "build_model", "hybrid_model", "oracle_of", "tokens"]

WINDOW = 16
NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid")


def hybrid_model(
    methods=("loopvq", "damp"), name="qwen3_5", seed=0, bits=2, encoder_metric="fisher", rows=2, **changes
):
    """A tiny model with random tables of the given methods: sinks of 8, a window of 16, two protected rows."""
    model = build_model(name, seed, **changes)
    settings = {}
    if "loopvq" in methods:
        settings["loopvq"] = LoopVQConfig(
            bits=bits, loop_group_size=1, encoder_metric=encoder_metric, recent_window=WINDOW
        )
        random_codebooks(model, settings["loopvq"], seed)
    if "damp" in methods:
        settings["damp"] = DAMPConfig(rows=rows)
        attach_damp(model, settings["damp"], random_plans(model, rows=rows, seed=seed))
    fingerprint = artifact.weights_fingerprint(model)
    artifact.attach_fingerprint(model, fingerprint)
    mark_quantized(model, LowBitConfig(**settings, fingerprint=fingerprint))
    generation.enable(model)
    return model


def oracle_of(model):
    """The independent loop for a Qwen3.5 model, with the tables that the model carries."""
    weights = {name: value.float() for name, value in model.state_dict().items() if value.is_floating_point()}
    codes, states = {}, {}
    if has_loopvq(model):
        for i, layer in enumerate(model.model.layers):
            if codebook := getattr(getattr(layer, "self_attn", None), "loopvq", None):
                metrics = {
                    side: getattr(codebook, f"{side}_metric").view(torch.float16)[0] if codebook.has_metric else None
                    for side in ("key", "value")
                }
                codes[i] = {side: (codebook.table(side, 0), metrics[side]) for side in metrics}
    if has_damp(model):
        rows = model.config.quantization_config.damp.rows
        linear = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
        for i, tables in zip(linear, damp_tables(model), strict=True):
            states[i] = (tables.perm_k, tables.perm_v, tables.column_scale.view(torch.float32), rows)
    return HybridOracle(weights, model.config, codes, states, WINDOW)
