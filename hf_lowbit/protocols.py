"""What parts of the package ask of each other: models of caches (`KVAttention`), the evaluation of caches
(`LowBitCache`), everything around a method of the method (`Method`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


ForwardChunk = Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]


@runtime_checkable
class KVAttention(Protocol):
    """A cache that receives keys *before* RoPE and computes the attention itself.

    Stock caches receive rotated keys in ``update`` and hand back full-precision K and V; a cache over codes can do
    neither. Looped models therefore ask ``isinstance(cache, KVAttention)`` and, if so, let the cache drive.
    """

    def run(
        self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, forward_chunk: ForwardChunk
    ) -> dict[str, torch.Tensor]:
        """Run ``forward_chunk(inputs_embeds [B, n, h], position_ids [B, n])`` over the prompt, in one chunk or several.

        Args:
            inputs_embeds: ``[B, q, h]``.
            attention_mask: 2-D ``[B, past + q]``, 1 for real tokens, or None when nothing is padded.
            forward_chunk: runs every loop over one chunk and returns tensors ``[B, n, ...]``. An attribute
                ``graph_key`` on it (hashable) promises that all functions with an equal key run the same operations on
                the same weights and read nothing on the host, so that the cache may capture one in a CUDA graph and
                replay it for the others.

        Returns:
            The chunks' tensors concatenated along dimension 1, in the order of ``inputs_embeds``.
        """
        ...

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        layer: int,
        step: int,
        module: torch.nn.Module,
    ) -> torch.Tensor:
        """Store key and value of (layer, step) and return the attention output ``[B, n, Hq, D]``.

        Args:
            query: ``[B, Hq, n, D]`` before RoPE.
            key, value: ``[B, H, n, D]``, the key before RoPE.
            cos, sin: ``[B or 1, n, D]`` of the chunk's positions, model dtype.
            layer: physical layer, 0-based.
            step: loop step, 0-based.
            module: the attention module (``scaling``, ``num_key_value_groups``).
        """
        ...


class ForcedSchedule(NamedTuple):
    """How given texts must be fed to a cache so that every position sees what it would see in decoding.

    Attributes:
        prefill: tokens of the first forward pass.
        step: tokens of each later one.
        first_counted: first position whose prediction the cache's quantization can change.
    """

    prefill: int
    step: int
    first_counted: int


class CacheReport(Protocol):
    """Bytes of a cache, read from its tensors.

    A cache of recurrent states also reports ``state_bits_per_value`` and ``state_bytes``.
    """

    per_request: int  # bytes of everything that belongs to the sequences
    bits_per_element: float | None  # over what is quantized; None before anything is

    def to_dict(self) -> dict[str, Any]: ...


class LowBitCache(Protocol):
    """What the evaluation and the commands need of a quantized cache besides transformers' `Cache`."""

    backend: str  # the implementation that decodes: "cuda", "triton", "reference", ...

    def memory_report(self) -> CacheReport: ...

    def forced_schedule(self, prompt_tokens: int | None = None) -> ForcedSchedule:
        """The teacher-forced schedule; ``prompt_tokens`` is the prefill of caches that leave it open.

        Raises:
            ValueError: ``prompt_tokens`` is not possible for this cache.
        """
        ...


class Report(Protocol):
    """What a calibration did and measured."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; no number in it is infinite or NaN."""
        ...

    def summary(self) -> str:
        """A few lines for a terminal."""
        ...


class Reports(dict):
    """Reports of several methods by name; a :class:`Report` itself."""

    def to_dict(self) -> dict[str, Any]:
        return {name: report.to_dict() for name, report in self.items()}

    def summary(self) -> str:
        return "\n".join(report.summary() for report in self.values())


class Calibration(NamedTuple):
    """Texts of a calibration and how to run it; a method refuses what it has no use for.

    Attributes:
        tokenizer: for the texts.
        texts: the documents.
        domains: one label per text, or None.
        extra: texts for fine-tuning only, or None.
        fingerprint: of the model's weights.
        resume_dir: directory for intermediate states, or None.
        progress: show progress bars.
    """

    tokenizer: Any
    texts: list[str]
    domains: list[str] | None
    extra: list[str] | None
    fingerprint: str
    resume_dir: str | None
    progress: bool


class CardText(NamedTuple):
    """A method's part of the model card.

    Attributes:
        tags: for the Hub.
        title: of the card, after the model's name.
        cache: the cache in a few words, for a comment in the usage snippet.
        description: what lies beside the weights; Markdown.
        rows: of the table of the calibration.
    """

    tags: list[str]
    title: str
    cache: str
    description: str
    rows: dict[str, str]


class Method(Protocol):
    """One way of keeping a cache in few bits.

    A method puts one module of integer buffers (``table_class``, under the method's name) into every layer it serves.
    What those modules are called in messages is ``tables``.
    """

    name: str
    tables: str
    table_class: type[torch.nn.Module]
    cache_options: tuple[str, ...]  # what cache_config may hold

    def check(self, model) -> None:
        """Raise TypeError or ValueError for a model the method cannot serve; weights may still be on the meta device."""
        ...

    def fit(self, model, config, calibration: Calibration) -> tuple[Any, list, Report]:
        """Fit tables and leave the model as it was.

        Returns:
            The configuration with every choice resolved, the tables for :meth:`attach`, and a report.
        """
        ...

    def attach(self, model, config, tables: list | None = None) -> None:
        """Put the tables on the model: the given ones, or empty ones for a checkpoint to fill."""
        ...

    def detach(self, model) -> None:
        """Remove the tables, and whatever else :meth:`attach` left on the model; nothing if there are none."""
        ...

    def validate(self, model) -> None:
        """Raise ValueError if the model's tables are damaged."""
        ...

    def describe(self, model) -> dict[str, Any]:
        """What the tables hold, JSON-able."""
        ...

    def make_cache(self, model, **options) -> LowBitCache:
        """An empty cache; ``options`` are among ``cache_options``."""
        ...

    def card(self, model, report: dict[str, Any] | None) -> CardText: ...
