"""Bytes of a LoopVQ cache, read from its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class MemoryReport:
    """All sizes in bytes, measured as ``numel * itemsize`` of the tensors that exist.

    Attributes:
        codes: codes of tokens that are coded now.
        codes_reserved: the whole code tensors, spare capacity included (contains ``codes``).
        window: sinks and recent tokens in model dtype.
        codebooks: tables and norms; they belong to the model and serve all caches.
        scratch: RoPE tables, row lengths and the like.
        states: recurrent and convolution states of a hybrid model's other layers.
        total: codes_reserved + window + scratch + states + codebooks.
        full_precision: K and V of the same tokens in model dtype, as a stock cache would hold them (computed; such a
            cache does not exist). Without states.
        tokens: tokens held, over all rows.
        coded_tokens: those of them held as codes.
        bits_per_element: measured code bits per K or V element of the coded tokens; None while nothing is coded.
    """

    codes: int
    codes_reserved: int
    window: int
    codebooks: int
    scratch: int
    full_precision: int
    tokens: int
    coded_tokens: int
    bits_per_element: float | None
    states: int = 0

    @property
    def total(self) -> int:
        return self.per_request + self.codebooks

    @property
    def per_request(self) -> int:
        """Without the codebooks, which all requests share."""
        return self.codes_reserved + self.window + self.scratch + self.states

    def to_dict(self) -> dict:
        return {**asdict(self), "total": self.total, "per_request": self.per_request}

    def __str__(self) -> str:
        bits = "nothing coded yet" if self.bits_per_element is None else f"{self.bits_per_element:g} bit an element"
        rows = [
            ("codes", self.codes, f"{self.coded_tokens} of {self.tokens} tokens, {bits}"),
            ("codes reserved", self.codes_reserved, "with room to grow"),
            ("window", self.window, "sinks and recent tokens, model dtype"),
            ("scratch", self.scratch, "RoPE tables, lengths"),
            *([("states", self.states, "of the recurrent layers, as transformers keeps them")] if self.states else []),
            ("codebooks", self.codebooks, "shared by all caches of the model"),
            ("total", self.total, ""),
            ("full precision", self.full_precision, "keys and values of the same tokens in a stock cache"),
        ]
        return "\n".join(f"{name:<15} {size:>14,} B  {note}".rstrip() for name, size, note in rows)
