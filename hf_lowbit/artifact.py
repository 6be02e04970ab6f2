"""What a calibrated model carries: tables on its layers and a fingerprint of the weights they were fitted to."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import torch

from . import generation, methods
from .config import LowBitConfig, check_model, lowbit_config


FINGERPRINT = "lowbit_fingerprint"  # uint8 [32] buffer of the top-level model

# Settings besides the weights that cached states depend on: other values give other states for the same weights. A
# setting that a model does not have leaves no trace, so models of new kinds may add names here.
_STRUCTURE = (
    "total_ut_steps",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_heads",
    "linear_head_dim",
    "linear_conv_kernel_dim",
    "linear_allow_neg_eigval",
)


def weights_fingerprint(model) -> str:
    """SHA-256 (hex) over the decoder's weights and the settings its keys and values depend on.

    Weights enter rounded to bf16 and with magnitudes below 2^-14 as zero, so that a checkpoint has one fingerprint
    whether it is loaded in float32, bfloat16 or (from a bf16 checkpoint) float16. The sums are integers: exact, and
    the same on every device.

    Raises:
        ValueError: a weight is on the meta device (offloaded), so that it cannot be read.
    """
    base = getattr(model, "base_model", model)
    base = getattr(base, "language_model", base)  # of a model that also sees images
    digest = hashlib.sha256()
    for name, parameter in sorted(base.named_parameters()):
        if parameter.is_meta:
            raise ValueError(f"{name} is offloaded; a fingerprint needs all weights in memory.")
        first, second = 0, 0
        flat = parameter.detach().flatten()
        for part in flat.split(1 << 24):
            part = part.to(torch.bfloat16)
            part = torch.where(part.abs() < 2.0**-14, torch.zeros_like(part), part)
            bits = part.view(torch.int16).long()
            factors = torch.arange(1, len(bits) + 1, device=bits.device) % 8191 + 1
            first, second = first + int(bits.sum()), second + int((bits * factors).sum())
        digest.update(f"{name} {tuple(parameter.shape)} {first} {second}\n".encode())
    config = base.config
    structure = {name: getattr(config, name, None) for name in _STRUCTURE}
    rope = getattr(config, "rope_parameters", None) or {}
    structure |= {f"rope.{name}": value for name, value in rope.items()}
    kinds = getattr(config, "layer_types", None) or []
    if "linear_attention" in kinds:
        structure["layer_types"] = " ".join(kinds)
    # 10000 and 10000.0, or a default spelled out as None, are the same setting.
    structure = {k: float(v) if isinstance(v, (int, float)) else v for k, v in structure.items() if v is not None}
    digest.update(json.dumps(structure, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def attach_fingerprint(model, fingerprint: str | None = None) -> None:
    """Register the fingerprint buffer, zero where the checkpoint will fill it."""
    value = bytes.fromhex(fingerprint) if fingerprint else bytes(32)
    device = next(model.parameters()).device
    model.register_buffer(FINGERPRINT, torch.tensor(list(value), dtype=torch.uint8, device=device))


def detach(model) -> None:
    """Remove everything a calibration left on the model: it is an ordinary one again, and is saved as one."""
    methods.detach(model)
    generation.disable(model)
    if isinstance(getattr(model.config, "quantization_config", None), LowBitConfig):
        del model.config.quantization_config
        for name in ("hf_quantizer", "is_quantized", "quantization_method"):
            model.__dict__.pop(name, None)
    if FINGERPRINT in getattr(model, "_buffers", {}):
        delattr(model, FINGERPRINT)


def stored_fingerprint(model) -> str | None:
    """Hex digest kept in the model's buffer, or None."""
    buffer = getattr(model, FINGERPRINT, None)
    return None if buffer is None else bytes(buffer.cpu().tolist()).hex()


def validate(model) -> None:
    """Check that the tables belong to these weights and are whole.

    Raises:
        ValueError: another fingerprint, or tables that cannot be right.
    """
    found = methods.methods_on(model)
    stored, actual = stored_fingerprint(model), weights_fingerprint(model)
    if stored != actual:
        tables = " and ".join(method.tables for method in found)
        raise ValueError(
            f"the {tables} were fitted to other weights (fingerprint {stored and stored[:12]}, these weights have "
            f"{actual[:12]}). Calibrate again for this checkpoint, or load the weights the {tables} came with; "
            "fine-tuned or merged weights need their own calibration."
        )
    for method in found:
        method.validate(model)


def assert_quantized(model) -> None:
    """Raise unless ``model.generate`` will use a low-bit cache.

    Without ``import hf_lowbit`` before ``from_pretrained``, transformers loads a lowbit checkpoint with only a warning
    and runs it in full precision; call this where that must not go unnoticed.

    Raises:
        RuntimeError: the model carries no tables of any method.
    """
    check_model(model)
    if not methods.methods_on(model):
        tables = " and no ".join(method.tables for method in methods.METHODS.values())
        raise RuntimeError(
            f"this {type(model).__name__} would run with a full-precision cache: it carries no {tables}. Put `import "
            "hf_lowbit` before from_pretrained, or calibrate the model with hf_lowbit.calibrate."
        )


def expected_tensors(model) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the artifact's tensors in ``model.state_dict()``."""
    found = {}
    for method in methods.methods_on(model):
        for name, module in methods.named_tables(model, method):
            for buffer_name, buffer in module.named_buffers():
                found[f"{name}.{buffer_name}"] = tuple(buffer.shape)
    if FINGERPRINT in model._buffers:
        found[FINGERPRINT] = (32,)
    return found


_LAYER = re.compile(rf"\blayers\.(\d+)\..*\b({'|'.join(methods.METHODS)})\.(\w+)$")


def parse_tensor_name(name: str) -> tuple[int, str, str] | None:
    """(layer, method, buffer) of a table's name in a model or a checkpoint file, else None.

    What stands around these parts differs: a bare decoder has no ``model.``, a model that also sees images has
    ``language_model.``, and some architectures rename their modules when they are saved.
    """
    match = _LAYER.search(name)
    return match and (int(match[1]), match[2], match[3])


def is_fingerprint_name(name: str) -> bool:
    """Whether ``name`` is the fingerprint buffer's, in a model or a checkpoint file."""
    return name.rsplit(".", 1)[-1] == FINGERPRINT


def describe(model) -> dict[str, Any]:
    """What a calibrated model holds: configuration, fingerprint, and sizes of each layer's tables.

    A model that carries tables of both methods has them under ``"loopvq"`` and ``"damp"``.
    """
    config = lowbit_config(model)
    described = {
        "quant_method": config.quant_method,
        "format_version": config.format_version,
        "fingerprint": stored_fingerprint(model),
    }
    parts = {method.name: method.describe(model) for method in methods.methods_on(model)}
    # Both methods' descriptions have "layers": of a model that carries both, each stands under its name.
    return described | (parts if len(parts) > 1 else next(iter(parts.values()), {}))
