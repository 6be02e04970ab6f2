"""``hf-lowbit`` calibrate, inspect and generate with ``--method damp``."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import tiny_model  # conftest.py puts its folder on the path
from safetensors.torch import load_file, save_file


sys.path.insert(0, str(Path(__file__).parents[1] / "damp"))  # damp_models.py, whatever pytest's import mode

from damp_models import build_model  # noqa: E402

import hf_lowbit  # noqa: E402
from hf_lowbit.artifact import describe  # noqa: E402
from hf_lowbit.cli import common  # noqa: E402
from hf_lowbit.cli.inspect import read_artifact  # noqa: E402
from hf_lowbit.cli.main import main  # noqa: E402


FLAGS = ["--method", "damp", "--rows", "3", "--sequences", "6", "--prompt-tokens", "8", "--decode-tokens", "32",
         "--windows", "0,8", "--window-tokens", "24", "--anchors", "8,16", "--horizon", "8", "--continuation", "text",
         "--quiet"]  # fmt: skip
PROMPT = "bas bon dim fol cum gir"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Folder with an uncalibrated hybrid model and calibration texts of two domains."""
    folder = tmp_path_factory.mktemp("hybrid")
    build_model("qwen3_5", vocab_size=257).save_pretrained(folder / "model")
    tiny_model.build_tokenizer().save_pretrained(folder / "model")
    records = [{"text": text, "domain": "ab"[i % 2]} for i, text in enumerate(tiny_model.texts(8))]
    tiny_model.write_jsonl(folder / "calibration.jsonl", records)
    return folder


def arguments(hybrid, output, *more):
    return ["calibrate", hybrid / "model", "--data", hybrid / "calibration.jsonl", "--output", output, *FLAGS, *more]


@pytest.fixture(scope="module")
def damp_artifact(hybrid):
    output = hybrid / "artifact"
    assert main([*map(str, arguments(hybrid, output)), "--device", "cpu", "--debug"]) == 0
    return output


def test_artifact(damp_artifact):
    config = json.loads((damp_artifact / "config.json").read_text())
    damp = config["quantization_config"]["damp"]
    assert config["architectures"] == ["Qwen3_5ForCausalLM"] and "loopvq" not in config["quantization_config"]
    assert (damp["rows"], damp["windows"], damp["anchors"], damp["low_bits"]) == (3, [0, 8], [8, 16], 8)
    report = json.loads((damp_artifact / "calibration_report.json").read_text())
    assert report["domains"] == {"a": 3, "b": 3} and len(report["layers"]) == 3
    assert not (damp_artifact.parent / "artifact.resume").exists()
    assert (damp_artifact / "README.md").read_text().count("DAMP") >= 1


def test_four_bits_without_zero_point(hybrid, run, tmp_path):
    # What another method's interrupted run left beside the output is neither in the way nor removed.
    (tmp_path / "a.resume").mkdir()
    (tmp_path / "a.resume" / "kmeans.pt").write_text("state")
    status, out, _ = run(
        *arguments(hybrid, tmp_path / "a", "--low-bits", "4", "--no-zero-point", "--selector", "error")
    )
    assert status == 0 and "INT4 with 3 FP16 rows" in out and (tmp_path / "a.resume" / "kmeans.pt").exists()
    damp = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]["damp"]
    assert damp["low_bits"] == 4 and damp["zero_point"] is False and damp["selector"] == "error"


BAD = {
    "loopvq flag": (["--bits", "0.5"], "--bits belongs to --method loopvq; --method damp takes --sequences"),
    "extra data": (["--extra-data", "x.jsonl"], "--extra-data belongs to --method loopvq"),
    "resume": (["--resume"], "--resume belongs to --method loopvq"),
    "bits": (["--low-bits", "3"], "low_bits=3 is not supported"),
    "rows": (["--rows", "17"], "rows=17"),
    "windows": (["--windows", "0,20"], "the window from 20 on needs 44 updates"),
    "sequences": (["--sequences", "7"], "multiple of 3"),
    "too much": (["--sequences", "9"], "domain 'a': too little calibration data"),
    "selector": (["--selector", "retention"], "retention"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_one_line_and_leaves_nothing(hybrid, run, tmp_path, name):
    flags, message = BAD[name]
    status, out, err = run(*arguments(hybrid, tmp_path / "out", *flags))
    assert status == 2 and list(tmp_path.iterdir()) == [] and out == ""
    assert err.splitlines()[-1].startswith("hf-lowbit calibrate: error: ") and message in err
    assert "Traceback" not in err


def test_flags_of_damp_are_refused_for_loopvq_and_models_for_the_other_method(base, hybrid, run, tmp_path):
    common_flags = ["--data", base / "calibration.jsonl", "--output", tmp_path / "out"]
    status, _, err = run("calibrate", base / "model", *common_flags, "--rows", "16")
    assert status == 2 and "--rows belongs to --method damp; --method loopvq takes --sequences" in err
    build_model("kimi_linear").save_pretrained(tmp_path / "kimi")
    tiny_model.build_tokenizer().save_pretrained(tmp_path / "kimi")
    status, _, err = run("calibrate", tmp_path / "kimi", *common_flags)
    assert status == 2 and "LoopVQ works on looped models" in err and "Method 'damp' works on this model" in err
    status, _, err = run("calibrate", base / "model", *common_flags, *FLAGS)
    assert status == 2 and "DAMP works on models with gated delta-rule layers" in err and "'loopvq'" in err


def test_generate(damp_artifact, hybrid, run):
    status, out, _ = run("generate", damp_artifact, "--prompt", PROMPT, "--max-new-tokens", 12)
    assert status == 0 and out.startswith(PROMPT) and "bits a value" in out and "FP32 states" in out
    assert run("generate", damp_artifact, "--prompt", PROMPT, "--max-new-tokens", 12, "--cache", "damp")[1] == out
    status, plain, _ = run("generate", damp_artifact, "--prompt", PROMPT, "--max-new-tokens", 12, "--cache", "dynamic")
    assert status == 0 and "full-precision cache: " in plain
    status, _, err = run("generate", hybrid / "model", "--prompt", PROMPT, "--cache", "damp")
    assert status == 2 and "carries no DAMP tables" in err
    status, _, err = run("generate", damp_artifact, "--prompt", PROMPT, "--cache", "loopvq")
    assert status == 2 and "asks for codebooks, but" in err and "calibrated for 'damp'" in err


def test_inspect_agrees_with_the_loaded_model(damp_artifact):
    model = common.load_model(str(damp_artifact), "cpu", "auto")
    loaded, found = describe(model), read_artifact(str(damp_artifact))
    assert found["fingerprint"] == loaded["fingerprint"] and found["table_bytes"] == loaded["table_bytes"]
    same = ("layer", "value_heads", "dk", "dv", "rows", "state_bytes", "state_bits_per_value", "table_bytes")
    for ours, theirs in zip(found["layers"], loaded["layers"], strict=True):
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert found["weight_bytes"] == sum(p.numel() * p.element_size() for p in model.parameters())
    # The calibration's own account of what it chose.
    for ours, theirs in zip(found["layers"], found["calibration"]["layers"], strict=True):
        assert ours["protected"] == [sorted(head["rows"]) for head in theirs["heads"]]


def dots(line):
    """(head, channel) of every dot in a line of the picture."""
    bits = {0x01: (0, 0), 0x02: (1, 0), 0x04: (2, 0), 0x40: (3, 0)}
    bits |= {0x08: (0, 1), 0x10: (1, 1), 0x20: (2, 1), 0x80: (3, 1)}
    cells = enumerate(line.split("|")[1])
    return {(head, 2 * i + side) for i, cell in cells for bit, (head, side) in bits.items() if ord(cell) & bit}


def test_inspect_prints(damp_artifact, run):
    status, out, _ = run("inspect", damp_artifact)
    assert status == 0
    for part in ("Qwen3_5ForCausalLM", "3 of them with recurrent states: 4 value heads x 16 x 32", "method       damp",
                 "3 of 16 key rows a head in FP16, the others INT8", "decay        exp(E[g]) of gdn", "worst eighth",
                 "stability", "retention W"):  # fmt: skip
        assert part in out, part
    layers = read_artifact(str(damp_artifact))["layers"]
    bits = sum(layer["state_bits_per_value"] for layer in layers) / 3
    assert f"bits         {bits:.5g} a value" in out
    drawn = [line for line in out.splitlines() if line.endswith("|")]
    assert len(drawn) == 3
    for line, layer in zip(drawn, layers):
        assert dots(line) == {(head, row) for head, rows in enumerate(layer["protected"]) for row in rows}
    status, out, _ = run("inspect", damp_artifact, "--json", "--verify")
    assert status == 0 and json.loads(out)["verified"]


def test_inspect_plots(damp_artifact, artifact, run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    status, _, _ = run("inspect", damp_artifact, "--plot", tmp_path / "rows.png")
    assert status == 0 and (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    status, _, err = run("inspect", artifact, "--plot", tmp_path / "other.png")
    assert status == 2 and "has none" in err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, err = run("inspect", damp_artifact, "--plot", tmp_path / "missing.png")
    assert status == 2 and "pip install 'hf-lowbit[plot]'" in err and not (tmp_path / "missing.png").exists()


def test_inspect_without_a_report_and_with_damage(damp_artifact, run, tmp_path):
    shutil.copytree(damp_artifact, tmp_path / "a")
    (tmp_path / "a" / "calibration_report.json").unlink()
    status, out, _ = run("inspect", tmp_path / "a")
    assert status == 0 and "no calibration_report.json" in out and "protected key rows" in out
    weights = tmp_path / "a" / "model.safetensors"
    tensors = load_file(weights)

    def error(change):
        changed = dict(tensors)
        change(changed)
        save_file(changed, weights, metadata={"format": "pt"})
        status, out, err = run("inspect", tmp_path / "a")
        assert status == 2 and out == "" and "Traceback" not in err
        return err

    key = "model.layers.1.linear_attn.damp."
    assert "no complete DAMP tables for layer 1" in error(lambda t: t.pop(key + "perm_v"))
    assert "tables of layer 1 are wrong" in error(lambda t: t.update({key + "perm_k": 0 * t[key + "perm_k"]}))
    assert "no complete DAMP tables" in error(lambda t: [t.pop(name) for name in tensors if ".damp." in name])
    assert "different fingerprints" in error(lambda t: t.update(lowbit_fingerprint=0 * t["lowbit_fingerprint"]))


def test_the_artifact_loads_and_is_what_the_api_makes(damp_artifact, hybrid):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_lowbit.damp.attach import damp_tables

    loaded = AutoModelForCausalLM.from_pretrained(damp_artifact)
    hf_lowbit.assert_quantized(loaded)
    model = AutoModelForCausalLM.from_pretrained(hybrid / "model")
    tokenizer = AutoTokenizer.from_pretrained(hybrid / "model")
    config = loaded.config.quantization_config.damp
    hf_lowbit.calibrate(model, tokenizer, config, dataset=str(hybrid / "calibration.jsonl"), progress=False)
    for ours, theirs in zip(damp_tables(loaded), damp_tables(model), strict=True):
        assert all((a == b).all() for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))
