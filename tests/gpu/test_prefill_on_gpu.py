"""Prompts in chunks with the kernels and flash attention, on a real GPU, against one masked attention."""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention.bias import CausalBias


sys.path.insert(0, str(Path(__file__).parents[1] / "loopvq"))

from loopvq_models import build_model, random_codebooks  # noqa: E402
from test_prefill import feed, ragged_only  # noqa: E402

from hf_lowbit import LoopVQCache, LoopVQConfig  # noqa: E402
from hf_lowbit.loopvq import prefill_attention, prefill_ragged  # noqa: E402


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = {"mha": {}, "gqa": dict(num_attention_heads=4), "head-96": dict(head_dim=96)}


def coded_model(dtype, bits=0.5, **changes):
    return random_codebooks(build_model(num_hidden_layers=1, **changes), LoopVQConfig(bits=bits)).to("cuda", dtype)


def prompts(rows, count):
    return torch.randint(1, 89, (rows, count), generator=torch.Generator().manual_seed(7)).cuda()


def in_fp32(model):
    return torch.nn.Module.float(model)  # transformers refuses it on quantized models; these only carry codebooks


def error(logits, exact):
    return (logits.float() - exact).abs().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_even_chunks_are_as_exact_as_the_masked_attention(shape, dtype, monkeypatch):
    model = coded_model(dtype, **SHAPES[shape])
    ids, pieces, masks = prompts(2, 700), [300, 257, 143], []
    original = prefill_attention.lower_right
    monkeypatch.setattr(prefill_attention, "lower_right", lambda *a: masks.append(original(*a)) or masks[-1])
    even = feed(model, LoopVQCache(model), ids, pieces)
    assert masks and all(isinstance(mask, CausalBias) for mask in masks)
    ragged_only(monkeypatch)
    monkeypatch.setattr(prefill_ragged, "APART", 10**9)
    masked = feed(model, LoopVQCache(model), ids, pieces)
    exact = feed(in_fp32(model), LoopVQCache(model), ids, pieces)
    assert error(even, exact) <= 1.1 * error(masked, exact)


@pytest.mark.parametrize("shape", SHAPES)
def test_even_chunks_in_fp32_equal_the_masked_attention(shape, monkeypatch):
    model, ids, pieces = coded_model(torch.float32, **SHAPES[shape]), prompts(2, 700), [300, 257, 143]
    even, masked = LoopVQCache(model), LoopVQCache(model)
    logits = feed(model, even, ids, pieces)
    ragged_only(monkeypatch)
    monkeypatch.setattr(prefill_ragged, "APART", 10**9)
    expected = feed(model, masked, ids, pieces)
    assert (logits - expected).abs().max() < 1e-3 * expected.abs().max()
    assert even.coded_tokens == masked.coded_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [2048, 264])
def test_padded_rows_go_row_by_row(chunk, dtype, monkeypatch):
    model, ids = coded_model(dtype), prompts(3, 700)
    mask = torch.ones_like(ids)
    mask[1, :200], mask[2, :690] = 0, 0
    taken, original = [], prefill_ragged.RaggedChunk._row_by_row
    monkeypatch.setattr(
        prefill_ragged.RaggedChunk, "_row_by_row", lambda self, *a: taken.append(1) or original(self, *a)
    )
    apart = LoopVQCache(model, prefill_chunk_size=chunk)
    logits = feed(model, apart, ids, [700], mask)
    assert taken and torch.isfinite(logits).all()
    monkeypatch.setattr(prefill_ragged, "APART", 10**9)
    masked = LoopVQCache(model, prefill_chunk_size=chunk)
    expected, real = feed(model, masked, ids, [700], mask), mask != 0
    assert apart.coded_tokens == masked.coded_tokens
    if dtype == torch.float32:
        assert (logits - expected)[real].abs().max() < 1e-3 * expected.abs().max()
    else:
        exact = feed(in_fp32(model), LoopVQCache(model, prefill_chunk_size=chunk), ids, [700], mask)[real]
        assert error(logits[real], exact) <= 1.1 * error(expected[real], exact)


def test_a_chunk_does_not_wait_for_the_device():
    model = coded_model(torch.bfloat16)
    ids, cache = prompts(1, 1200), LoopVQCache(model, prefill_chunk_size=400)
    feed(model, LoopVQCache(model, prefill_chunk_size=400), ids, [1200])  # kernels compile
    torch.cuda.set_sync_debug_mode("error")
    try:
        feed(model, cache, ids, [1200])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.coded_tokens[0] > 1000
