"""``hf-lowbit calibrate``: what it writes, and that failing leaves nothing behind."""

import json
import os
import shutil
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import FLAGS  # conftest.py puts its folder on the path

import hf_lowbit


def arguments(base, output, *more):
    return ["calibrate", base / "model", "--data", base / "calibration.jsonl", "--output", output, *FLAGS, *more]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_artifact_files(base, artifact):
    expected = {"README.md", "calibration_report.json", "config.json", "generation_config.json", "model.safetensors"}
    assert expected | {"tokenizer.json", "tokenizer_config.json"} <= set(names(artifact))
    assert not [name for name in names(base) if name.startswith(".") or name.endswith(".resume")]
    config = json.loads((artifact / "config.json").read_text())
    assert config["quantization_config"]["loopvq"]["bits"] == 0.5 and "auto_map" not in config
    report = json.loads((artifact / "calibration_report.json").read_text())
    assert report["config"]["seed"] == config["quantization_config"]["loopvq"]["seed"] and len(report["held_out"]) == 2


def test_card_begins_with_the_import(artifact):
    _, metadata, body = (artifact / "README.md").read_text().split("---\n", 2)
    assert "library_name: transformers" in metadata
    assert body.splitlines()[:2][1].startswith("import hf_lowbit")
    snippet = body.split("```python\n")[1].split("```")[0].replace("PATH_OR_REPO_ID", str(artifact))
    exec(compile(snippet, "README.md", "exec"), {})


def test_same_seed_same_artifact(base, artifact, run, tmp_path):
    assert run(*arguments(base, tmp_path / "again"))[0] == 0
    first, second = (load_file(folder / "model.safetensors") for folder in (artifact, tmp_path / "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


BAD = {
    "bits": (["--bits", "3"], "bits=3.0 is not supported"),
    "loop group": (["--loop-group-size", "3"], "loop_group_size=3"),
    "window": (["--recent-window", "12"], "recent_window=12 must be a multiple"),
    "rate": (["--learning-rate", "2"], "learning_rate=2.0 must be"),
    "too many sequences": (["--sequences", "50"], "too little calibration data: 6 texts"),
    "too short": (["--sequence-length", "24"], "at least 32 tokens"),
    "no data file": (["--data", "absent.jsonl"], "no such file: absent.jsonl"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_input_is_one_line_and_leaves_nothing(base, run, tmp_path, name):
    flags, message = BAD[name]
    status, out, err = run(*arguments(base, tmp_path / "out", *flags))
    assert status == 2 and names(tmp_path) == []
    assert err.splitlines()[-1].startswith("hf-lowbit calibrate: error: ") and message in err
    assert "Traceback" not in err and out == ""


def test_wrong_models(base, run, tmp_path):
    def error(model):
        status, _, err = run("calibrate", model, *arguments(base, tmp_path / "out")[2:])
        assert status == 2 and not (tmp_path / "out").exists() and "Traceback" not in err
        assert not (tmp_path / "out.resume").exists()
        return err.splitlines()[-1]

    assert "no such folder" in error(tmp_path / "absent")
    assert "has no config.json" in error(tmp_path)
    assert "is a file" in error(base / "text.jsonl")

    broken = tmp_path / "nan"
    shutil.copytree(base / "model", broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert "NaN" in error(broken)


def test_model_without_loops(base, run, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    shutil.copy(base / "model" / "tokenizer.json", tmp_path / "llama")
    shutil.copy(base / "model" / "tokenizer_config.json", tmp_path / "llama")
    status, _, err = run("calibrate", tmp_path / "llama", *arguments(base, tmp_path / "out")[2:])
    assert status == 2 and "LoopVQ works on looped models" in err and names(tmp_path) == ["llama"]


def test_output_that_is_taken(base, run, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine.txt").write_text("precious")
    status, _, err = run(*arguments(base, output))
    assert status == 2 and "is not empty" in err and names(output) == ["mine.txt"]
    # With --overwrite, but an error on the way: still there.
    assert run(*arguments(base, output, "--overwrite", "--sequences", "50"))[0] == 2
    assert names(output) == ["mine.txt"] and names(tmp_path) == ["out"]
    # Nothing but an artifact is ever replaced: neither a folder of something else nor a model in full precision.
    status, _, err = run(*arguments(base, output, "--overwrite"))
    assert status == 2 and "no hf_lowbit artifact" in err and names(output) == ["mine.txt"]
    shutil.copytree(base / "model", tmp_path / "model")
    status, _, err = run(*arguments(base, tmp_path / "model", "--overwrite"))
    assert status == 2 and "no hf_lowbit artifact" in err and "config.json" in names(tmp_path / "model")


def test_output_that_cannot_be_made_is_known_before_the_model_is_loaded(base, run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    status, _, err = run("calibrate", tmp_path / "absent", *arguments(base, tmp_path / "file" / "a" / "out")[2:])
    assert status == 2 and "is no folder that you may write to" in err and "absent" not in err
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    status, _, err = run("calibrate", tmp_path / "absent", *arguments(base, tmp_path / "new" / "out")[2:])
    assert status == 2 and f"{tmp_path} is no folder that you may write to" in err


def test_overwriting_an_artifact_with_the_permissions_of_the_umask(base, artifact, run, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(artifact, output)
    (output / "mine.txt").write_text("of the old artifact")
    before = os.umask(0o027)
    try:
        assert run(*arguments(base, output, "--overwrite"))[0] == 0
    finally:
        os.umask(before)
    assert "mine.txt" not in names(output) and "model.safetensors" in names(output) and names(tmp_path) == ["out"]
    assert stat.S_IMODE(output.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in output.iterdir()} == {0o640}


def test_failure_while_saving_leaves_nothing(base, run, tmp_path, monkeypatch):
    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", no_space)
    status, _, err = run(*arguments(base, tmp_path / "out"))
    # The calibration itself was fine: its state is kept, and said so.
    assert status == 2 and "No space left" in err and names(tmp_path) == ["out.resume"] and "--resume" in err


def test_interrupted_and_resumed(base, run, tmp_path, monkeypatch):
    from hf_lowbit.loopvq import finetune

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    output, state = tmp_path / "out", tmp_path / "out.resume"
    with monkeypatch.context() as patch:
        patch.setattr(finetune.Finetuner, "run", interrupt)
        status, _, err = run(*arguments(base, output))
    assert status == 130 and "out.resume holds the state so far" in err and names(tmp_path) == ["out.resume"]

    status, _, err = run(*arguments(base, output))
    assert status == 2 and "add --resume to continue it" in err and state.exists()
    status, _, err = run(*arguments(base, output, "--resume", "--seed", "5"))
    assert status == 2 and "seed was 0 and is 5" in err and state.exists() and not output.exists()

    assert run(*arguments(base, output, "--resume"))[0] == 0
    assert names(tmp_path) == ["out"]
    model = hf_lowbit.models.ouro.OuroForCausalLM.from_pretrained(output)
    hf_lowbit.assert_quantized(model)
