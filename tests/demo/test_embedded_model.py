"""The model inside the package: it loads, it is small, and it answers."""

import json
from collections import defaultdict

import pytest
import torch

import hf_lowbit.models  # noqa: F401  (registers ouro)
from hf_lowbit.demo import demo_data, demo_model_path, tasks


pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def loaded():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = demo_model_path()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def test_shape(loaded):
    config = loaded[0].config
    assert (config.model_type, config.total_ut_steps, config.head_dim) == ("ouro", 4, 64)
    assert 0.5e6 < loaded[0].num_parameters() < 2e6


@pytest.mark.parametrize("task", tasks.TASKS)
def test_answers_with_a_full_cache(loaded, task):
    model, tokenizer = loaded
    items = [json.loads(line) for line in demo_data("tasks").open()]
    items = [item for item in items if item["task"] == task][:20]
    inputs = tokenizer([item["prompt"] for item in items], return_tensors="pt", padding=True)
    out = model.generate(**inputs, max_new_tokens=tasks.MAX_NEW_TOKENS[task], do_sample=False)
    answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [tasks.is_right(item, answer) for item, answer in zip(items, answers)]
    assert sum(right) / len(right) >= 0.9


def test_data_files():
    rows = defaultdict(list)
    for name in ("calibration", "text", "tasks"):
        rows[name] = [json.loads(line) for line in demo_data(name).open()]
    assert (len(rows["calibration"]), len(rows["text"])) == (48, 16)
    assert {row["task"] for row in rows["tasks"]} == set(tasks.TASKS)


def test_unknown_name_names_the_choices():
    with pytest.raises(ValueError, match="calibration, text, tasks"):
        demo_data("test")
