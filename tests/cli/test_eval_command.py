"""``hf-lowbit eval``: the JSON's keys, and what may be left out."""

import json

import pytest

from hf_lowbit.evaluation import METRICS


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
