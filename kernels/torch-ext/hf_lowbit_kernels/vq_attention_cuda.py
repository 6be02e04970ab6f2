"""Decode attention over vector-quantized keys and values: the CUDA C++ kernel (``vq_attention.cu``) of Hopper GPUs."""

import ctypes
import functools
import os

import torch

from .cuda_module import CudaError, CudaKernel, cuda_problem, load_kernel
from .dependent_launch import overlaps
from .rope_tables import RopeTables


SOURCE = os.path.join(os.path.dirname(__file__), "vq_attention.cu")
CHANNELS = (4, 8)
HEAD_DIM = 128
LOG2E = 1.4426950408889634
# Of the source.
WARPS, SLICE, TABLE_BYTES, DEPTH, SLOT, OFFSETS, PARTIALS, PARTIAL, FLAGS = 12, 132, 65536, 3, 1824, 10, 48, 148, 16


def cuda_kernel_problem(
    device: torch.device, head_dim: int, group: int, channels: int, dtype: torch.dtype, sinks: int
) -> str | None:
    """Why the CUDA kernel does not take these sizes, or None."""
    if head_dim != HEAD_DIM or group != 1 or channels not in CHANNELS:
        return "it is for head_dim 128, one query head per kv head and 4 or 8 channels per code"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it is for bfloat16 and float16, not {dtype}"
    if sinks % 8:
        return "it needs sinks in whole pages of 8"
    # Compared by name before CUDA is asked anything: this also answers on machines without it.
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "it is for Hopper GPUs (compute capability 9.x)"
    problem = cuda_problem()
    if problem is not None:
        return problem
    try:
        _kernel(channels, dtype, torch.cuda.current_device() if device.index is None else device.index)
    except (CudaError, OSError) as error:  # compiled here, so that what fails shows before a cache is built on it
        return str(error)
    return None


def _kernel(channels: int, dtype: torch.dtype, device: int) -> CudaKernel:
    macros = (("CHANNELS", channels), ("HALF_INPUT", int(dtype == torch.float16)))
    return load_kernel(SOURCE, "vq_decode_attention", macros, device, shared_bytes())


def entry_major(table: torch.Tensor) -> torch.Tensor:
    """The same table ``[H, NG, 256, c]`` with memory in the order ``[H, 256, NG, c]``, as the CUDA kernel stages it."""
    return table.transpose(1, 2).contiguous().transpose(1, 2)


def is_entry_major(table: torch.Tensor) -> bool:
    return table.transpose(1, 2).is_contiguous()


def shared_bytes() -> int:
    """Shared memory of a block: ``SMEM_BYTES`` of the source."""
    warp = DEPTH * SLOT + 64 + 64
    return 2 * TABLE_BYTES + WARPS * warp + PARTIALS * PARTIAL * 4 + 2 * OFFSETS * (HEAD_DIM // 2) * 4 + FLAGS * 4 + 16


def cuda_layout_problem(
    query: torch.Tensor,
    k_codes: torch.Tensor,
    v_codes: torch.Tensor,
    k_table: torch.Tensor,
    v_table: torch.Tensor,
    k_window: torch.Tensor,
    v_window: torch.Tensor,
    rope: RopeTables,
) -> str | None:
    """Why the CUDA kernel does not take tensors that lie like these, or None."""
    if rope.tile != 8:
        return f"its RoPE tables have tiles of 8, not {rope.tile}"
    if not query.dtype == k_window.dtype == v_window.dtype:
        return f"the window is {k_window.dtype} and {v_window.dtype}, the query {query.dtype}; they must be the same"
    for name, table in (("k_table", k_table), ("v_table", v_table)):
        if not is_entry_major(table):
            return f"{name} is not entry-major (hf_lowbit_kernels.entry_major)"
    if k_codes.numel() and k_codes.stride()[3:] != (1, 8):
        return "k_codes and v_codes are not group-major (hf_lowbit_kernels.group_major)"
    # One pointer and one step serve both sides.
    for name, keys, values in (("codes", k_codes, v_codes), ("window", k_window, v_window)):
        if keys.numel() and keys.stride() != values.stride():
            return f"v_{name} has strides {values.stride()}, k_{name} {keys.stride()}; they must be the same"
    pieces = (
        ("query", query, 2),
        ("k_codes", k_codes, 3),
        ("v_codes", v_codes, 3),
        ("k_window", k_window, 3),
        ("v_window", v_window, 3),
    )
    for name, tensor, outer in pieces:
        size = tensor.element_size()
        if tensor.data_ptr() % 16 or any(stride * size % 16 for stride in tensor.stride()[:outer]):
            return f"{name} does not begin, or step, by whole pieces of 16 bytes"
    return None


def vq_decode_attention_cuda(
    query: torch.Tensor,
    k_codes: torch.Tensor,
    v_codes: torch.Tensor,
    k_table: torch.Tensor,
    v_table: torch.Tensor,
    k_window: torch.Tensor,
    v_window: torch.Tensor,
    lengths: torch.Tensor,
    n_coded: torch.Tensor,
    rope: RopeTables,
    scale: float,
    *,
    sinks: int = 8,
    max_coded: int,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.vq_decode_attention`.

    The tensors must lie as `cuda_layout_problem` wants them.
    """
    batch, heads, head_dim = query.shape
    channels = k_table.shape[3]
    # All blocks must be resident, as they wait for each other's slices. 128: results do not change with a few more SMs.
    resident = torch.cuda.get_device_properties(query.device).multi_processor_count // heads
    splits = max(1, min(num_splits or 128 // heads, resident))
    device = query.device
    kernel = _kernel(channels, query.dtype, device.index)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    scratch = torch.empty(batch * heads * splits * SLICE, dtype=torch.float32, device=device)
    counters = _counters(device, torch.cuda.current_stream(device).cuda_stream, batch * heads)
    tensors = (
        query, k_codes, v_codes, k_table, v_table, k_window, v_window, lengths, n_coded,
        rope.base_cos, rope.base_sin, rope.offset_cos, rope.offset_sin, rope.mirror_cos, rope.mirror_sin, rope.mirror_half,
        scratch, counters, out,
    )  # fmt: skip
    long, uint = ctypes.c_longlong, ctypes.c_uint
    strides = (
        *map(long, query.stride()[:2]),
        long(k_codes.stride(0)), uint(k_codes.stride(1)),
        *map(long, k_window.stride()[:3]),
    )  # fmt: skip
    kernel(
        (splits, heads, 1),
        WARPS * 32,
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
        ctypes.c_float(scale * LOG2E),
        ctypes.c_int(batch),
        ctypes.c_int(sinks),
        ctypes.c_int(k_window.shape[2] - sinks),
        *strides,
        overlap=overlaps(device),
    )
    return out


@functools.cache
def _counter_pool() -> dict[tuple[torch.device, int], list[torch.Tensor]]:
    return {}


def _counters(device: torch.device, stream: int, count: int) -> torch.Tensor:
    """Zeros that the kernel leaves as zeros. Older ones are kept: captured graphs hold their addresses."""
    kept = _counter_pool().setdefault((device, stream), [])
    if not kept or kept[-1].numel() < count:
        kept.append(torch.zeros(max(count, 4096), dtype=torch.int32, device=device))
    return kept[-1]
