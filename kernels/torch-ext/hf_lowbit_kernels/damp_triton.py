"""One decoding step on packed recurrent states: Triton kernel.

One program per (row, value head, tile of 32 columns), one launch. Both reductions of the delta rule run over rows,
so tiles are independent, the state stays in registers from load to store, and updating in place is safe: every stored
value depends on all of the tile's loads.

Codes must not depend on how a compiler contracts ``x * inverse + c``, so the kernel is compiled without FP fusion and
its divisions are IEEE ones. Nothing in a program depends on the batch: a row alone equals the row in any batch, bit
for bit.
"""

import torch
import triton
import triton.language as tl

from .damp_layout import GROUP, DampLayout, DampPlan, StochasticRounding
from .damp_reference import FP16_MAX, NORM_EPS, TINY


_COLUMNS = tl.constexpr(GROUP)
_FP16_MAX = tl.constexpr(FP16_MAX)
_NORM_EPS = tl.constexpr(NORM_EPS)
_TINY = tl.constexpr(TINY)
_NAN = tl.constexpr(float("nan"))
_INF_BITS = tl.constexpr(0x7F800000)
# 1.5 * 2^23: adding it leaves a small number, rounded to nearest even, in the low bits.
_MAGIC = tl.constexpr(12582912.0)
_MAGIC_BITS = tl.constexpr(0x4B400000)


def damp_update_triton(
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
    rounding: StochasticRounding | None = None,
    num_warps: int | None = None,
) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.damp_update`. ``num_warps`` is for tuning; it changes the order of sums."""
    batch, heads, dv = value.shape
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    if batch == 0:
        return out
    steps = streams = state_indices
    if rounding is not None:
        steps = rounding.steps
        streams = state_indices if rounding.streams is None else rounding.streams
    dk_pad = triton.next_power_of_2(layout.dk)
    # Three views of the same bytes; offsets inside the kernel count 16-byte units, so alignment is known to it.
    _update_kernel[(batch * heads * layout.tiles,)](
        records.view(torch.float16), records.view(torch.int8), records.view(torch.float32), state_indices,
        query, key, value, g, beta, plan.perm_k, plan.perm_v, plan.column_scale, steps, streams, out,
        records.shape[0], records.stride(0) // 16,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        g.stride(0), g.stride(1), beta.stride(0), beta.stride(1),
        scale, 0 if rounding is None else rounding.seed, 0 if rounding is None else rounding.layer << 16,
        HEADS=heads, RATIO=heads // query.shape[1], DK=layout.dk, DV=dv, TILES=layout.tiles,
        UNITS=layout.record_bytes // 16, HIGH=layout.high_rows, BITS=layout.low_bits, LOW_AT=layout.low_offset,
        SCALES_AT=layout.scale_offset, CHANNEL_DECAY=g.dim() == 3, NORMALIZE=normalize,
        STOCHASTIC=rounding is not None, DK_PAD=dk_pad,
        num_warps=num_warps or (8 if dk_pad > 128 else 4), enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _update_kernel(
    halves, bytes_, floats, indices, query, key, value, g, beta, perm_k, perm_v, column_scale, steps, streams, out,
    slots, slot_units, stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh,
    stride_bb, stride_bh, scale, seed, layer_bits,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILES: tl.constexpr,
    UNITS: tl.constexpr, HIGH: tl.constexpr, BITS: tl.constexpr, LOW_AT: tl.constexpr, SCALES_AT: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr, NORMALIZE: tl.constexpr, STOCHASTIC: tl.constexpr, DK_PAD: tl.constexpr,
):  # fmt: skip
    """One token of one (row, value head) on one record. Row i < HIGH of the register tile is a high row."""
    pid = tl.program_id(0)
    tile = pid % TILES
    head = (pid // TILES) % HEADS
    b = (pid // (TILES * HEADS)).to(tl.int64)
    row = tl.arange(0, DK_PAD)
    column = tl.arange(0, _COLUMNS)
    is_row = row < DK
    is_low = (row >= HIGH) & is_row
    is_column = tile * _COLUMNS + column < DV
    slot = tl.load(indices + b).to(tl.int64)

    v_at = tl.load(perm_v + head * DV + tile * _COLUMNS + column, mask=is_column, other=0).to(tl.int32)
    out_ptr = out + (b * HEADS + head) * DV + v_at
    if (slot < 0) | (slot >= slots):
        fill = tl.where(slot < 0, 0.0, _NAN)
        tl.store(out_ptr, tl.zeros([_COLUMNS], tl.float32) + fill, mask=is_column)
        return

    # Read.
    unit = slot * slot_units + (head * TILES + tile) * UNITS
    half_ptr = halves + unit * 8 + row[:, None] * _COLUMNS + column[None, :]
    scale_ptr = floats + unit * 4 + SCALES_AT // 4 + (row - HIGH)
    float_ptr = floats + unit * 4 + LOW_AT // 4 + (row - HIGH)[:, None] * _COLUMNS + column[None, :]
    byte_ptr = bytes_ + unit * 16 + LOW_AT + (row - HIGH)[:, None] * _COLUMNS + column[None, :]
    pair = tl.arange(0, _COLUMNS // 2)
    pair_ptr = bytes_ + unit * 16 + LOW_AT + (row - HIGH)[:, None] * (_COLUMNS // 2) + pair[None, :]
    state = tl.zeros([DK_PAD, _COLUMNS], tl.float32)
    if HIGH < DK:
        if BITS == 32:
            state = tl.load(float_ptr, mask=is_low[:, None], other=0.0)
        else:
            scales = tl.load(scale_ptr, mask=is_low, other=0.0)
            if BITS == 8:
                codes = tl.load(byte_ptr, mask=is_low[:, None], other=0).to(tl.float32)
            else:
                packed = tl.load(pair_ptr, mask=is_low[:, None], other=0).to(tl.int32)
                nibbles = tl.join((packed << 28) >> 28, (packed << 24) >> 28)
                codes = tl.reshape(nibbles, [DK_PAD, _COLUMNS]).to(tl.float32)
            state = codes * scales[:, None]
    if HIGH > 0:
        high = tl.load(half_ptr, mask=(row < HIGH)[:, None], other=0.0).to(tl.float32)
        state = tl.where((row < HIGH)[:, None], high, state)

    # One step of the recurrence, on permuted rows and columns.
    k_at = tl.load(perm_k + head * DK + row, mask=is_row, other=0).to(tl.int32)
    key_head = head // RATIO
    q = tl.load(query + b * stride_qb + key_head * stride_qh + k_at, mask=is_row, other=0.0).to(tl.float32)
    k = tl.load(key + b * stride_kb + key_head * stride_kh + k_at, mask=is_row, other=0.0).to(tl.float32)
    if NORMALIZE:
        q = q * tl.rsqrt(tl.sum(q * q, 0) + _NORM_EPS)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + _NORM_EPS)
    q = q * scale
    c = tl.load(column_scale + head * DV + v_at, mask=is_column, other=1.0)
    v = tl.load(value + b * stride_vb + head * stride_vh + v_at, mask=is_column, other=0.0).to(tl.float32)
    v = tl.div_rn(v, c)
    write = tl.load(beta + b * stride_bb + head * stride_bh).to(tl.float32)
    g_ptr = g + b * stride_gb + head * stride_gh
    if CHANNEL_DECAY:
        state = state * tl.exp(tl.load(g_ptr + k_at, mask=is_row, other=0.0).to(tl.float32))[:, None]
    else:
        state = state * tl.exp(tl.load(g_ptr).to(tl.float32))
    delta = (v - tl.sum(state * k[:, None], 0)) * write
    state = state + k[:, None] * delta[None, :]
    tl.store(out_ptr, tl.sum(state * q[:, None], 0) * c, mask=is_column)

    # Write back.
    # Magnitudes order like their bit patterns, NaN above infinity.
    magnitude = state.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if HIGH > 0:
        clipped = tl.minimum(tl.maximum(state, -_FP16_MAX), _FP16_MAX)
        clipped = tl.where(magnitude < _INF_BITS, clipped, _NAN)
        tl.store(half_ptr, clipped.to(tl.float16), mask=(row < HIGH)[:, None])
    if HIGH < DK:
        if BITS == 32:
            tl.store(float_ptr, state, mask=is_low[:, None])
        else:
            limit: tl.constexpr = 127.0 if BITS == 8 else 7.0
            amax_bits = tl.max(magnitude, 1)
            amax = amax_bits.to(tl.float32, bitcast=True)
            live = (amax_bits < _INF_BITS) & (amax >= _TINY)
            new_scale = tl.where(live, tl.div_rn(amax, limit), 1.0)
            scaled = state * tl.div_rn(1.0, new_scale)[:, None]
            if STOCHASTIC:
                element = row[:, None] * (TILES * _COLUMNS) + (tile * _COLUMNS + column)[None, :]
                zero = element * 0
                bits, _, _, _ = tl.philox(
                    seed, element, zero + (head + layer_bits), zero + tl.load(steps + b).to(tl.int32),
                    zero + tl.load(streams + b).to(tl.int32),
                )  # fmt: skip
                noise = (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
                scaled = tl.minimum(tl.maximum(tl.floor(scaled + noise), -limit), limit)
            # Nearest needs no clamp: |scaled| exceeds the limit by rounding errors only.
            rounded = (scaled + _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS
            rounded = tl.where(live[:, None], rounded, 0)
            if BITS == 8:
                tl.store(byte_ptr, rounded.to(tl.int8), mask=is_low[:, None])
            else:
                even, odd = tl.split(tl.reshape(rounded, [DK_PAD, _COLUMNS // 2, 2]))
                tl.store(pair_ptr, ((even & 15) | (odd << 4)).to(tl.int8), mask=is_low[:, None])
            kept = tl.where(live, new_scale, tl.where(amax_bits < _INF_BITS, 0.0, _NAN))
            tl.store(scale_ptr, kept, mask=is_low)
