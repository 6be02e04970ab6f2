"""The two programs, ``hf-lowbit`` and ``optimum-cli lowbit``, as processes: exit status, stderr, shared flags."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_lowbit.cli
from hf_lowbit.cli.main import COMMANDS, build_parser, main


REGISTER = Path(hf_lowbit.cli.__file__).parent / "optimum_register"


def process(*command, path=()):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr


def test_one_clean_line_on_stderr(artifact, tmp_path):
    weights = tmp_path / "a"
    weights.symlink_to(artifact)
    status, out, err = process("-m", "hf_lowbit.cli", "eval", weights, "--text", "absent.jsonl")
    assert (status, out, err) == (2, "", "hf-lowbit eval: error: no such file: absent.jsonl\n")


def test_debug_shows_the_traceback(run):
    status, _, err = run("inspect", "/absent", "--debug")
    assert status == 2 and "Traceback" in err and "no such folder" in err


def test_bugs_keep_their_traceback(artifact, run, monkeypatch):
    def bug(name):
        raise KeyError("oops")

    monkeypatch.setattr("hf_lowbit.cli.inspect.read_artifact", bug)
    status, _, err = run("inspect", artifact)
    assert status == 1 and "Traceback" in err and "oops" in err


def test_help_and_version(run, capsys):
    assert run()[0] == 2
    status, out, _ = run("--version")
    assert status == 0 and f"hf_lowbit {hf_lowbit.__version__}" in out
    for name in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0 and COMMANDS[name].HELP.split()[0] in capsys.readouterr().out


def test_register_folder_is_a_namespace():
    assert not (REGISTER / "__init__.py").exists() and (REGISTER / "register_lowbit.py").exists()


def test_optimum_cli(artifact, tmp_path):
    path = []
    if importlib.util.find_spec("optimum.commands.register") is None:
        # The package is not installed: make the folder a part of the namespace package, as an installation does.
        (tmp_path / "optimum" / "commands").mkdir(parents=True)
        (tmp_path / "optimum" / "commands" / "register").symlink_to(REGISTER)
        path = [tmp_path]
    # Two runs in one process, whose start takes longest. The second one's error is the process's exit status.
    run = (
        "import sys; from optimum.commands.optimum_cli import main; folder = sys.argv.pop();"
        "main(); print('first: done'); sys.argv[-1] = folder; main()"
    )
    status, out, err = process("-c", run, "lowbit", "inspect", artifact, tmp_path, path=path)
    assert "OuroForCausalLM" in out and out.endswith("first: done\n"), err
    assert status == 2 and "has no config.json" in err and "Traceback" not in err


def test_optimum_shares_the_flags(monkeypatch):
    import argparse

    from optimum.commands.base import RootOptimumCLICommand

    spec = importlib.util.spec_from_file_location("register_lowbit", REGISTER / "register_lowbit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    root = RootOptimumCLICommand("optimum-cli")
    (command,) = module.REGISTER_COMMANDS
    ours = command(root.subparsers)

    def flags(parser):
        return {option for action in parser._actions for option in action.option_strings or [action.dest]}

    (subparsers,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert {c.COMMAND.name: flags(c.parser) for c in ours.registered_subcommands} == {
        name: flags(parser) for name, parser in subparsers.choices.items()
    }
