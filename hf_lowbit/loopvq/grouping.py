"""Loop-axis grouping (paper section 4.1): which elements of a token share one code.

A code stands for ``G`` elements: ``c = G / T_c`` neighbouring channels at ``T_c`` consecutive loop steps. Coordinate
``i * T_c + m`` of the coupled vector of group ``g`` in block ``beta`` is channel ``g * c + i`` of step
``beta * T_c + m`` (0-based here; the paper counts steps from 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import LoopVQConfig


@dataclass(frozen=True)
class Grouping:
    """Sizes of the grouping for one model.

    Attributes:
        steps: T, loop steps of the model.
        steps_per_code: T_c, loop steps that share a code.
        group_size: G, elements per code.
        head_dim: D.
    """

    steps: int
    steps_per_code: int
    group_size: int
    head_dim: int

    def __post_init__(self):
        if self.steps % self.steps_per_code:
            raise ValueError(
                f"loop_group_size={self.steps_per_code} does not divide the model's {self.steps} loop steps; choose "
                f"one of {[t for t in range(1, self.steps + 1) if self.steps % t == 0]}."
            )
        if self.group_size % self.steps_per_code:
            raise ValueError(
                f"loop_group_size={self.steps_per_code} does not divide G = 8/bits = {self.group_size}; choose one of "
                f"{[t for t in range(1, self.steps + 1) if self.steps % t == 0 and self.group_size % t == 0]}."
            )
        if self.head_dim % self.channels:
            raise ValueError(
                f"c = G / T_c = {self.channels} channels per group do not divide head_dim={self.head_dim}; use more "
                "bits or a larger loop_group_size."
            )

    @classmethod
    def of(cls, config: LoopVQConfig, steps: int, head_dim: int) -> Grouping:
        """The grouping ``config`` means for a model with ``steps`` loops and ``head_dim`` channels per head."""
        size = config.loop_group_size
        if size is None:
            size = next(t for t in (4, 2, 1) if steps % t == 0 and config.group_size % t == 0)
        return cls(steps, size, config.group_size, head_dim)

    @property
    def channels(self) -> int:
        """c, channels per group."""
        return self.group_size // self.steps_per_code

    @property
    def groups(self) -> int:
        """NG, groups per head."""
        return self.head_dim // self.channels

    @property
    def blocks(self) -> int:
        """nB, blocks of T_c steps."""
        return self.steps // self.steps_per_code

    def couple(self, states: torch.Tensor) -> torch.Tensor:
        """``[T_c, ..., D]`` states of one block's steps to coupled vectors ``[..., NG, G]``."""
        split = states.unflatten(-1, (self.groups, self.channels))
        return split.movedim(0, -1).flatten(-2)

    def separate(self, vectors: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`couple`: ``[..., NG, G]`` to ``[T_c, ..., D]``."""
        split = vectors.unflatten(-1, (self.channels, self.steps_per_code))
        return split.movedim(-1, 0).flatten(-2)

    def step_tables(self, entries: torch.Tensor) -> torch.Tensor:
        """Cut coupled entries ``[..., 256, G]`` into one table per step, ``[T_c, ..., 256, c]``."""
        return entries.unflatten(-1, (self.channels, self.steps_per_code)).movedim(-1, 0)

    def join_tables(self, tables: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`step_tables`: ``[T_c, ..., 256, c]`` to ``[..., 256, G]``."""
        return tables.movedim(0, -1).flatten(-2)
