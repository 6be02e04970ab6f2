"""The ``hf-lowbit`` program."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence

from . import bench, calibrate, demo, evaluate, generate, inspect, sample


COMMANDS = {module.NAME: module for module in (calibrate, sample, generate, inspect, evaluate, bench, demo)}

USER_ERROR = 2  # as argparse: the input is wrong, not the program


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-lowbit",
        description="Caches in very few bits for transformers: LoopVQ KV caches, DAMP recurrent states.",
    )
    parser.add_argument("--version", action="store_true", help="print the versions in use and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, module in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        add_arguments(subparser, name)
    return parser


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """The arguments of command ``name``; also what ``optimum-cli lowbit`` uses."""
    COMMANDS[name].add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error, and all log messages")


def run_command(name: str, args: argparse.Namespace, command_line: str) -> int:
    """Run a parsed command; errors in the input become one line on stderr and exit status 2.

    Args:
        name: of the command.
        args: its parsed arguments.
        command_line: what the user typed, for the records of a run.

    Returns:
        The exit status: 0, 1 for a bug, 2 for wrong input, 130 when interrupted.
    """
    args.command_line = command_line
    return _guarded(name, args.debug, lambda: COMMANDS[name].run(args))


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.version:
        return _guarded("--version", False, _print_versions)
    if args.command is None:
        parser.print_help()
        return USER_ERROR
    return run_command(args.command, args, shlex.join(["hf-lowbit", *(sys.argv[1:] if argv is None else argv)]))


def _guarded(name: str, debug: bool, action: Callable[[], object]) -> int:
    if not debug:
        _quiet_logs()
    try:
        action()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # e.g. piped into head; the interpreter must not complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # What we and transformers raise for wrong input. Anything else is a bug and deserves its traceback.
        wrong_input = isinstance(error, _user_errors())
        if debug or not wrong_input:
            traceback.print_exc()
        else:
            print(f"hf-lowbit {name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR if wrong_input else 1
    return 0


def _user_errors() -> tuple[type[Exception], ...]:
    from safetensors import SafetensorError  # a truncated weight file

    from ..errors import FallbackError

    # TypeError: a model that the method does not fit
    return (ValueError, OSError, TypeError, SafetensorError, FallbackError)


def _quiet_logs() -> None:
    """Keep stderr for our own messages and progress bars."""
    import warnings

    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    warnings.simplefilter("ignore", FutureWarning)
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"


def _print_versions() -> None:
    import torch
    import transformers

    import hf_lowbit

    print(f"hf_lowbit {hf_lowbit.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
