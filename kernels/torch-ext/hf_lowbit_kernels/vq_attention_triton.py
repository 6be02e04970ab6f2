"""Decode attention over vector-quantized keys and values: Triton kernels.

Two launches. `_split_kernel` reduces one slice of one row's keys to fp32 partials (output, maximum, sum): one program
per slice of codes and one per query head for the bf16 window. `_merge_kernel` combines the slices of a row.

RoPE: the query is rotated back by the tile's base angle and then by the token's offset in the tile, instead of
rotating every key (see `RopeTables`). A looked-up key then needs no arithmetic but its dot product.

Batch invariance: slice bounds follow from the row's own code count and the head count, never from the batch; every
sum has a fixed order; there are no float atomics. A row alone equals the row in any batch, bit for bit.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .rope_tables import MAX_TILE, RopeTables


LOG2E = 1.4426950408889634
# A partial is D outputs, then maximum, sum and two unused floats that keep the next one 16-byte aligned.
STATS = tl.constexpr(4)


@dataclass(frozen=True)
class LaunchConfig:
    """Tuning knobs of one launch. Only ``rows`` and ``splits`` can change bits (they change the order of sums).

    Attributes:
        rows: (token, query head) pairs per tile.
        splits: slices of a row's codes.
        num_warps, num_stages: as in Triton.
    """

    rows: int
    splits: int
    num_warps: int
    num_stages: int


def launch_config(heads: int, group: int, head_dim: int, channels: int) -> LaunchConfig:
    """The configuration of a model: a function of its shape alone, so that results never depend on the batch.

    Few long slices: each program pulls its head's two 64 KB tables (at D=128) through L1 once, so that one program
    per SM with many warps reads the tables least often.
    """
    chunks = heads * -(-group // 8)
    splits = min(64, max(1, 128 // chunks))
    rows = 128 if head_dim <= 128 else 64
    return LaunchConfig(rows=rows, splits=splits, num_warps=16, num_stages=1)


def vq_decode_attention_triton(
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
    config: LaunchConfig | None = None,
) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.vq_decode_attention`. ``config`` overrides `launch_config` for tuning."""
    batch, query_heads, head_dim = query.shape
    heads, slots = k_window.shape[1:3]
    groups, _, channels = k_table.shape[1:]
    group = query_heads // heads
    config = config or launch_config(heads, group, head_dim, channels)
    splits = num_splits or config.splits

    head_block = min(8, triton.next_power_of_2(group))
    # A tile starts on a base row and reaches no further than the offset table.
    tokens = max(rope.tile, min(MAX_TILE, config.rows // head_block))
    # Widest run of channels that lies inside one entry and inside one RoPE half.
    half = head_dim // 2
    run = math.gcd(channels, half)
    # No codes anywhere: launch the window programs alone.
    code_programs = splits if max_coded > 0 else 0
    parts = 1 + code_programs

    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    partials = (batch * query_heads * parts, head_dim + STATS.value)
    scratch = torch.empty(partials, dtype=torch.float32, device=query.device)
    grid = (head_block + code_programs, heads * triton.cdiv(group, head_block), batch)
    _split_kernel[grid](
        query, k_codes, v_codes, k_table, v_table, k_window, v_window, lengths, n_coded,
        rope.base_cos, rope.base_sin, rope.offset_cos, rope.offset_sin, scratch,
        scale * LOG2E, rope.shift,
        query.stride(0), query.stride(1), k_codes.stride(0), k_codes.stride(1), v_codes.stride(0), v_codes.stride(1),
        k_window.stride(0), k_window.stride(1), k_window.stride(2),
        v_window.stride(0), v_window.stride(1), v_window.stride(2),
        parts, splits,
        CODE_TOKEN=k_codes.stride(3), CODE_GROUP=k_codes.stride(4),
        RING=slots - sinks, SINKS=sinks, ROPE_TILE=rope.tile, HEADS=heads, GROUP=group, HEAD_BLOCK=head_block,
        HALF=half, GROUPS=groups, C=channels, RUN=run, RUNS=half // run, RUNS_PAD=triton.next_power_of_2(half // run),
        TOKENS=tokens, WINDOW_TOKENS=16, HALF_PAD=triton.next_power_of_2(half),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    _merge_kernel[(query_heads, batch)](
        scratch, out, n_coded, parts, splits,
        D=head_dim, D_PAD=triton.next_power_of_2(head_dim), TOKENS=tokens, PARTS_BLOCK=8, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _slice_length(coded, splits, TOKENS: tl.constexpr):
    """Tokens per slice of a row: equal shares, rounded up to whole tiles."""
    return tl.cdiv(tl.cdiv(coded, splits), TOKENS) * TOKENS


@triton.jit
def _split_kernel(
    query, k_codes, v_codes, k_table, v_table, k_window, v_window, lengths, n_coded,
    base_cos, base_sin, offset_cos, offset_sin, scratch,
    scale, rope_shift,
    stride_qb, stride_qh, stride_kcb, stride_kcp, stride_vcb, stride_vcp,
    stride_kwb, stride_kwh, stride_kws, stride_vwb, stride_vwh, stride_vws,
    parts, splits,
    CODE_TOKEN: tl.constexpr, CODE_GROUP: tl.constexpr,
    RING: tl.constexpr, SINKS: tl.constexpr, ROPE_TILE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, RUN: tl.constexpr,
    RUNS: tl.constexpr, RUNS_PAD: tl.constexpr, TOKENS: tl.constexpr, WINDOW_TOKENS: tl.constexpr,
    HALF_PAD: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    chunks: tl.constexpr = (GROUP + HEAD_BLOCK - 1) // HEAD_BLOCK
    head = tl.program_id(1) // chunks
    first_query = (tl.program_id(1) % chunks) * HEAD_BLOCK  # within the kv head's group
    coded = tl.load(n_coded + row)
    query += row * stride_qb
    scratch += row * (HEADS * GROUP) * parts * (2 * HALF + STATS)

    if part < HEAD_BLOCK:
        if first_query + part < GROUP:
            query_head = head * GROUP + first_query + part
            _window_part(
                query + query_head * stride_qh,
                k_window + row * stride_kwb + head.to(tl.int64) * stride_kwh,
                v_window + row * stride_vwb + head.to(tl.int64) * stride_vwh,
                tl.load(lengths + row), coded, base_cos, base_sin, offset_cos, offset_sin,
                scratch + query_head.to(tl.int64) * parts * (2 * HALF + STATS),
                scale, rope_shift, stride_kws, stride_vws,
                RING, SINKS, ROPE_TILE, HALF, HALF_PAD, WINDOW_TOKENS,
            )  # fmt: skip
    else:
        share = _slice_length(coded, splits, TOKENS)
        begin = (part - HEAD_BLOCK) * share
        end = tl.minimum(begin + share, coded)
        if begin < end:
            table_offset = head * (GROUPS * 256 * C)
            first_part = (head * GROUP + first_query).to(tl.int64) * parts + 1
            _code_part(
                query + (head * GROUP + first_query) * stride_qh,
                k_codes + row * stride_kcb + head * (8 * GROUPS),
                v_codes + row * stride_vcb + head * (8 * GROUPS),
                k_table + table_offset, v_table + table_offset,
                begin, end, GROUP - first_query, base_cos, base_sin, offset_cos, offset_sin,
                scratch + (first_part + part - HEAD_BLOCK) * (2 * HALF + STATS),
                scale, rope_shift, stride_qh, stride_kcp, stride_vcp, parts, CODE_TOKEN, CODE_GROUP,
                SINKS, ROPE_TILE, HEAD_BLOCK, HALF, GROUPS, C, RUN, RUNS, RUNS_PAD, TOKENS,
            )  # fmt: skip


@triton.jit
def _code_part(
    query, k_codes, v_codes, k_table, v_table, begin, end, live_heads, base_cos, base_sin, offset_cos, offset_sin,
    scratch, scale, rope_shift, stride_qh, stride_kcp, stride_vcp, parts,
    CODE_TOKEN: tl.constexpr, CODE_GROUP: tl.constexpr,
    SINKS: tl.constexpr, ROPE_TILE: tl.constexpr, HEAD_BLOCK: tl.constexpr, HALF: tl.constexpr, GROUPS: tl.constexpr,
    C: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr, RUNS_PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Coded tokens [begin, end) against HEAD_BLOCK query heads of one kv head.

    Tensors are [runs, rows, RUN]. A row is a (token, query head) pair with the head innermost, so that the lanes that
    share a token issue the same table address. A run is RUN neighbouring channels of one entry, hence one vector load
    (8 bytes at c = 4). `1` and `2` are the two RoPE halves. Each row keeps its own softmax state: nothing crosses rows
    until the end.

    Runs come first because the compiler spreads the lanes of a warp over the leading dimension first: a warp then owns
    its rows (the score is a shuffle, no barrier), reads a token's codes as neighbouring bytes, and every thread meets
    several rows per tile, which share the query's base rotation.
    """
    ROWS: tl.constexpr = TOKENS * HEAD_BLOCK
    token = tl.arange(0, ROWS) // HEAD_BLOCK
    s = tl.arange(0, RUNS_PAD)
    m = tl.arange(0, RUN)
    channel = s[:, None] * RUN + m[None, :]  # [runs, RUN], within a half
    live = channel < HALF
    if RUNS_PAD != RUNS:
        # Padded runs look up run 0; their query is 0, and their output is not stored.
        s = tl.where(s < RUNS, s, 0)
    group1 = ((s * RUN) // C)[:, None]
    entry1 = group1 * (256 * C) + ((s * RUN) % C)[:, None]
    if HALF % C == 0:
        # A constant distance, which the compiler folds into the load instead of forming a second address.
        group2 = group1 + HALF // C
        entry2 = entry1 + HALF * 256
    else:
        group2 = ((s * RUN + HALF) // C)[:, None]
        entry2 = group2 * (256 * C) + ((s * RUN + HALF) % C)[:, None]

    if HEAD_BLOCK == 1:
        q1 = tl.load(query + channel, mask=live, other=0.0).to(tl.float32)[:, None, :] * scale
        q2 = tl.load(query + HALF + channel, mask=live, other=0.0).to(tl.float32)[:, None, :] * scale
    else:
        in_block = tl.arange(0, ROWS) % HEAD_BLOCK
        q_ptr = query + (in_block * stride_qh)[None, :, None] + channel[:, None, :]
        q_live = (in_block < live_heads)[None, :, None] & live[:, None, :]
        q1 = tl.load(q_ptr, mask=q_live, other=0.0).to(tl.float32) * scale
        q2 = tl.load(q_ptr + HALF, mask=q_live, other=0.0).to(tl.float32) * scale

    offsets = token[None, :, None] * HALF + channel[:, None, :]
    cos = tl.load(offset_cos + offsets, mask=live[:, None, :], other=0.0)
    sin = tl.load(offset_sin + offsets, mask=live[:, None, :], other=0.0)

    in_tile = (token % 8) * CODE_TOKEN
    k_rel = ((token // 8) * stride_kcp + in_tile)[None, :]
    v_rel = ((token // 8) * stride_vcp + in_tile)[None, :]

    # Finite, so that a row that has seen no token yet gives exp2(0) and not NaN.
    row_max = tl.full([ROWS], -1.0e30, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc1 = tl.zeros([RUNS_PAD, ROWS, RUN], tl.float32)
    acc2 = tl.zeros([RUNS_PAD, ROWS, RUN], tl.float32)
    for start in range(begin, end, TOKENS):
        valid = start + token < end
        page = tl.cast(start // 8, tl.int64)
        k_ptr = k_codes + page * stride_kcp + (k_rel + group1 * CODE_GROUP)
        v_ptr = v_codes + page * stride_vcp + (v_rel + group1 * CODE_GROUP)
        k_code1 = tl.load(k_ptr, mask=valid[None, :], other=0).to(tl.int32)
        k_code2 = tl.load(k_ptr + (group2 - group1) * CODE_GROUP, mask=valid[None, :], other=0).to(tl.int32)
        v_code1 = tl.load(v_ptr, mask=valid[None, :], other=0).to(tl.int32)
        v_code2 = tl.load(v_ptr + (group2 - group1) * CODE_GROUP, mask=valid[None, :], other=0).to(tl.int32)

        k1 = tl.load(k_table + (k_code1 * C + entry1)[:, :, None] + m[None, None, :]).to(tl.float32)
        k2 = tl.load(k_table + (k_code2 * C + entry2)[:, :, None] + m[None, None, :]).to(tl.float32)
        v1 = tl.load(v_table + (v_code1 * C + entry1)[:, :, None] + m[None, None, :]).to(tl.float32)
        v2 = tl.load(v_table + (v_code2 * C + entry2)[:, :, None] + m[None, None, :]).to(tl.float32)

        base = ((start + SINKS + rope_shift) // ROPE_TILE) * HALF + channel
        cos_b = tl.load(base_cos + base, mask=live, other=0.0)[:, None, :]
        sin_b = tl.load(base_sin + base, mask=live, other=0.0)[:, None, :]
        q1b = q1 * cos_b + q2 * sin_b
        q2b = q2 * cos_b - q1 * sin_b
        products = k1 * (q1b * cos + q2b * sin) + k2 * (q2b * cos - q1b * sin)
        score = tl.where(valid, tl.sum(tl.sum(products, 2), 0), float("-inf"))

        new_max = tl.maximum(row_max, score)
        decay = tl.exp2(row_max - new_max)
        weight = tl.exp2(score - new_max)
        row_sum = row_sum * decay + weight
        acc1 = acc1 * decay[None, :, None] + weight[None, :, None] * v1
        acc2 = acc2 * decay[None, :, None] + weight[None, :, None] * v2
        row_max = new_max

    # Rows of one query head into one partial.
    by_token = tl.reshape(row_max, [TOKENS, HEAD_BLOCK])
    block_max = tl.max(by_token, 0)  # [HEAD_BLOCK]
    row_weight = tl.exp2(by_token - block_max[None, :])
    block_sum = tl.sum(tl.reshape(row_sum, [TOKENS, HEAD_BLOCK]) * row_weight, 0)
    row_weight = tl.reshape(row_weight, [ROWS])[None, :, None]
    out1 = tl.sum(tl.reshape(acc1 * row_weight, [RUNS_PAD, TOKENS, HEAD_BLOCK, RUN]), 1)
    out2 = tl.sum(tl.reshape(acc2 * row_weight, [RUNS_PAD, TOKENS, HEAD_BLOCK, RUN]), 1)

    block = tl.arange(0, HEAD_BLOCK)
    to = scratch + block * parts * (2 * HALF + STATS)
    stored = (block < live_heads)[None, :, None] & live[:, None, :]
    to_out = to[None, :, None] + channel[:, None, :]
    tl.store(to_out, out1, mask=stored)
    tl.store(to_out + HALF, out2, mask=stored)
    tl.store(to + 2 * HALF, block_max, mask=block < live_heads)
    tl.store(to + 2 * HALF + 1, block_sum, mask=block < live_heads)


@triton.jit
def _window_part(
    query, k_window, v_window, length, coded, base_cos, base_sin, offset_cos, offset_sin, scratch,
    scale, rope_shift, stride_kws, stride_vws,
    RING: tl.constexpr, SINKS: tl.constexpr, ROPE_TILE: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    WINDOW_TOKENS: tl.constexpr,
):  # fmt: skip
    """The row's full-precision tokens (sinks and recent) against one query head."""
    channel = tl.arange(0, HALF_PAD)
    live = channel < HALF
    q1 = tl.load(query + channel, mask=live, other=0.0).to(tl.float32)[None, :] * scale
    q2 = tl.load(query + HALF + channel, mask=live, other=0.0).to(tl.float32)[None, :] * scale

    n_sinks = tl.minimum(length, SINKS)
    count = n_sinks + tl.maximum(length - SINKS - coded, 0)
    running_max = -1.0e30
    running_sum = 0.0
    acc1 = tl.zeros([HALF_PAD], tl.float32)
    acc2 = tl.zeros([HALF_PAD], tl.float32)
    for start in range(0, count, WINDOW_TOKENS):
        i = start + tl.arange(0, WINDOW_TOKENS)
        valid = i < count
        position = tl.where(i < SINKS, i, i + coded)
        slot = tl.where(i < SINKS, i, SINKS + (position - SINKS) % RING)
        mask = valid[:, None] & live[None, :]
        k_ptr = k_window + slot[:, None] * stride_kws + channel[None, :]
        v_ptr = v_window + slot[:, None] * stride_vws + channel[None, :]
        k1 = tl.load(k_ptr, mask=mask, other=0.0).to(tl.float32)
        k2 = tl.load(k_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
        v1 = tl.load(v_ptr, mask=mask, other=0.0).to(tl.float32)
        v2 = tl.load(v_ptr + HALF, mask=mask, other=0.0).to(tl.float32)

        shifted = position + rope_shift
        base = (shifted // ROPE_TILE)[:, None] * HALF + channel[None, :]
        offset = (shifted % ROPE_TILE)[:, None] * HALF + channel[None, :]
        cos_b = tl.load(base_cos + base, mask=mask, other=0.0)
        sin_b = tl.load(base_sin + base, mask=mask, other=0.0)
        cos = tl.load(offset_cos + offset, mask=mask, other=0.0)
        sin = tl.load(offset_sin + offset, mask=mask, other=0.0)
        q1b = q1 * cos_b + q2 * sin_b
        q2b = q2 * cos_b - q1 * sin_b
        products = k1 * (q1b * cos + q2b * sin) + k2 * (q2b * cos - q1b * sin)
        score = tl.where(valid, tl.sum(products, 1), float("-inf"))

        new_max = tl.maximum(running_max, tl.max(score, 0))
        decay = tl.exp2(running_max - new_max)
        weight = tl.exp2(score - new_max)
        running_sum = running_sum * decay + tl.sum(weight, 0)
        acc1 = acc1 * decay + tl.sum(weight[:, None] * v1, 0)
        acc2 = acc2 * decay + tl.sum(weight[:, None] * v2, 0)
        running_max = new_max

    tl.store(scratch + channel, acc1, mask=live)
    tl.store(scratch + HALF + channel, acc2, mask=live)
    tl.store(scratch + 2 * HALF, running_max)
    tl.store(scratch + 2 * HALF + 1, running_sum)


@triton.jit
def _merge_kernel(
    scratch, out, n_coded, parts, splits,
    D: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the partials that this row wrote. Unwritten ones are masked: weight exactly 0, so bits do not change."""
    row = tl.program_id(1).to(tl.int64)
    query_head = tl.program_id(0)
    here = row * tl.num_programs(0) + query_head
    coded = tl.load(n_coded + row)
    share = tl.maximum(_slice_length(coded, splits, TOKENS), 1)
    written = 1 + tl.cdiv(coded, share)
    scratch += here * parts * (D + STATS)

    channel = tl.arange(0, D_PAD)
    live = channel < D
    running_max = -1.0e30
    running_sum = 0.0
    acc = tl.zeros([D_PAD], tl.float32)
    for first in range(0, written, PARTS_BLOCK):
        index = first + tl.arange(0, PARTS_BLOCK)
        valid = index < written
        ptr = scratch + index * (D + STATS)
        part_max = tl.load(ptr + D, mask=valid, other=-1.0e30)
        part_sum = tl.load(ptr + D + 1, mask=valid, other=0.0)
        part_out = tl.load(ptr[:, None] + channel[None, :], mask=valid[:, None] & live[None, :], other=0.0)
        new_max = tl.maximum(running_max, tl.max(part_max, 0))
        decay = tl.exp2(running_max - new_max)
        weight = tl.exp2(part_max - new_max)
        running_sum = running_sum * decay + tl.sum(weight * part_sum, 0)
        acc = acc * decay + tl.sum(weight[:, None] * part_out, 0)
        running_max = new_max
    # An empty row (length 0) has no weight at all: its output is 0.
    result = acc / tl.where(running_sum > 0.0, running_sum, 1.0)
    tl.store(out + here * D + channel, result.to(out.dtype.element_ty), mask=live)
