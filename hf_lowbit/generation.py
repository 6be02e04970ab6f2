"""Which cache ``generate()`` uses for a calibrated model.

The names below never enter a :class:`~transformers.GenerationConfig`: its validation refuses unknown names, and a
repository whose ``generation_config.json`` held one would fail to load for everybody without this package. They are
taken from ``generate()``'s arguments and turned into a cache object.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import GenerationMixin

from .compat import CACHE_ARG
from .config import METHODS as METHOD_NAMES
from .protocols import KVAttention
from .subclassing import mix_in, take_out


CACHE_NAMES = (*METHOD_NAMES, "lowbit")


def make_cache(model, name: str = "lowbit", **options: Any):
    """Build the (still empty) cache that ``cache_implementation=name`` stands for.

    Args:
        model: a calibrated model.
        name: a method (``"loopvq"``, ``"damp"``), or ``"lowbit"`` for whatever the model's artifact holds.
        **options: options of the cache class, e.g. ``recent_window`` or ``rounding``, ``prefill_chunk_size``, ``strict``.

    Raises:
        ValueError: unknown name or option, or the model carries no tables of that method.
    """
    # Imported here: the looped models import this file, and the methods know the looped models' layers.
    from .hybrid import HybridCache
    from .methods import METHODS, methods_on

    if name not in CACHE_NAMES:
        raise ValueError(f"unknown cache {name!r}; hf_lowbit knows {', '.join(CACHE_NAMES)}.")
    found = methods_on(model)
    wanted = found if name == "lowbit" else [method for method in found if method.name == name]
    if found and not wanted:
        raise ValueError(
            f"cache_implementation={name!r} asks for {METHODS[name].tables}, but this {type(model).__name__} is calibrated "
            f"for {' and '.join(repr(method.name) for method in found)} "
            f'({" and ".join(method.tables for method in found)}): ask for that, or for "lowbit".'
        )
    if not wanted:
        missing = METHODS.values() if name == "lowbit" else [METHODS[name]]
        raise ValueError(
            f"cache_implementation={name!r} needs a calibrated model, but this {type(model).__name__} carries no "
            f"{' and no '.join(method.tables for method in missing)}. Calibrate it first (hf_lowbit.calibrate(model, "
            "tokenizer, LowBitConfig(...), dataset=...)) or load a calibrated checkpoint with `import hf_lowbit` before "
            "from_pretrained."
        )
    known = [option for method in wanted for option in method.cache_options]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(
            f"unknown options {unknown} in cache_config; this cache knows {', '.join(dict.fromkeys(known))}."
        )
    if len(wanted) > 1:
        return HybridCache(model, **options)
    (method,) = wanted
    return method.make_cache(model, **options)


class LowBitGenerationMixin:
    """Put before ``GenerationMixin``: a calibrated model uses its own cache, by default or by name."""

    def generate(self, *args, cache_implementation: str | None = None, cache_config: dict | None = None, **kwargs):
        """As :meth:`transformers.GenerationMixin.generate`, and three more values of ``cache_implementation``.

        Args:
            cache_implementation: ``"loopvq"``, ``"damp"`` or ``"lowbit"`` (what of them the model has, both on a model
                that has both) asks for the quantized cache by name (an error on a model that was not calibrated for it),
                ``"dynamic"`` turns it off, the other stock names work as ever. None: as ``"lowbit"`` when the model is
                calibrated.
            cache_config: options of the quantized cache (``recent_window`` or ``rounding``, ``prefill_chunk_size``,
                ``strict``).
        """
        if cache_config is not None and not isinstance(cache_config, dict):
            raise ValueError(f'cache_config={cache_config!r} must be a dict of options, e.g. {{"strict": True}}.')
        has_cache = kwargs.get(CACHE_ARG) is not None or kwargs.get("past_key_values") is not None
        if has_cache and cache_config:
            raise ValueError(
                "generate() got both a cache object and cache_config; give the options to the cache itself."
            )
        if cache_implementation in CACHE_NAMES:
            if has_cache:
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

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        from .methods import methods_on

        free_to_choose = (
            model_kwargs.get(CACHE_ARG) is None
            and generation_config.cache_implementation is None
            and generation_config.use_cache is not False
        )
        if free_to_choose and methods_on(self):
            model_kwargs[CACHE_ARG] = make_cache(self, **(generation_config.cache_config or {}))
        cache = model_kwargs.get(CACHE_ARG)
        chunk = getattr(cache, "prefill_chunk_size", None)
        # A KVAttention cache drives the model and splits prompts itself; for others generate() has to.
        if chunk is not None and not isinstance(cache, KVAttention) and generation_config.prefill_chunk_size is None:
            generation_config.prefill_chunk_size = chunk
        if hasattr(cache, "expect_length"):
            cache.expect_length(max_cache_length)
        return super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def _get_candidate_generator(
        self, generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs, *args, **kwargs
    ):
        drafts = super()._get_candidate_generator(
            generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs, *args, **kwargs
        )
        limit = getattr(model_kwargs.get(CACHE_ARG), "max_draft_tokens", None)
        if limit is not None:
            drafts.get_candidates = _shortened(drafts.get_candidates, limit)
        return drafts


def _shortened(get_candidates, limit: int):
    """Drafts of at most ``limit`` tokens: rejected ones are cropped, and a cache of codes can drop no more than that."""

    @functools.wraps(get_candidates)
    def wrapper(input_ids, *args, **kwargs):
        ids, logits = get_candidates(input_ids, *args, **kwargs)
        return ids[:, : input_ids.shape[1] + limit], None if logits is None else logits[:, :limit]

    return wrapper


def enable(model) -> None:
    """Give a model of one of transformers' own classes the :class:`LowBitGenerationMixin`.

    The model becomes an instance of a subclass of its class (:mod:`.subclassing`). Does nothing for models that have the
    mixin (Ouro) or cannot generate (a bare decoder).
    """
    if isinstance(model, GenerationMixin):
        mix_in(model, LowBitGenerationMixin)


def disable(model) -> None:
    """Undo :func:`enable`."""
    take_out(model, LowBitGenerationMixin)
