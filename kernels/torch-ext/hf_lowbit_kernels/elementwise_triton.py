"""The small operations of a decoder layer around its matrices: Triton kernels.

At batch 1 they cost their latency and nothing else: one launch each, all loads issued before the first is needed.
"""

import torch
import triton
import triton.language as tl

from .dependent_launch import overlap_options


# Products round before they are added, as in PyTorch. Otherwise LLVM makes one bf16 fma of both, whatever casts say.
ROUND_EACH = {"enable_fp_fusion": False}


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.rms_norm`."""
    return _norm(x, weight, None, None, eps, eps)[1]


def norm_add_norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    eps: float,
    next_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `hf_lowbit_kernels.norm_add_norm`."""
    return _norm(x, weight, residual, next_weight, eps, next_eps)


def swiglu_triton(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.swiglu`."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    size = gate.shape[-1]
    gate, up = _rows(gate), _rows(up)
    if gate.shape[0] == 0:
        return out
    block = min(1024, triton.next_power_of_2(size))
    _swiglu_kernel[gate.shape[0], triton.cdiv(size, block)](
        gate, up, out, gate.stride(0), up.stride(0), size, BLOCK=block, num_warps=_warps(block), **ROUND_EACH,
        **overlap_options(gate.device),
    )  # fmt: skip
    return out


def rope_store_triton(
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
) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.rope_store`."""
    batch, query_heads, head_dim = query.shape
    heads = key.shape[1]
    out = torch.empty(batch, query_heads, head_dim, dtype=query.dtype, device=query.device)
    if batch == 0:
        return out
    # One head per program while there are few rows (latency), several when programs would be too many and too small.
    tile = 1 if batch <= 8 else min(8, triton.next_power_of_2(heads))
    tiles = triton.cdiv(query_heads, tile) + 2 * triton.cdiv(heads, tile)
    half = head_dim // 2
    _rope_store_kernel[batch, tiles](
        query, key, value, cos, sin, keys, values, slot, out,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        cos.stride(0) if cos.shape[0] > 1 else 0, sin.stride(0) if sin.shape[0] > 1 else 0,
        *keys.stride()[:3], *values.stride()[:3], slot.stride(0),
        QUERY_HEADS=query_heads, HEADS=heads, HALF=half, BLOCK=triton.next_power_of_2(half), TILE=tile,
        ROTATE_KEY=rotate_key, num_warps=_warps(tile * half), **ROUND_EACH, **overlap_options(query.device),
    )  # fmt: skip
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` as ``[rows, n]``, a view wherever there is one."""
    return x.reshape(-1, x.shape[-1])


def _warps(elements: int) -> int:
    """Warps for that many elements at eight (16 bytes of bf16) per lane."""
    return max(1, min(16, triton.next_power_of_2(elements) // 256))


def _norm(x, weight, residual, next_weight, eps: float, next_eps: float):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    x = _rows(x)
    residual = x if residual is None else _rows(residual)
    if x.shape[0] == 0:
        return total, out
    block = triton.next_power_of_2(size)
    _norm_kernel[(x.shape[0],)](
        x, weight, residual, weight if next_weight is None else next_weight, out if total is None else total, out,
        x.stride(0), residual.stride(0), eps, next_eps,
        SIZE=size, BLOCK=block, ADD=total is not None, num_warps=_warps(block), **ROUND_EACH,
        **overlap_options(x.device),
    )  # fmt: skip
    return total, out


@triton.jit
def _norm_kernel(
    x, weight, residual, next_weight, total, out, stride_x, stride_r, eps, next_eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row: its norm; with ADD the residual plus that, and the norm of the sum."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < SIZE
    scale = tl.load(weight + column, mask=live, other=0.0)
    if ADD:
        next_scale = tl.load(next_weight + column, mask=live, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row * stride_x + column, mask=live, other=0.0)
    if ADD:
        before = tl.load(residual + row * stride_r + column, mask=live, other=0.0)
    values = _normalize(values, scale, eps, SIZE)
    if ADD:
        values = (before.to(tl.float32) + values.to(tl.float32)).to(values.dtype)
        tl.store(total + row * SIZE + column, values, mask=live)
        values = _normalize(values, next_scale, next_eps, SIZE)
    tl.store(out + row * SIZE + column, values, mask=live)


@triton.jit
def _normalize(values, scale, eps, SIZE: tl.constexpr):
    exact = values.to(tl.float32)
    normed = exact * tl.rsqrt(tl.sum(exact * exact, 0) / SIZE + eps)
    return (scale.to(tl.float32) * normed.to(values.dtype).to(tl.float32)).to(values.dtype)


@triton.jit
def _swiglu_kernel(
    gate, up, out, stride_gate, stride_up, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < size
    g = tl.load(gate + row * stride_gate + column, mask=live, other=0.0)
    u = tl.load(up + row * stride_up + column, mask=live, other=0.0)
    tl.store(out + row * size + column, _silu_product(g, u), mask=live)


@triton.jit
def _silu_product(gate, up):
    exact = gate.to(tl.float32)
    silu = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _rope_store_kernel(
    query, key, value, cos, sin, keys, values, slot, out,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_cos, stride_sin,
    stride_ksb, stride_ksh, stride_kss, stride_vsb, stride_vsh, stride_vss, stride_slot,
    QUERY_HEADS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ROTATE_KEY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """TILE heads of one row's query, key or value; which of them says program 1."""
    QUERY_TILES: tl.constexpr = (QUERY_HEADS + TILE - 1) // TILE
    TILES: tl.constexpr = (HEADS + TILE - 1) // TILE
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1).to(tl.int64)  # heads of long caches lie far apart
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    channel = tl.arange(0, BLOCK)[None, :]
    place = tl.arange(0, TILE)[:, None]
    cos_row, sin_row = cos + row * stride_cos, sin + row * stride_sin
    if tile < QUERY_TILES:
        head = tile * TILE + place
        live = (head < QUERY_HEADS) & (channel < HALF)
        from_ = query + row * stride_qb + head * stride_qh
        to = out + (row * QUERY_HEADS + head) * (2 * HALF)
        _rotate(from_, to, cos_row, sin_row, channel, live, HALF)
    else:
        at = tl.load(slot + row * stride_slot)
        if tile < QUERY_TILES + TILES:
            head = (tile - QUERY_TILES) * TILE + place
            live = (head < HEADS) & (channel < HALF)
            from_ = key + row * stride_kb + head * stride_kh
            to = keys + row * stride_ksb + head * stride_ksh + at * stride_kss
            if ROTATE_KEY:
                _rotate(from_, to, cos_row, sin_row, channel, live, HALF)
            else:
                _copy(from_, to, channel, live, HALF)
        else:
            head = (tile - QUERY_TILES - TILES) * TILE + place
            live = (head < HEADS) & (channel < HALF)
            from_ = value + row * stride_vb + head * stride_vh
            to = values + row * stride_vsb + head * stride_vsh + at * stride_vss
            _copy(from_, to, channel, live, HALF)


@triton.jit
def _rotate(from_, to, cos, sin, channel, live, HALF: tl.constexpr):
    first, second = tl.load(from_ + channel, mask=live), tl.load(from_ + HALF + channel, mask=live)
    inside = channel < HALF
    cos1, cos2 = tl.load(cos + channel, mask=inside), tl.load(cos + HALF + channel, mask=inside)
    sin1, sin2 = tl.load(sin + channel, mask=inside), tl.load(sin + HALF + channel, mask=inside)
    tl.store(to + channel, _rounded_sum(first, cos1, second, sin1, -1.0), mask=live)
    tl.store(to + HALF + channel, _rounded_sum(second, cos2, first, sin2, 1.0), mask=live)


@triton.jit
def _rounded_sum(a, b, c, d, sign: tl.constexpr):
    """a b + sign c d, each operation rounded to the tensors' dtype."""
    ab = (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)
    cd = (c.to(tl.float32) * d.to(tl.float32)).to(a.dtype).to(tl.float32)
    return (ab + sign * cd).to(a.dtype)


@triton.jit
def _copy(from_, to, channel, live, HALF: tl.constexpr):
    tl.store(to + channel, tl.load(from_ + channel, mask=live), mask=live)
    tl.store(to + HALF + channel, tl.load(from_ + HALF + channel, mask=live), mask=live)
