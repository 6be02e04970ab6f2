"""What a calibrated model carries: codebooks on its layers and a fingerprint of the weights they were fitted to."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from .config import lowbit_config
from .loopvq.attach import detach_loopvq, has_loopvq, loopvq_codebooks
from .loopvq.codebook import SIDES, LoopVQCodebook


FINGERPRINT = "lowbit_fingerprint"  # uint8 [32] buffer of the top-level model

# Settings besides the weights that codes depend on: other values give other keys for the same weights.
_STRUCTURE = ("total_ut_steps", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")


def weights_fingerprint(model) -> str:
    """SHA-256 (hex) over the decoder's weights and the settings its keys and values depend on.

    Weights enter rounded to bf16 and with magnitudes below 2^-14 as zero, so that a checkpoint has one fingerprint
    whether it is loaded in float32, bfloat16 or (from a bf16 checkpoint) float16. The sums are integers: exact, and
    the same on every device.

    Raises:
        ValueError: a weight is on the meta device (offloaded), so that it cannot be read.
    """
    base = getattr(model, "base_model", model)
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
    """Remove everything a calibration left on the model."""
    detach_loopvq(model)
    if FINGERPRINT in getattr(model, "_buffers", {}):
        delattr(model, FINGERPRINT)


def stored_fingerprint(model) -> str | None:
    """Hex digest kept in the model's buffer, or None."""
    buffer = getattr(model, FINGERPRINT, None)
    return None if buffer is None else bytes(buffer.cpu().tolist()).hex()


def validate(model) -> None:
    """Check that the codebooks belong to these weights and are whole.

    Raises:
        ValueError: another fingerprint, entries that are not finite, or tables that are constant.
    """
    stored, actual = stored_fingerprint(model), weights_fingerprint(model)
    if stored != actual:
        raise ValueError(
            f"the codebooks were fitted to other weights (fingerprint {stored and stored[:12]}, these weights have "
            f"{actual[:12]}). Calibrate again for this checkpoint, or load the weights the codebooks came with; "
            "fine-tuned or merged weights need their own calibration."
        )
    for layer, codebook in enumerate(loopvq_codebooks(model)):
        for side in SIDES:
            table = getattr(codebook, f"{side}_table").view(torch.float16)
            if codebook.has_metric:
                weights = getattr(codebook, f"{side}_metric").view(torch.float16)
                if not torch.isfinite(weights).all() or not (weights > 0).all():
                    raise ValueError(f"the {side} metric of layer {layer} is not positive; the artifact is damaged.")
            if not torch.isfinite(table).all():
                raise ValueError(f"the {side} codebook of layer {layer} holds NaN or Inf; the artifact is damaged.")
            if bool((table == table.flatten()[0]).all()):
                raise ValueError(f"the {side} codebook of layer {layer} is constant; the artifact is damaged.")


def assert_quantized(model) -> None:
    """Raise unless ``model.generate`` will use a low-bit cache.

    Without ``import hf_lowbit`` before ``from_pretrained``, transformers loads a lowbit checkpoint with only a warning
    and runs it in full precision; call this where that must not go unnoticed.

    Raises:
        RuntimeError: the model carries no codebooks.
    """
    if not has_loopvq(model):
        raise RuntimeError(
            f"this {type(model).__name__} would run with a full-precision cache: it carries no codebooks. Put `import "
            "hf_lowbit` before from_pretrained, or calibrate the model with hf_lowbit.calibrate."
        )


def expected_tensors(model) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the artifact's tensors in ``model.state_dict()``."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LoopVQCodebook):
            for buffer_name, buffer in module.named_buffers():
                found[f"{name}.{buffer_name}"] = tuple(buffer.shape)
    if FINGERPRINT in model._buffers:
        found[FINGERPRINT] = (32,)
    return found


def describe(model) -> dict[str, Any]:
    """What a calibrated model holds: configuration, fingerprint, and shape of each layer's tables and bytes of its
    buffers."""
    config = lowbit_config(model)
    layers = [
        {
            "layer": layer,
            "shape": list(codebook.key_table.shape),
            **{
                f"{side}_bytes": sum(b.nbytes for name, b in codebook.named_buffers() if name.startswith(side))
                for side in SIDES
            },
            "device": str(codebook.device),
        }
        for layer, codebook in enumerate(loopvq_codebooks(model))
    ]
    grouping = loopvq_codebooks(model)[0].grouping
    return {
        "quant_method": config.quant_method,
        "format_version": config.format_version,
        "fingerprint": stored_fingerprint(model),
        "loopvq": config.loopvq.to_dict(),
        "grouping": {
            "steps": grouping.steps,
            "steps_per_code": grouping.steps_per_code,
            "group_size": grouping.group_size,
            "channels": grouping.channels,
        },
        "layers": layers,
        "codebook_bytes": sum(layer["key_bytes"] + layer["value_bytes"] for layer in layers),
    }
