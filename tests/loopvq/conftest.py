"""Fixtures around loopvq_models.py."""

import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parent))  # oracle.py and loopvq_models.py, whatever pytest's import mode

from loopvq_models import VOCAB, build_model, random_codebooks  # noqa: E402

import hf_lowbit  # noqa: E402


@pytest.fixture
def make_model():
    return build_model


@pytest.fixture
def make_coded_model():
    def make(bits=0.5, loop_group_size=None, encoder_metric="fisher", seed=0, **changes):
        config = hf_lowbit.LoopVQConfig(bits=bits, loop_group_size=loop_group_size, encoder_metric=encoder_metric)
        return random_codebooks(build_model(seed, **changes), config, seed)

    return make


@pytest.fixture
def prompt():
    """prompt(n): seeded token ids [n], none of them padding."""

    def make(count, seed=0):
        return torch.randint(1, VOCAB, (count,), generator=torch.Generator().manual_seed(1000 + seed))

    return make
