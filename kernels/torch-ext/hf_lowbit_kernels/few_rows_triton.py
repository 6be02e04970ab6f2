"""Matrix products of one or a few rows: Triton kernels."""

import torch
import triton
import triton.language as tl

from .dependent_launch import overlap_options
from .elementwise_triton import _silu_product


# Per program: 2 rows of the matrix, 512 elements of each at a time, 16 bytes of bf16 per thread and row. Then x is laid out as
# the weights are (no exchange between threads), and small programs follow each other without a gap: larger and smaller ones
# made a decode step 5 to 10 % slower (docs/performance.md).
ROWS, WARPS = 2, 2


def few_rows_linear_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.few_rows_linear`."""
    return _product(x, weight, len(weight), False)


def few_rows_swiglu_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.few_rows_swiglu`."""
    return _product(x, weight, len(weight) // 2, True)


def _product(x: torch.Tensor, weight: torch.Tensor, columns: int, glu: bool, rows: int = ROWS, warps: int = WARPS):
    out = torch.empty(*x.shape[:-1], columns, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    x = x.reshape(-1, size)
    if out.numel() == 0:
        return out
    _few_rows_kernel[len(x), triton.cdiv(columns, rows)](
        x, weight, out, x.stride(0), weight.stride(0), columns,
        SIZE=size, ROWS=rows, BLOCK=min(256 * warps, triton.next_power_of_2(size)), GLU=glu,
        EVEN=columns % rows == 0, num_warps=warps, **overlap_options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _few_rows_kernel(
    x, weight, out, stride_x, stride_w, columns,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GLU: tl.constexpr, EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of one row of x. Rows come first in the grid: those that share weights run side by side."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, BLOCK)
    at = weight + column.to(tl.int64)[:, None] * stride_w + inner[None, :]
    up = weight + (columns + column).to(tl.int64)[:, None] * stride_w + inner[None, :]  # with GLU
    mask = (column < columns)[:, None] & (inner < SIZE)[None, :]
    if OVERLAP:  # two blocks of the matrix are on their way when the kernel ahead ends
        w0 = _load(at, mask, EVEN and BLOCK <= SIZE)
        if GLU:
            u0 = _load(up, mask, EVEN and BLOCK <= SIZE)
        if BLOCK < SIZE:
            mask = (column < columns)[:, None] & (BLOCK + inner < SIZE)[None, :]
            w1 = _load(at + BLOCK, mask, EVEN and 2 * BLOCK <= SIZE)
            if GLU:
                u1 = _load(up + BLOCK, mask, EVEN and 2 * BLOCK <= SIZE)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x += row * stride_x
    first = tl.zeros((ROWS, BLOCK), tl.float32)
    second = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK):
        live = start + inner < SIZE
        values = tl.load(x + start + inner, mask=live, other=0.0).to(tl.float32)
        mask = (column < columns)[:, None] & live[None, :]
        if OVERLAP and start == 0:
            w = w0
        elif OVERLAP and start == BLOCK:
            w = w1
        else:
            w = _load(at + start, mask, EVEN and start + BLOCK <= SIZE)
        first += w.to(tl.float32) * values[None, :]
        if GLU:
            if OVERLAP and start == 0:
                u = u0
            elif OVERLAP and start == BLOCK:
                u = u1
            else:
                u = _load(up + start, mask, EVEN and start + BLOCK <= SIZE)
            second += u.to(tl.float32) * values[None, :]
    result = tl.sum(first, 1).to(out.dtype.element_ty)
    if GLU:
        result = _silu_product(result, tl.sum(second, 1).to(out.dtype.element_ty))
    tl.store(out + row * columns + column, result, mask=column < columns)


@triton.jit
def _load(at, mask, WHOLE: tl.constexpr):
    """Weights, which are read once: they should not push anything out of a cache."""
    if WHOLE:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    return w
