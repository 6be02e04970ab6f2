"""Batched generation gives each prompt what it gets alone, cut to its own budget."""

import pytest
import tiny_model
import torch

from hf_lowbit.data import Task
from hf_lowbit.evaluation.greedy import batches, generate_greedily, left_pad, stop_tokens


@pytest.fixture(scope="module")
def tasks():
    return [
        Task(name, text[: 20 + 9 * i], "1", budget, "first_line")
        for name, budget in (("a", 10), ("b", 24))
        for i, text in enumerate(tiny_model.texts(4, seed=budget))
    ]


@pytest.mark.parametrize("cache", ["dynamic", "lowbit"])
def test_batched_equals_single(model, tokenizer, tasks, cache):
    together = generate_greedily(model, tokenizer, tasks, cache, batch_size=3, progress=False)
    alone = generate_greedily(model, tokenizer, tasks, cache, batch_size=1, progress=False)
    assert together.tokens == alone.tokens and together.texts == alone.texts
    assert [len(row) for row in together.tokens] == [10] * 4 + [24] * 4
    assert together.tokens_per_second > 0
    ids = torch.tensor([tokenizer(tasks[5].prompt)["input_ids"]])
    direct = model.generate(ids, do_sample=False, max_new_tokens=24, cache_implementation=cache)
    assert together.tokens[5] == direct[0, ids.shape[1] :].tolist()


def test_stops_at_the_end_token(model, tokenizer, tasks, monkeypatch):
    free = generate_greedily(model, tokenizer, tasks[4:], "dynamic", progress=False).tokens
    stop = free[0][5]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [0, stop])
    got = generate_greedily(model, tokenizer, tasks[4:], "dynamic", progress=False).tokens
    for ended, whole in zip(got, free, strict=True):
        assert ended == (whole[: whole.index(stop) + 1] if stop in whole else whole)


def test_batches_share_budgets_and_start_long():
    tasks = [Task("t", "", None, budget, "first_line") for budget in (5, 9, 5, 9, 5)]
    prompts = [[0] * length for length in (3, 4, 8, 1, 3)]
    assert list(batches(tasks, prompts, 2)) == [[1, 3], [2, 0], [4]]


def test_left_pad():
    ids, mask = left_pad([[5, 6], [7]], 9, torch.device("cpu"))
    assert ids.tolist() == [[5, 6], [9, 7]] and mask.tolist() == [[1, 1], [0, 1]]


def test_stop_tokens(model, tokenizer, monkeypatch):
    assert stop_tokens(model, tokenizer) == {0}
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    assert stop_tokens(model, tokenizer) == {tokenizer.eos_token_id}


def test_prompts_that_do_not_fit(model, tokenizer):
    with pytest.raises(ValueError, match="has 500 tokens and asks for 20 more; the model's context holds 512"):
        generate_greedily(model, tokenizer, [Task("t", "a" * 500, "1", 20, "first_line")], "dynamic")
    with pytest.raises(ValueError, match="has no tokens"):
        generate_greedily(model, tokenizer, [Task("t", "", "1", 2, "first_line")], "dynamic")
