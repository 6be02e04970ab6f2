"""What ``hf-lowbit inspect`` says about the tables of packed recurrent states, in text and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import common
from .artifact_files import LayerTensors


BUFFERS = {"perm_k", "perm_v", "column_scale"}

HEADS_A_LINE = 4
# Dots of a braille character by (row, column): a character shows 2 key channels of 4 heads.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def read(layers: LayerTensors, config: dict[str, Any], name: str) -> dict[str, Any]:
    """``layers`` (sizes, bits, and the protected key channels of each value head) and ``table_bytes``.

    Raises:
        ValueError: tables are missing or damaged, or do not belong to the settings.
    """
    import torch

    from hf_lowbit_kernels import DampPlan

    from ..config import DAMPConfig
    from ..damp.attach import check_rows, layout_of, stored_bytes

    settings = DAMPConfig.from_dict(config)
    found = []
    for index in sorted(layers):
        tensors = layers[index]
        if tensors.keys() != BUFFERS:
            raise ValueError(
                f"{name} holds no complete DAMP tables for layer {index}; the artifact is damaged, or was saved without "
                "them"
            )
        try:
            tables = {buffer: tensor.load() for buffer, tensor in tensors.items()}
            plan = DampPlan(tables["perm_k"], tables["perm_v"], tables["column_scale"].view(torch.float32))
            layout = layout_of(plan.perm_k.shape[1], plan.perm_v.shape[1], settings)
            check_rows(plan, layout.high_rows)
        except ValueError as error:
            raise ValueError(f"{name} is damaged: the DAMP tables of layer {index} are wrong ({error})") from None
        found.append(
            {
                "layer": index,
                "value_heads": plan.heads,
                "dk": layout.dk,
                "dv": layout.dv,
                "rows": layout.high_rows,
                "state_bits_per_value": 8 * stored_bytes(layout, settings.rounding) / (layout.dk * layout.dv),
                "state_bytes": plan.heads * stored_bytes(layout, settings.rounding),
                "table_bytes": sum(tensor.nbytes for tensor in tensors.values()),
                "protected": plan.perm_k[:, : layout.high_rows].sort(1).values.tolist(),
            }
        )
    return {"layers": found, "table_bytes": sum(layer["table_bytes"] for layer in found)}


def lines(found: dict[str, Any]) -> list[str]:
    """The report, after the artifact's name."""
    model, damp, layers = found["model"], found["config"]["damp"], found["layers"]
    packed = sum(layer["state_bytes"] for layer in layers)
    full = sum(4 * layer["value_heads"] * layer["dk"] * layer["dv"] for layer in layers)
    heads, dk, dv, rows = (_range(layer[key] for layer in layers) for key in ("value_heads", "dk", "dv", "rows"))
    zero_point = " with zero point" if damp["low_bits"] == 4 and damp["zero_point"] else ""
    return [
        f"model        {model['architecture']} ({model['model_type']}), {model['num_hidden_layers']} layers, {len(layers)} "
        f"of them with recurrent states: {heads} value heads x {dk} x {dv}, {model['dtype']}",
        f"method       damp, format {found['config']['format_version']}",
        f"bits         {32 * packed / full:.5g} a value: {rows} of {dk} key rows a head in FP16, the others INT"
        f"{damp['low_bits']}{zero_point} in groups of 32, rounding {damp['rounding']}",
        f"states       {common.format_bytes(packed)} a sequence, {common.format_bytes(full)} in FP32",
        f"fingerprint  {found['fingerprint']}" + (" (matches the weights)" if found.get("verified") else ""),
        f"tables       {common.format_bytes(found['table_bytes'])} beside {common.format_bytes(found['weight_bytes'])} "
        "of weights",
        *_calibration(found["calibration"], damp),
        "",
        *_picture(layers),
    ]


def _range(values) -> str:
    low, high = min(values := list(values)), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _calibration(report: dict[str, Any] | None, damp: dict[str, Any]) -> list[str]:
    if report is None:
        return ["calibration  no calibration_report.json in the artifact"]
    stable, check, share = report["stability"], report["validation"], report["error_share"]
    continuation = "of the text" if damp["continuation"] == "text" else "generated"
    text = [
        f"calibration  {damp['sequences']} sequences x ({damp['prompt_tokens']} prompt tokens + {damp['decode_tokens']} "
        f"{continuation}), seed {damp['seed']}, "
        + ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report["seconds"].items()),
        *(
            f"decay        exp(E[g]) of {kind}: "
            + ", ".join(f"{_number(value)} ({_percent(name)})" for name, value in quantiles.items())
            for kind, quantiles in report["decay"].items()
        ),
        f"errors       the worst eighth of a head's rows holds {_share(share['before'])} of its rounding error, "
        f"{_share(share['after'])} after scaling; held out, the protected rows hold {_share(check['error_share'])} of it "
        f"and {_share(check['risk_share'])} of the risk",
        f"stability    two halves of the data choose {_number(stable['overlap'])} of {stable['rows']:g} rows alike (chance "
        f"{_number(stable['chance'])}), Spearman of the risk {_number(stable['spearman'])}",
        "",
        "layer  retention W: least, median, largest of the heads' medians   error in the worst eighth: before, after",
    ]
    for layer in report["layers"]:
        heads = layer["heads"]
        retention = sorted(head["retention"]["p50"] for head in heads)
        middle = [retention[0], retention[len(retention) // 2], retention[-1]]
        shares = [[head["error_share"][i] for head in heads if head["error_share"][i] is not None] for i in (0, 1)]
        means = [_share(sum(part) / len(part) if part else None) for part in shares]
        text.append(
            f"{layer['layer']:>5}  " + "".join(f"{_number(value):>12}" for value in middle)
            + " " * 24 + "".join(f"{value:>8}" for value in means)
        )  # fmt: skip
    return text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _percent(name: str) -> str:
    return f"{name.removeprefix('p')} %"


def _picture(layers: list[dict[str, Any]]) -> list[str]:
    """A line for every 4 value heads, a column of dots for every key channel; a dot is a protected row."""
    text = [f"protected key rows: a character shows 2 channels of {HEADS_A_LINE} value heads", "layer  heads"]
    for layer in layers:
        for first in range(0, layer["value_heads"], HEADS_A_LINE):
            heads = layer["protected"][first : first + HEADS_A_LINE]
            cells = [0x2800] * -(-layer["dk"] // 2)
            for row, protected in enumerate(heads):
                for channel in protected:
                    cells[channel // 2] |= _DOTS[row][channel % 2]
            names = f"{first}-{first + len(heads) - 1}"
            text.append(f"{layer['layer']:>5}  {names:<7} |{''.join(map(chr, cells))}|")
    return text


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw the protected rows of all heads, and below them what the calibration measured of each head.

    Raises:
        ValueError: matplotlib is not installed. OSError: ``path`` cannot be written.
    """
    from ..evaluation.report import check_writable

    check_writable(path)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib; install it with: pip install 'hf-lowbit[plot]'") from None
    layers = found["layers"]
    heads = [protected for layer in layers for protected in layer["protected"]]
    most = max(layer["dk"] for layer in layers)
    picture = [[float(channel in set(protected)) for protected in heads] for channel in range(most)]
    report = found["calibration"]
    figure = Figure(figsize=(min(30, 4 + 0.12 * len(heads)), 8 if report else 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3 if report else 1, 1, squeeze=False, height_ratios=(2, 1, 1) if report else (1,))[:, 0]
    axes[0].imshow(picture, aspect="auto", interpolation="nearest", cmap="Greys", origin="lower")
    axes[0].set(title=f"protected rows, {found['model']['architecture']}", ylabel="key channel")
    borders = [0]
    for layer in layers:
        borders.append(borders[-1] + layer["value_heads"])
    for border in borders[1:-1]:
        axes[0].axvline(border - 0.5, color="tab:red", linewidth=0.5)
    axes[0].set_xticks(
        [(a + b - 1) / 2 for a, b in zip(borders, borders[1:])], [str(layer["layer"]) for layer in layers]
    )
    axes[0].set_xlabel("layer (columns: value heads)")
    if report:
        measured = [head for layer in report["layers"] for head in layer["heads"]]
        x = range(len(measured))
        low, middle, high = ([head["retention"][name] for head in measured] for name in ("p10", "p50", "p90"))
        axes[1].fill_between(x, low, high, alpha=0.3)
        axes[1].plot(x, middle)
        axes[1].set(yscale="log", ylabel="W, 10/50/90 %", xlim=(-0.5, len(measured) - 0.5))
        for i, label in enumerate(("columns as they are", "scaled")):
            shares = [float("nan") if head["error_share"][i] is None else head["error_share"][i] for head in measured]
            axes[2].plot(x, shares, ".", label=label)
        axes[2].set(
            ylabel="error in the worst eighth", ylim=(0, 1), xlim=(-0.5, len(measured) - 0.5), xlabel="value head"
        )
        axes[2].legend()
    figure.savefig(path, dpi=120)
