"""``hf-lowbit eval``: the full-precision and the quantized cache on the same prompts."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import common


NAME = "eval"
HELP = "compare the full-precision cache and the quantized one on texts and tasks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id of a calibrated model")
    parser.add_argument(
        "--text", type=Path, metavar="F.jsonl", help='texts for KL and top-1 agreement, {"text"} a line'
    )
    parser.add_argument("--tasks", type=Path, metavar="F.jsonl", help="tasks for accuracy, divergence and speed")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N texts, and N items of each task")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the result here (the table goes to stdout)")
    parser.add_argument(
        "--text-tokens", type=int, default=2048, metavar="N", help="cut texts to N tokens (default 2048)"
    )
    parser.add_argument(
        "--text-prompt-tokens",
        type=int,
        metavar="N",
        help="recurrent states only: tokens of a text processed at once before single-token steps (default 64)",
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="rows at once (default 16)")
    parser.add_argument(
        "--recent-window", type=int, metavar="N", help="codes only: another window than the artifact's"
    )
    parser.add_argument("--strict", action="store_true", help="fail rather than fall back to a slower implementation")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="only for models that draw random states")
    common.add_model_arguments(parser)
    common.add_quiet_argument(parser)


def run(args: argparse.Namespace) -> None:
    from ..data import read_tasks, read_texts
    from ..evaluation import evaluate, format_table, write_json
    from ..evaluation.report import check_writable

    if args.text is None and args.tasks is None:
        raise ValueError("nothing to evaluate on: give --text, --tasks or both")
    for flag in ("limit", "text_tokens", "text_prompt_tokens", "batch_size"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, got {value}")
    if args.json is not None:
        check_writable(args.json)
    texts = read_texts(args.text, args.limit) if args.text else None
    tasks = read_tasks(args.tasks, args.limit) if args.tasks else None
    tokenizer = common.load_tokenizer(args.model)
    model = common.load_model(args.model, args.device, args.dtype)
    options = {"recent_window": args.recent_window} if args.recent_window is not None else {}
    result = evaluate(
        model,
        tokenizer,
        texts,
        tasks,
        cache_config=options | ({"strict": True} if args.strict else {}),
        text_tokens=args.text_tokens,
        text_prompt_tokens=args.text_prompt_tokens,
        batch_size=args.batch_size,
        seed=args.seed,
        progress=not args.quiet,
    )
    files = {"model": args.model, "text_file": args.text, "tasks_file": args.tasks}
    result["settings"] |= {name: None if value is None else str(value) for name, value in files.items()}
    result["settings"] |= {"limit": args.limit, "command": args.command_line}
    if args.json is not None:
        write_json(args.json, result)
    print(format_table(result))
