"""One-token steps as the layers see them: the numbers that change from step to step, in tensors at fixed addresses.

Nothing here is read on the host while the layers run, so that a step can be captured in a CUDA graph and replayed after
:meth:`DecodeStep.refresh` has written the next token's numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hf_lowbit_kernels import rope_store

from ..config import PAGE
from .codebook import LoopVQCodebook


class StepTensors:
    """The numbers of one step on one device. Row b of a tensor belongs to row b of the batch, or to due page b.

    Attributes:
        length, coded: int32 ``[B]``; tokens with the current one, and coded tokens.
        position: int64 ``[B, 1]`` of the current token.
        slot: int64 ``[B]``; where in the window the current token goes.
        due_row, due_page, due_slot: int64 ``[B]``; of each page that this step encodes: its row, its index among the
            row's pages, and the window index of its first token.
        due_slots: int64 ``[B, 8]``; window indices of its tokens.
    """

    def __init__(self, batch: int, device: torch.device):
        self._sent = torch.zeros((7, batch), dtype=torch.int64, device=device)
        self._counts = torch.zeros((2, batch), dtype=torch.int32, device=device)
        self._place = torch.arange(PAGE, device=device)
        self.due_slots = torch.zeros((batch, PAGE), dtype=torch.int64, device=device)
        self.length, self.coded = self._counts
        position, self.slot, self.due_row, self.due_page, self.due_slot = self._sent[2:]
        self.position = position.unsqueeze(1)

    def send(self, numbers: torch.Tensor) -> None:
        """int64 ``[7, B]`` from the host, without waiting for the device."""
        if self._sent.is_cuda:
            # Fresh pinned memory comes from PyTorch's pool, which hands a block out again only after its copy: a buffer
            # of our own could be overwritten while the copy of an earlier step is still to come.
            numbers = numbers.pin_memory()
        self._sent.copy_(numbers, non_blocking=True)

    def derive(self) -> None:
        """Part of the captured step."""
        self._counts.copy_(self._sent[:2])
        torch.add(self.due_slot.unsqueeze(1), self._place, out=self.due_slots)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self._sent, self._counts, self._place, self.due_slots))


class DecodeStep:
    """A step of one token per row, reused for all of them while the batch stays what it is.

    Args:
        batch: B.
        devices: of the layers and of the embeddings.
        sinks: S.
        ring: R, ring slots of the window after the sinks.

    Attributes:
        pages: pages that the step encodes, some of them padding; the only thing that decides which kernels run, and
            therefore which graph.
    """

    def __init__(self, batch: int, devices: Iterable[torch.device], sinks: int, ring: int):
        self.batch, self.sinks, self.ring = batch, sinks, ring
        self.pages = 0
        # Normal tensors even under inference_mode, which would not let a later call without it write to them.
        with torch.inference_mode(False):
            self._tensors = {device: StepTensors(batch, device) for device in devices}

    def on(self, device: torch.device) -> StepTensors:
        return self._tensors[device]

    @property
    def devices(self) -> Iterable[torch.device]:
        return self._tensors.keys()

    def fits(self, batch: int, device: torch.device) -> bool:
        return batch == self.batch and device in self._tensors

    def refresh(self, lengths: list[int], coded: list[int], due: list[tuple[int, int]], spare: int) -> None:
        """Set the step's numbers.

        Args:
            lengths: tokens per row, the current one included.
            coded: coded tokens per row.
            due: (row, page) to encode, at most one per row.
            spare: a page that holds nothing. The number of pages is rounded up to a power of two, so that few graphs
                serve rows of every phase; the surplus is written there.
        """
        self.pages = min(self.batch, 1 << (len(due) - 1).bit_length()) if due else 0
        sinks, ring = self.sinks, self.ring
        positions = [length - 1 for length in lengths]
        slots = [p if p < sinks else sinks + (p - sinks) % ring for p in positions]
        due = due + [(0, spare)] * (self.batch - len(due))
        due_rows = [row for row, _ in due]
        due_pages = [page for _, page in due]
        due_slots = [sinks + PAGE * page % ring for page in due_pages]
        numbers = torch.tensor([lengths, coded, positions, slots, due_rows, due_pages, due_slots])
        for tensors in self._tensors.values():
            tensors.send(numbers)

    def derive(self) -> None:
        """What follows from the sent numbers, once before the layers run."""
        for tensors in self._tensors.values():
            tensors.derive()

    def rotate_and_write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        window: torch.Tensor,
    ) -> torch.Tensor:
        """Put the token's key and value into one loop step's window, and rotate its query, in one kernel.

        Args:
            query: ``[B, Hq, 1, D]`` before RoPE.
            key, value: ``[B, H, 1, D]``, kept as they are: keys before RoPE.
            cos, sin: ``[B or 1, 1, D]``.
            window: ``[2, B, H, S + R, D]``.

        Returns:
            ``[B, Hq, D]``.
        """
        token = (query[:, :, 0], key[:, :, 0], value[:, :, 0], cos[:, 0], sin[:, 0])
        rotated = rope_store(*token, window[0], window[1], self.on(window.device).slot, rotate_key=False)
        return rotated.to(query.dtype)  # as `rotate`

    def encode(self, window: torch.Tensor, codes: torch.Tensor, codebook: LoopVQCodebook, block: int) -> None:
        """Turn the due pages of one block into codes.

        Args:
            window: ``[T_c, 2, B, H, S + R, D]``, of the block's loop steps.
            codes: ``[2, B, pages, H, 8, NG]``, of the block.
            codebook: of the layer.
            block: which of the codebook's blocks.
        """
        if not self.pages:
            return
        at = self.on(window.device)
        rows, pages, slots = at.due_row[: self.pages], at.due_page[: self.pages], at.due_slots[: self.pages]
        codebook.encode_pages(block, window, codes, rows, pages, slots)

    @property
    def nbytes(self) -> int:
        return sum(tensors.nbytes for tensors in self._tensors.values())
