"""``hf-lowbit generate`` and ``hf-lowbit inspect``."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from hf_lowbit import artifact as core
from hf_lowbit.cli import common
from hf_lowbit.cli.inspect import read_artifact


PROMPT = "bas bon dim fol cum gir dos bas bon dim"


def test_generate_prints_text_and_memory(artifact, run):
    status, out, _ = run("generate", artifact, "--prompt", PROMPT, "--max-new-tokens", 12)
    assert status == 0 and out.startswith(PROMPT)
    assert "codes" in out and "codebooks" in out and "full precision" in out and "0.5 bit an element" in out
    assert run("generate", artifact, "--prompt", PROMPT, "--max-new-tokens", 12, "--cache", "loopvq")[1] == out
    status, plain, _ = run("generate", artifact, "--prompt", PROMPT, "--max-new-tokens", 12, "--cache", "dynamic")
    assert status == 0 and plain.startswith(PROMPT) and "full-precision cache: " in plain


def test_generate_on_an_uncalibrated_model(base, run):
    status, out, _ = run("generate", base / "model", "--prompt", PROMPT, "--max-new-tokens", 4)
    assert status == 0 and "full-precision cache" in out
    status, _, err = run("generate", base / "model", "--prompt", PROMPT, "--cache", "loopvq")
    assert status == 2 and "needs a calibrated model" in err
    status, _, err = run("generate", base / "model", "--prompt", PROMPT, "--strict")
    assert status == 2 and "is not calibrated" in err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--prompt", ""], "has no tokens"),
        (["--prompt", "a", "--max-new-tokens", "0"], "at least 1"),
        (["--prompt", "a", "--cache", "dynamic", "--strict"], "contradicts"),
        (["--prompt", "a", "--strict", "--device", "cpu"], "reference path"),
        (["--prompt", "a", "--device", "cuda:99"], "CUDA devices"),
        (["--prompt", "a", "--device", "gpu"], 'expected "cpu", "cuda"'),
    ],
)
def test_generate_refuses(artifact, run, flags, message):
    status, out, err = run("generate", artifact, *flags)
    assert status == 2 and message in err and "Traceback" not in err and out == ""


def test_inspect_agrees_with_the_loaded_model(artifact, run):
    model = common.load_model(str(artifact), "cpu", "auto")
    loaded = core.describe(model)
    found = read_artifact(str(artifact))
    assert found["fingerprint"] == loaded["fingerprint"]
    assert found["codebook_bytes"] == loaded["codebook_bytes"]
    assert [layer["key_shape"] for layer in found["layers"]] == [layer["shape"] for layer in loaded["layers"]]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert found["weight_bytes"] == weights


def test_inspect_prints(artifact, run):
    status, out, _ = run("inspect", artifact)
    assert status == 0
    for part in ("OuroForCausalLM", "2 layers x 4 loop steps", "0.5 per element", "4 channels x 4 loop steps",
                 "[4, 2, 4, 256, 4]", "8 first and 8 recent", "held-out KL", "losses       3 iterations"):  # fmt: skip
        assert part in out
    status, out, _ = run("inspect", artifact, "--json", "--verify")
    found = json.loads(out)
    assert status == 0 and found["verified"] and found["calibration"]["best_epoch"] in (0, 1)


def test_inspect_without_a_report(artifact, run, tmp_path):
    shutil.copytree(artifact, tmp_path / "a")
    (tmp_path / "a" / "calibration_report.json").unlink()
    status, out, _ = run("inspect", tmp_path / "a")
    assert status == 0 and "no calibration_report.json" in out


def test_inspect_refuses_damage(base, artifact, run, tmp_path):
    def error(name):
        status, out, err = run("inspect", tmp_path / name)
        assert status == 2 and out == "" and "Traceback" not in err
        return err

    def copy(name):
        shutil.copytree(artifact, tmp_path / name)
        return tmp_path / name

    assert "no such folder" in error("absent")
    status, _, err = run("inspect", base / "model")
    assert status == 2 and "is not a lowbit artifact" in err

    weights = copy("truncated") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "truncated or damaged" in error("truncated")
    (copy("no weights") / "model.safetensors").unlink()
    assert "no safetensors file" in error("no weights")
    shutil.copy(base / "model" / "model.safetensors", copy("no codebooks"))
    assert "no complete codebooks" in error("no codebooks")
    weights = copy("no metric") / "model.safetensors"
    tensors = load_file(weights)
    del tensors[next(name for name in tensors if name.endswith("layers.1.self_attn.loopvq.value_metric"))]
    save_file(tensors, weights, metadata={"format": "pt"})
    assert "value_metric is missing in layer 1" in error("no metric")
    config = copy("json") / "config.json"
    config.write_text(config.read_text()[:-20])
    assert "config.json is damaged" in error("json")
    config = copy("other fingerprint") / "config.json"
    config.write_text(config.read_text().replace(read_artifact(str(artifact))["fingerprint"], "0" * 64))
    assert "different fingerprints" in error("other fingerprint")


def test_verify_notices_other_weights(artifact, run, tmp_path):
    shutil.copytree(artifact, tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"] += 0.5
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    assert run("inspect", tmp_path / "a")[0] == 0
    status, _, err = run("inspect", tmp_path / "a", "--verify")
    assert status == 2 and "fitted to other weights" in err
