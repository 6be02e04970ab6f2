"""Intermediate state of a calibration on disk, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch


class Checkpoints:
    """Named states in a directory that belong to one (model, configuration, data) only.

    Args:
        directory: where states live; None keeps nothing.
        key: what the states depend on (JSON-able). A directory made with another key is refused.

    Raises:
        ValueError: the directory holds states of another calibration.
    """

    def __init__(self, directory: str | os.PathLike | None, key: dict):
        self.directory = Path(directory) if directory is not None else None
        if self.directory is None:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        stamp = self.directory / "calibration_key.json"
        key = json.loads(json.dumps(key))
        if stamp.exists():
            known = json.loads(stamp.read_text())
            changed = _differences(known, key)
            if changed:
                raise ValueError(
                    f"{self.directory} holds an interrupted calibration with other settings or data: "
                    f"{'; '.join(changed)}. Give the settings of that run to continue it, another resume directory, or "
                    "delete this one to start anew."
                )
        else:
            self._replace(stamp, lambda path: path.write_text(json.dumps(key, indent=2)))

    @staticmethod
    def _replace(path: Path, write) -> None:
        # A process killed while writing must leave the previous state readable.
        partial = path.with_suffix(path.suffix + ".partial")
        write(partial)
        os.replace(partial, path)

    def save(self, name: str, state: dict) -> None:
        if self.directory is not None:
            self._replace(self.directory / f"{name}.pt", lambda path: torch.save(state, path))

    def load(self, name: str) -> dict | None:
        if self.directory is None or not (self.directory / f"{name}.pt").exists():
            return None
        return torch.load(self.directory / f"{name}.pt", map_location="cpu", weights_only=True)


def _differences(known: dict, key: dict) -> list[str]:
    """Each entry that differs, named as a setting: ``bits was 0.5 and is 1.0``."""
    found = []
    for name in sorted(known.keys() | key.keys()):
        before, now = known.get(name), key.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            found += _differences(before, now)
        elif before != now:
            found.append(f"{name} was {_short(before)} and is {_short(now)}")
    return found


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
