"""Configuration of a calibration and of the artifact it makes (the ``quantization_config`` of a checkpoint)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from .registration import register_config


FORMAT_VERSION = 1
PAGE = 8  # tokens per page of codes; also the unit in which the window gives tokens to the codes (paper section 4.3)
ENTRIES = 256  # one uint8 index per code

_GROUP_OF_BITS = {2.0: 4, 1.0: 8, 0.5: 16, 0.25: 32}


@dataclass(frozen=True)
class LoopVQConfig:
    """LoopVQ: one 8-bit code for ``G = 8 / bits`` elements, ``c = G / T_c`` channels of ``T_c`` loop steps.

    Args:
        bits: bits per cached element over the coded region: 2, 1, 0.5 or 0.25 (G = 4, 8, 16, 32).
        loop_group_size: ``T_c``, the loop steps that share one code. None takes the largest of 4, 2, 1 that divides
            both the model's loop count and G. 1 codes every step by itself (CQ).
        encoder_metric: "fisher" lets the encoder weight each coordinate (channel of a step) by its squared gradient, so
            that codes spend their bits where the model is sensitive; "none" is the paper's plain nearest entry.
        sink_tokens: first tokens of each row kept in the model's dtype (8 in the paper). A multiple of 8.
        recent_window: most recent tokens kept in the model's dtype (64 in the paper, 256 for long contexts).
            A multiple of 8; between W + 1 and W + 8 tokens are kept, as tokens leave in pages of 8.
        prefill_chunk_size: longest piece of a prompt processed at once (tokens). Inside a piece attention is in full
            precision; earlier pieces are read from the cache. Keeps a prefill's memory far below a full-precision cache.
        sequences: calibration sequences. A quarter of them, at most 8, is held out to choose step size and epoch.
        sequence_length: their length in tokens.
        epochs: passes of end-to-end fine-tuning over the training sequences; 0 keeps the k-means codebooks.
        learning_rate: Adam's step, relative to the RMS of a codebook; "auto" tries ``learning_rates`` for one epoch
            each and takes the one with the lowest held-out KL.
        learning_rates: candidates of "auto".
        schedule: "cosine" (down to a tenth over the run) or "constant".
        kmeans_iterations: upper bound; k-means stops earlier once its objective changes by less than 1e-5.
        kmeans_vectors: at most so many tokens of the training sequences enter k-means (drawn with the seed). More
            is not better before fine-tuning: on the demo model the fine-tuned held-out KL was 0.036 with 8 iterations
            on 4,096 tokens, 0.039 with 100, 0.045 with 2, 0.042 with 8 on 2,048 and 0.048 with 30 on 32,768 (one run
            each).
        seed: seeds k-means, the order of sequences and the draw of tokens.

    Raises:
        ValueError: a value is outside its range; the message names the allowed ones.
    """

    bits: float = 0.5
    loop_group_size: int | None = None
    encoder_metric: str = "fisher"
    sink_tokens: int = 8
    recent_window: int = 64
    prefill_chunk_size: int = 2048
    sequences: int = 16
    sequence_length: int = 2048
    epochs: int = 4
    learning_rate: float | str = "auto"
    learning_rates: tuple[float, ...] = (0.003, 0.01, 0.03)
    schedule: str = "cosine"
    kmeans_iterations: int = 10
    kmeans_vectors: int = 4096
    seed: int = 0

    def __post_init__(self):
        if self.bits not in _GROUP_OF_BITS:
            raise ValueError(f"bits={self.bits!r} is not supported; choose one of {sorted(_GROUP_OF_BITS)}.")
        object.__setattr__(self, "bits", float(self.bits))
        object.__setattr__(self, "learning_rates", tuple(float(x) for x in self.learning_rates))
        if self.loop_group_size is not None:
            size = self.loop_group_size
            if not isinstance(size, int) or size < 1 or self.group_size % size:
                raise ValueError(
                    f"loop_group_size={size!r} must be a positive integer that divides G = 8/bits = {self.group_size}."
                )
        for name in ("sink_tokens", "recent_window"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < PAGE or value % PAGE:
                raise ValueError(f"{name}={value!r} must be a multiple of the page size {PAGE}, at least {PAGE}.")
        for name, low in (
            ("prefill_chunk_size", PAGE),
            ("sequences", 2),
            ("sequence_length", 2),
            ("epochs", 0),
            ("kmeans_iterations", 1),
            ("kmeans_vectors", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name}={value!r} must be an integer of at least {low}.")
        if self.learning_rate != "auto":
            if not isinstance(self.learning_rate, (int, float)) or not 0 < self.learning_rate < 1:
                raise ValueError(f"learning_rate={self.learning_rate!r} must be 'auto' or a number between 0 and 1.")
        elif not self.learning_rates or not all(0 < x < 1 for x in self.learning_rates):
            raise ValueError(f"learning_rates={self.learning_rates!r} must hold numbers between 0 and 1.")
        if self.encoder_metric not in ("fisher", "none"):
            raise ValueError(f"encoder_metric={self.encoder_metric!r} must be 'fisher' or 'none'.")
        if self.schedule not in ("cosine", "constant"):
            raise ValueError(f"schedule={self.schedule!r} must be 'cosine' or 'constant'.")

    @property
    def group_size(self) -> int:
        """G, the elements that one code stands for."""
        return _GROUP_OF_BITS[float(self.bits)]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LoopVQConfig:
        """Build from a (JSON) dict; unknown keys are an error, as they may change the meaning of the codes."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"LoopVQConfig does not know {unknown}; it knows {sorted(known)}. If the artifact was made by a newer "
                "hf_lowbit, update the package."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["learning_rates"] = list(self.learning_rates)
        return values


@register_config("lowbit")
class LowBitConfig(QuantizationConfigMixin):
    """``quantization_config`` of a model with low-bit caches (``quant_method: "lowbit"``). Weights are not touched.

    Args:
        loopvq: codes for the KV cache of a looped model; a :class:`LoopVQConfig` or its dict.
        dataset: calibration texts: a list of strings, or the path of a JSONL file of ``{"text": ...}`` lines. Needed
            when an uncalibrated model is loaded with this config; never saved.
        tokenizer: tokenizer for ``dataset``; never saved.
        fingerprint: hex digest of the weights the codebooks were fitted to; written by the calibration.
        format_version: of the artifact; written by the calibration.

    Example:
        >>> from hf_lowbit import LoopVQConfig, LowBitConfig
        >>> LowBitConfig(loopvq=LoopVQConfig(bits=0.25)).loopvq.group_size
        32
    """

    def __init__(
        self,
        loopvq: LoopVQConfig | dict | None = None,
        dataset: list[str] | str | None = None,
        tokenizer: Any = None,
        fingerprint: str | None = None,
        format_version: int = FORMAT_VERSION,
        **kwargs,
    ):
        kwargs.pop("quant_method", None)
        if kwargs:
            raise ValueError(f"LowBitConfig does not know {sorted(kwargs)}; it takes loopvq, dataset and tokenizer.")
        if format_version > FORMAT_VERSION:
            raise ValueError(
                f"this artifact has format version {format_version}, and this hf_lowbit reads up to {FORMAT_VERSION}; "
                "update the package."
            )
        if isinstance(loopvq, dict):
            loopvq = LoopVQConfig.from_dict(loopvq)
        if loopvq is None:
            raise ValueError("LowBitConfig needs a method: LowBitConfig(loopvq=LoopVQConfig(bits=0.5)).")
        if not isinstance(loopvq, LoopVQConfig):
            raise ValueError(f"loopvq must be a LoopVQConfig or a dict, not {type(loopvq).__name__}.")
        self.quant_method = "lowbit"
        self.loopvq = loopvq
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.format_version = format_version

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: without dataset and tokenizer, which belong to a run and not to the artifact."""
        return {
            "quant_method": self.quant_method,
            "format_version": self.format_version,
            "loopvq": self.loopvq.to_dict(),
            "fingerprint": self.fingerprint,
        }

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def replace(self, **changes) -> LowBitConfig:
        """A copy with some arguments changed."""
        values = dict(
            loopvq=self.loopvq,
            dataset=self.dataset,
            tokenizer=self.tokenizer,
            fingerprint=self.fingerprint,
            format_version=self.format_version,
        )
        return LowBitConfig(**{**values, **changes})


def lowbit_config(model) -> LowBitConfig:
    """The model's ``quantization_config`` as a :class:`LowBitConfig`."""
    config = getattr(model.config, "quantization_config", None)
    if isinstance(config, dict):
        config = LowBitConfig.from_dict(config)
    if not isinstance(config, LowBitConfig):
        raise ValueError(
            f"this {type(model).__name__} is not a lowbit model (quantization_config: {type(config).__name__})."
        )
    return config
