"""Packed recurrent states in the evaluation: single-token steps, measured bits, the same keys."""

import json
import math

import pytest
import tiny_model
import torch
from transformers import DynamicCache

from hf_lowbit.compat import cache_kwargs
from hf_lowbit.damp.cache import DAMPStateCache
from hf_lowbit.data import Task
from hf_lowbit.evaluation import METRICS, STATE_METRICS, evaluate, format_table
from hf_lowbit.evaluation.storage import full_cache_bytes, recurrent_states, tensor_bytes
from hf_lowbit.evaluation.teacher_forced import ForcedMetrics, compare_on_texts, forced_logits


PROMPT = 20


@pytest.fixture(scope="module")
def rows(tokenizer):
    return [tokenizer(text)["input_ids"] for text in tiny_model.texts(3, length=60, seed=3)]


def compare(model, rows, make_cache=None, **options):
    make_cache = make_cache or (lambda: DAMPStateCache(model))
    schedule = DAMPStateCache(model).forced_schedule(PROMPT)
    return compare_on_texts(model, rows, make_cache, schedule, progress=False, **options)


@torch.no_grad()
def expected(model, rows):
    """KL by its definition in fp64: a prompt, then token by token, against one pass without any cache."""
    kl, agree, losses = [], [], []
    for ids in rows:
        cache = DAMPStateCache(model)
        pieces = [ids[:PROMPT], *([token] for token in ids[PROMPT:])]
        logits = [model(torch.tensor([piece]), use_cache=True, **cache_kwargs(cache)).logits for piece in pieces]
        quantized = torch.cat(logits, dim=1)[0].double().log_softmax(-1)
        full = model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
        for q in range(PROMPT, len(ids)):
            kl.append((full[q].exp() * (full[q] - quantized[q])).sum().item())
            agree.append(full[q].argmax() == quantized[q].argmax())
            if q + 1 < len(ids):
                losses.append((-full[q, ids[q + 1]].item(), -quantized[q, ids[q + 1]].item()))
    return sum(kl) / len(kl), sum(agree).item() / len(agree), *torch.tensor(losses).mean(0).tolist()


def test_kl_is_that_of_single_token_steps(recurrent_model, rows):
    mixed = [rows[0], rows[1][:41], rows[2][:PROMPT]]  # the last one is all prompt
    kl, agree, nll_full, nll_quantized = expected(recurrent_model, mixed[:2])
    # A batch sums in another order, and a value at the border between two codes may then go to the other one.
    for batch_size, kl_tolerance, tolerance in ((1, 1e-4, 1e-6), (4, 0.1, 1e-3)):
        got = compare(recurrent_model, mixed, batch_size=batch_size)
        assert got.texts == 2 and got.positions == 60 + 41 - 2 * PROMPT
        assert kl > 1e-4 and math.isclose(got.kl_mean, kl, rel_tol=kl_tolerance)
        assert abs(got.top1_agreement - agree) < 0.05
        assert math.isclose(got.nll_full, nll_full, rel_tol=1e-6)
        assert math.isclose(got.nll_quantized, nll_quantized, rel_tol=tolerance)
        assert [start for start, _ in got.kl_by_position] == [0] and got.kl_by_position[0][1] == got.kl_mean


def test_longer_steps_round_less_often(recurrent_model, rows):
    # Why the schedule says 1: a piece rounds its states once, at its end.
    schedule = DAMPStateCache(recurrent_model).forced_schedule(PROMPT)
    assert schedule == (PROMPT, 1, PROMPT)
    honest = compare(recurrent_model, rows).kl_mean
    long = schedule._replace(step=20)
    flattered = compare_on_texts(recurrent_model, rows, lambda: DAMPStateCache(recurrent_model), long, progress=False)
    assert flattered.kl_mean < honest


@torch.no_grad()
def test_fp64_shows_what_fp32_hides(recurrent_model, rows):
    """The stock cache fed in single tokens instead of pieces differs by the order of sums only."""
    config = recurrent_model.config
    schedule = DAMPStateCache(recurrent_model).forced_schedule(PROMPT)
    kl = {}
    for dtype in (torch.float32, torch.float64):
        metrics = ForcedMetrics(rows, PROMPT, recurrent_model.device, dtype)
        pieces = [
            forced_logits(recurrent_model, metrics.ids, DynamicCache(config=config), schedule._replace(step=step))
            for step in (60, 1)
        ]
        (_, full), *_ = pieces[0]
        for first, logits in pieces[1]:
            metrics.add(first, full[:, first - PROMPT : first - PROMPT + 1], logits)
        kl[dtype] = metrics.kl[metrics.counted].mean().item()
    assert 0 < kl[torch.float64] < 1e-10 < 1e-9 < abs(kl[torch.float32]) < 1e-6


def test_keys_bits_and_bytes(recurrent_model, tokenizer):
    tasks = [Task("word", text[:40], "1", 8, "first_line") for text in tiny_model.texts(2, seed=4)]
    texts = tiny_model.texts(2, length=70, seed=5)
    result = evaluate(recurrent_model, tokenizer, texts, tasks, text_prompt_tokens=PROMPT, progress=False)
    json.dumps(result, allow_nan=False)
    full, quantized, settings = result["full"], result["quantized"], result["settings"]
    for side in (full, quantized):
        assert all(side[name] is not None for name in (*METRICS, *STATE_METRICS))
    assert full["bits_per_element"] == full["state_bits_per_value"] == 32
    assert (full["kl_mean"], full["top1_agreement"]) == (0.0, 1.0) and quantized["kl_mean"] > 1e-5
    assert (settings["prefill_tokens"], settings["chunk_tokens"], settings["recent_window"]) == (PROMPT, 1, None)
    assert settings["backend"] == "reference" and settings["quantization_config"]["damp"]["rows"] == 2
    assert settings["text_positions"] == 2 * (70 - PROMPT)

    # Bits are those of the records that exist, scales and padding included.
    cache = DAMPStateCache(recurrent_model)
    stock = DynamicCache(config=recurrent_model.config)
    ids = torch.tensor([tokenizer(texts[0])["input_ids"]])
    with torch.no_grad():
        for each in (cache, stock):
            for piece in (ids[:, :-1], ids[:, -1:]):
                recurrent_model(piece, use_cache=True, **cache_kwargs(each))
    values = sum(state.numel() for state in recurrent_states(stock))
    records = sum(layer.state.tensors["records"].nbytes for layer in cache.delta_layers)
    assert quantized["state_bytes"] == records and full["state_bytes"] == 4 * values
    assert quantized["state_bits_per_value"] == quantized["bits_per_element"] == 8 * records / values < 10.5
    assert full["cache_bytes"] == full_cache_bytes(stock) == tensor_bytes(stock)
    assert quantized["cache_bytes"] == full["cache_bytes"] - 4 * values + records + cache.memory_report().scratch
    table = format_table(result)
    assert "bits per state value" in table and "bytes of states" in table


def test_short_texts_and_wrong_options(recurrent_model, tokenizer):
    with pytest.raises(ValueError, match="no text has more than 64 tokens.*64 tokens at once and then 1 at a time"):
        evaluate(recurrent_model, tokenizer, ["a" * 64], progress=False)
    with pytest.raises(ValueError, match="recent_window"):
        evaluate(recurrent_model, tokenizer, ["a" * 99], cache_config={"recent_window": 8}, progress=False)
