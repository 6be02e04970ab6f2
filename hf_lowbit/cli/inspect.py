"""``hf-lowbit inspect``: what an artifact holds, read from its files; the model itself is not built or run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from . import common, inspect_damp, inspect_loopvq
from .artifact_files import download, read_json, read_tensors


NAME = "inspect"
HELP = "print what an artifact holds, without running the model"

_VIEWS = {"loopvq": inspect_loopvq, "damp": inspect_damp}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", help="folder or Hub id")
    parser.add_argument(
        "--verify", action="store_true", help="also load the model and check the fingerprint of its weights"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="damp: draw protected rows, retention and error shares"
    )


def run(args: argparse.Namespace) -> None:
    found = read_artifact(args.artifact)
    if args.plot is not None:
        if "damp" not in found["config"]:
            raise ValueError(f"--plot draws the protected rows of recurrent states, and {args.artifact} has none")
        inspect_damp.plot(_part(found, "damp"), args.plot)
    if args.verify:
        common.load_model(args.artifact, "cpu", "auto")  # raises unless the tables belong to the weights
        found["verified"] = True
    print(json.dumps(found, indent=2) if args.json else format_artifact(found))


def read_artifact(name: str) -> dict[str, Any]:
    """Collect what the files of an artifact say.

    Args:
        name: folder or Hub id.

    Returns:
        JSON-serializable: ``model`` (sizes), ``config`` (the quantization_config), ``fingerprint`` as stored beside the
        tables, ``weight_bytes``, ``calibration``, the calibration report or None if there is none, and what ``read`` of
        the method's view adds: ``layers`` and bytes of the tables. Of an artifact with both methods that stands under
        their names, as the calibration reports do.

    Raises:
        OSError: no such artifact. ValueError: not one of ours, or damaged.
    """
    from ..config import LowBitConfig
    from ..methods import METHODS
    from ..model_card import REPORT_NAME

    common.check_model_folder(name)
    folder = Path(name) if Path(name).is_dir() else download(name)
    config = read_json(folder / "config.json")
    stored = config.get("quantization_config")
    if not isinstance(stored, dict) or stored.get("quant_method") != "lowbit":
        raise ValueError(f"{name} is not a lowbit artifact: its config.json has no lowbit quantization_config")
    methods = LowBitConfig.from_dict(stored).methods  # refuses artifacts of a newer version, and damaged ones
    tables, fingerprint, weight_bytes = read_tensors(folder)
    for method in methods:
        if not fingerprint or not tables.get(method):
            raise ValueError(
                f"{folder} holds no complete {METHODS[method].tables}; the artifact is damaged, or was saved without them"
            )
    if fingerprint != stored.get("fingerprint"):
        raise ValueError(f"{name} is damaged: its config.json and its tensors hold different fingerprints")
    report = folder / REPORT_NAME
    sizes = ("num_hidden_layers", "total_ut_steps", "num_attention_heads", "num_key_value_heads", "head_dim", "dtype")
    text = config.get("text_config", config)  # of a model that also sees images
    found = {
        "artifact": str(name),
        "model": {
            "architecture": (config.get("architectures") or [None])[0],
            "model_type": config.get("model_type"),
            **{size: text.get(size, config.get(size)) for size in sizes},
        },
        "config": stored,
        "fingerprint": fingerprint,
        "weight_bytes": weight_bytes,
        "calibration": read_json(report) if report.is_file() else None,
    }
    parts = {method: _VIEWS[method].read(tables[method], stored[method], str(name)) for method in methods}
    return found | (parts if len(parts) > 1 else next(iter(parts.values())))


def format_artifact(found: dict[str, Any]) -> str:
    views = {name: view for name, view in _VIEWS.items() if name in found["config"]}
    parts = ["\n".join(view.lines(_part(found, name))) for name, view in views.items()]
    return f"artifact     {found['artifact']}\n" + "\n\n".join(parts)


def _part(found: dict[str, Any], method: str) -> dict[str, Any]:
    """What concerns one method, as if it were the only one."""
    if method not in found:
        return found
    return found | found[method] | {"calibration": (found["calibration"] or {}).get(method)}
