"""What ``hf-lowbit inspect`` says about codebooks of a KV cache."""

from __future__ import annotations

from typing import Any

from . import common
from .artifact_files import LayerTensors


def read(layers: LayerTensors, config: dict[str, Any], name: str) -> dict[str, Any]:
    """``layers`` (shapes ``[T, H, NG, 256, c]`` and bytes of both tables) and ``codebook_bytes``.

    Raises:
        ValueError: tables are missing, or do not belong to the settings.
    """
    expected = {f"{side}_table" for side in ("key", "value")}
    if config["encoder_metric"] == "fisher":
        expected |= {f"{side}_metric" for side in ("key", "value")}
    found = []
    for index in sorted(layers):
        tensors = layers[index]
        if tensors.keys() != expected:
            missing = sorted(expected - tensors.keys())
            problem = (
                f"{missing[0]} is missing" if missing else "its settings name no encoder metric, but it holds one"
            )
            raise ValueError(
                f"{name} holds no complete codebooks ({problem} in layer {index}); the artifact is damaged, or was saved "
                "without them"
            )
        found.append(
            {
                "layer": index,
                "key_shape": list(tensors["key_table"].shape),
                "value_shape": list(tensors["value_table"].shape),
                "bytes": sum(tensor.nbytes for tensor in tensors.values()),
            }
        )
    group, channels = round(8 / config["bits"]), found[0]["key_shape"][-1]
    size = config.get("loop_group_size") or group // channels
    if size * channels != group:
        raise ValueError(
            f"{name} is damaged: {config['bits']:g} bits means {group} elements per code, but its tables hold "
            f"{channels} channels x {size} loop steps"
        )
    return {"layers": found, "codebook_bytes": sum(layer["bytes"] for layer in found)}


def lines(found: dict[str, Any]) -> list[str]:
    """The report, after the artifact's name."""
    model, loopvq = found["model"], found["config"]["loopvq"]
    steps, heads, groups, entries, channels = found["layers"][0]["key_shape"]
    group = round(8 / loopvq["bits"])
    text = [
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
        text.append(f"{layer['layer']:>5}  {key:<46}  {value:<26} {layer['bytes']:>10,}")
    return [*text, "", *_calibration(found["calibration"])]


def _calibration(report: dict[str, Any] | None) -> list[str]:
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
