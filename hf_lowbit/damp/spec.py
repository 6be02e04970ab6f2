"""What DAMP needs to know of a model with gated delta-rule layers, read once from the loaded model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

from torch import nn


# Class name of a layer -> decay per value head (GDN) or per key channel (KDA). Named one by one: a class that merely
# looks alike may store its state in another orientation.
LAYER_CLASSES = {
    "Qwen3_5GatedDeltaNet": "gdn",
    "Qwen3_5MoeGatedDeltaNet": "gdn",
    "Qwen3NextGatedDeltaNet": "gdn",
    "OlmoHybridGatedDeltaNet": "gdn",
    "KimiLinearDeltaAttention": "kda",
}
# Names of a modeling file's one-token and many-token functions.
FUNCTIONS = {
    "gdn": ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"),
    "kda": ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"),
}


@dataclass(frozen=True)
class DeltaLayer:
    """One gated delta-rule layer.

    Attributes:
        index: ``layer_idx``, also its slot in the cache.
        module: the attention module.
        kind: "gdn" or "kda".
        key_heads: H.
        value_heads: HV, a multiple of H; the state is ``[B, HV, dk, dv]``.
        dk, dv: key and value channels of a head.
    """

    index: int
    module: nn.Module
    kind: str
    key_heads: int
    value_heads: int
    dk: int
    dv: int

    @property
    def modeling(self) -> ModuleType:
        """The modeling file whose globals hold the layer's recurrence."""
        return sys.modules[type(self.module).__module__]


@dataclass(frozen=True)
class DeltaSpec:
    """The gated delta-rule layers of a model, in order."""

    layers: tuple[DeltaLayer, ...]

    @classmethod
    def of(cls, model: nn.Module) -> DeltaSpec:
        """Read the spec of a model.

        Raises:
            TypeError: the model has no such layers.
        """
        layers = tuple(
            _read_layer(module, LAYER_CLASSES[type(module).__name__])
            for module in model.modules()
            if type(module).__name__ in LAYER_CLASSES
        )
        if not layers:
            raise TypeError(
                f"DAMP works on models with gated delta-rule layers ({', '.join(LAYER_CLASSES)}); this "
                f"{type(model).__name__} has none."
            )
        return cls(tuple(sorted(layers, key=lambda layer: layer.index)))

    @property
    def modelings(self) -> tuple[tuple[ModuleType, str], ...]:
        """The distinct (modeling file, kind) pairs."""
        return tuple(dict.fromkeys((layer.modeling, layer.kind) for layer in self.layers))


def _read_layer(module: nn.Module, kind: str) -> DeltaLayer:
    if kind == "kda":
        heads, size = module.num_heads, module.head_dim
        return DeltaLayer(module.layer_idx, module, kind, heads, heads, size, size)
    return DeltaLayer(
        module.layer_idx,
        module,
        kind,
        module.num_k_heads,
        module.num_v_heads,
        module.head_k_dim,
        module.head_v_dim,
    )
