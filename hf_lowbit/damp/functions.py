"""Patching a modeling file's recurrence functions, so that they take a `PackedState` for an FP32 state.

The models call two functions by their global names, one for a single token and one for many, and every modeling file
has its own copies. A wrapper acts on packed states only; any other call goes through untouched, so a patched file serves
stock caches, too. Patching happens when a cache is made, never at import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from .spec import FUNCTIONS
from .state import PackedState


def patch_delta_rules(modeling: ModuleType, kind: str) -> None:
    """Make the recurrence functions of a modeling file accept packed states. Doing it again changes nothing.

    Args:
        modeling: e.g. ``transformers.models.qwen3_5.modeling_qwen3_5``.
        kind: "gdn" or "kda".

    Raises:
        TypeError: the file does not define the functions that this hf_lowbit knows.
    """
    for name, wrap in zip(FUNCTIONS[kind], (_one_token, _many_tokens), strict=True):
        function = getattr(modeling, name, None)
        if function is None:
            raise TypeError(
                f"{modeling.__name__} has no {name}, so its recurrent states cannot be packed; this hf_lowbit does not "
                "know your transformers release. Update hf_lowbit or install a release that it is tested with."
            )
        if not _is_ours(function):
            wrapper = functools.wraps(function)(wrap(function))
            wrapper._damp_wrapper = wrapper  # functools.wraps of an outer wrapper copies the name, not the identity
            setattr(modeling, name, wrapper)


def unpatch_delta_rules(modeling: ModuleType, kind: str) -> None:
    """Put the original functions back. Caches that are in use raise at their next forward pass."""
    for name in FUNCTIONS[kind]:
        function = getattr(modeling, name, None)
        if _is_ours(function):
            setattr(modeling, name, function.__wrapped__)


def is_patched(modeling: ModuleType, kind: str) -> bool:
    """Whether both functions are our wrappers."""
    return all(_is_ours(getattr(modeling, name, None)) for name in FUNCTIONS[kind])


def _is_ours(function: Callable | None) -> bool:
    return getattr(function, "_damp_wrapper", None) is function and function is not None


def _one_token(original: Callable) -> Callable:
    """query, key ``[B, 1, H or HV, dk]``, value ``[B, 1, HV, dv]``; returns ``[B, 1, HV, dv]`` and the same state."""

    def wrapper(query, key, value, *args, **kwargs):
        state = kwargs.get("initial_state")
        if not isinstance(state, PackedState):
            return original(query, key, value, *args, **kwargs)
        _refuse_packed_sequences(kwargs)
        if state.backend == "model" or query.shape[1] != 1:
            kwargs |= {"initial_state": state.decode(), "output_final_state": True}
            out, final = original(query, key, value, *args, **kwargs)
            state.encode(final)
            return out, state
        token = (x[:, 0] for x in (query, key, value, kwargs["g"], kwargs["beta"]))
        out = state.update(*token, normalize=kwargs.get("use_qk_l2norm_in_kernel", False))
        return out.to(query.dtype).unsqueeze(1), state

    return wrapper


def _many_tokens(original: Callable) -> Callable:
    """Starts from the decoded state; the cache packs the FP32 state that comes back (paper, appendix A.4)."""

    def wrapper(query, key, value, *args, **kwargs):
        state = kwargs.get("initial_state")
        if isinstance(state, PackedState):
            _refuse_packed_sequences(kwargs)
            kwargs["initial_state"] = state.decode()
        return original(query, key, value, *args, **kwargs)

    return wrapper


def _refuse_packed_sequences(kwargs: dict) -> None:
    given = [name for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx") if kwargs.get(name) is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)}: several sequences packed into one row cannot share a DAMPStateCache, which keeps one "
            "state per row. Put the sequences into rows of a left-padded batch."
        )
