"""`hf-lowbit sample`, and its texts as extra data of a calibration."""

import json

from hf_lowbit.data import read_texts
from hf_lowbit.demo import demo_data, demo_model_path


def test_samples_are_reproducible_and_long_enough(run, tmp_path):
    flags = ("--data", demo_data("calibration"), "--count", "3", "--length", "60", "--batch-size", "2", "--quiet")
    for name in ("a.jsonl", "b.jsonl.gz"):
        status, out, err = run("sample", demo_model_path(), "--output", tmp_path / name, *flags)
        assert status == 0, err
    texts = read_texts(tmp_path / "a.jsonl")
    assert texts == read_texts(tmp_path / "b.jsonl.gz") and len(set(texts)) == 3
    assert all(len(text) >= 60 for text in texts)  # one byte a token in the embedded model


def test_calibration_takes_extra_data(run, tmp_path):
    text = read_texts(demo_data("calibration"))[0]
    (tmp_path / "extra.jsonl").write_text("".join(json.dumps({"text": text[i:]}) + "\n" for i in (0, 100, 200)))
    status, _, err = run(
        "calibrate", demo_model_path(), "--data", demo_data("calibration"), "--extra-data", tmp_path / "extra.jsonl",
        "--output", tmp_path / "out", "--sequences", "2", "--sequence-length", "100", "--epochs", "1",
        "--learning-rate", "0.01", "--kmeans-vectors", "300", "--recent-window", "8", "--dtype", "float32", "--quiet",
    )  # fmt: skip
    assert status == 0, err
    report = json.loads((tmp_path / "out" / "calibration_report.json").read_text())
    assert report["sequences"] == {"kmeans": 1, "fine-tuning": 4, "held_out": 1}


def test_bad_input_is_refused(run, tmp_path):
    data = demo_data("calibration")
    for flags, message in (
        (("--count", "0"), "count >= 1"),
        (("--length", "4"), "length > prompt_tokens"),
        (("--batch-size", "0"), "--batch-size"),
    ):
        status, _, err = run("sample", demo_model_path(), "--data", data, "--output", tmp_path / "x.jsonl", *flags)
        assert status == 2 and message in err
    status, _, err = run("sample", demo_model_path(), "--data", data, "--output", tmp_path / "no" / "x.jsonl")
    assert status == 2 and "does not exist" in err
    assert not list(tmp_path.iterdir())
