"""Reading an artifact from its files, without building the model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, known from the file's header."""

    file: Path
    name: str
    shape: tuple[int, ...]
    nbytes: int

    def load(self):
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as tensors:
            return tensors.get_tensor(self.name)


LayerTensors = dict[int, dict[str, StoredTensor]]  # layer -> buffer -> tensor


def read_tensors(folder: Path) -> tuple[dict[str, LayerTensors], str, int]:
    """The tables of each method, the fingerprint (empty if there is none), and bytes of everything else.

    Raises:
        ValueError: no weight file, or one that cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    from ..artifact import is_fingerprint_name, parse_tensor_name

    tables: dict[str, LayerTensors] = {}
    fingerprint = ""
    weight_bytes = 0
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no safetensors file")
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    part = tensors.get_slice(name)
                    tensor = StoredTensor(file, name, tuple(part.get_shape()), _nbytes(part))
                    if place := parse_tensor_name(name):
                        layer, method, buffer = place
                        tables.setdefault(method, {}).setdefault(layer, {})[buffer] = tensor
                    elif is_fingerprint_name(name):
                        fingerprint = bytes(tensors.get_tensor(name).tolist()).hex()
                    else:
                        weight_bytes += tensor.nbytes
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read ({error}); the artifact is truncated or damaged") from None
    return tables, fingerprint, weight_bytes


def _nbytes(part: Any) -> int:
    """Bytes of a safetensors slice, from its header."""
    count = 1
    for size in part.get_shape():
        count *= size
    dtype = part.get_dtype()  # "I16", "BF16", "F8_E4M3", "BOOL"
    bits = re.search(r"\d+", dtype)
    return count * (int(bits[0]) // 8 if bits else 1)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON and UTF-8 errors
        raise ValueError(f"{path} is damaged: {error}") from None


def download(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo_id, allow_patterns=["*.json", "*.safetensors"]))
