"""The development files outside the repository, if they are here."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from hf_lowbit.data import read_tasks, read_texts


SHARED = Path(os.environ.get("HF_LOWBIT_SHARED", Path(__file__).resolve().parents[3] / "shared")) / "eval"

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not here (set HF_LOWBIT_SHARED)"),
]


def test_texts():
    assert len(read_texts(SHARED / "calibration.jsonl")) == 48
    assert len(read_texts(SHARED / "text.jsonl", limit=5)) == 5


def test_reference_answers_are_right():
    tasks = read_tasks(SHARED / "tasks.jsonl")
    references = [json.loads(line)["reference"] for line in (SHARED / "tasks.jsonl").read_text().splitlines()]
    assert Counter(task.task for task in tasks) == dict.fromkeys(("word", "vars", "needle", "trace", "sort"), 200)
    assert all(task.is_correct(reference) for task, reference in zip(tasks, references, strict=True))


def test_benchmark_files():
    gsm8k = read_tasks(SHARED / "gsm8k_test.jsonl")
    assert len(gsm8k) == 1319 and gsm8k[0].is_correct("...\n#### 18")
    human = read_tasks(SHARED / "HumanEval.jsonl.gz")
    assert len(human) == 164 and human[0].is_correct("    return True") is None
