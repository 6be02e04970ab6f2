"""A tiny looped model with codebooks fitted to it in a second; everything is seeded."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # oracle.py

import hf_lowbit  # noqa: E402
from hf_lowbit import artifact  # noqa: E402
from hf_lowbit.loopvq.attach import attach_loopvq  # noqa: E402
from hf_lowbit.loopvq.codebook import SIDES, LoopVQCodebook  # noqa: E402
from hf_lowbit.loopvq.grouping import Grouping  # noqa: E402
from hf_lowbit.loopvq.spec import LoopSpec  # noqa: E402
from hf_lowbit.models.ouro import OuroConfig, OuroForCausalLM  # noqa: E402
from hf_lowbit.quantizer import mark_quantized  # noqa: E402

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
    codebooks = []
    for _ in spec.layers:
        codebook = LoopVQCodebook(grouping, spec.kv_heads)
        for side in SIDES:
            codebook.store(side, torch.randn(shape, generator=generator))
        codebooks.append(codebook)
    attach_loopvq(model, config, codebooks)
    artifact.attach_fingerprint(model, artifact.weights_fingerprint(model))
    mark_quantized(model, hf_lowbit.LowBitConfig(loopvq=config, fingerprint=artifact.stored_fingerprint(model)))
    return model


@pytest.fixture
def make_model():
    return build_model


@pytest.fixture
def make_coded_model():
    def make(bits=0.5, loop_group_size=None, seed=0, **changes):
        config = hf_lowbit.LoopVQConfig(bits=bits, loop_group_size=loop_group_size)
        return random_codebooks(build_model(seed, **changes), config, seed)

    return make


@pytest.fixture
def prompt():
    """prompt(n): seeded token ids [n], none of them padding."""

    def make(count, seed=0):
        return torch.randint(1, VOCAB, (count,), generator=torch.Generator().manual_seed(1000 + seed))

    return make
