"""``hf-lowbit demo``: calibrate, save, load and evaluate the embedded model."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from . import common


NAME = "demo"
HELP = "calibrate, save, reload and evaluate the embedded one-million-parameter model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of a minute instead of two: less data, worse codebooks"
    )
    parser.add_argument("--bits", type=float, default=0.5, help="per cached element: 2, 1, 0.5 or 0.25 (default 0.5)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the artifact here (default: do not keep it)")
    parser.add_argument("--overwrite", action="store_true", help="replace an output folder that is not empty")
    parser.add_argument("--device", default="cpu", help="default cpu: the model is too small to need more")
    common.add_quiet_argument(parser)


def run(args: argparse.Namespace) -> None:
    import torch

    # Matrices this small gain nothing from more threads, and lose a factor of ten where the cores are busy otherwise.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _run(args)
    finally:
        torch.set_num_threads(threads)


def _run(args: argparse.Namespace) -> None:
    if args.output is not None:
        common.check_output_folder(args.output, args.overwrite)
        _demo(args, args.output)
    else:
        with tempfile.TemporaryDirectory(prefix="hf-lowbit-demo-") as folder:
            _demo(args, Path(folder) / "artifact")


def _demo(args: argparse.Namespace, output: Path) -> None:
    from .. import LoopVQConfig, LowBitConfig, assert_quantized, calibrate
    from ..data import read_tasks, read_texts
    from ..demo import demo_data, demo_model_path
    from ..evaluation import evaluate, format_table
    from .calibrate import save_artifact

    source = str(demo_model_path())
    # float32 whatever the checkpoint's dtype: CPUs multiply it faster, and at this size memory does not matter.
    model = common.load_model(source, args.device, "float32")
    tokenizer = common.load_tokenizer(source)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"1. a looped model of {size:,} parameters, {model.config.total_ut_steps} loops, from {source}")

    # The step size was chosen on held-out KL for this model; "auto" would spend two thirds as long again on finding it.
    config = LoopVQConfig(
        bits=args.bits,
        seed=args.seed,
        sequences=4 if args.quick else 48,
        sequence_length=512,
        epochs=1 if args.quick else 3,
        learning_rate=0.04,
        kmeans_iterations=3 if args.quick else 8,
    )
    print(
        f"2. calibrating a {config.bits:g}-bit cache on {config.sequences} sequences of {config.sequence_length} tokens"
    )
    texts = read_texts(demo_data("calibration"))
    report = calibrate(model, tokenizer, LowBitConfig(loopvq=config), dataset=texts, progress=not args.quiet)
    print(report.summary())

    save_artifact(model, tokenizer, report.to_dict(), output, args.overwrite)
    model = common.load_model(str(output), args.device, "float32")
    assert_quantized(model)
    print("3. saved and loaded again with from_pretrained" + (f": {args.output}" if args.output else ""))

    limit = 4 if args.quick else 30
    print(f"4. full-precision cache against quantized cache: {limit} prompts a task")
    result = evaluate(
        model,
        tokenizer,
        read_texts(demo_data("text"), limit),
        read_tasks(demo_data("tasks"), limit),
        batch_size=limit,
        progress=not args.quiet,
    )
    print(format_table(result))
