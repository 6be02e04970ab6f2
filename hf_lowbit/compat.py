"""Every difference between transformers releases that hf_lowbit knows about, decided once, at import.

Supported: transformers 5.17 and later (tested on 5.17.0 and 5.24.0).

| what | 5.17 ... 5.23 | 5.24 |
|---|---|---|
| cache argument of ``forward`` and ``generate``, key in ``model_kwargs`` | ``past_key_values`` | ``cache`` |
| cache field of a model output | ``past_key_values`` | ``cache`` |
| ``create_causal_mask(...)`` takes the cache as | ``past_key_values=`` | ``cache=`` |
| attention layers call | ``update(k, v, idx)`` | ``update(k, v, idx, kwargs=kwargs)`` |
| ``modeling_utils.slice_logits_to_keep`` | absent | present |
| loading with a quantizer: tensors whose names differ in file and model | keep the file's dtype | get the model's |
| activation checkpointing | ``gradient_checkpointing_enable`` | ``activation_checkpointing_enable`` (old name warns) |

The name is read from the installed output classes rather than from the version number, so development builds between
two releases work too. Our own ``forward`` methods name the argument ``cache`` and accept both names on every release.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.quantizers.base import HfQuantizer


TRANSFORMERS_VERSION = Version(transformers.__version__)
MIN_TRANSFORMERS = Version("5.17.0")


def check_transformers_version(version: Version = TRANSFORMERS_VERSION) -> None:
    """Raise ImportError below the oldest supported release."""
    if version.release < MIN_TRANSFORMERS.release:
        raise ImportError(
            f"hf_lowbit needs transformers >= {MIN_TRANSFORMERS}, but {version} is installed. "
            f"Run: pip install -U 'transformers>={MIN_TRANSFORMERS}'"
        )


check_transformers_version()

#: Both names of the cache argument; every release accepts exactly one of them in ``generate``.
CACHE_ARG_NAMES = ("cache", "past_key_values")

#: Name of the cache in ``generate(...)``, in ``model_kwargs`` and in model outputs of the installed release.
CACHE_ARG: str = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"

_UPDATE_TAKES_KWARGS = CACHE_ARG == "cache"


def cache_kwargs(cache: Any) -> dict[str, Any]:
    """``{CACHE_ARG: cache}``: ``model.generate(ids, **cache_kwargs(c))`` works on every release."""
    return {CACHE_ARG: cache}


def cache_from_kwargs(kwargs: dict[str, Any]) -> Any:
    """Remove both cache names from ``kwargs`` and return the cache (None if neither is set).

    Raises:
        TypeError: both names hold different objects.
    """
    found = [value for value in (kwargs.pop(name, None) for name in CACHE_ARG_NAMES) if value is not None]
    if len(found) == 2 and found[0] is not found[1]:
        raise TypeError(
            "Got two different caches, one as `cache` and one as `past_key_values`. They are two names of the same "
            "argument: pass the one that should be used."
        )
    return found[0] if found else None


def accepts_both_cache_names(forward: Callable) -> Callable:
    """Let a ``forward(..., cache=None, ...)`` also be called with ``past_key_values=``, on every release."""

    @functools.wraps(forward)  # keeps the signature that generate() and Trainer inspect
    def wrapper(*args, **kwargs):
        if "past_key_values" in kwargs:
            kwargs["cache"] = cache_from_kwargs(kwargs)
        return forward(*args, **kwargs)

    return wrapper


def make_output(output_class: type, cache: Any = None, **fields: Any):
    """Build a ``ModelOutput`` subclass, putting the cache in the field that the installed release gives it."""
    return output_class(**{CACHE_ARG: cache}, **fields)


def get_cache(output: Any) -> Any:
    """The cache of a model output, whatever the field is called."""
    return getattr(output, CACHE_ARG)


def update_cache(cache: Cache, key: torch.Tensor, value: torch.Tensor, slot: int, kwargs: dict[str, Any]):
    """Call ``cache.update`` the way the installed release's own models do.

    Args:
        key, value: ``[B, H, n, D]``, the key after RoPE.
        slot: index into ``cache.layers``.
        kwargs: the attention module's keyword arguments (5.24 hands them on, among them ``position_ids``).

    Returns:
        Keys and values to attend to, ``[B, H, S, D]``.
    """
    if _UPDATE_TAKES_KWARGS:
        return cache.update(key, value, slot, kwargs=kwargs)
    return cache.update(key, value, slot)


try:  # 5.24
    from transformers.modeling_utils import slice_logits_to_keep
except ImportError:

    def slice_logits_to_keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
        """Keep the last ``logits_to_keep`` positions (0: all), or the positions in a 1-D tensor."""
        if isinstance(logits_to_keep, int):
            return hidden_states[:, slice(-logits_to_keep, None), :]
        return hidden_states[:, logits_to_keep, :]


def dtypes_to_load(model, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype that each floating tensor of a model on the meta device gets from a load without a quantizer."""
    kept = [re.escape(name).replace(r"\*", ".*") for name in model._get_dtype_plan(dtype)]
    in_fp32 = re.compile("|".join(kept) or "(?!)")  # (?!) matches nothing
    return {
        name: torch.float32 if in_fp32.search(name) else tensor.dtype
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }


def restore_dtypes(model, dtypes: dict[str, torch.dtype]) -> None:
    """Undo the dtypes of a release that keeps the file's for renamed tensors, as soon as there is a quantizer.

    Args:
        model: just loaded.
        dtypes: what :func:`dtypes_to_load` said before.
    """
    if hasattr(HfQuantizer, "get_new_dtype"):  # 5.24
        return
    for name, tensor in model.state_dict(keep_vars=True).items():
        wanted = dtypes.get(name, tensor.dtype)
        if tensor.dtype != wanted and not tensor.is_meta:
            tensor.data = tensor.data.to(wanted)


def is_activation_checkpointing(model) -> bool:
    """Whether the model recomputes activations in the backward pass."""
    if hasattr(model, "activation_checkpointing_enable"):
        return bool(model.is_activation_checkpointing)
    return bool(model.is_gradient_checkpointing)


def set_activation_checkpointing(model, on: bool) -> None:
    """Switch recomputation of activations on (non-reentrant) or off."""
    prefix = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if not on:
        getattr(model, f"{prefix}_checkpointing_disable")()
    else:
        getattr(model, f"{prefix}_checkpointing_enable")({"use_reentrant": False})


__all__ = [
    "CACHE_ARG",
    "CACHE_ARG_NAMES",
    "MIN_TRANSFORMERS",
    "TRANSFORMERS_VERSION",
    "accepts_both_cache_names",
    "cache_from_kwargs",
    "cache_kwargs",
    "check_transformers_version",
    "dtypes_to_load",
    "get_cache",
    "is_activation_checkpointing",
    "make_output",
    "restore_dtypes",
    "set_activation_checkpointing",
    "slice_logits_to_keep",
    "update_cache",
]
