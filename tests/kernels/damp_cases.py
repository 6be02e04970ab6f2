"""DAMP cases, their inputs, and oracles in NumPy fp64 that share no code with the package."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from hf_lowbit_kernels import DampLayout, DampPlan, damp_pack


# fp32 against fp64 for sums of up to 256 products, relative to the largest value; measured below 1e-6.
FP32_SUM = 4e-6


@dataclass(frozen=True)
class Case:
    dk: int = 64
    dv: int = 64
    high_rows: int = 16
    low_bits: int = 8
    heads: int = 2  # value heads
    ratio: int = 1  # value heads per key head
    channel_decay: bool = False
    slots: tuple[int, ...] = (3, 0)
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int32
    normalize: bool = True
    zero_point: bool = False

    @property
    def layout(self) -> DampLayout:
        return DampLayout(self.dk, self.dv, self.high_rows, self.low_bits, self.zero_point)

    @property
    def id(self) -> str:
        decay = "kda" if self.channel_decay else "gdn"
        name = f"{decay}-{self.dk}x{self.dv}-hi{self.high_rows}-b{self.low_bits}{'z' * self.zero_point}-h{self.heads}r{self.ratio}"
        return f"{name}-n{len(self.slots)}-{str(self.dtype).removeprefix('torch.')}"


BASE = Case()
CASES = [
    BASE,
    replace(BASE, channel_decay=True),
    replace(BASE, dk=128, dv=128, heads=2, ratio=2, slots=(4, 1)),
    replace(BASE, dk=128, dv=128, heads=1, channel_decay=True, dtype=torch.bfloat16, slots=(2,)),
    replace(BASE, dk=96, dv=40, high_rows=12, heads=4, ratio=2, dtype=torch.float16),
    replace(BASE, dk=60, dv=40, high_rows=1, channel_decay=True, index_dtype=torch.int64, slots=(2, 4, 1)),
    replace(BASE, dk=60, dv=64, high_rows=0, heads=3, ratio=3),
    replace(BASE, dk=96, dv=64, high_rows=96, channel_decay=True),
    replace(BASE, dk=60, dv=40, high_rows=60, heads=2, ratio=2),
    replace(BASE, dk=96, dv=40, high_rows=0, low_bits=32),
    replace(BASE, dk=64, dv=40, high_rows=1, low_bits=32, channel_decay=True),
    replace(BASE, dk=64, dv=64, low_bits=4),
    replace(BASE, dk=60, dv=40, high_rows=1, low_bits=4, channel_decay=True, heads=4, ratio=2),
    replace(BASE, dk=128, dv=64, high_rows=0, low_bits=4, slots=(1,)),
    replace(BASE, dk=64, dv=64, low_bits=4, zero_point=True, channel_decay=True),
    replace(BASE, dk=60, dv=40, high_rows=1, low_bits=4, zero_point=True, heads=4, ratio=2, slots=(1,)),
    replace(BASE, dk=128, dv=33, high_rows=16, low_bits=4, zero_point=True, heads=1, dtype=torch.bfloat16, slots=(2,)),
    replace(BASE, dk=160, dv=33, high_rows=20, slots=(1,)),
    replace(BASE, dk=1, dv=1, high_rows=0, slots=(1, 3, 0)),
    replace(BASE, normalize=False, dtype=torch.bfloat16, slots=(1, -1, 4)),
]


def make_plan(case, device, generator, power_of_two=False):
    rows = torch.stack([torch.randperm(case.dk, generator=generator)[: case.high_rows] for _ in range(case.heads)])
    perm_v = torch.stack([torch.randperm(case.dv, generator=generator) for _ in range(case.heads)])
    scale = torch.exp2(torch.randn(case.heads, case.dv, generator=generator))
    if power_of_two:
        scale = torch.exp2(scale.log2().round())
    return DampPlan.from_rows(rows, case.dk, case.dv, perm_v=perm_v, column_scale=scale).to(device)


def make_inputs(case, device, pool_slots=5):
    """(records, arguments of damp_update after records, plan). Pool slots that no row uses hold 0xFF bytes."""
    generator = torch.Generator().manual_seed(case.dk * 7 + case.dv + case.high_rows + len(case.slots))
    draw = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    batch, key_heads = len(case.slots), case.heads // case.ratio
    plan = make_plan(case, device, generator)
    records = torch.full(case.layout.pool_shape(pool_slots, case.heads), 255, dtype=torch.uint8, device=device)
    # Rows of very different size, as in real states.
    size = torch.exp2(2 * draw(1, case.heads, case.dk, 1))
    state = draw(batch, case.heads, case.dk, case.dv) * size
    packed = damp_pack(state.to(device), plan, case.layout)
    for i, slot in enumerate(case.slots):
        if 0 <= slot < pool_slots:
            records[slot] = packed[i]
    # Strided views of one projection, as the models make them.
    qk = draw(batch, 2 * key_heads, case.dk)
    if not case.normalize:
        qk = qk / case.dk**0.5
    qk = qk.to(case.dtype).to(device)
    g = -draw(batch, case.heads, case.dk).exp() * 0.2 if case.channel_decay else -draw(batch, case.heads).exp() * 0.2
    arguments = (
        torch.tensor(case.slots, dtype=case.index_dtype, device=device),
        qk[:, :key_heads],
        qk[:, key_heads:],
        draw(batch, case.heads, case.dv).to(case.dtype).to(device),
        g.to(device),
        torch.rand(batch, case.heads, generator=generator).to(case.dtype).to(device),
    )
    return records, arguments, plan


def oracle_decode(record_tiles, case, plan, head):
    """fp64 stored state ``[dk, dv]`` (permuted, scaled) of one head, and the step of every value: bytes by hand."""
    high, low = case.high_rows, case.dk - case.high_rows
    state, step = np.zeros((case.dk, case.dv)), np.zeros((case.dk, case.dv))
    for tile, record in enumerate(record_tiles.cpu().numpy()):
        raw = record.tobytes()
        scales_at = 64 * high + low * 32 * case.low_bits // 8
        width = min(32, case.dv - 32 * tile)
        for i in range(case.dk):
            if i < high:
                row = np.frombuffer(raw, np.float16, 32, 64 * i).astype(np.float64)
                unit = np.maximum(np.abs(row), 2.0**-14) * 2.0**-10
            elif case.low_bits == 32:
                row = np.frombuffer(raw, np.float32, 32, 64 * high + 128 * (i - high)).astype(np.float64)
                unit = np.zeros(32)
            else:
                scale = float(np.frombuffer(raw, np.float32, 1, scales_at + 4 * (i - high))[0])
                zero = 0.0
                if case.zero_point:
                    zero = float(np.frombuffer(raw, np.float32, 1, scales_at + 4 * low + 4 * (i - high))[0])
                if case.low_bits == 8:
                    codes = np.frombuffer(raw, np.int8, 32, 64 * high + 32 * (i - high)).astype(np.float64)
                else:
                    packed = np.frombuffer(raw, np.uint8, 16, 64 * high + 16 * (i - high))
                    nibbles = [n for byte in packed for n in (int(byte) % 16, int(byte) // 16)]
                    signed = not case.zero_point
                    codes = np.array([n - 16 if signed and n > 7 else n for n in nibbles], dtype=np.float64)
                assert not codes[width:].any(), "padding columns have code zero"
                row, unit = codes * scale + zero, np.full(32, scale)
            state[i, 32 * tile : 32 * tile + width] = row[:width]
            step[i, 32 * tile : 32 * tile + width] = unit[:width]
            assert case.zero_point or not row[width:].any(), "padding columns are zero"
    return state, step


def oracle_state(record_tiles, case, plan, head):
    """The same in model coordinates: state and step ``[dk, dv]``, by loops over the tables."""
    stored, step = oracle_decode(record_tiles, case, plan, head)
    perm_k, perm_v = plan.perm_k[head].tolist(), plan.perm_v[head].tolist()
    c = plan.column_scale[head].double().cpu().numpy()
    state, unit = np.zeros_like(stored), np.zeros_like(step)
    for i, u in enumerate(perm_k):
        for j, w in enumerate(perm_v):
            state[u, w] = stored[i, j] * c[w]
            unit[u, w] = step[i, j] * c[w]
    return state, unit


def oracle_step(state, arguments, case, b, head):
    """One token of the plain recurrence in fp64 and model coordinates: (new state, output)."""
    _, query, key, value, g, beta = (x.double().cpu().numpy() for x in arguments)
    q, k, v = query[b, head // case.ratio], key[b, head // case.ratio], value[b, head]
    if case.normalize:
        q = q / math.sqrt((q * q).sum() + 1e-6)
        k = k / math.sqrt((k * k).sum() + 1e-6)
    new = np.zeros_like(state)
    for u in range(case.dk):
        a = math.exp(g[b, head, u] if case.channel_decay else g[b, head])
        new[u] = a * state[u]
    predicted = sum(new[u] * k[u] for u in range(case.dk))
    for u in range(case.dk):
        new[u] = new[u] + beta[b, head] * k[u] * (v - predicted)
    return new, sum(new[u] * q[u] for u in range(case.dk)) / math.sqrt(case.dk)
