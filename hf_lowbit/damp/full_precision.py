"""`FullStateCache`: FP32 states as transformers keeps them, with steps that can be captured; for fair comparisons."""

from __future__ import annotations

import copy

from transformers.cache_utils import DynamicCache

from .decode import StepCache


class FullStateCache(StepCache):
    """Transformers' cache of a hybrid model, whose one-token steps may be CUDA graphs.

    Recurrent states stay in FP32 at fixed addresses; the model's own recurrence computes new ones, and transformers' cache
    layer copies them in place. Which recurrence that is, transformers decides at import: fla's where fla is installed.

    Args:
        model: a model with gated delta-rule layers.
        cuda_graphs, max_cache_len: see :class:`~hf_lowbit.damp.cache.DAMPStateCache`.

    Raises:
        TypeError: the model has no gated delta-rule layers.
        ValueError, FallbackError: see :class:`~hf_lowbit.damp.decode.StepCache`.
    """

    def __init__(self, model, *, cuda_graphs: bool | None = None, max_cache_len: int | None = None):
        slots = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        super().__init__(model, slots, cuda_graphs=cuda_graphs, max_cache_len=max_cache_len)
        self._empty = [copy.deepcopy(slot) for slot in self.layers]

    def reset(self) -> None:
        """Forget everything, tensors included."""
        self.drop_steps()
        self.layers = [copy.deepcopy(slot) for slot in self._empty]
