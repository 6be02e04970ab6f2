"""Pages of a prompt become codes: one launch for keys and values, where the layers left them and the codes belong."""

from collections.abc import Sequence

import torch

from .ops import (
    CUDA_TOKENS,
    Backend,
    _choose,
    _require,
    _require_one_device,
    attention_backend,
    vq_encode,
)
from .vq_encode_cuda import chunk_cuda_problem, vq_encode_chunk_cuda
from .vq_encode_pages import PageCoder, check_coders
from .vq_encode_reference import vq_encode_reference


def vq_encode_chunk(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    window: torch.Tensor,
    slots: torch.Tensor,
    first: int,
    codes: torch.Tensor,
    key: PageCoder,
    value: PageCoder,
    *,
    backend: Backend = "auto",
) -> None:
    """``codes[side, b, p, :, i]`` becomes the code of token ``first + 8 p + i`` of row b.

    A row's tokens are those of its window at ``slots``, followed by those of the chunk. The CUDA kernel's codes of a row do
    not depend on other rows; the other ways are those of `vq_encode`.

    Args:
        keys, values: T_c tensors ``[B, H, n, D]``, one for each loop step, bf16, fp16 or fp32; keys before RoPE.
        window: ``[T_c, 2, B, H, S, D]`` in their dtype; 2: keys before RoPE, values.
        slots: int64 ``[lead]`` contiguous, below S, read on the device only.
        first: 0 or more.
        codes: uint8 ``[2, B, P, H, 8, NG]``, changed in place, any strides; ``first + 8 P <= lead + n``.
        key, value: both with a metric or both without.
        backend: "auto" runs the CUDA kernel on Hopper GPUs for bf16 and fp16, T_c of at most 4, ``T_c * c`` of 8, 16 or 32, 256
            tokens a row and more, and states that lie alike and by whole pieces; else it gathers the tokens for `vq_encode`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend that was asked for is impossible here.
    """
    steps = len(key.tables)
    if not (len(keys) == len(values) == steps and keys[0].dim() == 4):
        raise ValueError(f"keys and values need {steps} tensors [B, H, n, D] each, as tables have T_c = {steps}.")
    batch, heads, count, head_dim = keys[0].shape
    for name, states in (("keys", keys), ("values", values)):
        for step, state in enumerate(states):
            if state.shape != keys[0].shape or state.dtype != window.dtype:
                expected = f"{list(keys[0].shape)} {window.dtype}"
                _require(False, f"{name}[{step}]", state, expected)
            if state.device != window.device:
                _require_one_device(window=window, **{f"{name}[{step}]": state})
    fits = window.dim() == 6 and window.shape[:4] == (steps, 2, batch, heads) and window.shape[5] == head_dim
    _require(fits, "window", window, f"[{steps}, 2, {batch}, {heads}, S, {head_dim}]")
    check_coders(window, codes, key, value)
    fits = slots.dim() == 1 and slots.dtype == torch.int64 and slots.is_contiguous()
    _require(fits, "slots", slots, "[lead], contiguous torch.int64")
    last, there = first + 8 * codes.shape[2], len(slots) + count
    if first < 0 or last > there:
        raise ValueError(
            f"codes hold tokens {first} to {last} of a row; there are {len(slots)} from the window and {count} of the chunk."
        )
    _require_one_device(window=window, codes=codes, slots=slots)

    if codes.numel() == 0:
        return
    available, reason = attention_backend(window.device, 2, 1, window.dtype)
    # By the tokens of a row: which kernel runs must not depend on the others.
    if backend == "cuda" or (backend == "auto" and available == "triton" and 8 * codes.shape[2] >= CUDA_TOKENS):
        problem = chunk_cuda_problem(keys, values, window, key, value)
        available, reason = ("cuda", "") if problem is None else (available, problem)
    name = _choose(backend, available, reason, window.device)
    if name == "cuda":
        vq_encode_chunk_cuda(keys, values, window, slots, first, codes, key, value)
    elif name == "reference":
        vq_encode_chunk_reference(keys, values, window, slots, first, codes, key, value)
    else:
        _gather_and_encode(vq_encode, keys, values, window, slots, first, codes, key, value)


def vq_encode_chunk_reference(keys, values, window, slots, first, codes, key, value) -> None:
    """Same contract as `vq_encode_chunk`."""
    _gather_and_encode(vq_encode_reference, keys, values, window, slots, first, codes, key, value)


def _gather_and_encode(encode, keys, values, window, slots, first: int, codes, key, value) -> None:
    pages = codes.shape[2]
    for side, (states, coder) in enumerate(((keys, key), (values, value))):
        tokens = torch.stack(list(states))  # [T_c, B, H, n, D]
        if len(slots):
            tokens = torch.cat([window[:, side].index_select(3, slots), tokens], dim=3)
        tokens = tokens[:, :, :, first : first + 8 * pages].transpose(2, 3)
        found = encode(tokens.flatten(1, 2), *coder)  # [B * 8 P, H, NG]
        codes[side] = found.unflatten(0, (-1, pages, 8)).transpose(2, 3)
