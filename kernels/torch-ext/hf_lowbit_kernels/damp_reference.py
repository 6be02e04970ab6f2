"""Packing of recurrent states and the packed update step: the specification, in plain PyTorch.

All arithmetic is fp32. Quotients are IEEE divisions by tensors: on CUDA, PyTorch turns a division by a Python number
into a multiplication by its reciprocal, which rounds differently.
"""

import torch

from .damp_layout import GROUP, DampLayout, DampPlan, StochasticRounding


# A group whose largest magnitude is below this is stored as zeros.
TINY = 1e-30
FP16_MAX = 65504.0
# Added to the sum of squares in the l2 norm of q and k, as in the models.
NORM_EPS = 1e-6
MASK32 = 0xFFFFFFFF


def to_stored(state: torch.Tensor, plan: DampPlan, layout: DampLayout) -> torch.Tensor:
    """``[N, HV, dk, dv]`` in model coordinates to ``S~``, fp32 ``[N, HV, dk, 32 * tiles]``."""
    state = state.float() / plan.column_scale[None, :, None]
    state = state.gather(2, plan.perm_k.long()[None, :, :, None].expand(state.shape))
    state = state.gather(3, plan.perm_v.long()[None, :, None].expand(state.shape))
    return torch.nn.functional.pad(state, (0, GROUP * layout.tiles - layout.dv))


def from_stored(stored: torch.Tensor, plan: DampPlan, layout: DampLayout) -> torch.Tensor:
    """Inverse of `to_stored` (up to rounding of c)."""
    stored = stored[..., : layout.dv]
    state = torch.zeros_like(stored).scatter_(3, plan.perm_v.long()[None, :, None].expand(stored.shape), stored)
    state = torch.zeros_like(state).scatter_(2, plan.perm_k.long()[None, :, :, None].expand(state.shape), state)
    return state * plan.column_scale[None, :, None]


def decode_records(records: torch.Tensor, layout: DampLayout) -> torch.Tensor:
    """uint8 ``[N, HV, tiles, R]`` to ``S~``, fp32 ``[N, HV, dk, 32 * tiles]``."""
    lead = records.shape[:-1]
    high = records[..., : layout.low_offset].contiguous().view(torch.float16).reshape(*lead, -1, GROUP).float()
    low = records[..., layout.low_offset : layout.scale_offset].contiguous()
    if layout.low_bits == 32:
        low = low.view(torch.float32).reshape(*lead, -1, GROUP)
    else:
        if layout.low_bits == 4:
            nibbles = torch.stack((low & 15, low >> 4), -1).to(torch.int16)
            codes = torch.where(nibbles > 7, nibbles - 16, nibbles)
        else:
            codes = low.view(torch.int8)
        scales = records[..., layout.scale_offset : layout.used_bytes].contiguous().view(torch.float32)
        low = codes.reshape(*lead, -1, GROUP).float() * scales[..., None]
    return torch.cat((high, low), -2).transpose(2, 3).flatten(3)


def encode_records(
    stored: torch.Tensor, layout: DampLayout, rounding: StochasticRounding | None, streams: torch.Tensor
) -> torch.Tensor:
    """``S~``, fp32 ``[N, HV, dk, 32 * tiles]``, to uint8 ``[N, HV, tiles, used_bytes]``.

    A group with a NaN or an infinity decodes to NaN. Finite values of high rows saturate at 65504.
    """
    blocks = stored.unflatten(3, (-1, GROUP)).transpose(2, 3)
    high, low = blocks[..., : layout.high_rows, :], blocks[..., layout.high_rows :, :]
    high = torch.where(high.isfinite(), high.clamp(-FP16_MAX, FP16_MAX), torch.nan).half()
    parts = [_bytes(high)]
    if layout.low_bits == 32:
        return torch.cat((*parts, _bytes(low)), -1)
    limit = 127 if layout.low_bits == 8 else 7
    amax = low.abs().amax(-1)
    finite = amax.isfinite()
    live = finite & (amax >= TINY)
    scale = torch.where(live, amax / torch.full_like(amax, limit), 0.0)
    inverse = torch.where(live, torch.ones_like(scale) / torch.where(live, scale, 1.0), 0.0)
    codes = torch.where(live[..., None], low, 0.0) * inverse[..., None]
    if rounding is None:
        codes = codes.round()
    else:
        codes = (codes + _uniform(rounding, streams, stored.shape[1], layout)).floor()
    codes = codes.clamp(-limit, limit).to(torch.int8)
    if layout.low_bits == 4:
        pairs = codes.unflatten(-1, (-1, 2)).view(torch.uint8)
        parts.append(((pairs[..., 0] & 15) | (pairs[..., 1] << 4)).flatten(-2))
    else:
        parts.append(_bytes(codes))
    parts.append(_bytes(torch.where(finite, scale, torch.nan)[..., None]))
    return torch.cat(parts, -1)


def damp_update_reference(
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
) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.damp_update`. Reads the indices on the host."""
    slots = records.shape[0]
    out = torch.zeros_like(value, memory_format=torch.contiguous_format)
    out[state_indices >= slots] = torch.nan
    rows = ((state_indices >= 0) & (state_indices < slots)).nonzero()[:, 0]
    if rows.numel() == 0:
        return out
    slot = state_indices[rows].long()
    perm_k, perm_v = (table.long().expand(rows.numel(), -1, -1) for table in (plan.perm_k, plan.perm_v))

    def by_value_head(x):
        x = x[rows].float()
        if normalize:
            x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
        return x.repeat_interleave(plan.heads // x.shape[1], 1).gather(2, perm_k)

    q, k = by_value_head(query) * scale, by_value_head(key)
    decay = g[rows].float().exp()
    decay = decay[..., None] if g.dim() == 2 else decay.gather(2, perm_k)
    v = (value[rows].float() / plan.column_scale).gather(2, perm_v)
    v = torch.nn.functional.pad(v, (0, GROUP * layout.tiles - layout.dv))

    packed = records[slot]
    state = decode_records(packed, layout) * decay[..., None]
    delta = (v - (state * k[..., None]).sum(2)) * beta[rows].float()[..., None]
    state = state + k[..., None] * delta[:, :, None]
    read = (state * q[..., None]).sum(2)[..., : layout.dv]
    read = torch.zeros_like(read).scatter_(2, perm_v, read) * plan.column_scale
    out[rows] = read.to(out.dtype)

    if rounding is None:
        streams = slot
    else:
        streams = slot if rounding.streams is None else rounding.streams[rows]
        rounding = StochasticRounding(rounding.seed, rounding.steps[rows], None, rounding.layer)
    packed[..., : layout.used_bytes] = encode_records(state, layout, rounding, streams)
    records[slot] = packed
    return out


def philox(counter: tuple[torch.Tensor, ...], seed: int) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 of four int64 tensors below 2^32: four int64 tensors below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK32, seed >> 32
    for _ in range(10):
        high2, low2 = _multiply(0xCD9E8D57, c2)
        high0, low0 = _multiply(0xD2511F53, c0)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def _multiply(a: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a * x, by halves: the product does not fit int64."""
    low, high = a * (x & 0xFFFF), a * (x >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def _uniform(rounding: StochasticRounding, streams: torch.Tensor, heads: int, layout: DampLayout) -> torch.Tensor:
    """Multiples of 2^-24 in [0, 1), fp32 ``[N, HV, tiles, low_rows, 32]``."""
    device = streams.device
    row = torch.arange(layout.high_rows, layout.dk, device=device)[:, None]
    tile = torch.arange(layout.tiles, device=device)[:, None, None]
    element = row * (GROUP * layout.tiles) + tile * GROUP + torch.arange(GROUP, device=device)
    head = torch.arange(heads, device=device)[:, None, None, None] + (rounding.layer << 16)
    step, stream = ((x.long() & MASK32)[:, None, None, None, None] for x in (rounding.steps, streams))
    c0, c1, c2, c3 = torch.broadcast_tensors(element, head, step, stream)
    return (philox((c0, c1, c2, c3), rounding.seed)[0] >> 8).float() * 2.0**-24


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of the last two dimensions, as one."""
    return x.contiguous().view(torch.uint8).flatten(-2)
