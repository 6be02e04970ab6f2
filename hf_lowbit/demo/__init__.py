"""The embedded demo: a one-million-parameter looped model, its tokenizer and its data, all package data.

`examples/train_demo_model.py` makes every file anew.
"""

from importlib.resources import files
from pathlib import Path


DATA_NAMES = ("calibration", "text", "tasks")


def demo_model_path() -> Path:
    """Folder for from_pretrained: config, weights, tokenizer."""
    return Path(str(files(__name__) / "model"))


def demo_data(name: str) -> Path:
    """A JSONL file: "calibration" and "text" hold {"text"}, "tasks" holds items as `demo.tasks.item` makes them."""
    if name not in DATA_NAMES:
        raise ValueError(f"no demo data named {name!r}; choose from {', '.join(DATA_NAMES)}")
    return Path(str(files(__name__) / "model" / f"{name}.jsonl"))
