"""``summary.png``: the tables of a folder as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..evaluation.report import check_writable
from .summary import read_tables


NAME = "summary.png"


def plot(folder: Path) -> Path:
    """Draw a panel for each table in ``folder`` that has something to draw.

    Returns:
        The path of the picture.

    Raises:
        ValueError: matplotlib is not installed, or no table has a row to draw.
    """
    path = folder / NAME
    check_writable(path)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    except ImportError:
        raise ValueError("the plot needs matplotlib; install it with: pip install 'hf-lowbit[plot]'") from None
    panels = []
    for table in read_tables(folder).values():
        for draw in _PANELS.get(table["table"], ()):
            series = draw(table)
            if any(points for points in series["lines"].values()):
                panels.append(series)
    if not panels:
        raise ValueError(f"no table in {folder} has a row to draw; run `hf-lowbit bench all --json {folder}`")
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels):
        for label, points in panel["lines"].items():
            if points:
                axis.plot(*zip(*sorted(points)), marker="o", markersize=3, label=label)
        axis.set(title=panel["title"], xlabel=panel["x"], ylabel=panel["y"], xscale="log", yscale="log")
        ticks = sorted({x for points in panel["lines"].values() for x, _ in points})
        axis.set_xticks(ticks, [f"{x // 1024}K" if x >= 1024 and x % 1024 == 0 else f"{x}" for x in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    figure.savefig(path, dpi=120)
    return path


def _arm(row: dict) -> str:
    return f"LoopVQ {row['bits']:g} bit" if row["arm"] == "loopvq" else row["arm"]


def _panel(table: dict, title: str, x: str, y: str, key: str, label=_arm, scale: float = 1.0) -> dict[str, Any]:
    """One line per label through the columns x and key of the rows that have both."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in table["rows"]:
        if row.get(key) is not None and row.get(x) is not None:
            lines.setdefault(label(row), []).append((row[x], scale * row[key]))
    return {"title": f"{title} {table['model'] or ''}".strip(), "x": x, "y": y, "lines": lines}


def _attention(table: dict) -> dict:
    rows = [row for row in table["rows"] if row["arm"] != "encode" and row.get("batch") == 1]
    one = {**table, "rows": rows}
    return _panel(one, "decode attention, batch 1", "tokens", "us a layer and step", "us")


def _damp(table: dict) -> dict:
    def label(row):
        return f"{row['kind']} {row['arm']}"

    return _panel(table, "recurrent update", "batch", "us a layer", "us", label)


def _decode(table: dict) -> dict:
    return _panel(table, "time per output token,", "tokens", "ms", "tpot_ms")


def _decode_memory(table: dict) -> dict:
    return _panel(table, "peak memory in decoding,", "tokens", "GB above the weights", "peak_bytes", scale=1e-9)


def _prefill(table: dict) -> dict:
    return _panel(table, "prefill,", "tokens", "s", "seconds")


def _throughput(table: dict) -> dict:
    return _panel(table, "throughput,", "batch", "tokens a second", "tokens_per_s")


def _encode(table: dict) -> dict:
    def label(row):
        return f"{row['part']}, {row['bits']:g} bit"

    return _panel(table, "share of encoding,", "tokens", "share", "encode_share", label)


def _hybrid(table: dict) -> dict:
    return _panel(table, "time per output token,", "batch", "ms", "tpot_ms")


_PANELS = {
    "attention": (_attention,),
    "damp": (_damp,),
    "decode": (_decode, _decode_memory),
    "encode": (_encode,),
    "hybrid": (_hybrid,),
    "prefill": (_prefill,),
    "throughput": (_throughput,),
}
