"""Prompts in chunks: rows of equal lengths without masks, ragged ones row by row, both against one masked attention."""

import dataclasses
import functools
import os

import pytest
import torch
from launches import count_as_on_a_gpu
from transformers import DynamicCache

from hf_lowbit import LoopVQCache
from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.loopvq import cache as cache_module
from hf_lowbit.loopvq import prefill_attention
from hf_lowbit.loopvq.prefill import EvenChunk
from hf_lowbit.loopvq.prefill_ragged import RaggedChunk, real_columns
from hf_lowbit_kernels import vq_decode_pages
from hf_lowbit_kernels.vq_attention_cuda import is_entry_major


interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
CASES = {
    "half-bit": dict(),
    "quarter-bit, gqa": dict(bits=0.25, num_attention_heads=4),
    "two blocks": dict(bits=1, loop_group_size=2),
    "one step, head-96": dict(bits=1, total_ut_steps=1, head_dim=96),
}
PIECES = {
    "one": [200],
    "aligned": [72, 80, 80],
    "short and odd": [3, 4, 10, 1, 91, 30, 2, 77],  # sinks over several passes, pages over a border of two
    "single": [5] + [1] * 8 + [90, 60],
}


@torch.no_grad()
def feed(model, cache, ids, pieces, mask=None):
    """Logits of ids fed in pieces."""
    out, done = [], 0
    for n in pieces:
        given = None if mask is None else mask[:, : done + n]
        out.append(model(ids[:, done : done + n], attention_mask=given, **{CACHE_ARG: cache}).logits)
        done += n
    return torch.cat(out, 1)


def same_codes(one, other):
    pages = [coded // 8 for coded in one.coded_tokens]
    assert one.coded_tokens == other.coded_tokens and max(pages) > 0
    for a, b in zip(one._stores, other._stores):
        for row, count in enumerate(pages):
            assert torch.equal(a.codes[:, :, row, :count], b.codes[:, :, row, :count])


def ragged_only(monkeypatch):
    """From here on every chunk goes the general way, under a mask."""

    def ragged(layout, batch, count, start, coded, coded_after, device):
        positions = torch.arange(start, start + count, device=device).expand(batch, count)
        numbers = [start] * batch, [coded] * batch, [coded_after] * batch
        return RaggedChunk(layout, count, None, positions, *numbers, [slice(0, count)] * batch)

    monkeypatch.setattr(cache_module, "EvenChunk", ragged)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("case", CASES)
def test_even_chunks_equal_the_masked_attention(case, pieces, rows, make_coded_model, prompt, monkeypatch):
    model, pieces = make_coded_model(num_hidden_layers=1, **CASES[case]), PIECES[pieces]
    ids = torch.stack([prompt(sum(pieces) + 1, seed=i) for i in range(rows)])
    even, masked = LoopVQCache(model), LoopVQCache(model)
    logits = feed(model, even, ids, [*pieces, 1])
    with monkeypatch.context() as patch:
        ragged_only(patch)
        expected = feed(model, masked, ids, [*pieces, 1])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    same_codes(even, masked)


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("chunk", [2048, 64])
def test_row_by_row_equals_the_masked_attention(chunk, side, make_coded_model, prompt, monkeypatch):
    """Padding on either side, a second turn of rows that are ragged by then, and rows without a token in it."""
    model = make_coded_model(num_hidden_layers=1)
    lengths, longest = (150, 97, 3, 120), 150
    ids = torch.stack([prompt(longest + 40, seed=n) for n in lengths])
    mask = torch.ones_like(ids)
    for row, n in enumerate(lengths):
        mask[row, : longest - n] = side != "left"
        mask[row, n:longest] = side == "left"
    mask[3, longest:] = 0
    if side == "holes":
        mask[1, 5:50:7] = 0
    pieces = [longest, 40]
    masked, apart = LoopVQCache(model, prefill_chunk_size=chunk), LoopVQCache(model, prefill_chunk_size=chunk)
    expected = feed(model, masked, ids, pieces, mask)
    taken = []
    original = RaggedChunk._row_by_row
    monkeypatch.setattr(RaggedChunk, "_apart", lambda self, device: self._spans is not None)
    monkeypatch.setattr(RaggedChunk, "_row_by_row", lambda self, *a: taken.append(1) or original(self, *a))
    logits = feed(model, apart, ids, pieces, mask)
    assert taken and torch.isfinite(logits).all()
    torch.testing.assert_close(logits[mask != 0], expected[mask != 0], atol=1e-5, rtol=1e-5)
    same_codes(apart, masked)


def test_a_row_on_its_way_alone_is_the_row_alone(make_coded_model, prompt, monkeypatch):
    monkeypatch.setattr(RaggedChunk, "_apart", lambda self, device: self._spans is not None)
    model = make_coded_model(num_hidden_layers=1)
    ids, mask = torch.stack([prompt(180), prompt(180, seed=1)]), torch.ones(2, 180, dtype=torch.long)
    mask[1, :60] = 0
    logits = feed(model, LoopVQCache(model, prefill_chunk_size=88), ids, [180], mask)
    alone = feed(model, LoopVQCache(model, prefill_chunk_size=88), ids[1:, 60:], [120])
    torch.testing.assert_close(logits[1:, 60:], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("apart", [False, True], ids=["masked", "apart"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chunk", [8, 88])
def test_padded_rows_at_the_borders_of_pages_and_chunks_equal_the_rows_alone(
    chunk, side, apart, make_coded_model, prompt, monkeypatch
):
    """One token; a whole chunk or page and one more; the first page to encode is due at 80 tokens. Then steps, and a turn."""
    if apart:
        monkeypatch.setattr(RaggedChunk, "_apart", lambda self, device: self._spans is not None)
    model = make_coded_model(num_hidden_layers=1)
    lengths, turn = (1, 8, 79, 80, 81, 88, 89), [1, 1, 1, 6]
    rows = [torch.cat([prompt(n, seed=n), prompt(sum(turn), seed=100 + n)]) for n in lengths]
    longest = max(lengths)
    ids = torch.full((len(rows), longest + sum(turn)), 3)
    mask = torch.ones_like(ids)
    for i, (row, n) in enumerate(zip(rows, lengths)):
        real = slice(longest - n, longest) if side == "left" else slice(0, n)
        mask[i, :longest] = 0
        mask[i, real], ids[i, real], ids[i, longest:] = 1, row[:n], row[n:]
    together = LoopVQCache(model, prefill_chunk_size=chunk)
    logits = feed(model, together, ids, [longest, *turn], mask)
    for i, (row, n) in enumerate(zip(rows, lengths)):
        alone = LoopVQCache(model, prefill_chunk_size=chunk)
        expected = feed(model, alone, row[None], [n, *turn])
        torch.testing.assert_close(logits[i][mask[i] != 0], expected[0], atol=5e-5, rtol=1e-4)
        assert together.coded_tokens[i] == alone.coded_tokens[0]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_change_nothing(dtype, make_coded_model, prompt, monkeypatch):
    """On keys, values and queries they round as PyTorch does."""
    model = make_coded_model(num_hidden_layers=1, total_ut_steps=2, bits=1, num_attention_heads=4).to(dtype)
    ids = torch.stack([prompt(140), prompt(140, seed=1)])
    pieces = [90, 50]
    expected = feed(model, LoopVQCache(model), ids, pieces)
    used = []
    for name in ("rope_copy", "vq_decode_pages"):
        kernel = functools.partial(getattr(prefill_attention, name), backend="triton")
        monkeypatch.setattr(
            prefill_attention, name, lambda *a, name=name, kernel=kernel, **k: used.append(name) or kernel(*a, **k)
        )
    logits = feed(model, LoopVQCache(model), ids, pieces)
    assert set(used) == {"rope_copy", "vq_decode_pages"}
    assert torch.equal(logits, expected)


def test_a_cache_for_the_cuda_kernel_hands_over_the_tables_it_stages(make_coded_model, prompt, monkeypatch):
    model = make_coded_model(num_hidden_layers=1)
    ids = prompt(180).unsqueeze(0)
    expected = feed(model, LoopVQCache(model, prefill_chunk_size=88), ids, [180])
    staged = []

    def spy(*tensors):
        staged.extend(is_entry_major(table) for table in tensors[2:4])
        vq_decode_pages(*tensors)

    monkeypatch.setattr(prefill_attention, "vq_decode_pages", spy)
    cache = LoopVQCache(model, prefill_chunk_size=88)
    cache._layout = dataclasses.replace(cache._layout, staged=True)
    assert torch.equal(feed(model, cache, ids, [180]), expected)
    assert staged and all(staged)


def test_padding_is_found_on_either_side():
    valid = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]], dtype=torch.bool)
    added, columns = real_columns(valid)
    assert added == [2, 2, 4, 0, 2]
    assert columns == [slice(2, 4), slice(0, 2), slice(0, 4), slice(0, 0), None]


def test_a_chunk_launches_no_more_than_a_stock_cache(make_coded_model, prompt, monkeypatch):
    launches = count_as_on_a_gpu(monkeypatch)

    def per_layer(make_cache):
        """Launches of a second chunk in one layer, all loop steps, and their names in two layers."""
        counts = []
        for layers in (1, 2):
            model = make_coded_model(num_hidden_layers=layers)
            cache = make_cache(model)
            with torch.no_grad():
                model(prompt(150)[None], use_cache=True, **{CACHE_ARG: cache})
                launches.names.clear()
                with launches:
                    model(prompt(150, seed=1)[None], use_cache=True, **{CACHE_ARG: cache})
            names = [name for name in launches.names if not name.startswith("new_empty")]
            counts.append(len(names))
        return counts[1] - counts[0], names

    stock, _ = per_layer(lambda model: DynamicCache())
    ours, names = per_layer(LoopVQCache)
    assert ours <= stock, (ours, stock)
    # Nothing that comes from the host or is counted on the device, in any layer.
    assert not {"nonzero", "argsort", "_local_scalar_dense", "index", "index_put_"} & set(names[len(names) // 2 :])
    assert names.count("vq_encode_chunk") == 2  # one for keys and values of all steps in each of two layers


def test_chunks_without_padding_are_even(make_coded_model, prompt, monkeypatch):
    """Also where rows were padded before, once they hold equally many tokens."""
    made = []
    monkeypatch.setattr(cache_module, "EvenChunk", lambda *a: made.append("even") or EvenChunk(*a))
    monkeypatch.setattr(cache_module, "RaggedChunk", lambda *a: made.append("ragged") or RaggedChunk(*a))
    model = make_coded_model(num_hidden_layers=1)
    ids, mask = torch.stack([prompt(100), prompt(100, seed=1)]), torch.ones(2, 100, dtype=torch.long)
    feed(model, LoopVQCache(model, prefill_chunk_size=40), ids, [100], mask)
    assert made == ["even"] * 3
    made.clear()
    mask[1, :30] = 0
    feed(model, LoopVQCache(model, prefill_chunk_size=40), ids, [100], mask)
    assert made == ["even", "ragged", "ragged"]
