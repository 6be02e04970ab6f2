"""Pages of codes become keys after RoPE, and values: one launch, into the place where attention reads them."""

import torch

from .elementwise_reference import rotate
from .on_device import on_device
from .ops import CHANNELS, Backend, _require, _require_one_device
from .rope_copy import check_angles, check_inner, copy_backend
from .vq_attention_cuda import is_entry_major
from .vq_codes import vq_decode
from .vq_decode_pages_cuda import decode_pages_cuda_problem, layout_problem, vq_decode_pages_cuda


try:
    from .vq_decode_pages_triton import vq_decode_pages_triton
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "triton":
        raise
    vq_decode_pages_triton = None


def vq_decode_pages(
    k_codes: torch.Tensor,
    v_codes: torch.Tensor,
    k_table: torch.Tensor,
    v_table: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """``keys[:, :, 8 p + i]`` becomes the rotated entries of ``k_codes[:, p, :, i]``; values likewise, not rotated.

    Entries round to the dtype of ``keys``, then RoPE as in `rope_copy`.

    Args:
        k_codes, v_codes: uint8 ``[B, P, H, 8, NG]``, any strides; keys before RoPE. The CUDA kernel needs them
            `group_major`.
        k_table, v_table: fp16 ``[H, NG, 256, c]``, ``NG * c = D`` even; c is 1, 2, 4, 8, 16 or 32. Contiguous or, needed
            by the CUDA kernel (the Triton kernel gets a contiguous copy of them), `entry_major`.
        cos, sin: ``[B or 1, 8 P, D]`` bf16, fp16 or fp32, innermost contiguous.
        keys, values: ``[B, H, 8 P, D]`` bf16, fp16 or fp32, innermost contiguous, changed in place.
        backend: "auto" runs the CUDA kernel on Hopper GPUs for D = 128, c of 4 or 8, bf16 or fp16 with angles of the same
            dtype, both layouts above, contiguous tokens (the rows of ``[n, D]``) and strides of keys like those of values,
            all in whole pieces of 16 bytes; else the Triton kernel on CUDA, else the reference.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit, or the backend that was asked for is impossible here.
    """
    if not (k_table.dim() == 4 and k_table.shape == v_table.shape):
        v_shape = tuple(v_table.shape)
        _require(False, "k_table", k_table, f"[H, NG, 256, c], the shape of v_table, which is {v_shape}")
    heads, groups, entries, channels = k_table.shape
    head_dim = groups * channels
    if entries != 256 or channels not in CHANNELS or head_dim % 2:
        raise ValueError(f"k_table has shape {tuple(k_table.shape)}; allowed is [H, D / c, 256, c], c in {CHANNELS}.")
    for name, table in (("k_table", k_table), ("v_table", v_table)):
        if table.dtype != torch.float16 or not (table.is_contiguous() or is_entry_major(table)):
            raise ValueError(
                f"{name} must be torch.float16, contiguous or entry-major, got {table.dtype}, strides {table.stride()}."
            )
    if k_codes.dim() != 5:
        _require(False, "k_codes", k_codes, f"[B, P, {heads}, 8, {groups}]")
    batch, pages = k_codes.shape[:2]
    for name, codes in (("k_codes", k_codes), ("v_codes", v_codes)):
        if codes.shape != (batch, pages, heads, 8, groups) or codes.dtype != torch.uint8:
            _require(False, name, codes, f"[{batch}, {pages}, {heads}, 8, {groups}] torch.uint8")
    for name, states in (("keys", keys), ("values", values)):
        if states.shape != (batch, heads, 8 * pages, head_dim):
            _require(False, name, states, f"[{batch}, {heads}, {8 * pages}, {head_dim}]")
    if keys.dtype != values.dtype or not keys.is_floating_point():
        raise ValueError(f"keys are {keys.dtype} and values {values.dtype}; they need one dtype, bf16, fp16 or fp32.")
    check_angles(cos, sin, batch, 8 * pages, head_dim)
    check_inner(cos=cos, sin=sin, keys=keys, values=values)
    _require_one_device(
        keys=keys, values=values, k_codes=k_codes, v_codes=v_codes, k_table=k_table, v_table=v_table, cos=cos, sin=sin
    )
    tensors = (k_codes, v_codes, k_table, v_table, cos, sin, keys, values)
    run = {"cuda": vq_decode_pages_cuda, "triton": _triton, "reference": vq_decode_pages_reference}
    run[_backend(tensors, channels, head_dim, backend)](*tensors)


def _backend(tensors: tuple[torch.Tensor, ...], channels: int, head_dim: int, backend: Backend) -> str:
    """ "cuda", "triton" or "reference"."""
    cos, keys = tensors[4], tensors[6]
    if backend in ("auto", "cuda"):
        problem = decode_pages_cuda_problem(keys.device, head_dim, channels, keys.dtype, cos.dtype)
        if problem is None:
            problem = layout_problem(*tensors)
        if problem is None:
            return "cuda"
        if backend == "cuda":
            raise ValueError(f'backend="cuda" is not possible: {problem}. Use "auto" or "reference".')
    return copy_backend(vq_decode_pages_triton, keys, cos, head_dim, backend)


def _triton(k_codes, v_codes, k_table, v_table, cos, sin, keys, values) -> None:
    run = on_device(vq_decode_pages_triton, keys.device)
    run(k_codes, v_codes, k_table.contiguous(), v_table.contiguous(), cos, sin, keys, values)


def vq_decode_pages_reference(
    k_codes: torch.Tensor,
    v_codes: torch.Tensor,
    k_table: torch.Tensor,
    v_table: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Same contract as `vq_decode_pages`."""
    keys.copy_(rotate(_states(k_codes, k_table).to(keys.dtype), cos, sin))
    values.copy_(_states(v_codes, v_table))


def _states(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """fp16 ``[B, H, 8 P, D]``."""
    return vq_decode(codes.transpose(2, 3).flatten(1, 2), table).transpose(1, 2)
