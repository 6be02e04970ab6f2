"""Stock caches for looped models: one slot per (loop step, layer) instead of one per layer."""

from __future__ import annotations

import copy

from transformers.cache_utils import Cache


def extend_cache(cache: Cache, num_slots: int) -> None:
    """Give a stock cache ``num_slots`` slots, in place.

    ``generate()`` and ``DynamicCache(config=...)`` build one slot per *physical* layer. A looped model writes slot
    ``step * num_hidden_layers + layer``; the missing slots are copies of the empty ones, so that every kind of layer
    (dynamic, static, quantized) keeps its own settings. Caches that grow lazily are left alone.

    Args:
        cache: any ``Cache``; extending twice is harmless.
        num_slots: ``config.num_cache_slots``.

    Raises:
        ValueError: the cache is too short and already holds tokens. They can only come from another model (or from
            fewer loops), and the missing slots cannot be filled afterwards.
    """
    if cache.layer_class_to_replicate is not None or len(cache.layers) >= num_slots:
        return
    num_layers = len(cache.layers)
    if num_layers == 0:
        raise ValueError(
            f"The cache has no layers to copy; {num_slots} are needed. Build it as `DynamicCache()` or as "
            "`DynamicCache(config=model.config)`."
        )
    if int(cache.get_seq_length()) > 0:
        raise ValueError(
            f"The cache has {num_layers} slots and already holds tokens, but this model needs {num_slots} slots "
            "(total_ut_steps * num_hidden_layers). Pass an empty cache, or one filled by this model."
        )
    while len(cache.layers) < num_slots:
        cache.layers.append(copy.deepcopy(cache.layers[len(cache.layers) % num_layers]))
