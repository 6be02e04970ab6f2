"""Tiny looped models with codebooks; everything is seeded. Used by tests/loopvq and tests/gpu."""

import torch

import hf_lowbit
from hf_lowbit import artifact
from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.loopvq.attach import attach_loopvq
from hf_lowbit.loopvq.codebook import SIDES, LoopVQCodebook
from hf_lowbit.loopvq.grouping import Grouping
from hf_lowbit.loopvq.spec import LoopSpec
from hf_lowbit.models.ouro import OuroConfig, OuroForCausalLM
from hf_lowbit.quantizer import mark_quantized


VOCAB = 89


def build_model(seed=0, **changes):
    """A random model whose greedy text does not fall into a loop at once."""
    sizes = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, total_ut_steps=4, max_position_embeddings=4096, rope_theta=10000.0,
        pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = OuroForCausalLM(OuroConfig(**{**sizes, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model.float().eval()


def random_codebooks(model, config, seed=0):
    """Attach codebooks of random entries at the scale of the model's keys: real codes, poor ones, at no cost."""
    spec = LoopSpec.of(model)
    grouping = Grouping.of(config, spec.steps, spec.head_dim)
    generator = torch.Generator().manual_seed(seed)
    shape = (grouping.blocks, spec.kv_heads, grouping.groups, 256, grouping.group_size)
    weighted = config.encoder_metric == "fisher"
    codebooks = []
    for _ in spec.layers:
        codebook = LoopVQCodebook(grouping, spec.kv_heads, weighted)
        for side in SIDES:
            metric = torch.rand((spec.steps, spec.kv_heads, spec.head_dim), generator=generator) + 0.1
            codebook.store(side, torch.randn(shape, generator=generator), metric if weighted else None)
        codebooks.append(codebook)
    attach_loopvq(model, config, codebooks)
    artifact.attach_fingerprint(model, artifact.weights_fingerprint(model))
    mark_quantized(model, hf_lowbit.LowBitConfig(loopvq=config, fingerprint=artifact.stored_fingerprint(model)))
    return model


def generate(model, rows, count, cache, **options):
    """Greedy continuation ``[B, n]`` of token rows, left-padded, and its logits."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, output_logits=True,
        return_dict_in_generate=True, **{CACHE_ARG: cache}, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits, 1) if out.logits else None
