"""``hf-lowbit calibrate``: fit codebooks to a model and save both as one artifact.

The artifact is built in a temporary folder beside the output and renamed at the end, so a run that fails leaves
nothing half-written. The only thing that may stay is ``OUTPUT.resume``, the state of an interrupted calibration: a later
run with ``--resume`` continues from it, and it is removed when a run succeeds or its input turns out to be wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from . import common


NAME = "calibrate"
HELP = "fit the codebooks of a low-bit cache to a model and save both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id of a looped causal language model")
    parser.add_argument("--method", choices=("loopvq",), default="loopvq")
    parser.add_argument(
        "--data", required=True, type=Path, metavar="F.jsonl", help='calibration texts, {"text"} a line'
    )
    parser.add_argument(
        "--extra-data",
        type=Path,
        metavar="F.jsonl",
        help="more texts, for fine-tuning only (as `hf-lowbit sample` writes them); all are used",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder of the artifact")
    parser.add_argument("--overwrite", action="store_true", help="replace an output folder that is not empty")
    add_method_arguments(parser)
    common.add_model_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run from OUTPUT.resume")
    common.add_quiet_argument(parser)


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per field of ``LoopVQConfig`` that users set; what is not given keeps the default of that class."""
    # No choices or defaults here: the config class owns them, and its errors say what is allowed.
    parser.add_argument("--bits", type=float, help="per cached element: 2, 1, 0.5 or 0.25 (default 0.5)")
    parser.add_argument("--sequences", type=int, metavar="N", help="calibration sequences (default 16)")
    parser.add_argument("--sequence-length", type=int, metavar="N", help="tokens of each (default 2048)")
    parser.add_argument("--epochs", type=int, metavar="N", help="of fine-tuning; 0 for none (default 4)")
    parser.add_argument("--seed", type=int, metavar="N", help="default 0")
    parser.add_argument(
        "--loop-group-size", type=int, metavar="N", help="loop steps per code (default: the most, up to 4)"
    )
    parser.add_argument(
        "--encoder-metric", metavar="M", help='weights of coordinates in the encoder: "fisher" (default) or "none"'
    )
    parser.add_argument(
        "--learning-rate", type=_rate, metavar="X", help='a number, or "auto" to choose on held-out KL'
    )
    parser.add_argument("--kmeans-vectors", type=int, metavar="N", help="tokens for k-means, at most (default 4096)")
    parser.add_argument("--kmeans-iterations", type=int, metavar="N", help="at most (default 10)")
    parser.add_argument("--recent-window", type=int, metavar="N", help="tokens in full precision (default 64)")


METHOD_FLAGS = (
    "bits",
    "sequences",
    "sequence_length",
    "epochs",
    "seed",
    "loop_group_size",
    "encoder_metric",
    "learning_rate",
    "kmeans_vectors",
    "kmeans_iterations",
    "recent_window",
)


def _rate(text: str) -> float | str:
    return text if text == "auto" else float(text)


def run(args: argparse.Namespace) -> None:
    from .. import LoopVQConfig, LowBitConfig, calibrate
    from ..data import read_texts

    # Everything that can be wrong without the model is found before the model is loaded.
    given = {name: getattr(args, name) for name in METHOD_FLAGS}
    config = LowBitConfig(loopvq=LoopVQConfig(**{name: value for name, value in given.items() if value is not None}))
    output = args.output.resolve()  # "." and links have names of their own
    common.check_output_folder(output, args.overwrite)
    resume_dir = output.with_name(output.name + ".resume")
    kept = _has_files(resume_dir)
    if kept and not (args.resume or args.overwrite):
        raise FileExistsError(
            f"{resume_dir} holds the state of an interrupted run: add --resume to continue it, or --overwrite to start "
            "anew"
        )
    texts = read_texts(args.data)
    extra = read_texts(args.extra_data) if args.extra_data else None
    tokenizer = common.load_tokenizer(args.model)
    model = common.load_model(args.model, args.device, args.dtype)

    if not args.resume:
        shutil.rmtree(resume_dir, ignore_errors=True)
        kept = False
    try:
        report = calibrate(
            model,
            tokenizer,
            config,
            dataset=texts,
            extra_dataset=extra,
            resume_dir=str(resume_dir),
            progress=not args.quiet,
        )
        save_artifact(model, tokenizer, report, output, args.overwrite, base_model=args.model)
    except BaseException as error:
        # Wrong input leaves nothing worth continuing, unless an earlier run did (say, with other settings).
        if not kept and (isinstance(error, (ValueError, TypeError)) or not _has_files(resume_dir)):
            shutil.rmtree(resume_dir, ignore_errors=True)
        elif not kept:
            print(f"{resume_dir} holds the state so far; --resume continues from it", file=sys.stderr)
        raise
    shutil.rmtree(resume_dir, ignore_errors=True)
    print(report.summary())
    print(f"saved to {args.output}")


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def save_artifact(
    model, tokenizer, report, output: Path, overwrite: bool = False, base_model: str | None = None
) -> None:
    """Write model, codebooks, tokenizer, ``calibration_report.json`` and the model card to ``output``, or nothing.

    Args:
        model: a calibrated model.
        tokenizer: saved beside it.
        report: what ``calibrate`` returned.
        output: the new folder.
        overwrite: replace ``output`` if it is not empty.
        base_model: where the model came from, for the card.
    """
    from ..evaluation.report import write_json
    from ..model_card import REPORT_NAME, model_card

    with common.new_folder(output, overwrite) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_json(folder / REPORT_NAME, report.to_dict())
        model_card(model, report.to_dict(), base_model).save(folder / "README.md")
