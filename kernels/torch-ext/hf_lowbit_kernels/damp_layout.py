"""Packed recurrent states of Gated DeltaNet and KDA (DAMP): byte layout, index tables and rounding options.

A state ``[dk, dv]`` of one (slot, value head) has key channels as rows and value channels as columns. It is stored in
transformed coordinates ``S~ = P_K S D_c^-1 P_V^T`` (paper, appendix A.3, eqs. 17-18): rows permuted so that the
protected ones come first, columns scaled by 1/c and permuted so that columns of like size share a quantization group.
"""

from dataclasses import dataclass

import torch


# Columns that share one scale, and columns of one record (paper, appendix A.1: 32 values along dv per group).
GROUP = 32
# perm_k is uint8.
MAX_KEY_DIM = 256
LOW_BITS = (8, 4, 32)


@dataclass(frozen=True)
class DampLayout:
    """Bytes of one record: the part of a state that lies in one tile of 32 permuted columns.

    A pool is uint8 ``[slots, HV, tiles, record_bytes]``. With K = ``high_rows`` a record holds, row-major:

    ======================  =====================================  ==========================
    part                    dtype and shape                        first byte
    ======================  =====================================  ==========================
    high (protected) rows   fp16 ``[K, 32]``                       0
    low rows, 8 bits        int8 ``[dk - K, 32]``                  ``64 * K``
    low rows, 4 bits        two's complement nibbles               ``64 * K``
                            ``[dk - K, 16]``, even column low
    low rows, 32 bits       fp32 ``[dk - K, 32]``, no scales       ``64 * K``
    scales                  fp32 ``[dk - K]``                      ``scale_offset``
    zero points             fp32 ``[dk - K]``, if ``zero_point``   ``scale_offset + 4 * (dk - K)``
    zeros                   up to a multiple of 16 bytes           ``used_bytes``
    ======================  =====================================  ==========================

    A low value is ``code * scale``, codes in [-127, 127] or [-7, 7]; the scale is ``amax / 127`` (or 7) over the row's
    32 columns, computed again at every write (paper, eqs. 5-6). With ``zero_point`` it is ``code * scale + zero``,
    unsigned codes in [0, 15], zero the smallest value and the scale a fifteenth of the range: 6 bits a low value, the
    paper's INT4. Zero bytes are a zero state. Columns past dv are zeros and counted; they take no part in a zero
    point's range. ``high_rows=dk`` is an FP16 state, ``high_rows=0`` plain grouped INT8 or INT4; ``low_bits=32`` turns
    quantization of the low rows off. At 128 x 128 with 16 rows a value takes 9.875 bits.

    Attributes:
        dk: key channels, 1 to 256.
        dv: value channels.
        high_rows: K_hi, rows in FP16, 0 to dk.
        low_bits: 8, 4 or 32.
        zero_point: whether 4-bit groups store a zero point; only with ``low_bits=4``.

    Raises:
        ValueError: a size is out of range, or a zero point is asked for with other than 4 bits.
    """

    dk: int
    dv: int
    high_rows: int = 16
    low_bits: int = 8
    zero_point: bool = False

    def __post_init__(self):
        if not 1 <= self.dk <= MAX_KEY_DIM:
            raise ValueError(f"dk is {self.dk}; allowed is 1 to {MAX_KEY_DIM}. Keep larger states in full precision.")
        if not 1 <= self.dv < 2**15:
            raise ValueError(f"dv is {self.dv}; allowed is 1 to {2**15 - 1}.")
        if not 0 <= self.high_rows <= self.dk:
            raise ValueError(f"high_rows is {self.high_rows}; allowed is 0 to dk = {self.dk}.")
        if self.low_bits not in LOW_BITS:
            raise ValueError(f"low_bits is {self.low_bits}; allowed is 8, 4 or 32 (32: low rows are not quantized).")
        if self.zero_point and self.low_bits != 4:
            raise ValueError(f"zero_point=True is for low_bits=4; with low_bits={self.low_bits} leave it False.")

    @property
    def tiles(self) -> int:
        """Records per state."""
        return -(-self.dv // GROUP)

    @property
    def low_rows(self) -> int:
        return self.dk - self.high_rows

    @property
    def low_offset(self) -> int:
        """First byte of the low rows."""
        return 2 * GROUP * self.high_rows

    @property
    def scale_offset(self) -> int:
        """First byte of the scales, a multiple of 16."""
        return self.low_offset + self.low_rows * GROUP * self.low_bits // 8

    @property
    def zero_offset(self) -> int:
        """First byte after the scales: the zero points, if there are any."""
        return self.scale_offset + (0 if self.low_bits == 32 else 4 * self.low_rows)

    @property
    def used_bytes(self) -> int:
        """Bytes before the zeros at a record's end."""
        return self.zero_offset + (4 * self.low_rows if self.zero_point else 0)

    @property
    def record_bytes(self) -> int:
        return -(-self.used_bytes // 16) * 16

    @property
    def state_bytes(self) -> int:
        """Bytes of one (slot, value head)."""
        return self.tiles * self.record_bytes

    @property
    def bits_per_value(self) -> float:
        """Stored bits per element of ``[dk, dv]``: scales, padding columns and padding bytes included."""
        return 8 * self.state_bytes / (self.dk * self.dv)

    def pool_shape(self, slots: int, heads: int) -> tuple[int, int, int, int]:
        """Shape of the uint8 tensor that holds ``slots`` states of ``heads`` value heads each."""
        return slots, heads, self.tiles, self.record_bytes

    def residual_shape(self, slots: int, heads: int) -> tuple[int, int, int, int, int]:
        """Shape of the fp16 tensor of `ErrorFeedback`."""
        return slots, heads, self.tiles, self.low_rows, GROUP

    def zeros(self, slots: int, heads: int, device: torch.device | str | None = None) -> torch.Tensor:
        """A pool of zero states."""
        return torch.zeros(self.pool_shape(slots, heads), dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class DampPlan:
    """Tables of one layer's value heads; see the module docstring for the coordinates.

    Attributes:
        perm_k: uint8 ``[HV, dk]``: stored row i is key channel ``perm_k[h, i]``. The protected channels come first.
        perm_v: int16 ``[HV, dv]``: stored column j is value channel ``perm_v[h, j]``.
        column_scale: fp32 ``[HV, dv]``, c of the paper, per *original* value channel, positive. A state is divided by
            it before it is stored.

    Raises:
        ValueError: a dtype or shape is wrong, a table is no permutation, or a scale is not positive and finite.
    """

    perm_k: torch.Tensor
    perm_v: torch.Tensor
    column_scale: torch.Tensor

    def __post_init__(self):
        for name, dtype in (("perm_k", torch.uint8), ("perm_v", torch.int16), ("column_scale", torch.float32)):
            table = getattr(self, name)
            if table.dtype != dtype or table.dim() != 2 or not table.is_contiguous():
                raise ValueError(
                    f"{name} must be a contiguous {dtype} matrix with one row per value head, got {table.dtype} "
                    f"{tuple(table.shape)} with strides {table.stride()}."
                )
        heads, dk = self.perm_k.shape
        dv = self.perm_v.shape[1]
        if self.perm_v.shape != (heads, dv) or self.column_scale.shape != (heads, dv):
            raise ValueError(
                f"perm_v {tuple(self.perm_v.shape)} and column_scale {tuple(self.column_scale.shape)} must both be "
                f"[HV, dv] with the HV = {heads} of perm_k."
            )
        for name, size in (("perm_k", dk), ("perm_v", dv)):
            table = getattr(self, name).long()
            if not torch.equal(table.sort(-1).values, torch.arange(size, device=table.device).expand(heads, size)):
                raise ValueError(f"every row of {name} must be a permutation of 0 to {size - 1}.")
        if not bool((self.column_scale > 0).all() & self.column_scale.isfinite().all()):
            raise ValueError("column_scale must be positive and finite; use 1 for a channel that is always zero.")

    @classmethod
    def identity(cls, heads: int, dk: int, dv: int, device: torch.device | str | None = None) -> "DampPlan":
        """No permutation, no scaling: with K_hi high rows, the first K_hi key channels are protected."""
        return cls.from_rows(torch.empty(heads, 0, dtype=torch.long, device=device), dk, dv)

    @classmethod
    def from_rows(
        cls,
        rows: torch.Tensor,
        dk: int,
        dv: int,
        *,
        perm_v: torch.Tensor | None = None,
        column_scale: torch.Tensor | None = None,
    ) -> "DampPlan":
        """Plan that protects given key channels; both parts are stored in ascending order.

        Args:
            rows: integer ``[HV, K_hi]``, distinct key channels of each head, in any order.
            dk, dv: state size.
            perm_v: integer ``[HV, dv]``; default: no permutation.
            column_scale: ``[HV, dv]``; default: ones.

        Raises:
            ValueError: a row index is out of range or repeated; as for the class.
        """
        heads, count = rows.shape
        rows = rows.long()
        if count > dk or (count and (int(rows.min()) < 0 or int(rows.max()) >= dk)):
            raise ValueError(f"rows must be at most {dk} indices from 0 to {dk - 1} per head, got {tuple(rows.shape)}")
        low = torch.ones(heads, dk, dtype=torch.long, device=rows.device).scatter_(1, rows, 0)
        if bool((low.sum(1) != dk - count).any()):
            raise ValueError("rows repeat an index within a head; give every protected key channel once.")
        perm_k = low.argsort(dim=1, stable=True).to(torch.uint8)
        if perm_v is None:
            perm_v = torch.arange(dv, device=rows.device).expand(heads, dv)
        if column_scale is None:
            column_scale = torch.ones(heads, dv, device=rows.device)
        return cls(perm_k, perm_v.to(torch.int16).contiguous(), column_scale.float().contiguous())

    @property
    def heads(self) -> int:
        """HV."""
        return self.perm_k.shape[0]

    def to(self, device: torch.device | str) -> "DampPlan":
        return DampPlan(self.perm_k.to(device), self.perm_v.to(device), self.column_scale.to(device))


@dataclass(frozen=True)
class StochasticRounding:
    """Rounds codes up with the probability of their fraction: ``round(x / scale + U)``, U uniform in (-1/2, 1/2).

    U = (h + 1/2) / 65536 - 1/2 with 16 random bits h. Eight neighbouring columns 8 j to 8 j + 7 of a row share one call
    of Philox4x32-10 with key ``seed`` and counter ``(row * 4 * tiles + j, head + 65536 * layer, step, stream)``, row and
    column in stored coordinates; column 8 j + i takes half i % 2 (the low one first) of word i // 2. So the same
    arguments give the same bits on every device, whatever else is in the batch. High rows are always rounded to nearest.
    Inferred: the paper does not name its rounding.

    Attributes:
        seed: 0 to 2^63 - 1.
        steps: int32 or int64 ``[B]``, the number of the write in each sequence (low 32 bits count). It must change
            from write to write, else errors repeat with the same sign.
        streams: int32 or int64 ``[B]``, names the sequence (low 32 bits count). Default: the slot index (0 to N - 1 in
            `damp_pack`). Pass zeros where a sequence's bits must not depend on its slot.
        layer: 0 to 32767, so that layers draw different numbers.
    """

    seed: int
    steps: torch.Tensor
    streams: torch.Tensor | None = None
    layer: int = 0

    def __post_init__(self):
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; allowed is 0 to 2^63 - 1.")
        if not 0 <= self.layer < 2**15:
            raise ValueError(f"layer is {self.layer}; allowed is 0 to {2**15 - 1}.")
        for name in ("steps", "streams"):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1):
                raise ValueError(f"{name} must be int32 or int64 [B], got {tensor.dtype} {tuple(tensor.shape)}.")


@dataclass(frozen=True)
class ErrorFeedback:
    """Carries the rounding error of every low value to its next write: with a residual r, a write of S stores Q(S + r),
    rounded to nearest, and leaves r <- S + r - Q(S + r). Reading does not use r. High rows are rounded to nearest.

    The residual takes 16 bits a low value, so that state and residual together are larger than an FP16 state. It is
    clipped at 65504. It means nothing where the stored group is not finite; zero it together with the records.

    Attributes:
        residual: fp16 `DampLayout.residual_shape`, contiguous but for the first dimension, changed in place. One row per
            slot in `damp_update`, one per state in `damp_pack`.
    """

    residual: torch.Tensor

    def __post_init__(self):
        residual = self.residual
        if residual.dtype != torch.float16 or residual.dim() != 5:
            raise ValueError(
                f"residual must be float16 [slots, HV, tiles, low_rows, {GROUP}], got {residual.dtype} "
                f"{tuple(residual.shape)}. Allocate it with torch.zeros(layout.residual_shape(slots, HV))."
            )


Rounding = StochasticRounding | ErrorFeedback | None
