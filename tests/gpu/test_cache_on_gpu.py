"""The cache with its Triton path, inside a model, on a real GPU."""

import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "loopvq"))

from loopvq_models import build_model, random_codebooks  # noqa: E402

from hf_lowbit import LoopVQCache, LoopVQConfig  # noqa: E402
from hf_lowbit.compat import CACHE_ARG  # noqa: E402


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Relative to the largest logit. fp32: another order of sums. bf16: the reference attends in fp32 over bf16 states as the
# kernel does, so what is left is the rounding of its output, carried through 8 layer calls.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def coded_model(bits, dtype, **changes):
    model = random_codebooks(build_model(**changes), LoopVQConfig(bits=bits))
    return model.to("cuda", dtype)


def logits_of(model, ids, backend, prefill=150):
    cache = LoopVQCache(model, backend=backend)
    out = []
    with torch.no_grad():
        model(ids[:, :prefill], **{CACHE_ARG: cache})
        for i in range(prefill, ids.shape[1]):
            out.append(model(ids[:, i : i + 1], **{CACHE_ARG: cache}).logits[:, -1].float())
    assert cache.coded_tokens[0] > 100
    return torch.stack(out, 1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bits", [0.25, 0.5, 1, 2])
@pytest.mark.parametrize("heads", [2, 4], ids=["mha", "gqa"])
def test_triton_decoding_equals_the_reference(bits, dtype, heads):
    model = coded_model(bits, dtype, num_attention_heads=heads)
    ids = torch.randint(1, 89, (3, 210), generator=torch.Generator().manual_seed(0)).cuda()
    reference, triton = (logits_of(model, ids, backend) for backend in ("reference", "triton"))
    assert (triton - reference).abs().max() / reference.abs().max() < TOLERANCE[dtype]


def test_the_kernel_is_the_default_and_strict_accepts_it():
    model = coded_model(0.5, torch.bfloat16)
    ids = torch.randint(1, 89, (1, 100)).cuda()
    out = model.generate(
        ids, max_new_tokens=5, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
        cache_implementation="loopvq", cache_config={"strict": True},
    )  # fmt: skip
    assert getattr(out, CACHE_ARG).backend == "triton"


def test_a_padded_row_gets_the_tokens_it_gets_alone():
    model = coded_model(0.5, torch.float32)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(1, 89, (n,), generator=generator) for n in (170, 120, 30)]
    settings = dict(max_new_tokens=60, do_sample=False, eos_token_id=None, cache_implementation="loopvq")
    ids, mask = torch.zeros(3, 170, dtype=torch.long), torch.zeros(3, 170, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 170 - len(row) :], mask[i, 170 - len(row) :] = row, 1
    both = model.generate(ids.cuda(), attention_mask=mask.cuda(), **settings)
    for i, row in enumerate(rows):
        alone = model.generate(row[None].cuda(), **settings)
        assert torch.equal(both[i, 170:], alone[0, len(row) :])
