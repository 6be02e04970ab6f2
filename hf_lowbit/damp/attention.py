"""`AttentionSlot`: an attention layer's keys and values, which can be put at addresses that stay."""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicLayer

from .state import select_rows


class AttentionSlot(DynamicLayer):
    """Transformers' growing slot, with room for tokens to come once a captured step needs it.

    Until :meth:`reserve` it is a `DynamicLayer`. Then ``keys`` and ``values`` are the beginnings of two larger tensors, and
    whatever replaces them from outside (rows selected, offloading, gradients) ends that until the next :meth:`reserve`.

    Attributes:
        room: keys and values ``[B, H, capacity, D]``, or None.
    """

    def __init__(self):
        super().__init__()
        self.room: tuple[torch.Tensor, torch.Tensor] | None = None
        self._shown: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def capacity(self) -> int:
        """Tokens that there is room for, or 0."""
        # Whoever assigned other keys took the slot out of its room.
        if self.room is None or self.keys is not self._shown[0] or self.values is not self._shown[1]:
            self.room = self._shown = None
            return 0
        return self.room[0].shape[2]

    @property
    def nbytes(self) -> int:
        held = self.room if self.capacity else (self.keys, self.values)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @torch.no_grad()
    def reserve(self, capacity: int) -> None:
        """Move to new tensors with room for ``capacity`` tokens."""
        length = self.get_seq_length()
        larger = []
        for held in (self.keys, self.values):
            shape = (*held.shape[:2], capacity, held.shape[3])
            # Zeros: masked places are multiplied by zero, which must not meet a NaN. No inference tensors: a later call
            # without inference mode must be able to write to them.
            with torch.inference_mode(False):
                larger.append(torch.zeros(shape, dtype=held.dtype, device=held.device))
            larger[-1][:, :, :length] = held
        self.room = tuple(larger)
        self._show(length)

    def _show(self, length: int) -> None:
        self.keys, self.values = self._shown = tuple(tensor[:, :, :length] for tensor in self.room)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        needs_grad = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if end > self.capacity or needs_grad:
            return super().update(key_states, value_states, *args, **kwargs)
        for tensor, new in zip(self.room, (key_states, value_states), strict=True):
            tensor[:, :, length:end] = new
        self._show(end)
        return self.keys, self.values

    def write(self, key_states, value_states, place: torch.Tensor, attended: int):
        """As `update` with one token, without anything that the host knows.

        Args:
            place: int64 ``[1]``, index of the token.
            attended: of the places, how many are handed out.
        """
        keys, values = self.room
        keys.index_copy_(2, place, key_states)
        values.index_copy_(2, place, value_states)
        return keys[:, :, :attended], values[:, :, :attended]

    def advance(self) -> None:
        """A captured step has written one token."""
        self._show(self.get_seq_length() + 1)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """In place if the number of rows stays."""
        if self.capacity and len(beam_idx) == self.keys.shape[0]:
            for tensor in (self.keys, self.values):
                select_rows(tensor, beam_idx)
        else:
            super().reorder_cache(beam_idx)

    def offload(self) -> None:
        super().offload()
        self.room = self._shown = None

    def __getstate__(self) -> dict:
        # Copies and pickles hold the tokens, not the room.
        copies = {name: None if (held := getattr(self, name)) is None else held.clone() for name in ("keys", "values")}
        return {**self.__dict__, **copies, "room": None, "_shown": None}
