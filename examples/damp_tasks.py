"""Task accuracy of DAMP: greedy answers of one small model with its states stored in several ways.

    python examples/damp_tasks.py MODEL DATA OUT                    # a GPU if there is one
    python examples/damp_tasks.py MODEL DATA OUT --device cpu --limit 2 --sequences 6

DATA holds calibration.jsonl and tasks.jsonl ({"task", "prompt", "target", "max_new_tokens"} a line). The arms are those
of damp_table.py, made from one capture; `full precision` is the stock cache. Accuracy is the share of answers that
equal the target; the columns "lost" and "won" count answers that full precision had right and the arm has not, and the
reverse. OUT gets tasks.json and tasks.md, rewritten after every arm.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import damp_table
import torch
import transformers
from damp_table_arms import Arm, all_arms
from transformers import AutoTokenizer

from hf_lowbit import generation
from hf_lowbit.config import DAMPConfig, LowBitConfig
from hf_lowbit.damp.attach import attach_damp, damp_layout
from hf_lowbit.data import Task, read_tasks
from hf_lowbit.evaluation.greedy import Generations, generate_greedily
from hf_lowbit.evaluation.metrics import accuracy, divergence
from hf_lowbit.evaluation.report import write_json
from hf_lowbit.quantizer import mark_quantized
from hf_lowbit_kernels import DampPlan


FULL = "full precision"
# The shipped format with 8 and with 4 bits, and each without protected rows.
ARMS = r"^int(8|4)$|^int(8|4)\+16 (damp|readout) sr #0$"


def main(argv: list[str] | None = None) -> int:
    args, table_args = parse(argv)
    transformers.logging.set_verbosity_error()
    bench = damp_table.Bench(table_args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tasks = read_tasks(args.data / "tasks.jsonl", args.limit)
    first = bench.spec.layers[0]
    rows = DAMPConfig().high_rows(first.dk) if args.rows is None else args.rows
    arms = [arm for arm in all_arms(first.kind, rows, 1) if re.search(args.arms, arm.name) and arm.low != "fp32"]
    if not arms:
        print(f"no arm matches --arms {args.arms!r}; damp_table.py --list names them", file=sys.stderr)
        return 2
    tables = damp_table.Tables(bench, readout=any(arm.selector == "readout" for arm in arms))
    started = time.perf_counter()
    reference = answer(bench, tokenizer, tasks, args.batch_tokens, "dynamic")
    results = [result(FULL, tasks, reference, reference)]
    for arm in arms:
        attach(bench, arm, tables.of(arm))
        cache = {"rounding": arm.rounding, "backend": args.backend}
        found = answer(bench, tokenizer, tasks, args.batch_tokens, "damp", cache_config=cache)
        bits = damp_layout(first, bench.model.config.quantization_config.damp).bits_per_value
        results.append(result(arm.name, tasks, reference, found) | {"layout_bits_per_value": bits})
        print(f"{arm.name}: {results[-1]['accuracy']} in {found.seconds:.1f} s", flush=True)
        text = markdown(results)
        content = {"settings": settings(args, table_args, tasks), "command": sys.argv, "arms": results}
        write_json(args.out / "tasks.json", content)
        (args.out / "tasks.md").write_text(text + "\n")
    print(f"\n{text}\n\n{time.perf_counter() - started:.0f} s; {args.out / 'tasks.json'}")
    return 0


def attach(bench: damp_table.Bench, arm: Arm, tables: list[tuple] | None) -> None:
    """Make the bench's model one that was calibrated to the arm."""
    if tables is None:
        plans = [DampPlan.identity(layer.value_heads, layer.dk, layer.dv) for layer in bench.spec.layers]
    else:
        plans = [DampPlan(*map(torch.from_numpy, table)) for table in tables]
    if arm.rows is None:
        raise ValueError("a calibration has a number of rows; the arm fp16 is for damp_table.py alone")
    config = arm.config(bench.args.base)
    attach_damp(bench.model, config, plans)
    mark_quantized(bench.model, LowBitConfig(damp=config))
    generation.enable(bench.model)


def answer(
    bench: damp_table.Bench, tokenizer, tasks: list[Task], batch_tokens: int, cache: str, **options
) -> Generations:
    """Greedy answers, in the order of the tasks; tasks of a name are generated with as many prompts at once as fit."""
    out = Generations(tokens=[[]] * len(tasks), texts=[""] * len(tasks))
    for name in dict.fromkeys(task.task for task in tasks):
        where = [i for i, task in enumerate(tasks) if task.task == name]
        longest = max(len(tokenizer(tasks[i].prompt)["input_ids"]) for i in where)
        own = [tasks[i] for i in where]
        batch = max(1, batch_tokens // longest)
        part = generate_greedily(bench.model, tokenizer, own, cache, batch_size=batch, progress=False, **options)
        out.seconds += part.seconds
        for i, tokens, text in zip(where, part.tokens, part.texts, strict=True):
            out.tokens[i], out.texts[i] = tokens, text
    return out


def result(name: str, tasks: list[Task], reference: Generations, found: Generations) -> dict:
    """Accuracy by task, and how the answers changed."""
    right = [[task.is_correct(text) for task, text in zip(tasks, side.texts)] for side in (reference, found)]
    pairs = list(zip(*right, strict=True))
    by_task = accuracy(tasks, found.texts)
    return {
        "name": name,
        "accuracy": by_task,
        "accuracy_mean": sum(by_task.values()) / len(by_task),
        "lost": pairs.count((True, False)),
        "won": pairs.count((False, True)),
        "divergence": divergence(reference.tokens, found.tokens).to_dict(),
        "right": [bool(own) for _, own in pairs],
        "seconds": found.seconds,
    }


def markdown(results: list[dict]) -> str:
    names = list(results[0]["accuracy"])
    lines = [
        f"| states | {' | '.join(names)} | mean | lost | won | same tokens | s |",
        "|---|" + "---|" * (len(names) + 5),
    ]
    for one in results:
        shares = " | ".join(f"{one['accuracy'][name]:.3f}" for name in names)
        lines.append(
            f"| {one['name']} | {shares} | {one['accuracy_mean']:.3f} | {one['lost']} | {one['won']} "
            f"| {one['divergence']['identical']:.3f} | {one['seconds']:.0f} |"
        )
    return "\n".join(lines)


def settings(args: argparse.Namespace, table_args: argparse.Namespace, tasks: list[Task]) -> dict:
    shared = damp_table.settings(table_args)
    kept = {name: shared[name] for name in ("model", "data", "backend", "device", "calibration")}
    return kept | {"items": len(tasks), "batch_tokens": args.batch_tokens, "dtype": "float32"}


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Own arguments, and those of damp_table.py (of the capture), which take all others."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The options of the calibration are those of damp_table.py: --sequences, --windows, --anchors, ...",
    )
    parser.add_argument("model", help="folder of a model with gated delta-rule layers")
    parser.add_argument("data", type=Path, help="folder with calibration.jsonl and tasks.jsonl")
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--arms", default=ARMS, metavar="REGEX", help=f"default {ARMS!r}")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N items of each task")
    parser.add_argument(
        "--batch-tokens", type=int, default=20_000, metavar="N", help="prompt tokens at once, about (default 20000)"
    )
    args, others = parser.parse_known_args(argv)
    table_args = damp_table.parse([args.model, str(args.data), str(args.out), *others])
    args.rows, args.backend = table_args.rows, table_args.backend
    args.out.mkdir(parents=True, exist_ok=True)
    return args, table_args


if __name__ == "__main__":
    sys.exit(main())
