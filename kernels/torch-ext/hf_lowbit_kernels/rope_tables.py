"""RoPE angles as two small tables, so that a kernel can rotate one query per tile instead of every key."""

from dataclasses import dataclass

import torch


# Longest run of tokens a kernel may process against one base row (rows of the in-tile offset table).
MAX_TILE = 128


@dataclass(frozen=True)
class RopeTables:
    """cos and sin of ``position * inv_freq``, split as position = base + offset.

    Base row ``i`` belongs to position ``i * tile - shift``; ``shift`` is the smallest value >= 0 that puts ``offset``
    (the position of coded token 0) on a base row. Every position p is then base row ``(p + shift) // tile`` plus
    offset row ``(p + shift) % tile``, and the angle addition theorem gives the exact rotation.

    Attributes:
        inv_freq: fp64 ``[D/2]`` on the CPU; the values of the model's own buffer.
        base_cos, base_sin: fp32 ``[rows, D/2]``, multiplied by ``attention_scaling``.
        offset_cos, offset_sin: fp32 ``[MAX_TILE, D/2]``, not scaled.
        mirror_cos, mirror_sin: fp32 ``[8, D/2]``, distances 0.5, 1.5, ... 7.5 from the middle of a run, not scaled.
        mirror_half: fp16 ``[2, 8, D/2]``, both of them rounded, for packed arithmetic.
        tile: positions between base rows.
        offset: position of coded token 0 (the number of sink tokens).
        attention_scaling: the model's factor on cos and sin (1.0 for the default RoPE). It counts once here, for the
            key; the query arrives rotated (and scaled) by the model.
    """

    inv_freq: torch.Tensor
    base_cos: torch.Tensor
    base_sin: torch.Tensor
    offset_cos: torch.Tensor
    offset_sin: torch.Tensor
    mirror_cos: torch.Tensor
    mirror_sin: torch.Tensor
    mirror_half: torch.Tensor
    tile: int
    offset: int
    attention_scaling: float = 1.0

    @property
    def shift(self) -> int:
        return -self.offset % self.tile

    @property
    def max_position(self) -> int:
        """Positions below this value are covered."""
        return self.base_cos.shape[0] * self.tile - self.shift

    @property
    def nbytes(self) -> int:
        tensors = (
            self.base_cos,
            self.base_sin,
            self.offset_cos,
            self.offset_sin,
            self.mirror_cos,
            self.mirror_sin,
            self.mirror_half,
        )
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def grow(self, max_position: int) -> "RopeTables":
        """Tables that cover positions below ``max_position``: self if they already do, else a longer copy.

        Only the new rows are computed, and the length at least doubles, so growing token by token is cheap. The new
        tables live at new addresses: a captured CUDA graph must be captured again.
        """
        if max_position <= self.max_position:
            return self
        rows = self.base_cos.shape[0]
        new_rows = max(_base_rows(max_position, self.tile, self.shift), 2 * rows)
        cos, sin = _base_table(self, rows, new_rows)
        return RopeTables(
            self.inv_freq,
            torch.cat([self.base_cos, cos]),
            torch.cat([self.base_sin, sin]),
            self.offset_cos,
            self.offset_sin,
            self.mirror_cos,
            self.mirror_sin,
            self.mirror_half,
            self.tile,
            self.offset,
            self.attention_scaling,
        )

    def cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """For the reference: exact, scaled cos and sin at ``positions`` (int ``[n]``), two ``[n, D/2]``."""
        angles = positions.to(torch.float64)[:, None] * self.inv_freq.to(positions.device)
        scaling = self.attention_scaling
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def build_rope_tables(
    inv_freq: torch.Tensor,
    max_position: int,
    tile: int = 8,
    offset: int = 8,
    device: torch.device | str | None = None,
    attention_scaling: float = 1.0,
) -> RopeTables:
    """Build the tables in fp64 and store them in fp32.

    fp32 ``position * inv_freq`` is off by up to 4e-3 rad at position 1e5, so the products are formed in fp64.

    Args:
        inv_freq: ``[D/2]``, the model's inverse frequencies (half-split RoPE: channel i turns with i + D/2).
        max_position: number of positions to cover; `RopeTables.grow` extends later.
        tile: positions per base row; a multiple of 8 that divides 128, so that kernel tiles start on a base row.
        offset: position of coded token 0 (the number of sink tokens).
        device: where the fp32 tables live; default: the device of ``inv_freq``.
        attention_scaling: the model's factor on cos and sin.

    Raises:
        ValueError: ``inv_freq`` is not a vector, or ``tile``, ``offset`` or ``max_position`` is out of range.
    """
    if inv_freq.dim() != 1:
        raise ValueError(f"inv_freq must be [head_dim / 2], got shape {tuple(inv_freq.shape)}.")
    if tile < 8 or MAX_TILE % tile:
        raise ValueError(f"tile must be 8, 16, 32, 64 or 128, got {tile}.")
    if offset < 0 or max_position < 1:
        raise ValueError(f"offset must be >= 0 and max_position >= 1, got {offset} and {max_position}.")
    device = inv_freq.device if device is None else torch.device(device)
    # On the CPU: some accelerators have no fp64.
    frequencies = inv_freq.detach().to("cpu", torch.float64)
    steps = torch.arange(MAX_TILE, dtype=torch.float64)[:, None] * frequencies
    mirrors = (torch.arange(8, dtype=torch.float64)[:, None] + 0.5) * frequencies
    empty = torch.empty(0, frequencies.shape[0], device=device)
    tables = RopeTables(
        frequencies,
        empty,
        empty,
        steps.cos().float().to(device),
        steps.sin().float().to(device),
        mirrors.cos().float().to(device),
        mirrors.sin().float().to(device),
        torch.stack([mirrors.cos(), mirrors.sin()]).half().to(device),
        tile,
        offset,
        float(attention_scaling),
    )
    return tables.grow(max_position)


def _base_rows(max_position: int, tile: int, shift: int) -> int:
    return -(-(max_position + shift) // tile)


def _base_table(tables: RopeTables, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(first, last, dtype=torch.float64) * tables.tile - tables.shift
    angles = positions[:, None] * tables.inv_freq
    cos, sin = angles.cos() * tables.attention_scaling, angles.sin() * tables.attention_scaling
    device = tables.offset_cos.device
    return cos.float().to(device), sin.float().to(device)
