"""Nearest codebook entry: the CUDA C++ kernel (``vq_encode.cu``) of Hopper GPUs."""

import ctypes
import functools
import os

import torch

from .cuda_module import CudaError, CudaKernel, cuda_problem, load_kernel


SOURCE = os.path.join(os.path.dirname(__file__), "vq_encode.cu")
SIZES = (8, 16, 32)  # coordinates of a vector
WARPS = 16  # of a block; a multiprocessor holds one, as each thread has 128 registers
TILES = {8: 4, 16: 2, 32: 2}  # size -> 16-token tiles of a warp; more would not fit into its registers
UNROLL = 2


def encode_cuda_problem(device: torch.device, dtype: torch.dtype, steps: int, channels: int) -> str | None:
    """Why the CUDA kernel does not take these sizes, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it is for bfloat16 and float16, not {dtype}"
    if steps * channels not in SIZES:
        return f"it is for T_c * c in {SIZES}"
    # Compared by name before CUDA is asked anything: this also answers on machines without it.
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
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
        _kernel(dtype, steps, channels, True, True, device)
    except (CudaError, OSError) as error:
        return str(error)
    return None


def shared_bytes(size: int) -> int:
    """Dynamic shared memory of a block: the ``FRAGMENTS`` and ``NORMS`` of the source."""
    return 65536 + 64 // size * 2048


def _kernel(dtype: torch.dtype, steps: int, channels: int, weighted: bool, vector: bool, device: int) -> CudaKernel:
    size = steps * channels
    macros = {
        "STEPS": steps,
        "CHANNELS": channels,
        "HALF_INPUT": int(dtype == torch.float16),
        "WEIGHTED": int(weighted),
        "VECTOR": int(vector),
        "TILES": TILES[size],
        "WARPS": WARPS,
        "UNROLL": UNROLL,
    }
    return load_kernel(SOURCE, "vq_encode", tuple(macros.items()), device, shared_bytes(size))


def _in_pieces(vectors: torch.Tensor, groups: int, channels: int) -> bool:
    """Whether what a lane loads is contiguous and aligned: a quarter of a vector, or of two at ``T_c = c = 4``."""
    steps = vectors.shape[0]
    if steps > 4 or vectors.stride(3) != 1:
        return False
    pair = steps == channels == 4
    unit = 16 if pair else steps * channels // 4 * vectors.element_size()
    starts = (vectors.data_ptr(), *(stride * vectors.element_size() for stride in vectors.stride()[:3]))
    return all(start % unit == 0 for start in starts) and not (pair and groups % 2)


@functools.cache  # tried out for one prompt length, asked for in every layer
def _split(tokens: int, chunk: int, columns: int, processors: int) -> int:
    """Tokens per block, so that blocks (``columns`` a range of tokens) fill the processors evenly."""
    chunks = -(-tokens // chunk)

    def cost(splits: int) -> int:
        # In chunks; building the tables of a block costs about as much as four.
        return -(-columns * splits // processors) * (-(-chunks // splits) + 4)

    splits = min(range(1, min(chunks, processors) + 1), key=cost)
    return -(-chunks // splits) * chunk


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
    size = steps * channels
    vector = _in_pieces(vectors, groups, channels)
    kernel = _kernel(vectors.dtype, steps, channels, metric is not None, vector, device.index)
    columns = heads * -(-groups // (64 // size))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    per_block = _split(tokens, 16 * TILES[size], columns, processors)
    tensors = (vectors, tables, half_norms, half_norms if metric is None else metric, codes)
    kernel(
        (columns, -(-tokens // per_block), 1),
        32 * WARPS,
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
        *(ctypes.c_int(n) for n in (tokens, heads, groups, per_block)),
        *(ctypes.c_longlong(stride) for stride in vectors.stride()),
        ctypes.c_float(-0.0),
    )
    return codes
