"""Public operations of a decoder layer around its matrices: argument checks, then the Triton kernel or the reference.

Each is one launch. They know tensors, no model: which norm follows which residual is the caller's business.
"""

from typing import Literal

import torch

from .elementwise_reference import (
    norm_add_norm_reference,
    rms_norm_reference,
    rope_store_reference,
    swiglu_reference,
)
from .on_device import on_device
from .ops import MAX_HEAD_DIM, Backend, _choose, _require, _triton_problem


try:
    from .elementwise_triton import norm_add_norm_triton, rms_norm_triton, rope_store_triton, swiglu_triton
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "triton":
        raise
    norm_add_norm_triton = rms_norm_triton = rope_store_triton = swiglu_triton = None


MAX_NORM_SIZE = 16384  # a program holds a whole row


def elementwise_backend(
    device: torch.device | str, dtype: torch.dtype, hidden: int = 1, head_dim: int = 2
) -> tuple[Literal["triton", "reference"], str]:
    """Which implementation ``backend="auto"`` runs for tensors of one dtype, and why.

    Args:
        device: where the tensors are.
        dtype: of all of them.
        hidden: size of the rows to normalize.
        head_dim: D of the heads to rotate.
    """
    device = torch.device(device)
    problem = _triton_problem(rms_norm_triton, device, dtype)
    if problem is None and hidden > MAX_NORM_SIZE:
        problem = f"there is no norm kernel for rows of {hidden} (at most {MAX_NORM_SIZE})"
    if problem is None and head_dim > MAX_HEAD_DIM:
        problem = f"there is no RoPE kernel for head_dim {head_dim} (at most {MAX_HEAD_DIM})"
    if problem is not None:
        return "reference", problem
    return "triton", f"Triton kernels on {device.type}"


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend = "auto") -> torch.Tensor:
    """``weight * (x / sqrt(mean(x ** 2) + eps))``: fp32 up to the rounded quotient, the product in the dtype of ``x``.

    Args:
        x: ``[..., n]`` bf16, fp16 or fp32.
        weight: ``[n]``, same dtype. With other dtypes "auto" takes the reference, which promotes like PyTorch.
        eps: added to the mean square.
        backend: "auto" runs what `elementwise_backend` names. "triton" or "reference" force one.

    Returns:
        As ``x``, contiguous.

    Raises:
        ValueError: shapes do not fit, or ``backend="triton"`` is impossible here.
    """
    _check_norm(x, weight)
    run = _pick(backend, rms_norm_triton, rms_norm_reference, x, weight, hidden=x.shape[-1])
    return run(x, weight, eps)


def norm_add_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    eps: float,
    next_eps: float | None = None,
    *,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual after a block that ends in a norm, and the input of the next block that begins with one.

    ``total = residual + rms_norm(x, weight, eps)`` and ``rms_norm(total, next_weight, next_eps)``.

    Args:
        x, residual: ``[..., n]`` bf16, fp16 or fp32.
        weight, next_weight: ``[n]``; dtypes as in `rms_norm`.
        eps, next_eps: of the two norms; the same if ``next_eps`` is None.
        backend: as in `rms_norm`.

    Returns:
        Both as ``x``, contiguous.

    Raises:
        ValueError: as in `rms_norm`.
    """
    _check_norm(x, weight)
    _check_norm(x, next_weight, "next_weight")
    _require(residual.shape == x.shape, "residual", residual, f"{list(x.shape)}, as x")
    tensors = (x, weight, residual, next_weight)
    run = _pick(backend, norm_add_norm_triton, norm_add_norm_reference, *tensors, hidden=x.shape[-1])
    return run(*tensors, eps, eps if next_eps is None else next_eps)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, backend: Backend = "auto") -> torch.Tensor:
    """``silu(gate) * up``; SiLU in fp32, rounded before the product.

    Args:
        gate, up: ``[..., n]`` of one dtype, innermost contiguous: two tensors, or the halves of a merged projection.
        backend: as in `rms_norm`.

    Returns:
        As ``gate``, contiguous.

    Raises:
        ValueError: as in `rms_norm`.
    """
    _require(gate.shape == up.shape, "up", up, f"{list(gate.shape)}, as gate")
    return _pick(backend, swiglu_triton, swiglu_reference, gate, up)(gate, up)


def rope_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
    *,
    rotate_key: bool,
    backend: Backend = "auto",
) -> torch.Tensor:
    """One token per row: rotates its query, and puts its key and value where the cache keeps them.

    Half-split RoPE, ``x * cos + rotate_half(x) * sin`` with every operation rounded, as models compute it.

    Args:
        query: ``[B, Hq, D]`` bf16, fp16 or fp32.
        key, value: ``[B, H, D]``, innermost contiguous like the query: three tensors, or parts of a merged projection.
        cos, sin: ``[B or 1, D]``, same dtype. With others "auto" takes the reference, which promotes like PyTorch.
        keys, values: ``[B, H, S, D]``, changed in place; innermost contiguous, dtype of key and value.
        slot: int64 ``[B]``, below S, the place of each row's token; read on the device only.
        rotate_key: store the key after RoPE (a full-precision cache) or as it is.
        backend: as in `rms_norm`.

    Returns:
        The rotated query ``[B, Hq, D]``.

    Raises:
        ValueError: shapes or dtypes do not fit, or ``backend="triton"`` is impossible here.
    """
    _require(query.dim() == 3 and query.shape[2] % 2 == 0, "query", query, "[B, Hq, D] with even D")
    batch, _, head_dim = query.shape
    _require(key.dim() == 3 and key.shape[::2] == (batch, head_dim), "key", key, f"[{batch}, H, {head_dim}]")
    _require(value.shape == key.shape, "value", value, f"{list(key.shape)}, as key")
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 2 and table.shape[0] in (1, batch) and table.shape[1] == head_dim
        _require(fits, name, table, f"[1 or {batch}, {head_dim}]")
    for name, store in (("keys", keys), ("values", values)):
        fits = store.dim() == 4 and (*store.shape[:2], store.shape[3]) == tuple(key.shape)
        _require(fits, name, store, f"[{batch}, {key.shape[1]}, S, {head_dim}]")
        if store.dtype != key.dtype or value.dtype != key.dtype:
            raise ValueError(f"{name} are {store.dtype}; key ({key.dtype}) and value ({value.dtype}) need that dtype.")
    _require(slot.dtype == torch.int64 and slot.shape == (batch,), "slot", slot, f"[{batch}], int64")
    tensors = (query, key, value, cos, sin, keys, values)
    run = _pick(backend, rope_store_triton, rope_store_reference, *tensors, head_dim=head_dim)
    return run(*tensors, slot, rotate_key=rotate_key)


def _pick(backend: Backend, kernel, reference, *tensors: torch.Tensor, hidden: int = 1, head_dim: int = 2):
    """The implementation that runs on these tensors."""
    first = tensors[0]
    problem = _misfit(tensors)
    if backend == "triton" and problem is not None:
        raise ValueError(f'backend="triton" is not possible: {problem}. Use "auto" or "reference".')
    if backend == "auto" and problem is not None:
        return reference
    available, reason = elementwise_backend(first.device, first.dtype, hidden, head_dim)
    if _choose(backend, available, reason, first.device) == "reference":
        return reference
    return on_device(kernel, first.device)


def _misfit(tensors: tuple[torch.Tensor, ...]) -> str | None:
    """Why no kernel takes these tensors together, or None."""
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        return f"dtypes differ ({', '.join(str(tensor.dtype) for tensor in tensors)})"
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in tensors):
        return "the last dimension of a tensor is not contiguous"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "the kernels have no backward pass"
    return None


def _check_norm(x: torch.Tensor, weight: torch.Tensor, name: str = "weight") -> None:
    _require(x.dim() >= 1 and weight.shape == x.shape[-1:], name, weight, f"{list(x.shape[-1:])}, the last size of x")
