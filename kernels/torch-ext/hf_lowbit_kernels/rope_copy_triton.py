"""Keys, rotated, and values into place: Triton kernel."""

import functools

import torch
import triton
import triton.language as tl

from .elementwise_triton import ROUND_EACH, _rounded_sum


def rope_copy_triton(
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
    """Same contract as `hf_lowbit_kernels.rope_copy`."""
    batch, heads, count, head_dim = keys.shape
    if batch * count * head_dim == 0:
        return
    valued = value is not None
    block, tokens = _tile(head_dim)
    value, values = (value, values) if valued else (key, keys)
    query_heads = 0 if query is None else query.shape[1]
    query, queries = (query, queries) if query_heads else (key, keys)
    if heads + query_heads == 0:
        return
    _rope_copy_kernel[-(-count // tokens), heads + query_heads, batch](
        key, value, cos, sin, keys, values, slots if slots is not None else cos, query, queries, count,
        *key.stride()[:3], *value.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        *query.stride()[:3], *queries.stride()[:3], *angle_strides(cos), *angle_strides(sin),
        HEADS=heads, HALF=head_dim // 2, BLOCK=block, TOKENS=tokens, VALUED=valued, GATHER=slots is not None,
        QUERY=query_heads > 0, ROUND=rounds(keys, cos), num_warps=4, **ROUND_EACH,
    )  # fmt: skip


@functools.cache
def _tile(head_dim: int) -> tuple[int, int]:
    """Channels of a half, padded, and tokens of a program."""
    block = triton.next_power_of_2(head_dim // 2)
    return block, max(8, min(64, 2048 // block))


def angle_strides(table: torch.Tensor) -> tuple[int, int]:
    """Of a ``[B or 1, n, D]`` table over rows and tokens."""
    row, token, _ = table.stride()
    return (row if table.shape[0] > 1 else 0), token


def rounds(states: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether products and sum round to the states' dtype, and not only the result: PyTorch promotes other angles."""
    return states.dtype == cos.dtype or torch.promote_types(states.dtype, cos.dtype) == states.dtype


@triton.jit
def _rope_copy_kernel(
    key, value, cos, sin, keys, values, slots, query, queries, count,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ksb, stride_ksh, stride_ksn, stride_vsb, stride_vsh, stride_vsn,
    stride_qb, stride_qh, stride_qn, stride_qsb, stride_qsh, stride_qsn,
    stride_cb, stride_cn, stride_sb, stride_sn,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, VALUED: tl.constexpr,
    GATHER: tl.constexpr, QUERY: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one head: of keys and values, or behind them of queries."""
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    channel = tl.arange(0, BLOCK)[None, :]
    alive = token < count
    live = alive[:, None] & (channel < HALF)
    cos_at = cos + row * stride_cb + token[:, None] * stride_cn + channel
    sin_at = sin + row * stride_sb + token[:, None] * stride_sn + channel
    if QUERY and head >= HEADS:
        head -= HEADS
        query_from = query + row * stride_qb + head * stride_qh + token[:, None] * stride_qn + channel
        query_to = queries + row * stride_qsb + head * stride_qsh + token[:, None] * stride_qsn + channel
        query_first, query_second = tl.load(query_from, mask=live), tl.load(query_from + HALF, mask=live)
        store_turned(query_first, query_second, cos_at, sin_at, query_to, live, HALF, ROUND)
    else:
        source = token
        if GATHER:
            source = tl.load(slots + token, mask=alive, other=0)
        from_ = key + row * stride_kb + head * stride_kh + source[:, None] * stride_kn + channel
        first, second = tl.load(from_, mask=live), tl.load(from_ + HALF, mask=live)
        if VALUED:
            value_from = value + row * stride_vb + head * stride_vh + source[:, None] * stride_vn + channel
            value_first, value_second = tl.load(value_from, mask=live), tl.load(value_from + HALF, mask=live)
        to = keys + row * stride_ksb + head * stride_ksh + token[:, None] * stride_ksn + channel
        store_turned(first, second, cos_at, sin_at, to, live, HALF, ROUND)
        if VALUED:
            value_to = values + row * stride_vsb + head * stride_vsh + token[:, None] * stride_vsn + channel
            tl.store(value_to, value_first, mask=live)
            tl.store(value_to + HALF, value_second, mask=live)


@triton.jit
def store_turned(first, second, cos, sin, to, live, HALF: tl.constexpr, ROUND: tl.constexpr):
    """Rotate the two halves of heads by the angles at ``cos`` and ``sin``, and store them at ``to``; see `rounds`."""
    cos1, cos2 = tl.load(cos, mask=live), tl.load(cos + HALF, mask=live)
    sin1, sin2 = tl.load(sin, mask=live), tl.load(sin + HALF, mask=live)
    tl.store(to, _turned(first, cos1, second, sin1, -1.0, ROUND), mask=live)
    tl.store(to + HALF, _turned(second, cos2, first, sin2, 1.0, ROUND), mask=live)


@triton.jit
def _turned(a, cos, b, sin, sign: tl.constexpr, ROUND: tl.constexpr):
    """a cos + sign b sin in the dtype of a; with ROUND the products round to it too."""
    if ROUND:
        turned = _rounded_sum(a, cos, b, sin, sign)
    else:
        turned = (a.to(tl.float32) * cos.to(tl.float32) + sign * (b.to(tl.float32) * sin.to(tl.float32))).to(a.dtype)
    return turned
