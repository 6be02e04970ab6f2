"""KL through the real cache: a page at a time sees what token-by-token decoding sees."""

import math

import pytest
import tiny_model
import torch
from transformers import DynamicCache

from hf_lowbit import LoopVQCache
from hf_lowbit.compat import cache_kwargs
from hf_lowbit.evaluation import teacher_forced
from hf_lowbit.evaluation.teacher_forced import compare_on_texts
from hf_lowbit.protocols import ForcedSchedule


SINKS, WINDOW = 8, 8
FIRST = SINKS + WINDOW + 8
SCHEDULE = ForcedSchedule(prefill=SINKS + WINDOW, step=8, first_counted=FIRST)


@pytest.fixture(scope="module")
def rows(tokenizer):
    return [tokenizer(text)["input_ids"] for text in tiny_model.texts(3, length=75, seed=3)]


def compare(model, rows, make_cache=None, schedule=SCHEDULE, **options):
    make_cache = make_cache or (lambda: LoopVQCache(model))
    return compare_on_texts(model, rows, make_cache, schedule, progress=False, **options)


def by_token(model, ids):
    """Log-probabilities ``[n, vocab]``, each token fed alone to a quantized cache."""
    cache = LoopVQCache(model)
    with torch.no_grad():
        logits = [
            model(input_ids=torch.tensor([[token]]), use_cache=True, **cache_kwargs(cache)).logits for token in ids
        ]
    return torch.cat(logits, dim=1)[0].double().log_softmax(-1)


def expected(model, rows):
    """KL, agreement and loss of both caches by their definitions, token by token, in fp64."""
    kl, agree, losses = [], [], []
    for ids in rows:
        quantized = by_token(model, ids)
        with torch.no_grad():
            full = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
        for q in range(FIRST, len(ids)):
            kl.append((full[q].exp() * (full[q] - quantized[q])).sum().item())
            agree.append(full[q].argmax() == quantized[q].argmax())
            if q + 1 < len(ids):
                losses.append((-full[q, ids[q + 1]].item(), -quantized[q, ids[q + 1]].item()))
    losses = torch.tensor(losses)
    return sum(kl) / len(kl), sum(agree).item() / len(agree), *losses.mean(0).tolist()


def test_the_cache_names_its_schedule(model):
    assert LoopVQCache(model).forced_schedule() == SCHEDULE
    assert LoopVQCache(model, recent_window=32).forced_schedule() == (40, 8, 48)
    with pytest.raises(ValueError, match="prompt_tokens=64 is for caches of recurrent states"):
        LoopVQCache(model).forced_schedule(64)


def test_pages_equal_single_tokens(model, rows):
    got = compare(model, rows[:1])
    kl, agree, nll_full, nll_quantized = expected(model, rows[:1])
    assert got.positions == len(rows[0]) - FIRST and got.texts == 1
    assert math.isclose(got.kl_mean, kl, rel_tol=1e-4) and got.kl_mean > 1e-4
    assert got.top1_agreement == agree
    assert math.isclose(got.nll_full, nll_full, rel_tol=1e-5)
    assert math.isclose(got.nll_quantized, nll_quantized, rel_tol=1e-5)
    assert math.isclose(got.kl_by_position[0][1], kl, rel_tol=1e-4)


def test_larger_chunks_would_flatter(model, rows):
    # Not a wish but a warning: late queries of a long chunk read what decoding has encoded already.
    honest = compare(model, rows)
    assert compare(model, rows, schedule=SCHEDULE._replace(step=40)).kl_mean < 0.9 * honest.kl_mean


def test_single_tokens_are_a_schedule_too(model, rows):
    by_page, by_token = compare(model, rows), compare(model, rows, schedule=SCHEDULE._replace(step=1))
    assert math.isclose(by_page.kl_mean, by_token.kl_mean, rel_tol=1e-4)
    assert by_page.positions == by_token.positions and by_page.top1_agreement == by_token.top1_agreement


def test_unequal_texts_in_a_batch(model, rows):
    mixed = [rows[0], rows[1][:51], rows[2][:30], rows[2][:10]]  # the last one never sees a code
    got = compare(model, mixed, batch_size=4)
    alone = compare(model, mixed, batch_size=1)
    kl, agree, nll_full, nll_quantized = expected(model, mixed[:3])
    for result in (got, alone):
        assert result.texts == 3 and result.positions == sum(len(ids) - FIRST for ids in mixed[:3])
        assert math.isclose(result.kl_mean, kl, rel_tol=1e-4)
        assert math.isclose(result.top1_agreement, agree)
        assert math.isclose(result.nll_full, nll_full, rel_tol=1e-5)
        assert math.isclose(result.nll_quantized, nll_quantized, rel_tol=1e-5)


def test_pieces_of_the_reference_do_not_matter(model, rows, monkeypatch):
    one = compare(model, rows)
    monkeypatch.setattr(teacher_forced, "BUCKET", 16)
    two = compare(model, rows)
    assert math.isclose(one.kl_mean, two.kl_mean, rel_tol=1e-4)
    assert [start for start, _ in two.kl_by_position] == [16, 32, 48, 64]


def test_full_cache_against_itself(model, rows):
    got = compare(model, rows, lambda: DynamicCache(config=model.config))
    assert abs(got.kl_mean) < 1e-7 and got.top1_agreement == 1.0
    assert math.isclose(got.nll_full, got.nll_quantized, rel_tol=1e-6)


def test_too_short(model, rows):
    with pytest.raises(ValueError, match="no text has more than 24 tokens.*the longest has 24"):
        compare(model, [rows[0][:24]])
    assert compare(model, [rows[0][:25]]).positions == 1


def test_logits_that_are_not_finite(model, rows):
    class Broken(torch.nn.Module):
        config, device = model.config, model.device

        def forward(self, **inputs):
            output = model(**inputs)
            output.logits[..., 0] = float("nan")
            return output

    with pytest.raises(ValueError, match="not finite"):
        compare(Broken(), rows[:1], lambda: LoopVQCache(model))
