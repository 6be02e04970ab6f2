"""``hf-lowbit bench``: tables of speed and memory from random weights of real shapes."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path


NAME = "bench"
HELP = "measure speed and memory with random weights of real shapes"

TABLES = ("attention", "encode", "damp", "decode", "prefill", "throughput", "calibrate", "hybrid")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tables",
        nargs="+",
        metavar="TABLE",
        choices=(*TABLES, "all", "summary", "plot"),
        help=f"{', '.join(TABLES)}; all: these with summary and plot; summary, plot: summary.json, summary.png of a folder",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("bench-results"),
        metavar="DIR",
        help="folder for JSON files, written anew after every row (default bench-results)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=90.0,
        metavar="S",
        help="seconds of a table and model; no row begins after them",
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", help="shapes of models, instead of the table's own")
    parser.add_argument("--bits", type=float, nargs="+", default=[0.5, 0.25], help="of LoopVQ (default 0.5 0.25)")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help="contexts; throughput: tokens in and out")
    parser.add_argument("--batches", type=int, nargs="+", metavar="B", help="rows at once")
    parser.add_argument("--epochs", type=int, metavar="N", help="calibrate: fewer than 4, and extrapolate")
    parser.add_argument("--sequences", type=int, metavar="N", help="calibrate: fewer than 16, and extrapolate")
    parser.add_argument(
        "--baselines",
        nargs="+",
        default=[],
        choices=("stock", "compiled"),
        help="decode: further bf16 sides, layers as they are and transformers' compiled static cache",
    )
    parser.add_argument("--profile", action="store_true", help="decode: print the kernels that take longest")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that a CPU runs in seconds: the program, not the speed"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda if there, else cpu (only with --tiny)"
    )


def run(args: argparse.Namespace) -> None:
    from ..bench.plot import plot
    from ..bench.summary import write_summary

    args.json.mkdir(parents=True, exist_ok=True)
    wanted = [*TABLES, "summary", "plot"] if "all" in args.tables else args.tables
    failed = []
    for name in (table for table in TABLES if table in wanted):
        try:
            failed += run_table(name, args)
        except RuntimeError as error:  # out of memory before the first row, say; the other tables can do without
            failed.append(f"{name}: {type(error).__name__}: {error}")
    if "summary" in wanted:
        print(f"wrote {write_summary(args.json)}")
    if "plot" in wanted:
        print(f"wrote {plot(args.json)}")
    if failed:
        raise RuntimeError(f"{len(failed)} rows failed: {'; '.join(failed)[:500]}")


def run_table(name: str, args: argparse.Namespace) -> list[str]:
    """Measure one table; returns what went wrong."""
    import torch

    from ..bench.report import Options, Report, file_name
    from ..bench.shapes import HYBRID, LOOPED
    from ..bench.timing import release
    from ..config import LoopVQConfig

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device; use --tiny --device cpu to try the program")
    if device == "cpu" and not args.tiny:
        raise ValueError("real sizes need a CUDA device; add --tiny to try the program on a CPU")
    if any(number < 1 for number in (*(args.tokens or ()), *(args.batches or ()))):
        raise ValueError("--tokens and --batches must be at least 1")
    for bits in args.bits:
        LoopVQConfig(bits=bits)  # says which there are
    table = importlib.import_module(f"hf_lowbit.bench.{name}")
    known = HYBRID if name == "hybrid" else LOOPED
    models = args.models or (("tiny",) if args.tiny else table.MODELS)
    unknown = [model for model in models if model not in LOOPED | HYBRID]
    models = [model for model in models if model in known]
    if unknown or not models and table.MODELS:
        raise ValueError(f"--models {' '.join(unknown or args.models)}: table {name} knows {', '.join(known)}")
    options = Options(
        device,
        args.tiny,
        tuple(args.bits),
        args.tokens and tuple(args.tokens),
        args.batches and tuple(args.batches),
        args.epochs,
        args.sequences,
        tuple(args.baselines),
        args.profile,
    )
    failed = []
    for model in models if table.MODELS else (None,):
        path = args.json / file_name(name, model)
        report = Report(path, name, model, command_of(name, model, args), table.METHOD, options, args.budget)
        table.run(report, options)
        report.save()
        failed += [f"{name} {model or ''}: {error}" for error in report.errors]
        release(device)
    return failed


def command_of(name: str, model: str | None, args: argparse.Namespace) -> str:
    """What measures this file again; the folder is called DIR, as a machine's own paths say nothing to others."""
    words = ["hf-lowbit", "bench", name, "--json", "DIR"]
    if model is not None:
        words += ["--models", model]
    if args.tiny:
        words.append("--tiny")
    if tuple(args.bits) != (0.5, 0.25):
        words += ["--bits", *(f"{bits:g}" for bits in args.bits)]
    for flag in ("tokens", "batches", "baselines"):
        if getattr(args, flag):
            words += [f"--{flag}", *map(str, getattr(args, flag))]
    for flag in ("epochs", "sequences"):
        if getattr(args, flag) is not None:
            words += [f"--{flag}", str(getattr(args, flag))]
    return " ".join([*words, "--budget", f"{args.budget:g}"])
