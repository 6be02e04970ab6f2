"""``hf-lowbit sample``: texts written by the model itself, as more data for fine-tuning its codebooks."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import common


NAME = "sample"
HELP = "let the model write texts for `calibrate --extra-data`"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id of a looped causal language model")
    parser.add_argument(
        "--data", required=True, type=Path, metavar="F.jsonl", help="texts whose beginnings start the samples"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="OUT.jsonl", help='samples, {"text"} a line')
    parser.add_argument("--count", type=int, default=64, metavar="N", help="samples (default 64)")
    parser.add_argument("--length", type=int, default=2048, metavar="N", help="tokens of each (default 2048)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="samples at once (default 32)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    common.add_model_arguments(parser)
    common.add_quiet_argument(parser)


def run(args: argparse.Namespace) -> None:
    from ..data import read_texts, write_texts
    from ..evaluation.report import check_writable
    from ..sampling import sample_texts

    check_writable(args.output)
    if args.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {args.batch_size}")
    prompts = read_texts(args.data)
    tokenizer = common.load_tokenizer(args.model)
    model = common.load_model(args.model, args.device, args.dtype)
    texts = sample_texts(
        model,
        tokenizer,
        prompts,
        args.count,
        args.length,
        batch_size=args.batch_size,
        seed=args.seed,
        progress=not args.quiet,
    )
    write_texts(args.output, texts)
    print(f"wrote {len(texts)} texts to {args.output}")
