"""Keys of many tokens, rotated, and their values as they are, into the place where attention reads them; queries too."""

import functools

import torch

from .elementwise_reference import rotate
from .on_device import on_device
from .ops import MAX_HEAD_DIM, MODEL_DTYPES, Backend, _choose, _require, _require_one_device, _triton_problem


try:
    from .rope_copy_triton import rope_copy_triton
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "triton":
        raise
    rope_copy_triton = None


def rope_copy(
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    queries: torch.Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> None:
    """``keys[:, :, i]`` becomes ``key[:, :, slots[i]]`` after RoPE, ``values[:, :, i]`` is ``value[:, :, slots[i]]``.

    The queries of the same tokens can be rotated in the same launch.

    Half-split RoPE, ``x * cos + rotate_half(x) * sin``; every operation rounds to the dtype that PyTorch gives it, the
    result to the dtype of ``keys``. No gradient flows through it.

    Args:
        key: ``[B, H, m, D]`` bf16, fp16 or fp32, D even; innermost contiguous, like all tensors here.
        cos, sin: ``[B or 1, n, D]``, both of one of these dtypes.
        keys: ``[B, H, n, D]`` in the dtype of ``key``, changed in place.
        value, values: like ``key`` and ``keys``, or both None.
        slots: int64 ``[n]``, below m, read on the device only; None: in order, and m = n.
        query, queries: ``[B, Hq, n, D]`` in the dtype of ``key``, the second changed in place; or both None. Not with ``slots``.
        backend: "auto" runs the Triton kernel on CUDA, else the reference.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit, or ``backend="triton"`` is impossible here.
    """
    if key.dim() != 4 or key.shape[3] % 2 or not key.is_floating_point():
        _require(False, "key", key, "[B, H, m, D] bf16, fp16 or fp32 with even D")
    batch, heads, count, head_dim = source = key.shape
    if slots is not None:
        if slots.dim() != 1 or slots.dtype != torch.int64 or not slots.is_contiguous():
            _require(False, "slots", slots, "[n], contiguous torch.int64")
        count = slots.shape[0]
    shape, dtype = (batch, heads, count, head_dim), key.dtype
    if keys.shape != shape:
        _require(False, "keys", keys, str(list(shape)))
    if (value is None) != (values is None):
        raise ValueError("value and values must be given together, or neither.")
    check_angles(cos, sin, batch, count, head_dim)
    check_inner(key=key, keys=keys, cos=cos, sin=sin)
    if keys.dtype != dtype:
        _refuse_dtype("keys", keys, dtype)
    if value is not None:
        if value.shape != source:
            _require(False, "value", value, f"{list(source)}, as key")
        if values.shape != shape:
            _require(False, "values", values, str(list(shape)))
        check_inner(value=value, values=values)
        for name, tensor in (("value", value), ("values", values)):
            if tensor.dtype != dtype:
                _refuse_dtype(name, tensor, dtype)
    if (query is None) != (queries is None) or (query is not None and slots is not None):
        raise ValueError("query and queries must be given together and without slots, or neither.")
    if query is not None:
        if query.dim() != 4 or (query.shape[0], *query.shape[2:]) != (batch, count, head_dim):
            _require(False, "query", query, f"[{batch}, Hq, {count}, {head_dim}]")
        if queries.shape != query.shape:
            _require(False, "queries", queries, f"{list(query.shape)}, as query")
        check_inner(query=query, queries=queries)
        for name, tensor in (("query", query), ("queries", queries)):
            if tensor.dtype != dtype:
                _refuse_dtype(name, tensor, dtype)
    _require_one_device(
        key=key, cos=cos, sin=sin, keys=keys, value=value, values=values, slots=slots, query=query, queries=queries
    )
    kernel = copy_backend(rope_copy_triton, key, cos, head_dim, backend) == "triton"
    run = on_device(rope_copy_triton, key.device) if kernel else rope_copy_reference
    run(key, cos, sin, keys, value, values, slots, query, queries)


def rope_copy_reference(
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    query: torch.Tensor | None = None,
    queries: torch.Tensor | None = None,
) -> None:
    """Same contract as `rope_copy`."""
    if query is not None:
        queries.copy_(rotate(query, cos, sin))
    if slots is not None:
        key = key.index_select(2, slots)
        value = None if value is None else value.index_select(2, slots)
    keys.copy_(rotate(key, cos, sin))
    if value is not None:
        values.copy_(value)


def check_angles(cos: torch.Tensor, sin: torch.Tensor, batch: int, count: int, head_dim: int) -> None:
    """ValueError unless both are ``[1 or batch, count, head_dim]`` of one floating-point dtype."""
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (1, count, head_dim) and table.shape != (batch, count, head_dim):
            _require(False, name, table, f"[1 or {batch}, {count}, {head_dim}]")
    if cos.dtype != sin.dtype or not cos.is_floating_point():
        raise ValueError(f"cos is {cos.dtype} and sin {sin.dtype}; they need one dtype, bf16, fp16 or fp32.")


def check_inner(**tensors: torch.Tensor) -> None:
    """ValueError unless the last dimension of each is contiguous."""
    for name, tensor in tensors.items():
        if tensor.stride()[-1] != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; the last dimension must be contiguous.")


def _refuse_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    raise ValueError(f"{name} is {tensor.dtype}; it needs the dtype of key, {dtype}.")


@functools.cache  # asked for at every call, and CUDA answers slowly
def copy_problem(kernel, device: torch.device, dtype: torch.dtype, angles: torch.dtype, head_dim: int) -> str | None:
    """Why no Triton kernel copies states of that dtype, device and size with such angles, or None."""
    problem = _triton_problem(kernel, device, dtype)
    if problem is None and (head_dim > MAX_HEAD_DIM or angles not in MODEL_DTYPES):
        problem = f"there is no kernel for head_dim {head_dim} (at most {MAX_HEAD_DIM}) with {angles} angles"
    return problem


def copy_backend(kernel, states: torch.Tensor, cos: torch.Tensor, head_dim: int, backend: Backend) -> str:
    """ "triton" or "reference": what copies states of that dtype, device and size."""
    problem = copy_problem(kernel, states.device, states.dtype, cos.dtype, head_dim)
    available = "triton" if problem is None else "reference"
    return _choose(backend, available, problem or "Triton kernel", states.device)
