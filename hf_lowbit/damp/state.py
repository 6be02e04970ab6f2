"""`PackedState`: the packed recurrent states of one layer, as the model carries them unread from cache to recurrence."""

from __future__ import annotations

import copy

import torch

from hf_lowbit_kernels import (
    DampLayout,
    DampPlan,
    ErrorFeedback,
    StochasticRounding,
    damp_pack,
    damp_unpack,
    damp_update,
)


ROUNDINGS = ("nearest", "stochastic", "error_feedback")


class PackedState:
    """States ``[B, HV, dk, dv]`` of a batch in one layer, held as bytes.

    Takes the place of the FP32 tensor in a stock cache. The models pass it on as ``initial_state=`` without looking at
    it; the functions that :func:`~hf_lowbit.damp.functions.patch_delta_rules` puts in place know what to do with it.

    Args:
        plan: tables of the layer, on the layer's device.
        layout: sizes and low bits.
        rounding: of the low rows: "nearest", "stochastic" or "error_feedback".
        seed: of stochastic rounding.
        layer: the layer's index, so that layers draw different random numbers.
        backend: "cuda", "triton", "reference", or "model" (decode, the model's own recurrence, encode).

    Attributes:
        tensors: what belongs to the rows of the batch, each with B first; empty before the first :meth:`encode`.
            ``records`` uint8 ``[B, HV, tiles, R]``; with stochastic rounding ``steps`` int32 ``[B]`` (writes so far) and
            ``streams`` int32 ``[B]`` (zeros: a row's bits must not depend on its place in the batch); with error
            feedback ``residual`` fp16 ``[B, HV, tiles, low rows, 32]``.
    """

    def __init__(
        self,
        plan: DampPlan,
        layout: DampLayout,
        *,
        rounding: str = "nearest",
        seed: int = 0,
        layer: int = 0,
        backend: str = "reference",
    ):
        self.plan, self.layout = plan, layout
        self.rounding, self.seed, self.layer, self.backend = rounding, seed, layer, backend
        self.tensors: dict[str, torch.Tensor] = {}
        self._slots: torch.Tensor | None = None

    # -- what the model does with it -----------------------------------------------------------------------------------

    def to(self, *args, **kwargs) -> PackedState:
        """Itself: Kimi-Linear casts the state to FP32 before it gives it back to the cache."""
        return self

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(
            f"{getattr(function, '__name__', function)} got a packed DAMP state: the model's recurrence functions were put "
            "back (or replaced) after this DAMPStateCache was made, or it was made for a model of another architecture. Make "
            "the cache for this model, inside of whatever replaces them, and load the model without use_kernels=True."
        )

    # -- reading and writing -------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """B, or 0 before the first :meth:`encode`."""
        return len(self.tensors["records"]) if self.tensors else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slot numbers that the update takes."""
        return 0 if self._slots is None else self._slots.nbytes

    def decode(self) -> torch.Tensor:
        """The states, fp32 ``[B, HV, dk, dv]``, in the model's coordinates."""
        return damp_unpack(self.tensors["records"], self.plan, self.layout)

    @torch.no_grad()
    def encode(self, state: torch.Tensor) -> None:
        """Replace the states by ``state`` ``[B, HV, dk, dv]``, rounded (paper, appendix A.4)."""
        if not self.tensors:
            self._allocate(state.shape[0], state.device)
        if state.shape[0] != self.rows:
            raise ValueError(
                f"the cache holds {self.rows} rows and got states of {state.shape[0]}; use one cache per batch (packed "
                "sequences, cu_seqlens, have no rows and do not work with a cache)."
            )
        self.tensors["records"].copy_(damp_pack(state, self.plan, self.layout, rounding=self._rounding()))
        self._count_write()
        self._number_slots(state.device)  # now, as a decoding step may be one that is captured

    @torch.no_grad()
    def update(self, query, key, value, g, beta, *, normalize: bool) -> torch.Tensor:
        """One token: read, decay, erase, write, read out and store again, in place.

        Args:
            query, key: ``[B, H or HV, dk]``; value ``[B, HV, dv]``; g ``[B, HV]`` or ``[B, HV, dk]``; beta ``[B, HV]``.
            normalize: l2-normalise query and key first.

        Returns:
            ``[B, HV, dv]`` in the value's dtype.
        """
        self._number_slots(value.device)
        inputs = [x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, g, beta)]
        out = damp_update(
            self.tensors["records"], self._slots, *inputs, self.plan, self.layout,
            normalize=normalize, rounding=self._rounding(), backend=self.backend,
        )  # fmt: skip
        self._count_write()
        return out

    def addressed(self) -> list[torch.Tensor]:
        """What :meth:`update` reads and writes at addresses that may change, the tables apart."""
        return [*self.tensors.values()] if self._slots is None else [*self.tensors.values(), self._slots]

    def _number_slots(self, device: torch.device) -> None:
        if self._slots is None or self._slots.shape[0] != self.rows or self._slots.device != device:
            self._slots = torch.arange(self.rows, dtype=torch.int32, device=device)

    def _allocate(self, rows: int, device: torch.device) -> None:
        heads, layout = self.plan.heads, self.layout
        self.tensors["records"] = layout.zeros(rows, heads, device)
        if self.rounding == "stochastic":
            for name in ("steps", "streams"):
                self.tensors[name] = torch.zeros(rows, dtype=torch.int32, device=device)
        elif self.rounding == "error_feedback":
            shape = layout.residual_shape(rows, heads)
            self.tensors["residual"] = torch.zeros(shape, dtype=torch.float16, device=device)

    def _rounding(self):
        if self.rounding == "stochastic":
            return StochasticRounding(self.seed, self.tensors["steps"], self.tensors["streams"], self.layer)
        if self.rounding == "error_feedback":
            return ErrorFeedback(self.tensors["residual"])
        return None

    def _count_write(self) -> None:
        if "steps" in self.tensors:
            self.tensors["steps"] += 1

    # -- rows, devices, copies -----------------------------------------------------------------------------------------

    def select(self, rows: torch.Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was; the number of rows may change."""
        for name, tensor in self.tensors.items():
            self.tensors[name] = select_rows(tensor, rows)

    def move(self, device: torch.device | str) -> None:
        """Move the rows; the tables stay on the layer's device."""
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}

    def clear(self) -> None:
        """Forget the rows."""
        self.tensors, self._slots = {}, None

    def __deepcopy__(self, memo) -> PackedState:
        memo[id(self.plan)] = self.plan  # the tables belong to the model
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return clone

    def __repr__(self) -> str:
        return f"PackedState(rows={self.rows}, layout={self.layout}, rounding={self.rounding!r}, backend={self.backend!r})"


def select_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``tensor[rows]``, written into ``tensor`` itself if the number of rows stays: addresses stay, too."""
    selected = tensor.index_select(0, rows.to(tensor.device))
    return tensor.copy_(selected) if len(selected) == len(tensor) else selected
