"""``hf-lowbit calibrate``: fit a low-bit cache to a model and save both as one artifact.

The artifact is built in a temporary folder beside the output and renamed at the end, so a run that fails leaves
nothing half-written. The only thing that may stay is ``OUTPUT.resume``, the state of an interrupted calibration of a
method that can be resumed: a later run with ``--resume`` continues from it, and it is removed when a run succeeds or its
input turns out to be wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from . import common
from .artifact_files import read_json


NAME = "calibrate"
HELP = "fit a low-bit cache to a model and save both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id of a causal language model")
    parser.add_argument(
        "--method",
        choices=tuple(FLAGS),
        default="loopvq",
        help="loopvq: KV cache of looped models and of hybrid models' attention layers (default); damp: states of Gated "
        "DeltaNet and Kimi Delta Attention. For both, calibrate the artifact of one method for the other",
    )
    parser.add_argument(
        "--data",
        required=True,
        type=Path,
        metavar="F.jsonl",
        help='calibration texts, {"text"} a line; damp: with "domain", domains take equal parts',
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder of the artifact")
    parser.add_argument("--overwrite", action="store_true", help="replace an output folder that is not empty")
    common.add_model_arguments(parser)
    common.add_quiet_argument(parser)
    add_method_arguments(parser)


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag per field of the configurations that users set; what is not given keeps the default of that class."""
    # No choices or defaults here: the config classes own them, and their errors say what is allowed.
    group = parser.add_argument_group("both methods")
    group.add_argument("--sequences", type=int, metavar="N", help="calibration sequences (default 16; damp 36)")
    group.add_argument("--seed", type=int, metavar="N", help="default 0")

    group = parser.add_argument_group("--method loopvq")
    group.add_argument("--bits", type=float, help="per cached element: 2, 1, 0.5 or 0.25 (default 0.5)")
    group.add_argument("--sequence-length", type=int, metavar="N", help="tokens of each (default 2048)")
    group.add_argument("--epochs", type=int, metavar="N", help="of fine-tuning; 0 for none (default 4)")
    group.add_argument(
        "--loop-group-size", type=int, metavar="N", help="loop steps per code (default: the most, up to 4)"
    )
    group.add_argument(
        "--encoder-metric", metavar="M", help='weights of coordinates in the encoder: "fisher" (default) or "none"'
    )
    group.add_argument("--learning-rate", type=_rate, metavar="X", help='a number, or "auto" to choose on held-out KL')
    group.add_argument("--kmeans-vectors", type=int, metavar="N", help="tokens for k-means, at most (default 4096)")
    group.add_argument("--kmeans-iterations", type=int, metavar="N", help="at most (default 10)")
    group.add_argument("--recent-window", type=int, metavar="N", help="tokens in full precision (default 64)")
    group.add_argument(
        "--extra-data",
        type=Path,
        metavar="F.jsonl",
        help="more texts, for fine-tuning only (as `hf-lowbit sample` writes them); all are used",
    )
    group.add_argument(
        "--resume", action="store_const", const=True, help="continue an interrupted run from OUTPUT.resume"
    )

    group = parser.add_argument_group("--method damp")
    group.add_argument("--low-bits", type=int, help="of unprotected rows: 8 (default) or 4")
    group.add_argument("--rows", type=int, metavar="N", help="key rows a head kept in FP16 (default: an eighth)")
    group.add_argument(
        "--no-zero-point", dest="zero_point", action="store_const", const=False, help="symmetric 4-bit codes"
    )
    group.add_argument("--rounding", metavar="R", help="nearest (default), stochastic or error_feedback")
    group.add_argument("--selector", metavar="S", help="damp (default), error, retention, energy, random or readout")
    group.add_argument("--scaling", metavar="S", help="of columns: per_head (default), global or none")
    group.add_argument("--horizon", type=int, metavar="N", help="decays after an anchor that count (default 256)")
    group.add_argument("--prompt-tokens", type=int, metavar="N", help="of a sequence (default 1024)")
    group.add_argument("--decode-tokens", type=int, metavar="N", help="after the prompt (default 4096)")
    group.add_argument(
        "--windows", type=_integers, metavar="A,B", help="where windows begin after the prompt (default 0,2048)"
    )
    group.add_argument("--window-tokens", type=int, metavar="N", help="of a window (default 1024)")
    group.add_argument(
        "--anchors", type=_integers, metavar="A,B", help="states sampled in a window (default 256,512,768)"
    )
    group.add_argument(
        "--continuation", metavar="C", help='"generate" (default) lets the model go on after a prompt, "text" the text'
    )


# Which flags a method knows, by their names in its configuration; and those that are no part of it.
_SHARED = ("sequences", "seed")
FLAGS = {
    "loopvq": (
        *_SHARED,
        "bits",
        "sequence_length",
        "epochs",
        "loop_group_size",
        "encoder_metric",
        "learning_rate",
        "kmeans_vectors",
        "kmeans_iterations",
        "recent_window",
    ),
    "damp": (
        *_SHARED,
        "low_bits",
        "rows",
        "zero_point",
        "rounding",
        "selector",
        "scaling",
        "horizon",
        "prompt_tokens",
        "decode_tokens",
        "windows",
        "window_tokens",
        "anchors",
        "continuation",
    ),
}
_OF_THE_RUN = {"loopvq": ("extra_data", "resume"), "damp": ()}


def method_config(args: argparse.Namespace):
    """The configuration that the flags ask for, a :class:`~hf_lowbit.LowBitConfig`.

    Raises:
        ValueError: a value out of range, or a flag of another method.
    """
    from .. import DAMPConfig, LoopVQConfig, LowBitConfig

    for other, names in FLAGS.items():
        own = FLAGS[args.method] + _OF_THE_RUN[args.method]
        for name in names + _OF_THE_RUN[other]:
            if name not in own and getattr(args, name) is not None:
                raise ValueError(
                    f"{_flag(name)} belongs to --method {other}; --method {args.method} takes "
                    f"{', '.join(map(_flag, own))}"
                )
    given = {name: getattr(args, name) for name in FLAGS[args.method] if getattr(args, name) is not None}
    config = {"loopvq": LoopVQConfig, "damp": DAMPConfig}[args.method](**given)
    return LowBitConfig(**{args.method: config})


def _flag(name: str) -> str:
    return "--no-zero-point" if name == "zero_point" else f"--{name.replace('_', '-')}"


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be integers with commas between them, such as 0,2048"
        ) from None


def _rate(text: str) -> float | str:
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number below 1 or 'auto'") from None


def run(args: argparse.Namespace) -> None:
    from .. import calibrate
    from ..data import calibration_texts

    # Everything that can be wrong without the model is found before the model is loaded.
    config = method_config(args)
    output = args.output.resolve()  # "." and links have names of their own
    common.check_output_folder(output, args.overwrite)
    # Of other methods' interrupted runs nothing is read, and nothing removed.
    resumable = "resume" in _OF_THE_RUN[args.method]
    resume_dir = output.with_name(output.name + ".resume") if resumable else None
    kept = resumable and _has_files(resume_dir)
    if kept and not (args.resume or args.overwrite):
        raise FileExistsError(
            f"{resume_dir} holds the state of an interrupted run: add --resume to continue it, or --overwrite to start "
            "anew"
        )
    for path in filter(None, (args.data, args.extra_data)):
        calibration_texts(path)
    tokenizer = common.load_tokenizer(args.model)
    model = common.load_model(args.model, args.device, args.dtype)

    if not args.resume:
        _remove(resume_dir)
        kept = False
    try:
        report = calibrate(
            model,
            tokenizer,
            config,
            dataset=args.data,
            extra_dataset=args.extra_data,
            resume_dir=resume_dir,
            progress=not args.quiet,
        )
        reports = _with_other_reports(model, args.method, report, Path(args.model))
        save_artifact(model, tokenizer, reports, output, args.overwrite, base_model=args.model)
    except BaseException as error:
        # Wrong input leaves nothing worth continuing, unless an earlier run did (say, with other settings).
        if resumable and not kept:
            if isinstance(error, (ValueError, TypeError)) or not _has_files(resume_dir):
                _remove(resume_dir)
            else:
                print(f"{resume_dir} holds the state so far; --resume continues from it", file=sys.stderr)
        raise
    _remove(resume_dir)
    print(report.summary())
    print(f"saved to {args.output}")


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _with_other_reports(model, method: str, report, source: Path) -> dict[str, Any]:
    """The report's dict; of a model that carries tables of both methods, ``{method: report}`` with what ``source`` has."""
    from ..methods import methods_on
    from ..model_card import REPORT_NAME

    others = [other.name for other in methods_on(model) if other.name != method]
    if not others:
        return report.to_dict()
    path = source / REPORT_NAME
    known = read_json(path) if path.is_file() else {}
    if known and not known.keys() <= FLAGS.keys():
        known = {others[0]: known}  # of an artifact with one method
    return known | {method: report.to_dict()}


def save_artifact(
    model, tokenizer, report: dict[str, Any], output: Path, overwrite: bool = False, base_model: str | None = None
) -> None:
    """Write model, tables, tokenizer, ``calibration_report.json`` and the model card to ``output``, or nothing.

    Args:
        model: a calibrated model.
        tokenizer: saved beside it.
        report: ``to_dict()`` of what ``calibrate`` returned.
        output: the new folder.
        overwrite: replace ``output`` if it is not empty.
        base_model: where the model came from, for the card.
    """
    from ..evaluation.report import write_json
    from ..model_card import REPORT_NAME, model_card

    with common.new_folder(output, overwrite) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_json(folder / REPORT_NAME, report)
        model_card(model, report, base_model).save(folder / "README.md")
