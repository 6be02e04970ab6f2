"""Nearest codebook entry: the CUDA C++ kernel (``vq_encode.cu``) of Hopper GPUs."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

import torch

from .cuda_module import CudaError, CudaKernel, cuda_problem, load_kernel
from .on_device import capability


SOURCE = os.path.join(os.path.dirname(__file__), "vq_encode.cu")
SIZES = (8, 16, 32)  # coordinates of a vector
WARPGROUPS = 4  # of a block; a multiprocessor holds one, as each thread has 128 registers
CHUNK = 64  # of the source: tokens of a warpgroup
PAGED_STEPS = 4  # of `vq_encode_chunk_cuda`, at most; of the source: pointers of a Side


def encode_cuda_problem(device: torch.device, dtype: torch.dtype, steps: int, channels: int) -> str | None:
    """Why the CUDA kernel does not take these sizes, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it is for bfloat16 and float16, not {dtype}"
    if steps * channels not in SIZES:
        return f"it is for T_c * c in {SIZES}"
    # Compared by name before CUDA is asked anything: this also answers on machines without it.
    if device.type != "cuda" or capability(device)[0] != 9:
        return "it is for Hopper GPUs (compute capability 9.x)"
    return _build_problem(
        dtype, steps, channels, torch.cuda.current_device() if device.index is None else device.index
    )


@functools.cache
def _build_problem(dtype: torch.dtype, steps: int, channels: int, device: int) -> str | None:
    problem = cuda_problem()
    if problem is not None:
        return problem
    try:
        # Compiled here, so that what fails shows before it is chosen.
        _kernel(dtype, steps, channels, True, True, False, device)
    except (CudaError, OSError) as error:
        return str(error)
    return None


def shared_bytes(size: int) -> int:
    """Dynamic shared memory of a block: ``GROUPS * PRODUCTS * PRODUCT`` of the source."""
    products = {8: 2, 16: 3, 32: 5}[size]
    return 64 // size * products * 8192


def _kernel(
    dtype: torch.dtype, steps: int, channels: int, weighted: bool, vector: bool, paged: bool, device: int
) -> CudaKernel:
    size = steps * channels
    macros = {
        "STEPS": steps,
        "CHANNELS": channels,
        "HALF_INPUT": int(dtype == torch.float16),
        "WEIGHTED": int(weighted),
        "VECTOR": int(vector),
        "PAGED": int(paged),
        "WARPGROUPS": WARPGROUPS,
    }
    return load_kernel(SOURCE, "vq_encode", tuple(macros.items()), device, shared_bytes(size), True)


class _Side(ctypes.Structure):
    """``Side`` of the source: keys, or values."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tables", "half_norms", "metric")),
        ("states", ctypes.c_void_p * PAGED_STEPS),
        ("window", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, coder, states: Sequence[torch.Tensor], window: torch.Tensor | None = None) -> _Side:
        tables, half_norms, metric = (None if tensor is None else tensor.data_ptr() for tensor in coder)
        pointers = (ctypes.c_void_p * PAGED_STEPS)(*(tensor.data_ptr() for tensor in states))
        return cls(tables, half_norms, metric, pointers, None if window is None else window.data_ptr())


_Sides = _Side * 2


def _unit(steps: int, channels: int) -> int:
    """Numbers that a lane loads at once: a quarter of a vector, or of two at ``T_c = c = 4``."""
    return 8 if steps == channels == 4 else steps * channels // 4


def _in_pieces(groups: int, channels: int, steps: int, *states: torch.Tensor) -> bool:
    """Whether what a lane loads is contiguous and aligned, in these tensors of steps, or of vectors, of one size."""
    unit = _unit(steps, channels)
    if steps > 4 or (unit == 8 and channels == 4 and groups % 2):
        return False
    starts = [state.data_ptr() // state.element_size() for state in states]
    strides = [stride for state in states for stride in state.stride()[:-1]]
    return all(state.stride(-1) == 1 for state in states) and all(n % unit == 0 for n in (*starts, *strides))


def _tables_in_pieces(coder) -> bool:
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in coder)


@functools.cache  # tried out for one prompt length, asked for in every layer
def _split(tokens: int, columns: int, processors: int) -> int:
    """Tokens per block, so that blocks (``columns`` a range of tokens) fill the processors evenly."""
    chunks = -(-tokens // CHUNK)

    def cost(splits: int) -> int:
        # In chunks; building the tables of a block costs about as much as four.
        return -(-columns * splits // processors) * (-(-chunks // splits) + 4)

    splits = min(range(1, min(chunks, processors) + 1), key=cost)
    return -(-chunks // splits) * CHUNK


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def vq_encode_cuda(
    vectors: torch.Tensor, tables: torch.Tensor, half_norms: torch.Tensor, metric: torch.Tensor | None = None
) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.vq_encode`, for what `encode_cuda_problem` lets through."""
    steps, tokens, heads, _ = vectors.shape
    groups, _, channels = tables.shape[2:]
    device = vectors.device
    codes = torch.empty(tokens, heads, groups, dtype=torch.uint8, device=device)
    if tokens == 0:
        return codes
    coder = (tables, half_norms, metric)
    vector = _in_pieces(groups, channels, steps, vectors) and _tables_in_pieces(coder)
    kernel = _kernel(vectors.dtype, steps, channels, metric is not None, vector, False, device.index)
    columns = heads * -(-groups // (64 // (steps * channels)))
    per_block = _split(tokens, columns, _processors(device.index))
    per_token = heads * groups
    _launch(
        kernel,
        (columns, -(-tokens // per_block), 1),
        _Sides(_Side.of(coder, [vectors])),
        codes,
        (tokens, heads, groups, per_block),
        vectors.stride(),
        code_strides=(0, 0, 8 * per_token, groups, 1, per_token),
    )
    return codes


def chunk_cuda_problem(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    window: torch.Tensor,
    key,
    value,
) -> str | None:
    """Why the CUDA kernel does not encode this chunk, or None."""
    steps, _, groups, _, channels = (len(keys), *key.tables.shape[1:])
    problem = encode_cuda_problem(window.device, window.dtype, steps, channels)
    if problem is not None:
        return problem
    if steps > PAGED_STEPS:
        return f"it is for at most {PAGED_STEPS} steps a code"
    states = (*keys, *values)
    if any(state.stride() != keys[0].stride() for state in states[1:]):
        return "keys and values of all steps must lie alike"
    if not _in_pieces(groups, channels, steps, *states, window):
        return "states and window must be contiguous in their last dimension, and begin and step by whole pieces"
    if not (_tables_in_pieces(key) and _tables_in_pieces(value)):
        return "tables, norms and metric must lie at multiples of 16 bytes"
    return None


def vq_encode_chunk_cuda(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    window: torch.Tensor,
    slots: torch.Tensor,
    first: int,
    codes: torch.Tensor,
    key,
    value,
) -> None:
    """Same contract as `hf_lowbit_kernels.vq_encode_chunk`, for what has no `chunk_cuda_problem`."""
    steps, (batch, heads, _, _) = len(keys), keys[0].shape
    groups, channels, tokens = key.tables.shape[2], key.tables.shape[4], 8 * codes.shape[2]
    device = window.device.index
    kernel = _kernel(window.dtype, steps, channels, key.metric is not None, True, True, device)
    columns = heads * -(-groups // (64 // (steps * channels)))
    per_block = _split(tokens, 2 * columns * batch, _processors(device))
    splits = -(-tokens // per_block)
    stride_b, stride_h, stride_n, _ = keys[0].stride()
    stride_wt, _, stride_wb, stride_wh, stride_wn, _ = window.stride()
    cs, cb, cp, ch, cn, cg = codes.stride()
    _launch(
        kernel,
        (columns, batch * splits, 2),
        _Sides(_Side.of(key, keys, window[:, 0]), _Side.of(value, values, window[:, 1])),
        codes,
        (tokens, heads, groups, per_block),
        (0, stride_n, stride_h, 1),
        slots=slots,
        rows=(len(slots), first, splits),
        window_strides=(stride_b, stride_wt, stride_wb, stride_wh, stride_wn),
        code_strides=(cs, cb, cp, ch, cg, cn),
    )


def _launch(
    kernel: CudaKernel,
    grid: tuple[int, int, int],
    sides: ctypes.Array,
    codes: torch.Tensor,
    sizes: tuple[int, int, int, int],
    strides: tuple[int, int, int, int],
    slots: torch.Tensor | None = None,
    rows: tuple[int, int, int] = (0, 0, 1),
    window_strides: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
    code_strides: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0),
) -> None:
    """In the order of the source."""
    kernel(
        grid,
        128 * WARPGROUPS,
        sides,
        ctypes.c_void_p(codes.data_ptr()),
        *map(ctypes.c_int, sizes),
        *map(ctypes.c_longlong, strides),
        ctypes.c_float(-0.0),
        ctypes.c_void_p(None if slots is None else slots.data_ptr()),
        *map(ctypes.c_int, rows),
        *map(ctypes.c_longlong, (*window_strides, *code_strides)),
    )
