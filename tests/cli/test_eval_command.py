"""``hf-lowbit eval``: the JSON's keys, and what may be left out."""

import json
import sys
from pathlib import Path

import pytest
import tiny_model

import hf_lowbit
from hf_lowbit.evaluation import METRICS, STATE_METRICS


sys.path.insert(0, str(Path(__file__).parents[1] / "damp"))  # damp_models.py, whatever pytest's import mode

import damp_models  # noqa: E402


def test_json(base, artifact, run, tmp_path):
    output = tmp_path / "result.json"
    status, out, _ = run(
        "eval", artifact, "--text", base / "text.jsonl", "--tasks", base / "tasks.jsonl", "--limit", 2, "--json", output,
        "--batch-size", 4, "--device", "cpu", "--quiet",
    )  # fmt: skip
    assert status == 0 and [path.name for path in tmp_path.iterdir()] == ["result.json"]
    result = json.loads(output.read_text())
    assert set(result) == {"full", "quantized", "settings"}
    for side in ("full", "quantized"):
        assert set(METRICS) <= result[side].keys() and all(result[side][name] is not None for name in METRICS)
        assert set(result[side]["accuracy"]) == {"word", "sort"}
    full, quantized, settings = result["full"], result["quantized"], result["settings"]
    assert (full["kl_mean"], full["top1_agreement"], full["bits_per_element"]) == (0.0, 1.0, 32.0)
    assert quantized["kl_mean"] > 0 and quantized["bits_per_element"] == 0.5
    assert quantized["cache_bytes"] < full["cache_bytes"]
    assert quantized["first_divergence"] <= full["first_divergence"]
    assert settings["limit"] == 2 and settings["texts"] == 2 and settings["tasks"] == {"word": 2, "sort": 2}
    assert settings["backend"] == "reference" and settings["versions"]["torch"] and "eval" in settings["command"]
    assert "KL, nats per token" in out and "accuracy word" in out


def test_text_only_and_tasks_only(base, artifact, run, tmp_path):
    run("eval", artifact, "--text", base / "text.jsonl", "--limit", 1, "--json", tmp_path / "a.json", "--quiet")
    result = json.loads((tmp_path / "a.json").read_text())
    for name in ("accuracy", "accuracy_mean", "first_divergence", "tokens_per_second"):
        assert result["full"][name] is None and result["quantized"][name] is None
    assert result["quantized"]["kl_mean"] > 0 and result["quantized"]["cache_bytes"] > 0

    run("eval", artifact, "--tasks", base / "tasks.jsonl", "--limit", 1, "--json", tmp_path / "b.json", "--quiet")
    result = json.loads((tmp_path / "b.json").read_text())
    assert result["quantized"]["kl_mean"] is None and result["full"]["top1_agreement"] is None
    assert result["quantized"]["accuracy_mean"] is not None and result["quantized"]["cache_bytes"] > 0


def test_another_window(base, artifact, run, tmp_path):
    kl = {}
    for window in (8, 32):
        output = tmp_path / f"{window}.json"
        flags = ["--text", base / "text.jsonl", "--recent-window", window, "--json", output, "--quiet"]
        assert run("eval", artifact, *flags)[0] == 0
        result = json.loads(output.read_text())
        assert result["settings"]["recent_window"] == window
        kl[window] = result["quantized"]["kl_mean"]
    assert kl[8] != kl[32]


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "give --text, --tasks or both"),
        (["--text", "absent.jsonl"], "no such file"),
        (["--text", "{base}/tasks.jsonl"], "missing key 'text'"),
        (["--tasks", "{base}/text.jsonl"], "missing key 'prompt'"),
        (["--text", "{base}/text.jsonl", "--limit", "0"], "--limit must be at least 1"),
        (["--text", "{base}/text.jsonl", "--json", "{out}/no/where.json"], "does not exist"),
        (["--text", "{base}/text.jsonl", "--text-tokens", "20"], "no text has more than 24 tokens"),
        (["--text", "{base}/text.jsonl", "--recent-window", "12"], "recent_window=12 must be a multiple of 8"),
        (["--text", "{base}/text.jsonl", "--strict", "--device", "cpu"], "reference path"),
    ],
)
def test_refusals_leave_no_file(base, artifact, run, tmp_path, flags, message):
    flags = [flag.format(base=base, out=tmp_path) for flag in flags]
    if "--json" not in flags:
        flags += ["--json", tmp_path / "result.json"]
    status, out, err = run("eval", artifact, *flags, "--quiet")
    assert status == 2 and message in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == [] and out == ""


def test_uncalibrated_model(base, run):
    status, _, err = run("eval", base / "model", "--text", base / "text.jsonl", "--quiet")
    assert status == 2 and "needs a calibrated model" in err


@pytest.fixture(scope="module")
def recurrent_artifact(base):
    """A calibrated model with packed recurrent states."""
    tokenizer = tiny_model.build_tokenizer()
    model = damp_models.build_model("qwen3_5", vocab_size=len(tokenizer))
    hf_lowbit.calibrate(model, tokenizer, tiny_model.DAMP, dataset=tiny_model.texts(6), progress=False)
    model.save_pretrained(base / "recurrent")
    tokenizer.save_pretrained(base / "recurrent")
    return base / "recurrent"


def test_recurrent_states(base, recurrent_artifact, run, tmp_path):
    results = {}
    for prompt in (16, 64):
        output = tmp_path / f"{prompt}.json"
        flags = ["--text", base / "text.jsonl", "--text-tokens", 80, "--text-prompt-tokens", prompt, "--json", output]
        if prompt == 16:
            flags += ["--tasks", base / "tasks.jsonl", "--limit", 2]
        status, out, err = run("eval", recurrent_artifact, *flags, "--quiet")
        assert status == 0, err
        results[prompt] = json.loads(output.read_text())
    full, quantized, settings = (results[16][part] for part in ("full", "quantized", "settings"))
    for side in (full, quantized):
        assert all(side[name] is not None for name in (*METRICS, *STATE_METRICS))
        assert set(side["accuracy"]) == {"word", "sort"}
    assert full["state_bits_per_value"] == 32 and quantized["state_bits_per_value"] == 10
    assert full["state_bytes"] / quantized["state_bytes"] == 3.2
    assert quantized["kl_mean"] > 0 and quantized["cache_bytes"] < full["cache_bytes"]
    assert settings["text_positions"] == 2 * (80 - 16) and settings["chunk_tokens"] == 1
    assert results[64]["settings"]["text_positions"] == 3 * (80 - 64)


def test_flags_of_the_other_kind_of_cache(base, artifact, recurrent_artifact, run):
    text = ["--text", base / "text.jsonl", "--quiet"]
    status, _, err = run("eval", artifact, *text, "--text-prompt-tokens", 64)
    assert status == 2 and "prompt_tokens=64 is for caches of recurrent states" in err
    status, _, err = run("eval", recurrent_artifact, *text, "--recent-window", 8)
    assert status == 2 and "recent_window" in err
