"""Pages of codes become rotated keys, and values: the CUDA C++ kernel (``vq_decode_pages.cu``) of Hopper GPUs."""

import ctypes
import functools
import os

import torch

from .cuda_module import CudaError, CudaKernel, cuda_problem, load_kernel


SOURCE = os.path.join(os.path.dirname(__file__), "vq_decode_pages.cu")
CHANNELS = (4, 8)
HEAD_DIM = 128
DTYPES = (torch.bfloat16, torch.float16)
TABLE_BYTES, WARPS = 65536, 16  # of the source
RESIDENT = 2  # blocks on a multiprocessor: their registers and tables fit


def decode_pages_cuda_problem(
    device: torch.device, head_dim: int, channels: int, dtype: torch.dtype, angles: torch.dtype
) -> str | None:
    """Why the CUDA kernel does not take these sizes and dtypes, or None."""
    if head_dim != HEAD_DIM or channels not in CHANNELS:
        return "it is for head_dim 128 and 4 or 8 channels per code"
    if dtype not in DTYPES or angles != dtype:
        return f"it is for bfloat16 or float16 with angles of the same dtype, not {dtype} with {angles} angles"
    if device.type != "cuda":
        return "it is for Hopper GPUs (compute capability 9.x)"
    found = _kernel(channels, dtype, torch.cuda.current_device() if device.index is None else device.index)
    return found if isinstance(found, str) else None


@functools.cache
def _kernel(channels: int, dtype: torch.dtype, device: int) -> CudaKernel | str:
    """The kernel, or why there is none: asked for at every call, so both are kept."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "it is for Hopper GPUs (compute capability 9.x)"
    problem = cuda_problem()
    if problem is not None:
        return problem
    macros = (("CHANNELS", channels), ("HALF_STATES", int(dtype == torch.float16)))
    try:
        return load_kernel(SOURCE, "vq_decode_pages", macros, device, TABLE_BYTES + 16)
    except (CudaError, OSError) as error:
        return str(error)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def layout_problem(
    k_codes: torch.Tensor,
    v_codes: torch.Tensor,
    k_table: torch.Tensor,
    v_table: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> str | None:
    """What lies otherwise in memory than the kernel reads and writes it, or None."""
    codes, angles, states = k_codes.stride(), cos.stride(), keys.stride()
    if codes != v_codes.stride() or codes[3:] != (1, 8):
        return "codes must be group-major, keys' like values'"
    heads, groups, _, channels = k_table.shape
    entry_major = (256 * HEAD_DIM, channels, HEAD_DIM, 1)
    if k_table.stride()[1:] != entry_major[1:] or v_table.stride()[1:] != entry_major[1:]:
        return "tables must be entry-major"
    if heads > 1 and (k_table.stride(0) != entry_major[0] or v_table.stride(0) != entry_major[0]):
        return "tables must be entry-major"
    if angles != sin.stride() or angles[1] != HEAD_DIM or states != values.stride() or states[2] != HEAD_DIM:
        return "tokens of angles, keys and values must be contiguous, sin's like cos's and values' like keys'"
    # Pieces of 8 bytes of codes, of 16 of all else.
    if (codes[0] | codes[1] | codes[2] | k_codes.data_ptr() | v_codes.data_ptr()) % 8:
        return "codes must lie at multiples of 8 bytes"
    pointers = k_table.data_ptr() | v_table.data_ptr() | cos.data_ptr() | sin.data_ptr() | keys.data_ptr()
    if (pointers | values.data_ptr()) % 16 or (angles[0] | states[0] | states[1]) % 8:
        return "tables, angles, keys and values must lie at multiples of 16 bytes"
    return None


def vq_decode_pages_cuda(
    k_codes: torch.Tensor,
    v_codes: torch.Tensor,
    k_table: torch.Tensor,
    v_table: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Same contract as `hf_lowbit_kernels.vq_decode_pages`.

    The tensors must have no `layout_problem`, their sizes no `decode_pages_cuda_problem`.
    """
    batch, pages, heads = k_codes.shape[:3]
    if keys.numel() == 0:
        return
    device = keys.device.index
    # As many blocks as fit at once, but a page for each warp: a block begins with copying its table.
    splits = max(1, min(RESIDENT * _multiprocessors(device) // (2 * heads * batch), pages // WARPS))
    share = -(-pages // splits)
    long = ctypes.c_longlong
    tensors = (k_codes, v_codes, k_table, v_table, cos, sin, keys, values)
    _kernel(k_table.shape[3], keys.dtype, device)(
        (-(-pages // share), 2 * heads, batch),
        32 * WARPS,
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
        ctypes.c_int(pages),
        ctypes.c_int(share),
        *map(long, k_codes.stride()[:3]),
        long(cos.stride(0) if cos.shape[0] > 1 else 0),
        *map(long, keys.stride()[:2]),
    )
