"""The whole comparison, byte counting, and files that are whole or absent."""

import json
import math

import pytest
import tiny_model
import torch
from transformers import DynamicCache

from hf_lowbit import LoopVQCache
from hf_lowbit.compat import cache_kwargs
from hf_lowbit.data import Task
from hf_lowbit.evaluation import METRICS, evaluate, format_table, write_json
from hf_lowbit.evaluation.storage import full_cache_bytes, tensor_bytes


def test_a_right_answer_counts(model, tokenizer):
    prompt = tiny_model.texts(1, seed=4)[0][:60]
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    said = tokenizer.decode(
        model.generate(ids, do_sample=False, max_new_tokens=6, cache_implementation="dynamic")[0, 60:]
    )
    tasks = [Task("right", prompt, said.split("\n")[0], 6, "first_line"), Task("wrong", prompt, "no", 6, "first_line")]
    result = evaluate(model, tokenizer, tasks=tasks, progress=False)
    full = result["full"]
    assert full["accuracy"] == {"right": 1.0, "wrong": 0.0} and full["accuracy_mean"] == 0.5
    assert full["first_divergence"] == 6.0 and full["first_divergence_detail"]["identical"] == 1.0
    json.dumps(result, allow_nan=False)


def test_keys_and_table(model, tokenizer):
    result = evaluate(model, tokenizer, texts=tiny_model.texts(2, seed=5), progress=False)
    assert set(METRICS) <= result["full"].keys() & result["quantized"].keys()
    table = format_table(result)
    assert "KL, nats per token" in table and "accuracy" not in table


def test_nothing_to_do(model, tokenizer):
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        evaluate(model, tokenizer)


@torch.no_grad()
def test_reported_bytes_are_those_of_the_tensors(model, tokenizer):
    ids = torch.tensor([tokenizer(tiny_model.texts(1)[0])["input_ids"]])
    ours, stock = LoopVQCache(model), DynamicCache(config=model.config)
    for cache in (ours, stock):
        for piece in (ids[:, :100], ids[:, 100:101], ids[:, 101:102]):
            model(input_ids=piece, use_cache=True, **cache_kwargs(cache))
    # All but the RoPE frequencies: D / 2 = 8 numbers in fp64, in host memory on every device.
    assert tensor_bytes(ours) - ours.memory_report().per_request in (0, 8 * 8)
    assert tensor_bytes(stock) == full_cache_bytes(stock) == ours.memory_report().full_precision
    assert full_cache_bytes(stock) == 2 * 8 * 2 * 16 * 102 * 4  # K and V, 8 slots, 2 heads x 16, 102 tokens, fp32


def test_tensor_bytes_counts_storages_once():
    base = torch.zeros(100)
    assert tensor_bytes([base, base[:10], {"a": (base.view(10, 10),)}]) == 400
    assert tensor_bytes([torch.nn.Linear(3, 3), "text", None, 5]) == 0
    loop = [base]
    loop.append(loop)
    assert tensor_bytes(loop) == 400


def test_json_is_whole_or_absent(tmp_path):
    path = tmp_path / "r.json"
    with pytest.raises(ValueError):
        write_json(path, {"a": math.nan})
    assert list(tmp_path.iterdir()) == []
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        write_json(tmp_path / "no" / "r.json", {})
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path, {})
