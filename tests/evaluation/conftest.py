"""A calibrated tiny model, shared by the evaluation tests; nothing may change it."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent))  # tiny_model.py, whatever pytest's import mode

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
