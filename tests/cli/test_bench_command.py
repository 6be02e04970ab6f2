"""``hf-lowbit bench``: every table end to end in sizes that a CPU runs in seconds."""

import json

import pytest

from hf_lowbit.cli.bench import TABLES


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Folder with all tables, made by the command, and what it printed."""
    from hf_lowbit.cli.main import main

    folder = tmp_path_factory.mktemp("bench")
    arguments = ["bench", "all", "--tiny", "--device", "cpu", "--bits", "0.5", "--json", str(folder), "--debug"]
    status = main(arguments)
    return status, folder


def read(folder, name):
    return json.loads((folder / name).read_text())


def test_every_table_has_rows_and_no_errors(results):
    pytest.importorskip("matplotlib")  # else the plot at the end fails
    status, folder = results
    assert status == 0
    files = {"attention": "attention.json", "damp": "damp.json"}
    for name in TABLES:
        table = read(folder, files.get(name, f"{name}_tiny.json"))
        assert table["table"] == name and table["rows"] and not table["skipped"]
        assert not [row for row in table["rows"] if "error" in row or "out_of_memory" in row]
        assert table["command"].startswith(f"hf-lowbit bench {name} --json DIR") and "--tiny" in table["command"]
        assert str(folder) not in json.dumps(table)
        assert {"device", "torch", "transformers", "python"} <= table["machine"].keys()
        assert len(table["method"]) > 100


def test_ratios_are_of_the_rows_beside_them(results):
    folder = results[1]
    rows = read(folder, "decode_tiny.json")["rows"]
    full = {row["tokens"]: row["tpot_ms"] for row in rows if row["arm"] == "bf16"}
    coded = [row for row in rows if row["arm"] == "loopvq"]
    assert len(full) == len(coded) == 1
    for row in coded:
        assert row["tpot_ratio"] == pytest.approx(row["tpot_ms"] / full[row["tokens"]])
    rows = read(folder, "prefill_tiny.json")["rows"]
    full = {row["tokens"]: row for row in rows if row["arm"] == "bf16"}
    for row in rows:
        if row["arm"] == "loopvq":
            assert row["time_ratio"] == pytest.approx(row["seconds"] / full[row["tokens"]]["seconds"])
            assert 0 < row["held_bytes"] < full[row["tokens"]]["held_bytes"]


def test_throughput_is_composed_as_it_says(results):
    table = read(results[1], "throughput_tiny.json")
    settings, rows = table["settings"], table["rows"]
    per_row = {row["arm"]: row["prefill_s_per_row"] for row in rows if "prefill_s_per_row" in row}
    points = [row for row in rows if "tokens_per_s" in row]
    assert {(row["arm"], row["batch"]) for row in points} == {(a, b) for a in ("bf16", "loopvq") for b in (1, 2)}
    for row in points:
        first, middle, last = (t / 1e3 for t in row["tpot_ms"])
        decode = settings["tokens_out"] * (first + 2 * middle + last) / 4
        seconds = decode + row["batch"] * per_row[row["arm"]]
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * settings["tokens_out"] / seconds)


def test_shares_of_encoding(results):
    rows = read(results[1], "encode_tiny.json")["rows"]
    for row in rows:
        if row["part"] == "prefill":
            assert 0 < row["encode_share"] < row["commit_share"] < 1
        else:
            mean = (row["step_with_page_ms"] + 7 * row["step_without_page_ms"]) / 8
            assert row["step_ms"] == pytest.approx(mean)
    assert {row["part"] for row in rows} == {"prefill", "decode"}


def test_hybrid_states_and_calibration_parts(results):
    rows = {row["arm"]: row for row in read(results[1], "hybrid_tiny.json")["rows"]}
    assert rows["fp32 eager"]["state_dtype"] == "torch.float32"
    assert rows["damp eager"]["state_bytes"] < rows["fp32 eager"]["state_bytes"]
    expected = rows["damp eager"]["tpot_ms"] / rows["fp32 eager"]["tpot_ms"] - 1
    assert rows["damp eager"]["change"] == pytest.approx(expected)
    assert "no_graphs" in rows["damp graph"] and "change" not in rows["damp graph"]  # there are none on a CPU
    (row,) = read(results[1], "calibrate_tiny.json")["rows"]
    assert row["full"] is False and {"Fisher weights", "k-means", "fine-tuning"} <= row["parts"].keys()
    assert 0 < sum(row["parts"].values()) <= row["seconds"]


def test_summary_and_picture(results, run):
    pytest.importorskip("matplotlib")
    folder = results[1]
    summary = read(folder, "summary.json")
    assert "tiny_b1_128_0.5bit" in summary["tpot_ratio"] and "b1_n128_0.5bit" in summary["vq_attention_speedup"]
    assert summary["throughput_peak_batch"].keys() == {"tiny_bf16", "tiny_0.5bit"}
    assert summary.keys() - {"sources"} == summary["sources"].keys()
    before = (folder / "summary.json").read_bytes()
    assert run("bench", "summary", "--json", folder)[0] == 0 and (folder / "summary.json").read_bytes() == before
    (folder / "summary.png").unlink()
    assert run("bench", "plot", "--json", folder)[0] == 0
    assert (folder / "summary.png").read_bytes().startswith(b"\x89PNG")


def test_budget_leaves_a_file_that_says_what_is_missing(run, tmp_path):
    arguments = ("bench", "decode", "--tiny", "--device", "cpu", "--json", tmp_path, "--budget", 0, "--tokens", 128)
    assert run(*arguments)[0] == 0
    table = read(tmp_path, "decode_tiny.json")
    assert table["rows"] == [] and table["skipped"][0] == "arm=bf16 batch=1 tokens=128" and len(table["skipped"]) == 3


def test_failed_rows_are_told_at_the_end(run, tmp_path, monkeypatch):
    def fail(*args):
        raise ArithmeticError("no clock")

    monkeypatch.setattr("hf_lowbit.bench.calibrate.one", fail)
    status, _, err = run("bench", "calibrate", "--tiny", "--device", "cpu", "--json", tmp_path)
    assert status == 1 and "1 rows failed: calibrate tiny: ArithmeticError: no clock" in err
    assert read(tmp_path, "calibrate_tiny.json")["rows"][0]["error"] == "ArithmeticError: no clock"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("decode", "--device", "cpu"), "add --tiny"),
        (("decode", "--tiny", "--device", "cpu", "--models", "gpt"), "table decode knows ouro1.4b, ouro2.6b"),
        (("decode", "--tiny", "--device", "cpu", "--tokens", "0"), "must be at least 1"),
        (("decode", "--tiny", "--device", "cpu", "--bits", "3"), "bits=3.0 is not supported"),
        (("throughput", "--tiny", "--device", "cpu", "--tokens", "9"), "two numbers of tokens"),
        (("prefill", "--tiny", "--device", "cpu", "--batches", "1", "2"), "one number after --batches"),
        (("hybrid", "--tiny", "--device", "cpu", "--models", "ouro1.4b"), "table hybrid knows qwen3.5-4b"),
        (("summary",), "holds no table"),
    ],
)
def test_wrong_input(run, tmp_path, arguments, message):
    status, _, err = run("bench", *arguments, "--json", tmp_path / "new")
    assert status == 2 and message in err
