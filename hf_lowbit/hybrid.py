"""`HybridCache`: the attention layers of a hybrid model on LoopVQ's codes, its recurrent layers on DAMP's packed states.

The methods do not know each other. LoopVQ's cache asks for a cache of the layers that have no keys and values; this file
gives it DAMP's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .damp.cache import FAST_BACKENDS, DAMPStateCache
from .damp.memory import DampMemoryReport
from .loopvq.cache import LoopVQCache
from .loopvq.memory import MemoryReport
from .protocols import ForcedSchedule


@dataclass(frozen=True)
class HybridMemoryReport:
    """Bytes of a :class:`HybridCache`, read from its tensors.

    Attributes:
        attention: of the attention layers; its ``states`` is 0.
        recurrent: of the recurrent layers; its ``attention_bytes`` is 0.
    """

    attention: MemoryReport
    recurrent: DampMemoryReport

    @property
    def per_request(self) -> int:
        """Everything but codebooks and tables, which all requests share."""
        return self.attention.per_request + self.recurrent.per_request

    @property
    def total(self) -> int:
        return self.attention.total + self.recurrent.total

    @property
    def bits_per_element(self) -> float | None:
        """Code bits per key or value element of the coded tokens; None while nothing is coded."""
        return self.attention.bits_per_element

    @property
    def state_bits_per_value(self) -> float | None:
        """Bits per value of the recurrent states; None while the cache is empty."""
        return self.recurrent.state_bits_per_value

    @property
    def state_bytes(self) -> int:
        """Packed recurrent states of all layers."""
        return self.recurrent.state_bytes

    def to_dict(self) -> dict[str, Any]:
        derived = ("bits_per_element", "state_bits_per_value", "state_bytes", "per_request", "total")
        parts = {"attention": self.attention.to_dict(), "recurrent": self.recurrent.to_dict()}
        return parts | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        parts = [f"attention layers\n{self.attention}", f"recurrent layers\n{self.recurrent}"]
        return "\n\n".join(
            [*parts, f"{'per request':<15} {self.per_request:>14,} B\n{'total':<15} {self.total:>14,} B"]
        )


class HybridCache(LoopVQCache):
    """Codes for keys and values, packed bytes for recurrent states. Allocates nothing until it is used.

    Prompts longer than ``prefill_chunk_size`` go in pieces counted from their end. States are rounded after each of them,
    codes are read from the second on; left padding changes neither.

    Args:
        model: a hybrid model that was calibrated for both methods.
        rounding, seed: of states, as :class:`~hf_lowbit.DAMPStateCache` takes them.
        strict: raise instead of falling back when decode attention or the update of states cannot run on a kernel.
        backend: "auto", or "triton" / "reference" to force a path for both.
        **options: ``recent_window``, ``prefill_chunk_size``, ``cuda_graphs``, ``max_cache_len`` of
            :class:`~hf_lowbit.LoopVQCache`.

    Attributes:
        backend: the path of decode attention; ``states.backend`` is that of the states.
        states: the :class:`~hf_lowbit.DAMPStateCache` of the recurrent layers.

    Raises:
        ValueError: codebooks or tables are missing, or an option is out of range.
        FallbackError: ``strict`` and no kernel.

    Example:
        >>> cache = HybridCache(model)                                          # doctest: +SKIP
        >>> model.generate(**inputs, cache=cache, max_new_tokens=100)           # doctest: +SKIP
        >>> print(cache.memory_report())                                        # doctest: +SKIP
    """

    states: DAMPStateCache

    def __init__(
        self,
        model,
        *,
        rounding: str | None = None,
        seed: int | None = None,
        strict: bool = False,
        backend: str = "auto",
        **options: Any,
    ):
        if backend not in ("auto", "triton", "reference"):
            raise ValueError(f"backend={backend!r} must be 'auto', 'triton' or 'reference' for both kinds of layers.")

        def states() -> DAMPStateCache:
            return DAMPStateCache(
                model, rounding=rounding, seed=seed, strict=strict, backend=backend, cuda_graphs=False
            )

        super().__init__(model, strict=strict, backend=backend, states=states, **options)

    def verify(self, model) -> None:
        """Check that the states were made with the tables that ``model`` carries; see :meth:`DAMPStateCache.verify`."""
        self.states.verify(model)

    def forced_schedule(self, prompt_tokens: int | None = None) -> ForcedSchedule:
        """A prompt, then single tokens: every step rounds the states, and a step sees the codes that decoding sees.

        Args:
            prompt_tokens: tokens of the prompt; None takes 64.
        """
        return self.states.forced_schedule(prompt_tokens)

    def memory_report(self) -> HybridMemoryReport:
        """Bytes of everything this cache holds, read from the tensors."""
        return HybridMemoryReport(super().memory_report(), self.states.memory_report())

    def _graph_obstacle(self) -> str | None:
        if self.states.backend not in FAST_BACKENDS:
            return f"packed states are updated on the slow {self.states.backend} path"
        return super()._graph_obstacle()

    def _state_tensors(self) -> Iterable[torch.Tensor]:
        return self.states.step_tensors()

    def _state_bytes(self) -> int:
        return 0  # the other report counts them

    def __repr__(self) -> str:
        return f"HybridCache({super().__repr__()}, {self.states!r})"
