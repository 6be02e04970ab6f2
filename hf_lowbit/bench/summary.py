"""``summary.json``: the figures of a folder's tables by name, each with the command and the machine that made it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..evaluation.report import write_json
from .report import file_name


NAME = "summary.json"
Figure = tuple[str, str, float]  # figure, case, value


def write_summary(folder: Path) -> Path:
    """Write ``summary.json`` from the tables in ``folder``.

    Returns:
        Its path.

    Raises:
        ValueError: the folder holds no table.
    """
    path = folder / NAME
    write_json(path, summarize(read_tables(folder)))
    return path


def read_tables(folder: Path) -> dict[str, dict[str, Any]]:
    """The tables of a folder by file name, those under the names that `hf-lowbit bench` gives them.

    A table that was kept under another name, an older run say, is left out: it would replace figures of the present one.

    Raises:
        ValueError: there is none.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and {"table", "command", "machine", "rows"} <= content.keys():
            if path.name == file_name(content["table"], content.get("model")):
                found[path.name] = content
    if not found:
        raise ValueError(
            f"{folder} holds no table of `hf-lowbit bench`; run one first: hf-lowbit bench all --json {folder}"
        )
    return found


def summarize(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Figures by name and case, and under ``"sources"`` what each name was read from."""
    figures: dict[str, Any] = {}
    sources: dict[str, list[dict]] = {}
    for file, table in tables.items():
        names = set()
        for name, case, value in _FIGURES[table["table"]](table):
            figures.setdefault(name, {})[case] = value
            names.add(name)
        for name in names:
            source = {"file": file, "command": table["command"], "machine": table["machine"]}
            sources.setdefault(name, []).append(source)
    change = figures.get("hybrid_tpot_change", {}).get("qwen3.5-4b_b256")
    if change is not None:
        figures["qwen35_tpot_b256_change"] = change
        sources["qwen35_tpot_b256_change"] = [s for s in sources["hybrid_tpot_change"] if "qwen3.5-4b" in s["file"]]
    return {name: figures[name] for name in sorted(figures)} | {
        "sources": {name: sources[name] for name in sorted(sources)}
    }


def _context(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def _bits(row: dict) -> str:
    return f"{row['bits']:g}bit"


def _attention(table: dict) -> Iterator[Figure]:
    for row in table["rows"]:
        case = f"b{row.get('batch')}_n{row['tokens']}"
        if "speedup" in row:
            yield "vq_attention_speedup", f"{case}_{_bits(row)}", row["speedup"]
        if row["arm"] != "encode" and "us" in row:
            name = case + ("_bf16" if row["arm"] == "bf16" else f"_{_bits(row)}")
            yield "vq_attention_us", name, row["us"]


def _encode(table: dict) -> Iterator[Figure]:
    for row in table["rows"]:
        case = f"{table['model']}_n{row['tokens']}_{_bits(row)}"
        if "commit_share" in row:
            yield "vq_encode_prefill_overhead", case, row["commit_share"]
        elif "encode_share" in row:
            yield "vq_encode_decode_overhead", case, row["encode_share"]


def _damp(table: dict) -> Iterator[Figure]:
    names = {
        "speedup": "damp_update_speedup",
        "speedup_over_copy": "damp_update_speedup_over_copy",
        "copy_share": "damp_copy_rate_share",
        "us": "damp_update_us",
    }
    for row in table["rows"]:
        if row["arm"] == "damp":
            for key, name in names.items():
                if key in row:
                    yield name, f"{row['kind']}_b{row['batch']}", row[key]


def _decode(table: dict) -> Iterator[Figure]:
    full = {(row["batch"], row["tokens"]): row for row in table["rows"] if row["arm"] == "bf16"}
    for row in table["rows"]:
        if row["arm"] != "loopvq" or "tpot_ms" not in row:
            continue
        case = f"{table['model']}_b{row['batch']}_{_context(row['tokens'])}_{_bits(row)}"
        for name in ("tpot_ratio", "tpot_ratio_over_stock", "tpot_ratio_over_compiled"):
            if name in row:
                yield name, case, row[name]
        yield from _memory("decode", table, row, full.get((row["batch"], row["tokens"]), {}))


def _prefill(table: dict) -> Iterator[Figure]:
    full = {row["tokens"]: row for row in table["rows"] if row["arm"] == "bf16"}
    for row in table["rows"]:
        if "time_ratio" in row:
            case = f"{table['model']}_{_context(row['tokens'])}_{_bits(row)}"
            yield "prefill_time_ratio", case, row["time_ratio"]
        if row["arm"] == "loopvq":
            yield from _memory("prefill", table, row, full.get(row["tokens"], {}))


def _memory(what: str, table: dict, row: dict, full: dict) -> Iterator[Figure]:
    if row["tokens"] == 32768 and row["batch"] == 1 and row.get("peak_bytes") and full.get("peak_bytes"):
        yield "peak_memory_ratio_32k", f"{table['model']}_{what}_{_bits(row)}", row["peak_bytes"] / full["peak_bytes"]


def _throughput(table: dict) -> Iterator[Figure]:
    peaks: dict[str, dict] = {}
    for row in table["rows"]:
        if "tokens_per_s" in row:
            arm = "bf16" if row["arm"] == "bf16" else _bits(row)
            if arm not in peaks or row["tokens_per_s"] > peaks[arm]["tokens_per_s"]:
                peaks[arm] = row
    for arm, row in peaks.items():
        yield "throughput_peak_tokens_per_s", f"{table['model']}_{arm}", row["tokens_per_s"]
        yield "throughput_peak_batch", f"{table['model']}_{arm}", row["batch"]
        if arm != "bf16" and "bf16" in peaks:
            yield "throughput_ratio", f"{table['model']}_{arm}", row["tokens_per_s"] / peaks["bf16"]["tokens_per_s"]


def _calibrate(table: dict) -> Iterator[Figure]:
    for row in table["rows"]:
        case = f"{table['model']}_{_bits(row)}"
        if row.get("full"):
            yield "calibration_seconds", case, row["seconds"]
        elif "extrapolated_s" in row:
            yield "calibration_seconds", f"{case}_extrapolated", row["extrapolated_s"]


def _hybrid(table: dict) -> Iterator[Figure]:
    """The change of the arm that users get: under graphs if both sides ran so, else without."""
    changes: dict[int, dict[str, float]] = {}
    for row in table["rows"]:
        if "change" in row:
            changes.setdefault(row["batch"], {})[row["arm"]] = row["change"]
    for batch, found in changes.items():
        arm = "damp graph" if "damp graph" in found else "damp eager"
        yield "hybrid_tpot_change", f"{table['model']}_b{batch}", found[arm]


_FIGURES = {
    "attention": _attention,
    "encode": _encode,
    "damp": _damp,
    "decode": _decode,
    "prefill": _prefill,
    "throughput": _throughput,
    "calibrate": _calibrate,
    "hybrid": _hybrid,
}
