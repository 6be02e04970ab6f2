"""Pages of codes become rotated keys, and values: Triton kernel."""

import functools
import math

import torch
import triton
import triton.language as tl

from .elementwise_triton import ROUND_EACH
from .rope_copy_triton import angle_strides, rounds, store_turned


# A program stays with one table (64 KB at D = 128, c = 4), so that entries come from L1: about three per multiprocessor,
# whose tables fit there together.
PROGRAMS = 512
MOST_TILES = 32


def vq_decode_pages_triton(
    k_codes: torch.Tensor,
    v_codes: torch.Tensor,
    k_table: torch.Tensor,
    v_table: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Same contract as `hf_lowbit_kernels.vq_decode_pages`."""
    batch, heads, count, head_dim = keys.shape
    if keys.numel() == 0:
        return
    groups, _, channels = k_table.shape[1:]
    half = head_dim // 2
    run, runs, tokens = _tile(channels, half)
    tiles = -(-count // tokens)
    per_program = min(MOST_TILES, triton.next_power_of_2(-(-2 * batch * heads * tiles // PROGRAMS)))
    _decode_pages_kernel[-(-tiles // per_program), 2 * heads, batch](
        k_codes, v_codes, k_table, v_table, cos, sin, keys, values, count,
        *k_codes.stride(), *v_codes.stride(), *angle_strides(cos), *angle_strides(sin),
        *keys.stride()[:3], *values.stride()[:3],
        GROUPS=groups, C=channels, HALF=half, RUN=run, RUNS=half // run, RUNS_PAD=runs, TOKENS=tokens,
        TILES=per_program, ROUND=rounds(keys, cos), num_warps=8, **ROUND_EACH,
    )  # fmt: skip


@functools.cache
def _tile(channels: int, half: int) -> tuple[int, int, int]:
    """Channels of a run, runs of a half, padded, and tokens."""
    # Widest run of channels that lies inside one entry and inside one half: loaded and stored as a whole.
    run = math.gcd(channels, half)
    runs = triton.next_power_of_2(half // run)
    return run, runs, max(8, min(64, 2048 // (run * runs)))


@triton.jit
def _decode_pages_kernel(
    k_codes, v_codes, k_table, v_table, cos, sin, keys, values, count,
    stride_kcb, stride_kcp, stride_kch, stride_kcn, stride_kcg,
    stride_vcb, stride_vcp, stride_vch, stride_vcn, stride_vcg,
    stride_cb, stride_cn, stride_sb, stride_sn,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    GROUPS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr,
    RUNS_PAD: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """TILES tiles of tokens of one head's keys or values."""
    row, head = tl.program_id(2).to(tl.int64), (tl.program_id(1) // 2).to(tl.int64)
    m = tl.arange(0, RUN)[None, None, :]
    run = tl.arange(0, RUNS_PAD)
    channel = run[None, :, None] * RUN + m
    table_at = head * (GROUPS * 256 * C)
    for i in range(TILES):
        token = (tl.program_id(0) * TILES + i) * TOKENS + tl.arange(0, TOKENS)
        alive = (token < count)[:, None] & (run < RUNS)[None, :]
        live = alive[:, :, None] & (m < RUN)
        wide = token.to(tl.int64)[:, None, None]
        if tl.program_id(1) % 2 == 0:
            codes = k_codes + row * stride_kcb + head * stride_kch
            first, second = _entries(
                codes, k_table + table_at, token, run, m, alive, live, stride_kcp, stride_kcn, stride_kcg,
                C, HALF, RUN,
            )  # fmt: skip
            dtype: tl.constexpr = keys.dtype.element_ty
            cos_at = cos + row * stride_cb + wide * stride_cn + channel
            sin_at = sin + row * stride_sb + wide * stride_sn + channel
            to = keys + row * stride_kb + head * stride_kh + wide * stride_kn + channel
            store_turned(first.to(dtype), second.to(dtype), cos_at, sin_at, to, live, HALF, ROUND)
        else:
            codes = v_codes + row * stride_vcb + head * stride_vch
            first, second = _entries(
                codes, v_table + table_at, token, run, m, alive, live, stride_vcp, stride_vcn, stride_vcg,
                C, HALF, RUN,
            )  # fmt: skip
            value_to = values + row * stride_vb + head * stride_vh + wide * stride_vn + channel
            tl.store(value_to, first.to(values.dtype.element_ty), mask=live)
            tl.store(value_to + HALF, second.to(values.dtype.element_ty), mask=live)


@triton.jit
def _entries(
    codes, table, token, run, m, alive, live, stride_p, stride_n, stride_g,
    C: tl.constexpr, HALF: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """fp16 ``[TOKENS, RUNS, RUN]`` of channels below and from HALF on."""
    from_ = codes + ((token // 8).to(tl.int64) * stride_p + (token % 8) * stride_n)[:, None]
    channel = run * RUN
    group1, group2 = channel // C, (channel + HALF) // C
    code1 = tl.load(from_ + (group1 * stride_g)[None, :], mask=alive, other=0).to(tl.int32)
    code2 = tl.load(from_ + (group2 * stride_g)[None, :], mask=alive, other=0).to(tl.int32)
    entry1 = group1 * (256 * C) + channel % C
    entry2 = group2 * (256 * C) + (channel + HALF) % C
    first = tl.load(table + (code1 * C + entry1[None, :])[:, :, None] + m, mask=live)
    second = tl.load(table + (code2 * C + entry2[None, :])[:, :, None] + m, mask=live)
    return first, second
