"""Bytes that a cache really holds, counted from its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import Cache


def tensor_bytes(root: Any) -> int:
    """Bytes of the distinct storages of all tensors reachable from ``root``.

    Follows attributes, lists, tuples, dicts and sets, but no ``nn.Module``: weights and codebooks belong to the model.
    A storage that is shared, or only partly used by a view, counts once and in full, as it does in memory.
    """
    storages: dict[tuple[str, int], int] = {}
    for tensor in _tensors(root, set()):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[(str(tensor.device), storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


# Where the layers of a stock cache keep what belongs to the sequences: attention, and recurrent layers.
_KEPT = ("keys", "values", "conv_states", "recurrent_states")


def full_cache_bytes(cache: Cache) -> int:
    """Bytes of keys, values, convolution and recurrent states of a stock cache."""
    return tensor_bytes([getattr(layer, name, None) for layer in cache.layers for name in _KEPT])


def recurrent_states(cache: Cache) -> list[torch.Tensor]:
    """The recurrent states of a stock cache that exist, one per layer that has one."""
    states = [state for layer in cache.layers for state in getattr(layer, "recurrent_states", {}).values()]
    return [state for state in states if state is not None]


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, (nn.Module, str, bytes, int, float, type, torch.device, torch.dtype)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = list(value)
    else:
        children = list(getattr(value, "__dict__", {}).values())
        slots = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()))
        children += [getattr(value, name) for name in slots if hasattr(value, name)]
    for child in children:
        yield from _tensors(child, seen)
