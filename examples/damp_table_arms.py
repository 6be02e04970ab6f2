"""The arms of examples/damp_table.py: ways to store recurrent states, and several of them side by side in one batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from hf_lowbit.config import DAMPConfig
from hf_lowbit.damp.cache import DAMPStateCache
from hf_lowbit.damp.state import PackedState
from hf_lowbit_kernels import DampLayout


LOW = {"int8": (8, False), "int4": (4, True), "int4sym": (4, False)}  # low_bits, zero_point
# Run with every seed, which draws the sequences that tables are fitted on and selected with.
SEEDED = ("random", "energy", "error", "retention", "damp", "readout")
NAMED_WITH_SEED_0 = ("random", "error", "damp", "readout")  # arms keep the names that docs/benchmarks has


@dataclass(frozen=True)
class Arm:
    """One way to store the states. ``rows`` None: all rows, an FP16 state. ``low`` "fp32": nothing is rounded."""

    low: str
    rows: int | None = 0
    selector: str = ""
    scaling: str = "none"
    rounding: str = "nearest"
    seed: int = 0

    @property
    def group(self) -> str:
        """Name without the seed."""
        if self.low == "fp32":
            return "fp32 stepwise"
        if self.rows is None:
            return "fp16"
        words = [f"{self.low}+{self.rows} {self.selector}" if self.rows else self.low]
        words += {"none": [], "per_head": ["sr"], "global": ["sr-global"]}[self.scaling]
        return " ".join(words + [self.rounding.replace("_", "-")] * (self.rounding != "nearest"))

    @property
    def name(self) -> str:
        return self.group + f" #{self.seed}" * bool(self.selector in NAMED_WITH_SEED_0 or self.seed)

    @property
    def calibrated(self) -> bool:
        return bool(self.rows) or self.scaling != "none"

    @property
    def stage(self) -> int:
        """Order of the runs: arms without a calibration, plain columns with every seed, then column scalings seed by seed."""
        return 2 + self.seed if self.scaling != "none" else int(self.calibrated)

    def config(self, base: DAMPConfig) -> DAMPConfig:
        """The calibration's settings that give this arm's tables."""
        bits, zero_point = LOW[self.low]
        changes = {"low_bits": bits, "zero_point": zero_point, "rows": self.rows, "scaling": self.scaling}
        return DAMPConfig(**{**asdict(base), **changes, "selector": self.selector or "error", "seed": self.seed})

    def layout(self, dk: int, dv: int) -> DampLayout:
        if self.low == "fp32":
            return DampLayout(dk, dv, high_rows=0, low_bits=32)
        if self.rows is None:
            return DampLayout(dk, dv, high_rows=dk)
        bits, zero_point = LOW[self.low]
        return DampLayout(dk, dv, high_rows=self.rows, low_bits=bits, zero_point=zero_point)


def all_arms(kind: str, rows: int, seeds: int) -> list[Arm]:
    """In the order of the table. ``kind``: "gdn" or "kda"; ``rows``: K_hi of the main arms."""
    selectors = [name for name in SEEDED if kind == "kda" or name != "retention"]
    arms = [Arm("fp32"), Arm("int8", None)]
    for low in ("int8", "int4"):
        for scaling in ("none", "per_head"):
            arms.append(Arm(low, scaling=scaling))
            arms += [Arm(low, rows, name, scaling, seed=seed) for name in selectors for seed in range(seeds)]
        arms.append(Arm(low, rows, "damp", "global"))
        arms += [Arm(low, other, "damp", "per_head") for other in (rows // 2, 2 * rows)]
        for rounding in ("stochastic", "error_feedback"):
            arms += [Arm(low, rounding=rounding), Arm(low, rows, "damp", "per_head", rounding)]
    arms += [Arm("int4sym", scaling=scaling) for scaling in ("none", "per_head")]
    arms += [Arm("int4sym", rows, "damp", scaling) for scaling in ("none", "per_head")]
    return arms


class ArmStates(PackedState):
    """One layer's states of several arms: equal shares of the batch's rows, one arm after another.

    The forward pass around the states costs the same for one arm and for many, as one-token steps wait for kernel
    launches; only the packed update runs arm by arm.

    Args:
        parts: the arms' own states, in the order of their rows.
    """

    def __init__(self, parts: Sequence[PackedState]):
        super().__init__(parts[0].plan, parts[0].layout, backend=parts[0].backend)
        self.parts = parts

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def decode(self) -> torch.Tensor:
        return torch.cat([part.decode() for part in self.parts])

    def encode(self, state: torch.Tensor) -> None:
        for part, rows in zip(self.parts, state.chunk(len(self.parts)), strict=True):
            part.encode(rows)

    def update(self, *token: torch.Tensor, normalize: bool) -> torch.Tensor:
        shares = zip(*(x.chunk(len(self.parts)) for x in token), strict=True)
        return torch.cat(
            [part.update(*share, normalize=normalize) for part, share in zip(self.parts, shares, strict=True)]
        )


def side_by_side(caches: Sequence[DAMPStateCache]) -> DAMPStateCache:
    """One empty cache for a batch that holds the rows of all ``caches``, which go on holding their recurrent states."""
    joint = copy.deepcopy(caches[0])
    for i, layer in enumerate(joint.delta_layers):
        layer.recurrent_states[0] = ArmStates([cache.delta_layers[i].state for cache in caches])
    return joint
