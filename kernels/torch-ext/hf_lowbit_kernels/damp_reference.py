"""Packing of recurrent states and the packed update step: the specification, in plain PyTorch.

All arithmetic is fp32, but for codes: see `_quantize`. Quotients are IEEE divisions by tensors: on CUDA, PyTorch turns a division by a Python number
into a multiplication by its reciprocal, which rounds differently.
"""

import torch

from .damp_layout import GROUP, DampLayout, DampPlan, ErrorFeedback, Rounding, StochasticRounding


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
            codes = torch.stack((low & 15, low >> 4), -1).to(torch.int16)
            if not layout.zero_point:
                codes = torch.where(codes > 7, codes - 16, codes)
        else:
            codes = low.view(torch.int8)
        scale = records[..., layout.scale_offset : layout.zero_offset].contiguous().view(torch.float32)
        low = codes.reshape(*lead, -1, GROUP).float() * scale[..., None]
        if layout.zero_point:
            zero = records[..., layout.zero_offset : layout.used_bytes].contiguous().view(torch.float32)
            low = torch.where(_is_column(layout, low.device), low + zero[..., None], 0.0)
    return torch.cat((high, low), -2).transpose(2, 3).flatten(3)


def encode_records(
    stored: torch.Tensor, layout: DampLayout, rounding: Rounding, streams: torch.Tensor
) -> torch.Tensor:
    """``S~``, fp32 ``[N, HV, dk, 32 * tiles]``, to uint8 ``[N, HV, tiles, used_bytes]``.

    A group with a NaN or an infinity decodes to NaN. Finite values of high rows saturate at 65504. A residual has N rows
    and is changed in place.
    """
    blocks = stored.unflatten(3, (-1, GROUP)).transpose(2, 3)
    high, low = blocks[..., : layout.high_rows, :], blocks[..., layout.high_rows :, :]
    high = torch.where(high.isfinite(), high.clamp(-FP16_MAX, FP16_MAX), torch.nan).half()
    parts = [_bytes(high)]
    if layout.low_bits == 32:
        return torch.cat((*parts, _bytes(low)), -1)
    feedback = isinstance(rounding, ErrorFeedback)
    if feedback:
        low = low + rounding.residual.float()
    noise = _noise(rounding, streams, stored.shape[1], layout) if isinstance(rounding, StochasticRounding) else None
    codes, scale, zero = _quantize(low, layout, noise)
    if feedback:
        decoded = codes * scale[..., None]
        if layout.zero_point:
            decoded = torch.where(_is_column(layout, low.device), decoded + zero[..., None], 0.0)
        rounding.residual.copy_((low - decoded).clamp(-FP16_MAX, FP16_MAX))
    codes = codes.to(torch.int8)
    if layout.low_bits == 4:
        pairs = codes.unflatten(-1, (-1, 2)).view(torch.uint8)
        parts.append(((pairs[..., 0] & 15) | (pairs[..., 1] << 4)).flatten(-2))
    else:
        parts.append(_bytes(codes))
    parts.append(_bytes(scale[..., None]))
    if layout.zero_point:
        parts.append(_bytes(zero[..., None]))
    return torch.cat(parts, -1)


def _quantize(
    low: torch.Tensor, layout: DampLayout, noise: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 codes ``[..., 32]``, scales and zero points ``[...]`` of groups ``[..., 32]``.

    Groups with a NaN or an infinity get NaN scales and codes 0, groups below TINY (with a zero point: of a range below
    TINY) get scale and codes 0.
    """
    if layout.zero_point:
        is_column = _is_column(layout, low.device)
        # + 0: a zero minimum is stored as +0.
        zero = torch.where(is_column, low, torch.inf).amin(-1) + 0.0
        size = torch.where(is_column, low, -torch.inf).amax(-1) - zero
        least, most = 0, 15
    else:
        is_column, zero = True, torch.zeros_like(low[..., 0])
        size = low.abs().amax(-1)
        most = 127 if layout.low_bits == 8 else 7
        least = -most
    finite = size.isfinite()
    live = finite & (size >= TINY)
    scale = torch.where(live, size / torch.full_like(size, most), 0.0)
    inverse = torch.where(live, torch.ones_like(scale) / torch.where(live, scale, 1.0), 0.0)
    use = live[..., None] & is_column
    shifted = low - zero[..., None] if layout.zero_point else low
    # Rounded once, as by a fused multiply-add: ties are ties of the exact product.
    codes = torch.where(use, shifted, 0.0).double() * inverse.double()[..., None]
    codes = codes if noise is None else (codes + noise).float()
    codes = torch.where(use, codes.round().clamp(least, most).float(), 0.0)
    return codes, torch.where(finite, scale, torch.nan), torch.where(finite, zero, torch.nan)


def _is_column(layout: DampLayout, device: torch.device) -> torch.Tensor:
    """bool ``[tiles, 1, 32]``: false in the padding of the last tile."""
    return (torch.arange(GROUP * layout.tiles, device=device) < layout.dv).view(layout.tiles, 1, GROUP)


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
    rounding: Rounding = None,
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

    streams = slot
    if isinstance(rounding, StochasticRounding):
        streams = slot if rounding.streams is None else rounding.streams[rows]
        rounding = StochasticRounding(rounding.seed, rounding.steps[rows], None, rounding.layer)
    elif rounding is not None:
        pool, rounding = rounding.residual, ErrorFeedback(rounding.residual[slot])
    packed[..., : layout.used_bytes] = encode_records(state, layout, rounding, streams)
    records[slot] = packed
    if isinstance(rounding, ErrorFeedback):
        pool[slot] = rounding.residual
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


def _noise(rounding: StochasticRounding, streams: torch.Tensor, heads: int, layout: DampLayout) -> torch.Tensor:
    """Odd multiples of 2^-17 in (-1/2, 1/2), fp32 ``[N, HV, tiles, low_rows, 32]``."""
    device = streams.device
    row = torch.arange(layout.high_rows, layout.dk, device=device)[:, None]
    tile = torch.arange(layout.tiles, device=device)[:, None, None]
    octet = (row * layout.tiles + tile) * (GROUP // 8) + torch.arange(GROUP // 8, device=device)
    head = torch.arange(heads, device=device)[:, None, None, None] + (rounding.layer << 16)
    step, stream = ((x.long() & MASK32)[:, None, None, None, None] for x in (rounding.steps, streams))
    words = torch.stack(philox(torch.broadcast_tensors(octet, head, step, stream), rounding.seed), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(-3)
    return halves.float() * 2.0**-16 + (2.0**-17 - 0.5)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of the last two dimensions, as one."""
    return x.contiguous().view(torch.uint8).flatten(-2)
