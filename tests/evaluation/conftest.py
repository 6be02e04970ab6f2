"""Calibrated tiny models, shared by the evaluation tests; nothing may change them."""

import sys
from pathlib import Path

import pytest


for folder in (Path(__file__).parent, Path(__file__).parents[1] / "damp"):  # whatever pytest's import mode
    sys.path.insert(0, str(folder))

import damp_models  # noqa: E402
import tiny_model  # noqa: E402

import hf_lowbit  # noqa: E402


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_model.build_tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer):
    model = tiny_model.build_model()
    hf_lowbit.calibrate(model, tokenizer, tiny_model.LOOPVQ, dataset=tiny_model.texts(6), progress=False)
    return model


@pytest.fixture(scope="session", params=["qwen3_5", "kimi_linear"])
def recurrent_model(request, tokenizer):
    """A calibrated GDN and a calibrated KDA model."""
    model = damp_models.build_model(request.param, vocab_size=len(tokenizer))
    hf_lowbit.calibrate(model, tokenizer, tiny_model.DAMP, dataset=tiny_model.texts(6), progress=False)
    return model
