"""Bytes of a DAMP cache, read from its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class DampMemoryReport:
    """All sizes in bytes, measured as ``numel * itemsize`` of the tensors that exist.

    Attributes:
        rows: sequences held, B.
        state_bytes: packed recurrent states of all layers; with error feedback, the residuals too.
        full_state_bytes: the same states in FP32, as a stock cache would hold them (computed; they do not exist).
        conv_bytes: states of the short convolutions, in model dtype.
        attention_bytes: keys and values of the attention layers, with the room that captured steps reserve.
        scratch: counters of writes, slot numbers and the inputs of captured steps.
        table_bytes: permutations and column scales; they belong to the model and serve all caches.
        state_bits_per_value: ``8 * state_bytes`` over the number of state values; None while the cache is empty.
    """

    rows: int
    state_bytes: int
    full_state_bytes: int
    conv_bytes: int
    attention_bytes: int
    scratch: int
    table_bytes: int
    state_bits_per_value: float | None

    @property
    def bits_per_element(self) -> float | None:
        """Bits per element of what is quantized: the states."""
        return self.state_bits_per_value

    @property
    def per_request(self) -> int:
        """Everything but the tables, which all requests share."""
        return self.state_bytes + self.conv_bytes + self.attention_bytes + self.scratch

    @property
    def total(self) -> int:
        return self.per_request + self.table_bytes

    def to_dict(self) -> dict:
        derived = ("bits_per_element", "per_request", "total")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        bits = "empty" if self.state_bits_per_value is None else f"{self.state_bits_per_value:.5g} bits a value"
        lines = [
            ("states", self.state_bytes, f"{self.rows} rows, {bits}"),
            ("convolutions", self.conv_bytes, "model dtype"),
            ("attention", self.attention_bytes, "keys and values, model dtype"),
            ("scratch", self.scratch, "counters, slot numbers, inputs of captured steps"),
            ("tables", self.table_bytes, "shared by all caches of the model"),
            ("total", self.total, ""),
            ("FP32 states", self.full_state_bytes, "the same states in a stock cache"),
        ]
        return "\n".join(f"{name:<15} {size:>14,} B  {note}".rstrip() for name, size, note in lines)
