"""``optimum-cli lowbit COMMAND``: the commands of ``hf-lowbit`` under optimum's program.

Installed as ``optimum/commands/register/register_lowbit.py``, a namespace folder that optimum-cli searches (it must not
hold an ``__init__.py``). optimum imports this file at every start, so nothing heavy is imported here; flags and code
are those of ``hf_lowbit.cli``.
"""

import shlex
import sys

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from hf_lowbit.cli.main import COMMANDS, add_arguments, run_command


def _command(name: str, help_text: str) -> CommandInfo:
    """A class of optimum's command interface around one of our command modules."""

    def parse_args(parser):
        add_arguments(parser, name)

    def run(self):
        status = run_command(name, self.args, shlex.join(["optimum-cli", *sys.argv[1:]]))
        if status:  # optimum-cli ignores what run() returns
            raise SystemExit(status)

    body = {"parse_args": staticmethod(parse_args), "run": run}
    subclass = type(f"LowBit{name.title()}Command", (BaseOptimumCLICommand,), body)
    return CommandInfo(name, help_text, subcommand_class=subclass)


class LowBitCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo("lowbit", "Caches in very few bits: LoopVQ KV caches, DAMP recurrent states.")
    SUBCOMMANDS = tuple(_command(name, module.HELP) for name, module in COMMANDS.items())


REGISTER_COMMANDS = [LowBitCommand]
