"""Keys of many tokens, rotated, and their values as they are, into the place where attention reads them."""

import torch

from .on_device import on_device
from .ops import MAX_HEAD_DIM, MODEL_DTYPES, Backend, _choose, _require, _triton_problem


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
    *,
    backend: Backend = "auto",
) -> None:
    """``keys[:, :, i]`` becomes ``key[:, :, slots[i]]`` after RoPE, ``values[:, :, i]`` is ``value[:, :, slots[i]]``.

    Half-split RoPE, ``x * cos + rotate_half(x) * sin``; every operation rounds to the dtype that PyTorch gives it, the
    result to the dtype of ``keys``. No gradient flows through it.

    Args:
        key: ``[B, H, m, D]`` bf16, fp16 or fp32, D even; innermost contiguous, like all tensors here.
        cos, sin: ``[B or 1, n, D]``, both of one of these dtypes.
        keys: ``[B, H, n, D]`` in the dtype of ``key``, changed in place.
        value, values: like ``key`` and ``keys``, or both None.
        slots: int64 ``[n]``, below m, read on the device only; None: in order, and m = n.
        backend: "auto" runs the Triton kernel on CUDA, else the reference.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or ``backend="triton"`` is impossible here.
    """
    _require(key.dim() == 4 and key.shape[3] % 2 == 0, "key", key, "[B, H, m, D] with even D")
    batch, heads, _, head_dim = key.shape
    count = key.shape[2] if slots is None else len(slots)
    shape = (batch, heads, count, head_dim)
    _require(keys.shape == shape, "keys", keys, str(list(shape)))
    if (value is None) != (values is None):
        raise ValueError("value and values must be given together, or neither.")
    if value is not None:
        _require(value.shape == key.shape, "value", value, f"{list(key.shape)}, as key")
        _require(values.shape == shape, "values", values, str(list(shape)))
    if slots is not None:
        fits = slots.dim() == 1 and slots.dtype == torch.int64 and slots.is_contiguous()
        _require(fits, "slots", slots, "[n], contiguous torch.int64")
    check_angles(cos, sin, batch, count, head_dim)
    tensors = {"key": key, "keys": keys, "cos": cos, "sin": sin}
    tensors |= {} if value is None else {"value": value, "values": values}
    check_inner(tensors)
    for name in ("keys", "value", "values"):
        if name in tensors and tensors[name].dtype != key.dtype:
            raise ValueError(f"{name} is {tensors[name].dtype}; it needs the dtype of key, {key.dtype}.")
    kernel = copy_backend(rope_copy_triton, key, cos, head_dim, backend) == "triton"
    run = on_device(rope_copy_triton, key.device) if kernel else rope_copy_reference
    run(key, cos, sin, keys, value, values, slots)


def rope_copy_reference(
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    value: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> None:
    """Same contract as `rope_copy`."""
    if slots is not None:
        key = key.index_select(2, slots)
        value = None if value is None else value.index_select(2, slots)
    keys.copy_(turn(key, cos, sin))
    if value is not None:
        values.copy_(value)


def turn(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split RoPE of ``[B, heads, n, D]`` in the dtype that PyTorch promotes to."""
    first, second = states.chunk(2, dim=-1)
    return states * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)


def check_angles(cos: torch.Tensor, sin: torch.Tensor, batch: int, count: int, head_dim: int) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 3 and table.shape[0] in (1, batch) and table.shape[1:] == (count, head_dim)
        _require(fits, name, table, f"[1 or {batch}, {count}, {head_dim}]")
    if cos.dtype != sin.dtype:
        raise ValueError(f"cos is {cos.dtype} and sin {sin.dtype}; they need one dtype.")


def check_inner(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; the last dimension must be contiguous.")


def copy_backend(kernel, states: torch.Tensor, cos: torch.Tensor, head_dim: int, backend: Backend) -> str:
    """ "triton" or "reference": what copies states of that dtype, device and size."""
    problem = _triton_problem(kernel, states.device, states.dtype)
    if problem is None and (head_dim > MAX_HEAD_DIM or cos.dtype not in MODEL_DTYPES):
        problem = f"there is no kernel for head_dim {head_dim} (at most {MAX_HEAD_DIM}) with {cos.dtype} angles"
    available = "triton" if problem is None else "reference"
    return _choose(backend, available, problem or "Triton kernel", states.device)
