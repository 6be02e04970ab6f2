"""`LowBitQuantizer`: calibrates while a model loads, and restores calibrated models; `calibrate` for loaded ones."""

from __future__ import annotations

import dataclasses
import os
import warnings

from transformers.quantizers.base import HfQuantizer

from . import artifact
from .config import LoopVQConfig, LowBitConfig
from .data import calibration_sequences, read_texts
from .loopvq.attach import NAME, attach_loopvq
from .loopvq.calibration import CalibrationReport, fit
from .loopvq.spec import LoopSpec
from .registration import register_quantizer_class


@register_quantizer_class("lowbit")
class LowBitQuantizer(HfQuantizer):
    """transformers' hooks around a model with low-bit caches. Weights are never changed.

    - ``from_pretrained(id, quantization_config=LowBitConfig(loopvq=..., dataset=..., tokenizer=...))`` on a plain
      checkpoint loads it and calibrates.
    - ``from_pretrained(dir)`` on a calibrated checkpoint creates the codebook buffers before loading and checks them
      against the weights afterwards.
    """

    requires_calibration = False

    def validate_environment(self, *args, **kwargs):
        config = self.quantization_config
        if not self.pre_quantized and (config.dataset is None or config.tokenizer is None):
            raise ValueError(
                "this checkpoint is not calibrated, so LowBitConfig needs dataset= (texts, or a JSONL path) and "
                "tokenizer=; or load it without quantization_config and call hf_lowbit.calibrate later."
            )

    def _process_model_before_weight_loading(self, model, checkpoint_files: list[str] | None = None, **kwargs):
        LoopSpec.of(model)  # says no before the weights are read, not after
        if not self.pre_quantized:
            return
        attach_loopvq(model, self.quantization_config.loopvq)
        artifact.attach_fingerprint(model)
        if checkpoint_files:
            _check_whole(model, checkpoint_files)

    def _process_model_after_weight_loading(self, model, **kwargs):
        if not self.pre_quantized:
            config = self.quantization_config
            calibrate(model, config.tokenizer, config, dataset=config.dataset)
            return
        if any(parameter.is_meta for parameter in model.parameters()):
            warnings.warn("some weights are offloaded: the codebooks' fingerprint was not checked.", stacklevel=2)
            return
        artifact.validate(model)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        # Codebooks fit one set of weights; training would leave them behind without a word.
        return False


def _check_whole(model, files: list[str]) -> None:
    """Refuse a checkpoint without all codebooks: transformers would leave the missing ones uninitialized."""
    from safetensors import safe_open

    present: dict[str, tuple[int, ...]] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            return
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    if f".{NAME}." in name or artifact.FINGERPRINT in name:
                        present[name] = tuple(tensors.get_slice(name).get_shape())
        except Exception as error:  # safetensors raises its own error types, not all public
            raise ValueError(f"{file} cannot be read ({error}); the artifact is truncated or damaged.") from error
    for name, shape in artifact.expected_tensors(model).items():
        # A bare OuroModel loads a causal LM's file: the same tensors behind the prefix "model.".
        found = present.get(name, present.get(f"{model.base_model_prefix}.{name}"))
        if found != shape:
            problem = "is missing" if found is None else f"has shape {list(found)} instead of {list(shape)}"
            raise ValueError(
                f"the artifact is damaged or was made with other settings: {name} {problem} in the checkpoint. "
                "Download it again or calibrate again."
            )


def calibrate(
    model,
    tokenizer,
    config: LowBitConfig | LoopVQConfig,
    *,
    dataset: list[str] | str | os.PathLike,
    extra_dataset: list[str] | str | os.PathLike | None = None,
    resume_dir: str | os.PathLike | None = None,
    progress: bool = True,
) -> CalibrationReport:
    """Calibrate a loaded model in place; afterwards its ``generate`` uses the low-bit cache.

    Args:
        model: a looped causal LM in full precision.
        tokenizer: for ``dataset``.
        config: what to fit.
        dataset: texts, or the path of a JSONL file of ``{"text": ...}`` lines.
        extra_dataset: more texts, for fine-tuning only and never held out; as many sequences as they fill. Texts sampled from the
            model itself serve well (:func:`hf_lowbit.sampling.sample_texts`): codebooks of few calibration texts
            overfit them.
        resume_dir: directory for intermediate states. A calibration that was interrupted goes on there when it is
            called again with the same model, configuration and data.
        progress: show progress bars.

    Returns:
        What was done and measured. The model is unchanged if an error is raised.

    Raises:
        TypeError: the model is not looped.
        ValueError: impossible sizes, too little data, NaN in activations, or a model that another quantizer holds.

    Example:
        >>> report = hf_lowbit.calibrate(model, tokenizer, LoopVQConfig(bits=0.5), dataset=texts)  # doctest: +SKIP
        >>> model.save_pretrained("ouro-loopvq")                                                   # doctest: +SKIP
    """
    if isinstance(config, LoopVQConfig):
        config = LowBitConfig(loopvq=config)
    other = getattr(model, "hf_quantizer", None)
    if other is not None and not isinstance(other, LowBitQuantizer):
        raise ValueError(
            f"this model's weights are quantized by {type(other).__name__}; a checkpoint records one quantization "
            "method, so calibrate the unquantized model."
        )
    LoopSpec.of(model)
    loopvq = config.loopvq
    texts = _texts(dataset)
    sequences = calibration_sequences(texts, tokenizer, loopvq.sequences, loopvq.sequence_length, seed=loopvq.seed)
    extra = None
    if extra_dataset is not None:
        extra = calibration_sequences(_texts(extra_dataset), tokenizer, None, loopvq.sequence_length, seed=loopvq.seed)
    fingerprint = artifact.weights_fingerprint(model)
    codebooks, report = fit(
        model, loopvq, sequences, fingerprint=fingerprint, extra=extra, resume_dir=resume_dir, progress=progress
    )
    artifact.detach(model)
    attach_loopvq(model, loopvq, codebooks)
    artifact.attach_fingerprint(model, fingerprint)
    try:
        artifact.validate(model)
    except BaseException:
        artifact.detach(model)
        raise
    # "The largest T_c that fits" must not mean something else to a later release: the artifact names its own.
    loopvq = dataclasses.replace(loopvq, loop_group_size=codebooks[0].grouping.steps_per_code)
    mark_quantized(model, config.replace(loopvq=loopvq, fingerprint=fingerprint, dataset=None, tokenizer=None))
    return report


def _texts(dataset) -> list[str]:
    if dataset is None:
        raise ValueError("calibration needs dataset=: a list of texts, or the path of a JSONL file of them.")
    return list(dataset) if isinstance(dataset, (list, tuple)) else read_texts(dataset)


def mark_quantized(model, config: LowBitConfig) -> None:
    """What ``from_pretrained`` sets on a quantized model."""
    model.config.quantization_config = config
    model.hf_quantizer = LowBitQuantizer(config, pre_quantized=True)
    model.is_quantized = True
    model.quantization_method = config.quant_method


__all__ = ["LowBitQuantizer", "calibrate"]
