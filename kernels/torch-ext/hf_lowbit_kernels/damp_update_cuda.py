"""One decoding step on packed recurrent states: the CUDA C++ kernel (``damp_update.cu``) of Hopper GPUs."""

import ctypes
import functools
import os

import torch

from .cuda_module import CudaError, CudaKernel, cuda_problem, load_kernel
from .damp_layout import GROUP, DampLayout, DampPlan, Rounding


SOURCE = os.path.join(os.path.dirname(__file__), "damp_update.cu")
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
MAX_TILES = 8  # warps of a block
WARPS = 28  # on a multiprocessor; more would not fit into its shared memory at 128 x 128


def damp_cuda_problem(device: torch.device, layout: DampLayout) -> str | None:
    """Why the CUDA kernel does not take this layout here, or None. It rounds to nearest, whatever the layout."""
    if layout.low_bits == 32:
        return "it is for low rows of 8 or 4 bits"
    if layout.dv % GROUP or layout.tiles > MAX_TILES:
        return f"it is for value dimensions that are multiples of {GROUP} up to {GROUP * MAX_TILES}"
    # Compared by name before CUDA is asked anything: this also answers on machines without it.
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "it is for Hopper GPUs (compute capability 9.x)"
    return _build_problem(layout, _index(device))


@functools.cache
def _build_problem(layout: DampLayout, device: int) -> str | None:
    problem = cuda_problem()
    if problem is not None:
        return problem
    try:
        # Compiled here, for some heads and dtypes, so that what fails shows before anything is built on it.
        _kernel(layout, 1, 1, False, True, False, (torch.bfloat16,) * 4, device)
    except (CudaError, OSError) as error:
        return str(error)
    return None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _span(x: torch.Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def shared_bytes(layout: DampLayout) -> int:
    """Dynamic shared memory of a block: ``SPACE`` of the source."""
    high_blocks, low_blocks = -(-layout.high_rows // 16), -(-layout.low_rows // 16)
    last = max(layout.low_offset + 64 * low_blocks * layout.low_bits, layout.record_bytes)
    records = -(-((layout.tiles - 1) * layout.record_bytes + last) // 128) * 128
    coefficients = 512 * (-(-high_blocks // 2) + -(-low_blocks // 4))
    # The inputs of the key channels lie there before.
    return records + max(layout.tiles * coefficients, 16 * layout.dk)


def _kernel(
    layout: DampLayout,
    heads: int,
    ratio: int,
    channel_decay: bool,
    normalize: bool,
    long_indices: bool,
    dtypes: tuple[torch.dtype, ...],
    device: int,
) -> CudaKernel:
    """``dtypes`` of query and key, value, g, beta."""
    macros = {
        "DK": layout.dk,
        "TILES": layout.tiles,
        "HIGH": layout.high_rows,
        "BITS": layout.low_bits,
        "ZERO_POINT": int(layout.zero_point),
        "HEADS": heads,
        "RATIO": ratio,
        "RECORD": layout.record_bytes,
        "LOW_AT": layout.low_offset,
        "SCALES_AT": layout.scale_offset,
        "CHANNEL_DECAY": int(channel_decay),
        "NORMALIZE": int(normalize),
        "INDEX64": int(long_indices),
        "MIN_BLOCKS": max(1, WARPS // layout.tiles),
    }
    macros |= {name: DTYPES[dtype] for name, dtype in zip(("QK", "VALUE", "G", "BETA"), dtypes, strict=True)}
    return load_kernel(SOURCE, "damp_update", tuple(macros.items()), device, shared_bytes(layout))


def damp_update_cuda(
    records: torch.Tensor,
    state_indices: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    plan: DampPlan,
    layout: DampLayout,
    *,
    scale: float,
    normalize: bool = True,
    rounding: Rounding = None,
) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.damp_update`, for what `damp_cuda_problem` lets through."""
    if rounding is not None:
        raise ValueError("the CUDA kernel rounds to nearest; use the Triton kernel for other roundings.")
    batch, heads, _ = value.shape
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    if batch == 0:
        return out
    if key.dtype != query.dtype:
        key, query = key.float(), query.float()
    # Element offsets are 32-bit integers in the kernel. A view of something huge is copied.
    query, key, value, g, beta = (x if _span(x) < 2**31 else x.contiguous() for x in (query, key, value, g, beta))
    kernel = _kernel(
        layout, heads, heads // query.shape[1], g.dim() == 3, normalize, state_indices.dtype == torch.int64,
        (query.dtype, value.dtype, g.dtype, beta.dtype), _index(value.device),
    )  # fmt: skip
    tensors = (
        records, state_indices, query, key, value, g, beta, plan.perm_k, plan.perm_v, plan.column_scale, out,
    )  # fmt: skip
    strides = [x.stride(i) for x in (query, key, value, g, beta) for i in (0, 1)]
    kernel(
        (batch * heads, 1, 1),
        32 * layout.tiles,
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
        ctypes.c_longlong(records.shape[0]),
        ctypes.c_longlong(records.stride(0)),
        *map(ctypes.c_int, strides),
        ctypes.c_float(scale),
    )
    return out
