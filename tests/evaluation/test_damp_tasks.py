"""examples/damp_tasks.py on a tiny model whose own answers in full precision are the targets."""

import json
import sys
from pathlib import Path

import damp_models
import tiny_model

from hf_lowbit.data import read_tasks
from hf_lowbit.evaluation.greedy import generate_greedily


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import damp_tasks  # noqa: E402


def test_accuracy_of_the_arms(tmp_path, capsys):
    tokenizer = tiny_model.build_tokenizer()
    model = damp_models.build_model("qwen3_5", vocab_size=len(tokenizer)).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model.write_texts(tmp_path / "calibration.jsonl", 4)
    items = [
        {"task": f"copy{i % 2}", "prompt": text, "target": "?", "max_new_tokens": 12}
        for i, text in enumerate(tiny_model.texts(6, length=20, seed=3))
    ]
    path = tiny_model.write_jsonl(tmp_path / "tasks.jsonl", items)
    own = generate_greedily(model, tokenizer, read_tasks(path), "dynamic", progress=False)
    for item, text in zip(items, own.texts):
        item["target"] = text.split("\n", 1)[0].strip()
    tiny_model.write_jsonl(path, items)

    status = damp_tasks.main(
        [str(tmp_path / "model"), str(tmp_path), str(tmp_path / "out"), "--device=cpu", "--rows=4", "--sequences=3",
         "--prompt-tokens=16", "--windows=0", "--window-tokens=48", "--anchors=16,32", "--horizon=16",
         "--arms=^int(8|4sym)$|damp sr #0", "--batch-tokens=50"]
    )  # fmt: skip
    assert status == 0 and "| full precision | 1.000 | 1.000 | 1.000 | 0 | 0 |" in capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "tasks.json").read_text())
    arms = {arm["name"]: arm for arm in content["arms"]}
    assert {"full precision", "int8", "int4sym", "int8+4 damp sr #0"} <= arms.keys()
    for arm in arms.values():
        assert arm["lost"] == arm["right"].count(False) and arm["won"] == 0  # full precision is right everywhere
        assert arm["accuracy_mean"] == sum(arm["right"]) / 6
    assert arms["int8+4 damp sr #0"]["layout_bits_per_value"] == 10.75  # 4 of 16 rows
    # 4 bits without protected rows derail a random model; its states are what generation really ran on.
    assert arms["int4sym"]["divergence"]["identical"] < 1
