"""Which cache ``generate()`` uses for a calibrated model.

The names below never enter a :class:`~transformers.GenerationConfig`: its validation refuses unknown names, and a
repository whose ``generation_config.json`` held one would fail to load for everybody without this package. They are
taken from ``generate()``'s arguments and turned into a cache object.
"""

from __future__ import annotations

from typing import Any

from .compat import CACHE_ARG


CACHE_NAMES = ("loopvq", "lowbit")
CACHE_OPTIONS = ("recent_window", "prefill_chunk_size", "strict", "backend")


def make_cache(model, name: str = "lowbit", **options: Any):
    """Build the (still empty) cache that ``cache_implementation=name`` stands for.

    Args:
        model: a calibrated model.
        name: ``"loopvq"``, or ``"lowbit"`` for whatever the model's artifact holds.
        **options: options of the cache class, e.g. ``recent_window``, ``prefill_chunk_size``, ``strict``.

    Raises:
        ValueError: unknown name or option, or the model carries no codebooks.
    """
    from .loopvq.attach import has_loopvq
    from .loopvq.cache import LoopVQCache

    if name not in CACHE_NAMES:
        raise ValueError(f"unknown cache {name!r}; hf_lowbit knows {', '.join(CACHE_NAMES)}.")
    if not has_loopvq(model):
        raise ValueError(
            f"cache_implementation={name!r} needs a calibrated model, but this {type(model).__name__} carries no "
            "codebooks. Calibrate it first (hf_lowbit.calibrate(model, tokenizer, LowBitConfig(...), dataset=...)) or "
            "load a calibrated checkpoint with `import hf_lowbit` before from_pretrained."
        )
    unknown = sorted(set(options) - set(CACHE_OPTIONS))
    if unknown:
        raise ValueError(f"unknown options {unknown} in cache_config; this cache knows {', '.join(CACHE_OPTIONS)}.")
    return LoopVQCache(model, **options)


class LowBitGenerationMixin:
    """Put before ``GenerationMixin``: a calibrated model uses its own cache, by default or by name."""

    def generate(self, *args, cache_implementation: str | None = None, cache_config: dict | None = None, **kwargs):
        """As :meth:`transformers.GenerationMixin.generate`, and two more values of ``cache_implementation``.

        Args:
            cache_implementation: ``"loopvq"`` or ``"lowbit"`` asks for the quantized cache by name (an error on an
                uncalibrated model), ``"dynamic"`` turns it off, the other stock names work as ever. None: the
                quantized cache when the model is calibrated.
            cache_config: options of the quantized cache (``recent_window``, ``prefill_chunk_size``, ``strict``).
        """
        if cache_implementation in CACHE_NAMES:
            if kwargs.get(CACHE_ARG) is not None or kwargs.get("past_key_values") is not None:
                raise ValueError(
                    f"generate() got both a cache object and cache_implementation={cache_implementation!r}; pass one."
                )
            if kwargs.get("use_cache") is False:
                raise ValueError(f"cache_implementation={cache_implementation!r} contradicts use_cache=False.")
            kwargs[CACHE_ARG] = make_cache(self, cache_implementation, **(cache_config or {}))
            return super().generate(*args, **kwargs)
        if cache_implementation is not None:
            kwargs["cache_implementation"] = cache_implementation
        if cache_config is not None:
            kwargs["cache_config"] = cache_config
        return super().generate(*args, **kwargs)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        from .loopvq.attach import has_loopvq

        free_to_choose = (
            model_kwargs.get(CACHE_ARG) is None
            and generation_config.cache_implementation is None
            and generation_config.use_cache is not False
        )
        if free_to_choose and has_loopvq(self):
            model_kwargs[CACHE_ARG] = make_cache(self, **(generation_config.cache_config or {}))
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
