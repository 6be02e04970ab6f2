"""Registration with transformers' quantizer tables, safe to repeat (a notebook's reload, two import paths)."""

from __future__ import annotations

from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)


def _register_once(name: str, table: dict, register):
    # transformers raises on a second registration; the newest class of the same name replaces the old one.
    def decorator(cls):
        known = table.get(name)
        if known is None:
            return register(name)(cls)
        if known.__module__ != cls.__module__:
            raise ValueError(
                f"quantization method {name!r} is already taken by {known.__module__}.{known.__name__}; "
                "hf_lowbit cannot be used beside it in one process."
            )
        table[name] = cls
        return cls

    return decorator


def register_config(name: str):
    """Class decorator: the config class of quantization method ``name``."""
    return _register_once(name, AUTO_QUANTIZATION_CONFIG_MAPPING, register_quantization_config)


def register_quantizer_class(name: str):
    """Class decorator: the HfQuantizer of quantization method ``name``."""
    return _register_once(name, AUTO_QUANTIZER_MAPPING, register_quantizer)
