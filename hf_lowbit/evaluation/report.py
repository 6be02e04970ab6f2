"""Printing a comparison, and writing JSON so that no half-written file can be left behind."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: str | Path, content: Any) -> None:
    """Write ``content`` through a temporary file in the same folder and a rename.

    Raises:
        OSError: the folder does not exist or cannot be written.
        ValueError: a number is NaN or infinite, which JSON cannot hold.
    """
    path = Path(path)
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    check_writable(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private to the user
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def check_writable(path: str | Path) -> None:
    """Raise the OSError that writing ``path`` would end in, before hours of work are spent on its content."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a file name")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(f"the folder {path.parent} is not writable")


def format_table(result: dict[str, Any]) -> str:
    """A small text table of :func:`hf_lowbit.evaluation.evaluate`'s result: one line per metric, two columns."""
    full, quantized = result["full"], result["quantized"]
    rows = [("", "full", "quantized")]
    for name in full["accuracy"] or {}:
        rows.append((f"accuracy {name}", f"{full['accuracy'][name]:.3f}", f"{quantized['accuracy'][name]:.3f}"))
    formats = {
        "accuracy_mean": ("accuracy, mean over tasks", "{:.3f}"),
        "first_divergence": ("first differing token, mean", "{:.1f}"),
        "repetition_rate": ("repeating generations", "{:.3f}"),
        "kl_mean": ("KL, nats per token", "{:.5f}"),
        "top1_agreement": ("top-1 agreement", "{:.4f}"),
        "nll_mean": ("loss, nats per token", "{:.4f}"),
        "bits_per_element": ("bits per quantized element", "{:g}"),
        "state_bits_per_value": ("bits per state value", "{:g}"),
        "state_bytes": ("bytes of states", "{:,}"),
        "cache_bytes": (f"cache bytes, {result['settings']['cache_prompt_tokens']:,} tokens", "{:,}"),
        "tokens_per_second": ("new tokens per second", "{:.1f}"),
    }
    for key, (label, pattern) in formats.items():
        values = [side.get(key) for side in (full, quantized)]
        if any(value is not None for value in values):
            rows.append((label, *("-" if value is None else pattern.format(value) for value in values)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)
