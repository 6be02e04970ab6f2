"""`LowBitQuantizer`: calibrates while a model loads, and restores calibrated models; `calibrate` for loaded ones."""

from __future__ import annotations

import os
import warnings

import torch
from transformers.quantizers.base import HfQuantizer

from . import artifact, generation
from .compat import dtypes_to_load, restore_dtypes
from .config import DAMPConfig, LoopVQConfig, LowBitConfig, check_model, lowbit_config
from .data import Texts, calibration_texts
from .methods import METHODS, check, methods_on
from .protocols import Calibration, Report, Reports
from .registration import register_quantizer_class


@register_quantizer_class("lowbit")
class LowBitQuantizer(HfQuantizer):
    """transformers' hooks around a model with low-bit caches. Weights are never changed.

    - ``from_pretrained(id, quantization_config=LowBitConfig(loopvq=..., dataset=..., tokenizer=...))`` on a plain
      checkpoint loads it and calibrates.
    - ``from_pretrained(dir)`` on a calibrated checkpoint creates the tables' buffers before loading and checks them
      against the weights afterwards.
    """

    requires_calibration = False
    _dtype: torch.dtype  # of the load
    _dtypes: dict[str, torch.dtype]  # of each tensor

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = dtype
        return dtype

    def validate_environment(self, *args, **kwargs):
        config = self.quantization_config
        if not self.pre_quantized and (config.dataset is None or config.tokenizer is None):
            raise ValueError(
                "this checkpoint is not calibrated, so LowBitConfig needs dataset= (texts, or a JSONL path) and "
                "tokenizer=; or load it without quantization_config and call hf_lowbit.calibrate later."
            )

    def _process_model_before_weight_loading(self, model, checkpoint_files: list[str] | None = None, **kwargs):
        config = self.quantization_config
        for name in config.methods:
            check(model, METHODS[name])  # says no before the weights are read, not after
        if not self.pre_quantized:
            return
        self._dtypes = dtypes_to_load(model, self._dtype)
        for name, settings in config.methods.items():
            METHODS[name].attach(model, settings)
        artifact.attach_fingerprint(model)
        if checkpoint_files:
            _check_whole(model, checkpoint_files)

    def _process_model_after_weight_loading(self, model, **kwargs):
        if not self.pre_quantized:
            config = self.quantization_config
            calibrate(model, config.tokenizer, config, dataset=config.dataset)
            return
        restore_dtypes(model, self._dtypes)
        del self._dtypes
        if any(parameter.is_meta for parameter in model.parameters()):
            warnings.warn("some weights are offloaded: the artifact's fingerprint was not checked.", stacklevel=2)
        else:
            artifact.validate(model)
        generation.enable(model)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        # Tables fit one set of weights; training would leave them behind without a word.
        return False


def _check_whole(model, files: list[str]) -> None:
    """Refuse a checkpoint without all tables: transformers would leave the missing ones uninitialized."""
    from safetensors import safe_open

    present: dict[object, tuple[int, ...]] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            return
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    if key := _tensor_key(name):
                        present[key] = tuple(tensors.get_slice(name).get_shape())
        except Exception as error:  # safetensors raises its own error types, not all public
            raise ValueError(f"{file} cannot be read ({error}); the artifact is truncated or damaged.") from error
    expected = artifact.expected_tensors(model)
    unknown = sorted(map(str, set(present) - {_tensor_key(name) for name in expected}))
    if unknown:
        raise ValueError(
            f"the artifact does not fit its config.json: the checkpoint holds tables that these settings do not have "
            f"({', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}). Restore config.json or calibrate again."
        )
    for name, shape in expected.items():
        found = present.get(_tensor_key(name))
        if found != shape:
            problem = "is missing" if found is None else f"has shape {list(found)} instead of {list(shape)}"
            raise ValueError(
                f"the artifact is damaged or was made with other settings: {name} {problem} in the checkpoint. "
                "Download it again or calibrate again."
            )


def _tensor_key(name: str) -> object:
    return artifact.FINGERPRINT if artifact.is_fingerprint_name(name) else artifact.parse_tensor_name(name)


def calibrate(
    model,
    tokenizer,
    config: LowBitConfig | LoopVQConfig | DAMPConfig,
    *,
    dataset: Texts,
    extra_dataset: Texts | None = None,
    resume_dir: str | os.PathLike | None = None,
    progress: bool = True,
) -> Report:
    """Calibrate a loaded model in place; afterwards its ``generate`` uses the low-bit cache.

    Args:
        model: a causal LM in full precision: a looped one for LoopVQ, one with gated delta-rule layers for DAMP, and for
            LoopVQ if it has attention layers, too. Tables of the other method that it carries already stay.
        tokenizer: for ``dataset``.
        config: what to fit; a LowBitConfig may name both methods.
        dataset: texts, or the path of a JSONL file of ``{"text": ...}`` lines. For DAMP a line may also name its
            ``"domain"``: domains then take equal parts in every split. Lists may hold such dicts as well.
        extra_dataset: LoopVQ only: more texts, for fine-tuning only and never held out; as many sequences as they fill.
            Texts sampled from the model itself serve well (:func:`hf_lowbit.sampling.sample_texts`): codebooks of few
            calibration texts overfit them.
        resume_dir: LoopVQ only: directory for intermediate states. A calibration that was interrupted goes on there
            when it is called again with the same model, configuration and data.
        progress: show progress bars.

    Returns:
        What was done and measured; of both methods, :class:`~hf_lowbit.protocols.Reports`. The model is unchanged if an
        error is raised.

    Raises:
        TypeError: the model has no layers that the method works on.
        ValueError: impossible sizes, too little data, NaN in activations, an option of another method, or a model that
            another quantizer holds.

    Example:
        >>> report = hf_lowbit.calibrate(model, tokenizer, LoopVQConfig(bits=0.5), dataset=texts)  # doctest: +SKIP
        >>> model.save_pretrained("ouro-loopvq")                                                   # doctest: +SKIP
    """
    check_model(model)
    if not isinstance(config, (LowBitConfig, LoopVQConfig, DAMPConfig)):
        raise ValueError(
            f"calibrate takes a LoopVQConfig, DAMPConfig or LowBitConfig that says what to fit, not {type(config).__name__}."
        )
    if isinstance(config, (LoopVQConfig, DAMPConfig)):
        config = LowBitConfig(**{"loopvq" if isinstance(config, LoopVQConfig) else "damp": config})
    other = getattr(model, "hf_quantizer", None)
    if other is not None and not isinstance(other, LowBitQuantizer):
        raise ValueError(
            f"this model's weights are quantized by {type(other).__name__}; a checkpoint records one quantization "
            "method, so calibrate the unquantized model."
        )
    for name in config.methods:
        check(model, METHODS[name])
    if len(config.methods) > 1 and (extra_dataset is not None or resume_dir is not None):
        raise ValueError(
            "extra_dataset and resume_dir belong to one method; calibrate for one after the other, each call keeps what the "
            "other made."
        )
    if dataset is None:
        raise ValueError("calibration needs dataset=: a list of texts, or the path of a JSONL file of them.")
    if not callable(tokenizer):
        raise ValueError(
            f"calibration needs the model's tokenizer, e.g. AutoTokenizer.from_pretrained(...), not {type(tokenizer).__name__}."
        )
    texts, domains = calibration_texts(dataset)
    fingerprint = artifact.weights_fingerprint(model)
    calibration = Calibration(
        tokenizer=tokenizer,
        texts=texts,
        domains=domains,
        extra=None if extra_dataset is None else calibration_texts(extra_dataset)[0],
        fingerprint=fingerprint,
        resume_dir=None if resume_dir is None else os.fspath(resume_dir),
        progress=progress,
    )
    kept = _other_settings(model, config, fingerprint)
    made = {}
    for name, settings in config.methods.items():
        made[name] = METHODS[name].fit(model, settings, calibration)
    if not kept:
        artifact.detach(model)
    try:
        for name, (settings, tables, _) in made.items():
            METHODS[name].detach(model)
            METHODS[name].attach(model, settings, tables)
        artifact.attach_fingerprint(model, fingerprint)
        settings = kept | {name: settings for name, (settings, _, _) in made.items()}
        mark_quantized(model, LowBitConfig(**settings, fingerprint=fingerprint))
        artifact.validate(model)
    except BaseException:
        artifact.detach(model)
        raise
    generation.enable(model)
    reports = {name: report for name, (_, _, report) in made.items()}
    return Reports(reports) if len(reports) > 1 else next(iter(reports.values()))


def _other_settings(model, config: LowBitConfig, fingerprint: str) -> dict[str, LoopVQConfig | DAMPConfig]:
    """Settings of the methods that the model was calibrated for before and is not now; their tables stay."""
    found = [method for method in methods_on(model) if method.name not in config.methods]
    if found and artifact.stored_fingerprint(model) != fingerprint:
        tables, names = (" and ".join(getattr(method, what) for method in found) for what in ("tables", "name"))
        warnings.warn(
            f"the model's {tables} were fitted to other weights and are removed; calibrate for {names} again.",
            stacklevel=3,
        )
        return {}
    return {method.name: getattr(lowbit_config(model), method.name) for method in found}


def mark_quantized(model, config: LowBitConfig) -> None:
    """What ``from_pretrained`` sets on a quantized model."""
    model.config.quantization_config = config
    model.hf_quantizer = LowBitQuantizer(config, pre_quantized=True)
    model.is_quantized = True
    model.quantization_method = config.quant_method


__all__ = ["LowBitQuantizer", "calibrate"]
