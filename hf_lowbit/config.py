"""Configuration of a calibration and of the artifact it makes (the ``quantization_config`` of a checkpoint)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.utils.quantization_config import QuantizationConfigMixin

from .registration import register_config


FORMAT_VERSION = 1
PAGE = 8  # tokens per page of codes; also the unit in which the window gives tokens to the codes (paper section 4.3)
ENTRIES = 256  # one uint8 index per code

METHODS = ("loopvq", "damp")  # fields of LowBitConfig

# Settings without which an artifact's tables mean something else. The others may be edited in a config.json: they are
# defaults of the caches, or say how the tables were made.
_MEANING = {"loopvq": ("bits", "loop_group_size", "encoder_metric"), "damp": ("low_bits", "rows", "zero_point")}

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
        if not isinstance(self.bits, (int, float)) or isinstance(self.bits, bool) or self.bits not in _GROUP_OF_BITS:
            raise ValueError(f"bits={self.bits!r} is not supported; choose one of {sorted(_GROUP_OF_BITS)}.")
        object.__setattr__(self, "bits", float(self.bits))
        rates = self.learning_rates
        if not isinstance(rates, (list, tuple)) or not all(isinstance(x, (int, float)) for x in rates):
            raise ValueError(f"learning_rates={rates!r} must be a tuple of numbers.")
        object.__setattr__(self, "learning_rates", tuple(float(x) for x in rates))
        if self.loop_group_size is not None:
            size = self.loop_group_size
            if not isinstance(size, int) or isinstance(size, bool) or size < 1 or self.group_size % size:
                raise ValueError(
                    f"loop_group_size={size!r} must be a positive integer that divides G = 8/bits = {self.group_size}."
                )
        for name in ("sink_tokens", "recent_window"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < PAGE or value % PAGE:
                raise ValueError(f"{name}={value!r} must be a multiple of the page size {PAGE}, at least {PAGE}.")
        _check_integers(
            self,
            ("prefill_chunk_size", PAGE),
            ("sequences", 2),
            ("sequence_length", 2),
            ("epochs", 0),
            ("kmeans_iterations", 1),
            ("kmeans_vectors", 1),
            ("seed", 0),
        )
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
        return cls(**_known(cls, values))

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["learning_rates"] = list(self.learning_rates)
        return values


@dataclass(frozen=True)
class DAMPConfig:
    """DAMP: recurrent states with a few key rows in FP16 and the rest in grouped INT8 or INT4.

    The defaults are the paper's (section 5, appendix A.2); every count can be made smaller for small models.

    Args:
        low_bits: 8 (9 bits a low value with its group's scale) or 4.
        rows: K_hi, key rows of each value head kept in FP16. None: an eighth of the key channels (16 of 128).
        zero_point: 4-bit groups have an FP32 zero point beside the FP32 scale (the paper's INT4, 6 bits a value);
            False: symmetric codes (5 bits). 8-bit groups are symmetric always.
        rounding: of the low rows at every write: "nearest", "stochastic" (seeded) or "error_feedback" (keeps an FP16
            residual, which costs more than an FP16 state: for comparison).
        selector: which rows are protected: "damp" (E[e W]), "error" (E[e]), "retention" (E[W], KDA only),
            "energy" (E||S_u||^2), "random", or "readout" (E[e W^out], not in the paper: weights errors by what later
            queries read of them, in the choice of scalings, too).
        scaling: column scaling and reordering (SR): "per_head" chooses a candidate for every head by J(c), "global" one
            for the model, "none" keeps columns as they are.
        horizon: H, updates after an anchor that enter its retention weight W (or W^out).
        sequences: calibration sequences, cut into fitting, selection and validation thirds. A multiple of 3.
        prompt_tokens: tokens of each sequence before the first recorded update.
        decode_tokens: upper bound of the updates after the prompt: all windows must end within it. What lies behind the
            last window is neither generated nor read.
        windows: first update of each window, counted from the end of the prompt.
        window_tokens: updates of a window.
        anchors: updates of a window after which the state is sampled; each needs ``horizon`` more updates.
        continuation: "generate" lets the model go on after each prompt (end token suppressed), as in the paper; "text"
            goes on with the calibration text itself, which must be long enough for all windows.
        seed: seeds the splits, random selection and stochastic rounding.

    Raises:
        ValueError: a value is outside its range; the message names the allowed ones.
    """

    low_bits: int = 8
    rows: int | None = None
    zero_point: bool = True
    rounding: str = "nearest"
    selector: str = "damp"
    scaling: str = "per_head"
    horizon: int = 256
    sequences: int = 36
    prompt_tokens: int = 1024
    decode_tokens: int = 4096
    windows: tuple[int, ...] = (0, 2048)
    window_tokens: int = 1024
    anchors: tuple[int, ...] = (256, 512, 768)
    continuation: str = "generate"
    seed: int = 0

    def __post_init__(self):
        for name in ("windows", "anchors"):
            values = getattr(self, name)
            if not isinstance(values, (list, tuple)):
                raise ValueError(f"{name}={values!r} must be a tuple of integers.")
            object.__setattr__(self, name, tuple(values))
        for name, allowed in (
            ("low_bits", (8, 4)),
            ("zero_point", (True, False)),
            ("rounding", ("nearest", "stochastic", "error_feedback")),
            ("selector", ("damp", "error", "retention", "energy", "random", "readout")),
            ("scaling", ("per_head", "global", "none")),
            ("continuation", ("generate", "text")),
        ):
            value = getattr(self, name)
            if value not in allowed or type(value) is not type(allowed[0]):
                raise ValueError(f"{name}={value!r} is not supported; choose one of {list(allowed)}.")
        _check_integers(
            self,
            ("horizon", 1),
            ("sequences", 3),
            ("prompt_tokens", 1),
            ("decode_tokens", 2),
            ("window_tokens", 2),
            ("seed", 0),
        )
        if self.rows is not None:
            _check_integers(self, ("rows", 0))
        if self.sequences % 3:
            raise ValueError(
                f"sequences={self.sequences} must be a multiple of 3: fitting, selection and validation get a third each."
            )
        for name, low in (("windows", 0), ("anchors", 1)):
            values = getattr(self, name)
            if not values or not all(type(value) is int and value >= low for value in values):
                raise ValueError(f"{name}={values!r} must hold integers of at least {low}.")
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={values!r} holds a value twice.")
        if max(self.anchors) + self.horizon > self.window_tokens:
            raise ValueError(
                f"the last anchor {max(self.anchors)} and its horizon of {self.horizon} updates do not fit into a window "
                f"of {self.window_tokens}; use earlier anchors, a shorter horizon or longer windows."
            )
        if max(self.windows) + self.window_tokens > self.decode_tokens:
            raise ValueError(
                f"the window from {max(self.windows)} on needs {max(self.windows) + self.window_tokens} updates, but "
                f"decode_tokens={self.decode_tokens}."
            )

    @property
    def updates(self) -> int:
        """Updates after the prompt up to the end of the last window; later ones would not be looked at."""
        return max(self.windows) + self.window_tokens

    @property
    def text_tokens(self) -> int:
        """Tokens that each calibration text has to give."""
        return self.prompt_tokens + (self.updates if self.continuation == "text" else 0)

    def high_rows(self, dk: int) -> int:
        """K_hi for states with ``dk`` key rows.

        Raises:
            ValueError: more rows asked for than there are.
        """
        rows = dk // 8 if self.rows is None else self.rows
        if rows > dk:
            raise ValueError(f"rows={rows} is more than a state's {dk} key rows; protect at most {dk}.")
        return rows

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DAMPConfig:
        """Build from a (JSON) dict; unknown keys are an error, as they may change the meaning of the states."""
        return cls(**_known(cls, values))

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return values | {name: list(values[name]) for name in ("windows", "anchors")}


def _check_integers(config, *bounds: tuple[str, int]) -> None:
    for name, low in bounds:
        check_integer(name, getattr(config, name), low)


def check_integer(name: str, value: Any, low: int, or_none: str = "") -> None:
    """Raise ValueError unless ``value`` is an integer of at least ``low``; ``or_none`` says what None would mean."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        otherwise = f", or None for {or_none}" if or_none else ""
        raise ValueError(f"{name}={value!r} must be an integer of at least {low}{otherwise}.")


def check_switch(name: str, value: Any, or_none: str = "") -> None:
    """Raise ValueError unless ``value`` is True or False, or None where ``or_none`` says what that would mean."""
    if not isinstance(value, bool) and not (value is None and or_none):
        otherwise = f", or None for {or_none}" if or_none else ""
        raise ValueError(f"{name}={value!r} must be True or False{otherwise}.")


def check_model(model: Any) -> None:
    """Raise TypeError unless ``model`` is a loaded model."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"got {model!r:.100} ({type(model).__name__}) for a model; pass a loaded one, e.g. "
            "AutoModelForCausalLM.from_pretrained(name)."
        )


def _known(cls, values: dict[str, Any]) -> dict[str, Any]:
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"{cls.__name__} does not know {unknown}; it knows {sorted(known)}. If the artifact was made by a newer "
            "hf_lowbit, update the package."
        )
    return values


@register_config("lowbit")
class LowBitConfig(QuantizationConfigMixin):
    """``quantization_config`` of a model with low-bit caches (``quant_method: "lowbit"``). Weights are not touched.

    Args:
        loopvq: codes for the KV cache of a looped model, or of a hybrid model's attention layers; a
            :class:`LoopVQConfig` or its dict.
        damp: packed recurrent states of a model with gated delta-rule layers; a :class:`DAMPConfig` or its dict. At least
            one method must be given; a hybrid model takes both.
        dataset: calibration texts: a list of strings, or the path of a JSONL file of ``{"text": ...}`` lines. Needed
            when an uncalibrated model is loaded with this config; never saved.
        tokenizer: tokenizer for ``dataset``; never saved.
        fingerprint: hex digest of the weights that the artifact was fitted to; written by the calibration.
        format_version: of the artifact; written by the calibration.
        digest: of the settings that give the tables their meaning; written by the calibration, so that an edited
            ``config.json`` is noticed.

    Raises:
        ValueError: no method, an argument of a wrong type, an artifact of a newer version, or settings that are not the
            ones the digest was made of.

    Example:
        >>> from hf_lowbit import LoopVQConfig, LowBitConfig
        >>> LowBitConfig(loopvq=LoopVQConfig(bits=0.25)).loopvq.group_size
        32
    """

    def __init__(
        self,
        loopvq: LoopVQConfig | dict | None = None,
        damp: DAMPConfig | dict | None = None,
        dataset: list[str] | str | None = None,
        tokenizer: Any = None,
        fingerprint: str | None = None,
        format_version: int = FORMAT_VERSION,
        digest: str | None = None,
        **kwargs,
    ):
        kwargs.pop("quant_method", None)
        if kwargs:
            raise ValueError(
                f"LowBitConfig does not know {sorted(kwargs)}; it takes loopvq, damp, dataset and tokenizer."
            )
        check_integer("format_version", format_version, 1)
        if format_version > FORMAT_VERSION:
            raise ValueError(
                f"this artifact has format version {format_version}, and this hf_lowbit reads up to {FORMAT_VERSION}; "
                "update the package."
            )
        methods = {"loopvq": (loopvq, LoopVQConfig), "damp": (damp, DAMPConfig)}
        for name, (value, cls) in methods.items():
            if isinstance(value, dict):
                value = cls.from_dict(value)
            if value is not None and not isinstance(value, cls):
                raise ValueError(f"{name} must be a {cls.__name__} or a dict, not {type(value).__name__}.")
            setattr(self, name, value)
        if not self.methods:
            raise ValueError(
                "LowBitConfig needs a method: LowBitConfig(loopvq=LoopVQConfig(bits=0.5)) for looped models, "
                "LowBitConfig(damp=DAMPConfig()) for models with gated delta-rule layers."
            )
        self.quant_method = "lowbit"
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.format_version = format_version
        if digest is not None and digest != _digest(self.methods):
            found = ", ".join(f"{name}={value!r}" for name, value in _meaning(self.methods).items())
            raise ValueError(
                f"config.json names other settings than this artifact's tables were made with: one of {found} was edited, "
                "and the tables would be read as what they are not. Restore config.json, or calibrate again with the "
                "settings you want."
            )

    @property
    def methods(self) -> dict[str, LoopVQConfig | DAMPConfig]:
        """The configurations that were given, by method name."""
        found = {name: getattr(self, name) for name in METHODS}
        return {name: config for name, config in found.items() if config is not None}

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: without dataset and tokenizer, which belong to a run and not to the artifact."""
        return {
            "quant_method": self.quant_method,
            "format_version": self.format_version,
            **{name: config.to_dict() for name, config in self.methods.items()},
            "fingerprint": self.fingerprint,
            **({"digest": _digest(self.methods)} if self.fingerprint else {}),
        }

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def replace(self, **changes) -> LowBitConfig:
        """A copy with some arguments changed."""
        values = dict(
            loopvq=self.loopvq,
            damp=self.damp,
            dataset=self.dataset,
            tokenizer=self.tokenizer,
            fingerprint=self.fingerprint,
            format_version=self.format_version,
        )
        return LowBitConfig(**{**values, **changes})


def _meaning(methods: dict[str, LoopVQConfig | DAMPConfig]) -> dict[str, Any]:
    return {name: getattr(config, name) for method, config in methods.items() for name in _MEANING[method]}


def _digest(methods: dict[str, LoopVQConfig | DAMPConfig]) -> str:
    return hashlib.sha256(json.dumps(_meaning(methods), sort_keys=True).encode()).hexdigest()[:16]


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
