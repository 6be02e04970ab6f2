"""A table's JSON file, written anew after every row: a run that is cut off leaves what it measured."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..evaluation.report import write_json
from .timing import release


@dataclass(frozen=True)
class Options:
    """What the command line says about a table. None: the table's own default.

    Attributes:
        device: "cuda" or "cpu".
        tiny: sizes that a CPU runs in seconds.
        bits: of LoopVQ.
        tokens: contexts.
        batches: rows at once.
        epochs, sequences: of a calibration.
        baselines: more full-precision sides of table decode, "stock" and "compiled".
        profile: table decode prints its kernels.
    """

    device: str
    tiny: bool = False
    bits: tuple[float, ...] = (0.5, 0.25)
    tokens: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    epochs: int | None = None
    sequences: int | None = None
    baselines: tuple[str, ...] = ()
    profile: bool = False

    def choose(self, given: Any, real: Any, tiny: Any) -> Any:
        """What was asked for, else the default of these sizes."""
        return given if given is not None else (tiny if self.tiny else real)

    def one(self, flag: str, real: int, tiny: int) -> int:
        """The only number of ``--tokens`` or ``--batches``, for tables that take one.

        Raises:
            ValueError: several were given.
        """
        values = self.choose(getattr(self, flag), (real,), (tiny,))
        if len(values) != 1:
            raise ValueError(f"this table takes one number after --{flag}, got {list(values)}.")
        return values[0]


@functools.cache
def machine(device: str) -> dict[str, Any]:
    """What the numbers depend on; no names of hosts or folders."""
    found = {"device": platform.machine() if device == "cpu" else torch.cuda.get_device_name()}
    found |= {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "triton", "flash-linear-attention"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def file_name(table: str, model: str | None) -> str:
    """Of a table's JSON file; ``model`` is None for tables of kernels."""
    return f"{table}.json" if model is None else f"{table}_{model}.json"


@dataclass
class Report:
    """Rows of one table on one model.

    Args:
        path: the JSON file.
        table, model: their names; model None for tables of kernels.
        command: what makes this file again.
        method: how the numbers come about.
        options: of the command line.
        budget: seconds; no row begins after them.
    """

    path: Path
    table: str
    model: str | None
    command: str
    method: str
    options: Options
    budget: float
    rows: list[dict] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        return self.budget - self.seconds

    @property
    def errors(self) -> list[str]:
        return [row["error"] for row in self.rows if "error" in row]

    def measure(self, function: Callable[[], dict], **fields: Any) -> dict:
        """Add a row: ``fields`` and what ``function`` returns.

        A row that does not fit into memory says ``"out_of_memory": true``, one that fails ``"error"``; neither ends the
        table. A row that would begin after the budget is skipped and listed; the result is then empty.
        """
        label = " ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in fields.items()
        )
        if self.left <= 0:
            self.skipped.append(label)
            self.save()
            return {}
        start = time.monotonic()
        try:
            result = function()
        except torch.OutOfMemoryError:
            result = {"out_of_memory": True}
        except Exception as error:
            traceback.print_exc(limit=4)
            result = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        row = {**fields, **result, "row_seconds": round(time.monotonic() - start, 2)}
        self.rows.append(row)
        self.save()
        print(
            f"{self.table:<10} {self.model or '':<18} {label}: {_brief(result)} ({row['row_seconds']:.1f} s)",
            flush=True,
        )
        release(self.options.device)
        return row

    def save(self) -> None:
        write_json(self.path, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        return {
            "table": self.table,
            "model": self.model,
            "command": self.command,
            "machine": machine(self.options.device),
            "method": " ".join(self.method.split()),
            "settings": self.settings,
            "seconds": round(self.seconds, 1),
            "skipped": self.skipped,
            "rows": self.rows,
        }


def _brief(result: dict) -> str:
    shown = []
    for name, value in result.items():
        if isinstance(value, float):
            shown.append(f"{name} {value:.4g}")
        elif isinstance(value, (int, str)):
            shown.append(f"{name} {value}")
    return ", ".join(shown)
