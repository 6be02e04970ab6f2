"""``hf-lowbit inspect``: what an artifact holds, read from its files; the model itself is not built or run."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from . import common


NAME = "inspect"
HELP = "print what an artifact holds, without running the model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", help="folder or Hub id")
    parser.add_argument(
        "--verify", action="store_true", help="also load the model and check the fingerprint of its weights"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    found = read_artifact(args.artifact)
    if args.verify:
        common.load_model(args.artifact, "cpu", "auto")  # raises unless the codebooks belong to the weights
        found["verified"] = True
    print(json.dumps(found, indent=2) if args.json else format_artifact(found))


def read_artifact(name: str) -> dict[str, Any]:
    """Collect what the files of an artifact say.

    Args:
        name: folder or Hub id.

    Returns:
        JSON-serializable: ``model`` (sizes), ``config`` (the quantization_config), ``fingerprint`` as stored beside the
        codebooks, ``layers`` (shapes ``[T, H, NG, 256, c]`` and bytes of both tables), ``codebook_bytes``,
        ``weight_bytes``, and ``calibration``, the calibration report or None if there is none.

    Raises:
        OSError: no such artifact. ValueError: not one of ours, or damaged.
    """
    from ..config import LowBitConfig
    from ..model_card import REPORT_NAME

    common.check_model_folder(name)
    folder = Path(name) if Path(name).is_dir() else _download(name)
    config = _read_json(folder / "config.json")
    stored = config.get("quantization_config")
    if not isinstance(stored, dict) or stored.get("quant_method") != "lowbit":
        raise ValueError(f"{name} is not a lowbit artifact: its config.json has no lowbit quantization_config")
    LowBitConfig.from_dict(stored)  # refuses artifacts of a newer version, and damaged ones
    layers, fingerprint, codebook_bytes, weight_bytes = _read_tensors(folder)
    if fingerprint != stored.get("fingerprint"):
        raise ValueError(f"{name} is damaged: its config.json and its tensors hold different fingerprints")
    group, channels = round(8 / stored["loopvq"]["bits"]), layers[0]["key_shape"][-1]
    size = stored["loopvq"].get("loop_group_size") or group // channels
    if size * channels != group:
        raise ValueError(
            f"{name} is damaged: {stored['loopvq']['bits']:g} bits means {group} elements per code, but its tables hold "
            f"{channels} channels x {size} loop steps"
        )
    report = folder / REPORT_NAME
    sizes = ("num_hidden_layers", "total_ut_steps", "num_attention_heads", "num_key_value_heads", "head_dim", "dtype")
    return {
        "artifact": str(name),
        "model": {
            "architecture": (config.get("architectures") or [None])[0],
            "model_type": config.get("model_type"),
            **{size: config.get(size) for size in sizes},
        },
        "config": stored,
        "fingerprint": fingerprint,
        "layers": layers,
        "codebook_bytes": codebook_bytes,
        "weight_bytes": weight_bytes,
        "calibration": _read_json(report) if report.is_file() else None,
    }


def format_artifact(found: dict[str, Any]) -> str:
    model, loopvq = found["model"], found["config"]["loopvq"]
    steps, heads, groups, entries, channels = found["layers"][0]["key_shape"]
    group = channels * _steps_per_code(found)
    lines = [
        f"artifact     {found['artifact']}",
        f"model        {model['architecture']} ({model['model_type']}), {model['num_hidden_layers']} layers x {steps} loop "
        f"steps, {heads} KV heads x {groups * channels}, {model['dtype']}",
        f"method       loopvq, format {found['config']['format_version']}",
        f"bits         {loopvq['bits']:g} per element: one of {entries} entries stands for {group} elements, {channels} "
        f"channels x {group // channels} loop steps",
        f"window       {loopvq['sink_tokens']} first and {loopvq['recent_window']} recent tokens in model dtype",
        f"fingerprint  {found['fingerprint']}" + (" (matches the weights)" if found.get("verified") else ""),
        f"codebooks    {common.format_bytes(found['codebook_bytes'])} beside {common.format_bytes(found['weight_bytes'])} "
        "of weights",
        "",
        "layer  keys [steps, heads, groups, entries, channels]  values" + " " * 26 + "bytes",
    ]
    for layer in found["layers"]:
        key, value = (str(layer[f"{side}_shape"]) for side in ("key", "value"))
        lines.append(f"{layer['layer']:>5}  {key:<46}  {value:<26} {layer['bytes']:>10,}")
    return "\n".join(lines + ["", *_format_report(found["calibration"])])


def _steps_per_code(found: dict[str, Any]) -> int:
    """T_c, which a config that left it to the calibration does not hold: G / c."""
    return round(8 / found["config"]["loopvq"]["bits"]) // found["layers"][0]["key_shape"][-1]


def _format_report(report: dict[str, Any] | None) -> list[str]:
    if report is None:
        return ["calibration  no calibration_report.json in the artifact"]
    config, held_out, losses = report["config"], report["held_out"], report["losses"]
    lines = [
        f"calibration  {config['sequences']} sequences x {config['sequence_length']} tokens, seed {config['seed']}, "
        + ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report["seconds"].items()),
        f"held-out KL  {held_out[0]:.5g} nats after k-means"
        + "".join(f", {kl:.5g} after epoch {epoch}" for epoch, kl in enumerate(held_out[1:], start=1)),
    ]
    if losses:
        lines += [
            f"kept         epoch {report['best_epoch']}, step size {report['learning_rate']:g}"
            + "".join(
                f"; {rate} " + ("diverged" if kl is None else f"gave {kl:.5g}")
                for rate, kl in report["probes"].items()
            ),
            f"losses       {len(losses)} iterations, first {losses[0]:.5g}, last {losses[-1]:.5g}",
        ]
    return lines


def _read_tensors(folder: Path) -> tuple[list[dict[str, Any]], str, int, int]:
    """Per-layer tables, fingerprint, bytes of the codebooks and of everything else, from the safetensors headers."""
    from safetensors import SafetensorError, safe_open

    from ..artifact import FINGERPRINT
    from ..loopvq.attach import NAME as LOOPVQ

    pattern = re.compile(rf"\.(\d+)\..*\.{LOOPVQ}\.(key|value)_(table|metric)$")
    layers: dict[int, dict[str, Any]] = {}
    fingerprint = ""
    codebook_bytes = weight_bytes = 0
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no safetensors file")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    part = tensors.get_slice(name)
                    size = _nbytes(part)
                    match = pattern.search(name)
                    if match:
                        layer = layers.setdefault(int(match[1]), {"layer": int(match[1]), "bytes": 0})
                        if match[3] == "table":
                            layer[f"{match[2]}_shape"] = part.get_shape()
                        layer["bytes"] += size
                        codebook_bytes += size
                    elif name.rsplit(".", 1)[-1] == FINGERPRINT:
                        fingerprint = bytes(tensors.get_tensor(name).tolist()).hex()
                    else:
                        weight_bytes += size
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read ({error}); the artifact is truncated or damaged") from None
    whole = all({"key_shape", "value_shape"} <= layer.keys() for layer in layers.values())
    if not layers or not fingerprint or not whole:
        raise ValueError(f"{folder} holds no complete codebooks; the artifact is damaged, or was saved without them")
    return [layers[index] for index in sorted(layers)], fingerprint, codebook_bytes, weight_bytes


def _nbytes(part: Any) -> int:
    """Bytes of a safetensors slice, from its header."""
    count = 1
    for size in part.get_shape():
        count *= size
    dtype = part.get_dtype()  # "I16", "BF16", "F8_E4M3", "BOOL"
    bits = re.search(r"\d+", dtype)
    return count * (int(bits[0]) // 8 if bits else 1)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON and UTF-8 errors
        raise ValueError(f"{path} is damaged: {error}") from None


def _download(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo_id, allow_patterns=["*.json", "*.safetensors"]))
