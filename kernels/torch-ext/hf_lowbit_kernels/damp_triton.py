"""One decoding step on packed recurrent states: Triton kernel.

One program per (row, value head, tile of 32 columns), one launch. Both reductions of the delta rule run over rows, so
tiles are independent, the state stays in registers from load to store, and updating in place is safe: every stored
value depends on all of the tile's loads.

With one warp per program, nothing crosses warps and all of a record is in flight at once. A warp takes `DampLaunch.rows`
rows at a time; with 8 rows, a thread holds 8 columns of one row, which needs the fewest shuffles for the sums over rows
and the maxima over columns together. What is left is bound by instruction issue as much as by memory (about 2,000
instructions per 5 KB record), hence:

- the read is taken from the old state, ``S^T q = S_old^T q + (k q) delta``, so that one pass makes both sums;
- the norms of q and k are applied to sums, not to elements;
- contraction is explicit: ``enable_fp_fusion=False`` and ``tl.fma`` where one is wanted, so that codes do not depend on
  what a compiler contracts.

Nothing in a program depends on the batch: a row alone equals the row in any batch, bit for bit.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .damp_layout import GROUP, DampLayout, DampPlan, ErrorFeedback, Rounding, StochasticRounding
from .damp_reference import FP16_MAX, NORM_EPS, TINY


_COLUMNS = tl.constexpr(GROUP)
_FP16_MAX = tl.constexpr(FP16_MAX)
_NORM_EPS = tl.constexpr(NORM_EPS)
_TINY = tl.constexpr(TINY)
# No such constant for NaN: triton compares globals by value before every launch, and NaN never equals itself.
_INF = tl.constexpr(float("inf"))
_INF_BITS = tl.constexpr(0x7F800000)
# 1.5 * 2^23: adding it leaves a small number, rounded to nearest even, in the low bits.
_MAGIC = tl.constexpr(12582912.0)
_MAGIC_BITS = tl.constexpr(0x4B400000)


@dataclass(frozen=True)
class DampLaunch:
    """Tuning knobs of one launch. ``rows`` and ``num_warps`` can change bits (they change the order of sums).

    Attributes:
        rows: rows of a record that are taken at a time, a power of two; 8 per warp is meant.
        num_warps: warps per record.
        max_registers: registers per thread, to have more warps at once; None leaves it to the compiler. NVIDIA only.
        streaming: bypass L1 on loads and mark lines as used once on stores.
    """

    rows: int = 8
    num_warps: int = 1
    max_registers: int | None = None
    streaming: bool = False


def damp_launch(layout: DampLayout) -> DampLaunch:
    """The configuration of a layer: a function of its shape alone, so that results never depend on the batch."""
    if layout.dk > 128:
        return DampLaunch(rows=16, num_warps=2)
    # 168: 12 warps per multiprocessor instead of 9 for 12 spilled registers; 110 instead of 132 us a layer at batch 256 on
    # an H200. The fp32 state needs more.
    return DampLaunch(max_registers=None if layout.low_bits == 32 else 168)


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
    rounding: Rounding = None,
    launch: DampLaunch | None = None,
) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.damp_update`. ``launch`` overrides `damp_launch` for tuning."""
    batch, heads, dv = value.shape
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    if batch == 0:
        return out
    launch = launch or damp_launch(layout)
    steps = streams = state_indices
    halves = residual = records.view(torch.float16)
    stochastic, feedback = isinstance(rounding, StochasticRounding), isinstance(rounding, ErrorFeedback)
    if stochastic:
        steps = rounding.steps
        streams = state_indices if rounding.streams is None else rounding.streams
    if feedback:
        residual = rounding.residual
    options = {"num_warps": launch.num_warps, "enable_fp_fusion": False}
    if launch.max_registers is not None and torch.version.hip is None:
        options["maxnreg"] = launch.max_registers
    # Three views of the same bytes; offsets inside the kernel count 16-byte units, so alignment is known to it.
    _update_kernel[(batch * heads * layout.tiles,)](
        halves, records.view(torch.int8), records.view(torch.float32), state_indices,
        query, key, value, g, beta, plan.perm_k, plan.perm_v, plan.column_scale, steps, streams, residual, out,
        records.shape[0], records.stride(0) // 16, residual.stride(0) // 8,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        g.stride(0), g.stride(1), beta.stride(0), beta.stride(1),
        scale, rounding.seed if stochastic else 0, rounding.layer << 16 if stochastic else 0,
        HEADS=heads, RATIO=heads // query.shape[1], DK=layout.dk, DV=dv, TILES=layout.tiles,
        UNITS=layout.record_bytes // 16, HIGH=layout.high_rows, BITS=layout.low_bits, ZERO_POINT=layout.zero_point,
        LOW_AT=layout.low_offset, SCALES_AT=layout.scale_offset, CHANNEL_DECAY=g.dim() == 3, NORMALIZE=normalize,
        STOCHASTIC=stochastic, FEEDBACK=feedback, DK_PAD=triton.next_power_of_2(layout.dk), ROWS=launch.rows,
        COLUMNS=GROUP, STREAMING=launch.streaming, **options,
    )  # fmt: skip
    return out


# Numbers that change from call to call: no version of the kernel for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["slots", "slot_units", "residual_units", "seed", "layer_bits"])
def _update_kernel(
    halves, bytes_, floats, indices, query, key, value, g, beta, perm_k, perm_v, column_scale, steps, streams, residual,
    out, slots, slot_units, residual_units, stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_gb, stride_gh, stride_bb, stride_bh, scale, seed, layer_bits,
    HEADS: tl.constexpr, RATIO: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TILES: tl.constexpr,
    UNITS: tl.constexpr, HIGH: tl.constexpr, BITS: tl.constexpr, ZERO_POINT: tl.constexpr, LOW_AT: tl.constexpr,
    SCALES_AT: tl.constexpr, CHANNEL_DECAY: tl.constexpr, NORMALIZE: tl.constexpr, STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr, DK_PAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STREAMING: tl.constexpr,
):  # fmt: skip
    """One token of one (row, value head) on one record. High and low rows are taken in blocks of ROWS each."""
    LOW: tl.constexpr = DK - HIGH
    HIGH_BLOCKS: tl.constexpr = (HIGH + ROWS - 1) // ROWS
    LOW_BLOCKS: tl.constexpr = (LOW + ROWS - 1) // ROWS
    WHOLE_HIGH: tl.constexpr = HIGH % ROWS == 0
    WHOLE_LOW: tl.constexpr = LOW % ROWS == 0
    WHOLE_TILES: tl.constexpr = DV % COLUMNS == 0
    LOW_BYTES: tl.constexpr = COLUMNS * BITS // 8
    MOST: tl.constexpr = 127.0 if BITS == 8 else 15.0 if ZERO_POINT else 7.0  # largest code
    LEAST: tl.constexpr = 0.0 if ZERO_POINT else -MOST

    pid = tl.program_id(0)
    tile = pid % TILES
    head = (pid // TILES) % HEADS
    b = (pid // (TILES * HEADS)).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_column = tile * COLUMNS + column < DV
    slot = tl.load(indices + b).to(tl.int64)

    v_at = _load(perm_v + head * DV + tile * COLUMNS + column, is_column, WHOLE_TILES).to(tl.int32)
    out_ptr = out + (b * HEADS + head) * DV + v_at
    if (slot < 0) | (slot >= slots):
        fill = tl.where(slot < 0, 0.0, float("nan"))
        tl.store(out_ptr, tl.zeros([COLUMNS], tl.float32) + fill, mask=is_column)
        return

    # All of the record first: these loads take longest and depend on nothing but the slot.
    unit = slot * slot_units + (head * TILES + tile) * UNITS
    half_ptr = halves + unit * 8 + row[:, None] * COLUMNS + column[None, :]
    scale_ptr = floats + unit * 4 + SCALES_AT // 4 + row
    if BITS == 32:
        low_ptr = floats + unit * 4 + LOW_AT // 4 + row[:, None] * COLUMNS + column[None, :]
        LOW_STEP: tl.constexpr = ROWS * COLUMNS
    else:
        low_ptr = bytes_ + unit * 16 + LOW_AT + row[:, None] * LOW_BYTES + tl.arange(0, LOW_BYTES)[None, :]
        LOW_STEP: tl.constexpr = ROWS * LOW_BYTES
    high_raw, low_raw, scales, zeros = (), (), (), ()
    for i in tl.static_range(HIGH_BLOCKS):
        is_row = (i * ROWS + row < HIGH)[:, None]
        high_raw += (_load(half_ptr + i * ROWS * COLUMNS, is_row, WHOLE_HIGH, STREAMING),)
    for i in tl.static_range(LOW_BLOCKS):
        is_row = i * ROWS + row < LOW
        low_raw += (_load(low_ptr + i * LOW_STEP, is_row[:, None], WHOLE_LOW, STREAMING),)
        if BITS != 32:
            scales += (_load(scale_ptr + i * ROWS, is_row, WHOLE_LOW, STREAMING),)
        if ZERO_POINT:
            zeros += (_load(scale_ptr + LOW + i * ROWS, is_row, WHOLE_LOW, STREAMING),)

    # Inputs of the rows, as they come; then what belongs to the head.
    key_head = head // RATIO
    q_ptr = query + b * stride_qb + key_head * stride_qh
    k_ptr = key + b * stride_kb + key_head * stride_kh
    g_ptr = g + b * stride_gb + head * stride_gh
    at_ptr = perm_k + head * DK + row
    q, k, decay = (), (), ()
    for i in tl.static_range(HIGH_BLOCKS):
        at = _load(at_ptr + i * ROWS, i * ROWS + row < HIGH, WHOLE_HIGH).to(tl.int32)
        qi, ki, ai = _row_inputs(q_ptr, k_ptr, g_ptr, at, i * ROWS + row < HIGH, WHOLE_HIGH, CHANNEL_DECAY)
        q, k, decay = q + (qi,), k + (ki,), decay + (ai,)
    for i in tl.static_range(LOW_BLOCKS):
        at = _load(at_ptr + HIGH + i * ROWS, i * ROWS + row < LOW, WHOLE_LOW).to(tl.int32)
        qi, ki, ai = _row_inputs(q_ptr, k_ptr, g_ptr, at, i * ROWS + row < LOW, WHOLE_LOW, CHANNEL_DECAY)
        q, k, decay = q + (qi,), k + (ki,), decay + (ai,)
    channel = tl.arange(0, DK_PAD)
    all_q = _load(q_ptr + channel, channel < DK, DK == DK_PAD).to(tl.float32)
    all_k = _load(k_ptr + channel, channel < DK, DK == DK_PAD).to(tl.float32)
    kq = tl.sum(all_k * all_q, 0)
    q_scale = scale
    k_scale = 1.0
    if NORMALIZE:
        q_scale = scale * tl.rsqrt(tl.sum(all_q * all_q, 0) + _NORM_EPS)
        k_scale = tl.rsqrt(tl.sum(all_k * all_k, 0) + _NORM_EPS)
    c = _load(column_scale + head * DV + v_at, is_column, WHOLE_TILES)
    v = _load(value + b * stride_vb + head * stride_vh + v_at, is_column, WHOLE_TILES).to(tl.float32)
    v = tl.div_rn(v, tl.where(is_column, c, 1.0))
    write = tl.load(beta + b * stride_bb + head * stride_bh).to(tl.float32)

    # Decode, decay, and the two sums over rows.
    predicted = tl.zeros([ROWS, COLUMNS], tl.float32)
    read = tl.zeros([ROWS, COLUMNS], tl.float32)
    state = ()
    for i in tl.static_range(HIGH_BLOCKS + LOW_BLOCKS):
        if i < HIGH_BLOCKS:
            x = _scale_rows(high_raw[i].to(tl.float32), decay[i], CHANNEL_DECAY)
        elif BITS == 32:
            x = _scale_rows(low_raw[i - HIGH_BLOCKS], decay[i], CHANNEL_DECAY)
        else:
            x = _codes(low_raw[i - HIGH_BLOCKS], BITS, ZERO_POINT, ROWS).to(tl.float32)
            if ZERO_POINT:
                shift = zeros[i - HIGH_BLOCKS] * decay[i]
                x = tl.fma(x, (scales[i - HIGH_BLOCKS] * decay[i])[:, None], shift[:, None])
                if not WHOLE_TILES:
                    x = tl.where(is_column[None, :], x, 0.0)
            else:
                x = x * (scales[i - HIGH_BLOCKS] * decay[i])[:, None]
        predicted = tl.fma(x, k[i][:, None], predicted)
        read = tl.fma(x, q[i][:, None], read)
        state += (x,)
    delta = (v - tl.sum(predicted, 0) * k_scale) * (write * k_scale)
    o = tl.fma(delta, kq, tl.sum(read, 0)) * q_scale * c
    tl.store(out_ptr, o, mask=is_column)

    # A NaN or an infinity anywhere in a column of the state, in k, v, g or beta is in the column's delta too, so that no
    # element needs a check. Left out: sums beyond 3e38 of finite terms, which overflow below.
    poison = (delta - delta)[None, :]
    poisoned = tl.max(delta.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0) >= _INF_BITS
    tile_poison = tl.where(poisoned, float("nan"), 0.0)

    # Write, encode and store.
    for i in tl.static_range(HIGH_BLOCKS):
        x = tl.fma(k[i][:, None], delta[None, :], state[i])
        x = tl.minimum(tl.maximum(x, -_FP16_MAX), _FP16_MAX) + poison
        is_row = (i * ROWS + row < HIGH)[:, None]
        _store(half_ptr + i * ROWS * COLUMNS, x.to(tl.float16), is_row, WHOLE_HIGH, STREAMING)
    for i in tl.static_range(LOW_BLOCKS):
        x = tl.fma(k[HIGH_BLOCKS + i][:, None], delta[None, :], state[HIGH_BLOCKS + i])
        is_row = i * ROWS + row < LOW
        if BITS == 32:
            _store(low_ptr + i * LOW_STEP, x, is_row[:, None], WHOLE_LOW, STREAMING)
        else:
            if FEEDBACK:
                at = ((head * TILES + tile) * LOW + i * ROWS + row) * COLUMNS
                residual_ptr = residual + slot * residual_units * 8 + at[:, None] + column[None, :]
                x = x + _load(residual_ptr, is_row[:, None], WHOLE_LOW, STREAMING).to(tl.float32)
            # Scale and zero point of the rows. max and min skip NaN: tile_poison brings it back.
            if ZERO_POINT:
                low, high = x, x
                if not WHOLE_TILES:
                    low, high = tl.where(is_column[None, :], x, _INF), tl.where(is_column[None, :], x, -_INF)
                new_zero = tl.min(low, 1) + 0.0  # + 0: a zero minimum is stored as +0
                size = tl.max(high, 1) - new_zero
                shifted = x - new_zero[:, None]
            else:
                size = tl.max(tl.abs(x), 1)
                shifted = x
            # size / MOST: one correction makes the product with the reciprocal the IEEE quotient (tried for all
            # mantissas and these three divisors), at a third of a division's instructions.
            quotient = tl.fma(size, 1.0 / MOST, tile_poison)
            new_scale = tl.fma(tl.fma(quotient, -MOST, size), 1.0 / MOST, quotient)
            inverse = tl.where(size < _TINY, 0.0, _reciprocal(new_scale))
            new_scale = tl.where(size < _TINY, tile_poison, new_scale)
            if STOCHASTIC:
                octet = (HIGH + i * ROWS + row) * (TILES * COLUMNS // 8) + tile * (COLUMNS // 8)
                noise = _noise(octet, seed, head + layer_bits, tl.load(steps + b), tl.load(streams + b), ROWS)
                scaled = tl.fma(shifted, inverse[:, None], noise)
                rounded = tl.minimum(tl.maximum(scaled, LEAST), MOST) + _MAGIC
            else:
                # No clamp: |scaled| exceeds the limit by rounding errors only.
                rounded = tl.fma(shifted, inverse[:, None], _MAGIC)
            codes = rounded.to(tl.int32, bitcast=True) - _MAGIC_BITS
            if FEEDBACK:
                decoded = (rounded - _MAGIC) * new_scale[:, None]
                if ZERO_POINT:
                    decoded = decoded + new_zero[:, None]
                error = tl.minimum(tl.maximum(x - decoded, -_FP16_MAX), _FP16_MAX)
                if ZERO_POINT and not WHOLE_TILES:
                    error = tl.where(is_column[None, :], error, 0.0)
                _store(residual_ptr, error.to(tl.float16), is_row[:, None], WHOLE_LOW, STREAMING)
            if ZERO_POINT:
                if not WHOLE_TILES:
                    codes = tl.where(is_column[None, :], codes, 0)
                _store(scale_ptr + LOW + i * ROWS, new_zero + tile_poison, is_row, WHOLE_LOW, STREAMING)
            if BITS == 4:
                even, odd = tl.split(tl.reshape(codes, [ROWS, COLUMNS // 2, 2]))
                codes = (even & 15) | (odd << 4)
            _store(low_ptr + i * LOW_STEP, codes.to(tl.int8), is_row[:, None], WHOLE_LOW, STREAMING)
            _store(scale_ptr + i * ROWS, new_scale, is_row, WHOLE_LOW, STREAMING)


@triton.jit
def _load(ptr, mask, WHOLE: tl.constexpr, STREAMING: tl.constexpr = False):
    """Zero where the mask is false. WHOLE: the mask is true everywhere."""
    modifier: tl.constexpr = ".cg" if STREAMING else ""
    if WHOLE:
        return tl.load(ptr, cache_modifier=modifier)
    else:
        return tl.load(ptr, mask=mask, other=0, cache_modifier=modifier)


@triton.jit
def _store(ptr, x, mask, WHOLE: tl.constexpr, STREAMING: tl.constexpr):
    modifier: tl.constexpr = ".cs" if STREAMING else ""
    if WHOLE:
        tl.store(ptr, x, cache_modifier=modifier)
    else:
        tl.store(ptr, x, mask=mask, cache_modifier=modifier)


@triton.jit
def _row_inputs(q_ptr, k_ptr, g_ptr, at, mask, WHOLE: tl.constexpr, CHANNEL_DECAY: tl.constexpr):
    """q and k of a block's rows, not normalised, and their decay (one for all rows without CHANNEL_DECAY)."""
    q = _load(q_ptr + at, mask, WHOLE).to(tl.float32)
    k = _load(k_ptr + at, mask, WHOLE).to(tl.float32)
    if CHANNEL_DECAY:
        g = _load(g_ptr + at, mask, WHOLE).to(tl.float32)
    else:
        g = tl.load(g_ptr).to(tl.float32)
    return q, k, tl.exp(g)


@triton.jit
def _scale_rows(x, factor, PER_ROW: tl.constexpr):
    if PER_ROW:
        return x * factor[:, None]
    else:
        return x * factor


@triton.jit
def _codes(raw, BITS: tl.constexpr, UNSIGNED: tl.constexpr, ROWS: tl.constexpr):
    """Integer codes ``[ROWS, 32]`` from the stored bytes."""
    if BITS == 8:
        return raw
    else:
        if UNSIGNED:
            packed = raw.to(tl.uint8, bitcast=True)
            nibbles = tl.join(packed & 15, packed >> 4)
        else:
            packed = raw.to(tl.int32)
            nibbles = tl.join((packed << 28) >> 28, packed >> 4)
        return tl.reshape(nibbles, [ROWS, _COLUMNS])


@triton.jit
def _reciprocal(x):
    """The IEEE quotient 1 / x (tried for all mantissas; all ones is one unit off), for normal x with a normal reciprocal.

    Fewer instructions than a division, which must handle the ends of the range. The difference of the patterns is off by
    up to 1/8; two steps of third order bring that to a rounding error, a last one rounds correctly.
    """
    y = (0x7F000000 - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    for _ in tl.static_range(2):
        error = tl.fma(-x, y, 1.0)
        y = tl.fma(tl.fma(error, error, error), y, y)
    return tl.fma(tl.fma(-x, y, 1.0), y, y)


@triton.jit
def _noise(octet, seed, head, step, stream, ROWS: tl.constexpr):
    """U of `StochasticRounding` for ``[ROWS, 32]``; ``octet`` numbers the first octet of the rows."""
    at = octet[:, None] + tl.arange(0, _COLUMNS // 8)[None, :]
    zero = at * 0
    w0, w1, w2, w3 = tl.philox(seed, at, zero + head, zero + step.to(tl.int32), zero + stream.to(tl.int32))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    bits = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [ROWS, _COLUMNS])
    return tl.fma(bits.to(tl.int32).to(tl.float32), 1.52587890625e-05, -0.49999237060546875)  # 2^-16, 2^-17 - 1/2
