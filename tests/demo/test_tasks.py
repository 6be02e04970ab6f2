"""The generators behind the embedded model: unique keys, old facts, right answers."""

import random
import re

import numpy as np
import pytest

from hf_lowbit.demo import tasks


ITEMS = tasks.items(seed=3, per_task=40)
SINKS, WINDOW = 8, 64


def facts_of(item):
    """Spans of the statements an answer is read from, found by walking the prompt itself."""
    context, _, question = item["prompt"].rpartition("\n")
    if item["task"] == "sort":
        assert question == "sort?"
        (match,) = re.finditer(r"\[([A-Z]+)\];", context)
        return [match.span()], "".join(sorted(match[1])) + "\n"
    key, spans, path = question[:-1], [], []
    while not key.isdigit():
        (match,) = re.finditer(rf"{key}=(\w+);", context)
        spans.append(match.span())
        path.append(match[1])
        key = match[1]
    if item["task"] == "needle":
        return spans, key + "\n"
    return spans, ">".join(path) + f"\n#### {key}\n"


@pytest.mark.parametrize("item", ITEMS[::4], ids=lambda item: f"{item['task']}-{item['prompt_tokens']}")
def test_answers_follow_from_facts_in_the_coded_region(item):
    spans, answer = facts_of(item)
    assert answer == item["reference"]
    for start, end in spans:
        assert start >= SINKS and item["prompt_tokens"] - end >= WINDOW
    assert item["prompt_tokens"] == len(item["prompt"]) <= 512 - item["max_new_tokens"]
    assert len(item["reference"]) <= item["max_new_tokens"]


def test_scoring_rule():
    for item in ITEMS:
        assert tasks.is_right(item, item["reference"])
        assert tasks.is_right(item, item["reference"] + "k7?1234\n")
        assert not tasks.is_right(item, item["reference"].replace(item["target"], "0"))
    assert {item["answer"] for item in ITEMS} == {"first_line", "after_hashes"}


def test_same_seed_same_items():
    assert tasks.items(5, 2) == tasks.items(5, 2) != tasks.items(6, 2)


@pytest.mark.parametrize("length", [64, 128, 511, 512])
def test_batch(length):
    ids, flags = tasks.batch(random.Random(0), 4, length, 32)
    assert ids.shape == flags.shape == (4, length) and ids.dtype == flags.dtype == np.uint8
    assert 0 < flags.mean() < 0.5 and ids.max() < tasks.VOCAB_SIZE


def test_keys_are_unique_within_a_sequence():
    for seed in range(20):
        data, _ = tasks.sequence(random.Random(seed), 512)
        keys = re.findall(rb"([a-z][0-9])=", data)
        assert len(keys) == len(set(keys)) and data.count(b"[") <= 1


def test_sequence_answers_are_right():
    data, _ = tasks.sequence(random.Random(1), 512)
    facts = dict(re.findall(r"([a-z]\d)=(\w+);", data.decode("latin1")))
    asked = re.findall(r"^([a-z]\d)\?(\d{4})$", data.decode("latin1"), re.M)
    assert asked and all(facts[key] == value for key, value in asked)
