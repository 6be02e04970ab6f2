"""Where a model keeps its LoopVQ codebooks: one module inside each attention module, on the layer's device."""

from __future__ import annotations

from collections.abc import Iterable

from ..config import LoopVQConfig, lowbit_config
from .codebook import LoopVQCodebook
from .grouping import Grouping
from .spec import LoopSpec
from .stock import hand_over_keys, keep_keys


NAME = "loopvq"  # of the codebook module inside an attention module


def attach_loopvq(model, config: LoopVQConfig, codebooks: Iterable[LoopVQCodebook] | None = None) -> None:
    """Put codebooks on the attention modules: the given ones, or empty ones for a checkpoint to fill."""
    spec = LoopSpec.of(model)
    if codebooks is None:
        grouping = Grouping.of(config, spec.steps, spec.head_dim)
        metric = config.encoder_metric == "fisher"
        codebooks = [
            LoopVQCodebook(grouping, spec.kv_heads, metric, attention.k_proj.weight.device)
            for attention in spec.layers
        ]
    for attention, codebook in zip(spec.layers, codebooks, strict=True):
        attention.add_module(NAME, codebook)
    hand_over_keys(model)


def detach_loopvq(model) -> None:
    """Remove the codebooks; a hybrid model keeps its keys to itself again."""
    keep_keys(model)
    for module in list(model.modules()):
        if isinstance(getattr(module, NAME, None), LoopVQCodebook):
            delattr(module, NAME)


def has_loopvq(model) -> bool:
    """Whether the model carries LoopVQ codebooks."""
    return any(isinstance(module, LoopVQCodebook) for module in model.modules())


def loopvq_codebooks(model) -> list[LoopVQCodebook]:
    """The codebooks in layer order.

    Raises:
        ValueError: the model carries none.
    """
    if not has_loopvq(model):
        raise ValueError(
            f"this {type(model).__name__} carries no LoopVQ codebooks. Calibrate it (hf_lowbit.calibrate) or load a "
            "calibrated checkpoint with `import hf_lowbit` before from_pretrained."
        )
    return [getattr(attention, NAME) for attention in LoopSpec.of(model).layers]


def loopvq_config(model) -> LoopVQConfig:
    """The settings the model's codebooks were made with."""
    loopvq_codebooks(model)
    return lowbit_config(model).loopvq
