"""Tiny random Ouro models (fp32, CPU). Everything is seeded; a model is built in milliseconds."""

import os
import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parent))  # ouro_reference.py, whatever pytest's import mode

from hf_lowbit.models.ouro import OuroConfig, OuroForCausalLM  # noqa: E402


REPO = Path(__file__).resolve().parents[2]

SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}


def build_model(seed: int = 0, dtype: torch.dtype = torch.float32, attn: str = "sdpa", **changes) -> OuroForCausalLM:
    """A random model whose loops, norms and gates all matter (unit-ish activations, gates spread around zero)."""
    torch.manual_seed(seed)
    config = OuroConfig(**{**SIZES, **changes}, attn_implementation=attn)
    model = OuroForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * torch.randn_like(parameter))
            elif "early_exit_gate" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5))
    return model.to(dtype).eval()


@pytest.fixture
def make_model():
    return build_model


@pytest.fixture
def ids():
    """[2, 13] token ids, never 0 (0 is the padding id in these tests)."""
    return torch.randint(1, SIZES["vocab_size"], (2, 13), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def hub_config_dir() -> Path:
    return REPO / "hub_configs"


@pytest.fixture
def looped_mini() -> Path:
    """The small trained checkpoint with hub weight names; HF_LOWBIT_SHARED defaults to ../shared."""
    shared = Path(os.environ.get("HF_LOWBIT_SHARED", REPO.parent / "shared"))
    path = shared / "models" / "looped-mini"
    if not (path / "model.safetensors").exists():
        pytest.skip(f"{path} is not here (set HF_LOWBIT_SHARED)")
    return path
