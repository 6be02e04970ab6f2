"""One calibrated tiny artifact for all CLI tests, made by the CLI itself."""

import sys
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))  # tiny_model.py, whatever pytest's import mode

import tiny_model  # noqa: E402

from hf_lowbit.cli.main import main  # noqa: E402


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Folder with an uncalibrated model, its tokenizer and data files."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model.build_model().save_pretrained(folder / "model")
    tiny_model.build_tokenizer().save_pretrained(folder / "model")
    tiny_model.write_texts(folder / "calibration.jsonl", 6)
    tiny_model.write_texts(folder / "text.jsonl", 3, seed=9)
    tiny_model.write_tasks(folder / "tasks.jsonl")
    return folder


@pytest.fixture(scope="session")
def artifact(base):
    """Calibrated artifact; tests must not change it."""
    output = base / "artifact"
    arguments = [str(base / "model"), "--data", str(base / "calibration.jsonl"), "--output", str(output)]
    # --debug leaves the process's log settings alone, which later tests may look at.
    assert main(["calibrate", *arguments, "--bits", "0.5", "--debug", "--device", "cpu", *tiny_model.FLAGS]) == 0
    return output


@pytest.fixture
def run(capsys, monkeypatch):
    """``run("inspect", path)`` -> (exit status, stdout, stderr)."""
    monkeypatch.setattr("hf_lowbit.cli.main._quiet_logs", lambda: None)  # as above; the subprocess tests cover it

    def call(*arguments):
        capsys.readouterr()
        if arguments and arguments[0] in ("calibrate", "generate", "eval") and "--device" not in arguments:
            arguments += ("--device", "cpu")  # the same numbers on every machine
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
