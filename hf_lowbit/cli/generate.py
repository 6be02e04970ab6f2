"""``hf-lowbit generate``: continue a prompt and show what the cache occupies."""

from __future__ import annotations

import argparse
from typing import Any

from ..config import METHODS
from . import common


NAME = "generate"
HELP = "continue a prompt greedily and print the memory report of the cache"
CACHES = (*METHODS, "dynamic")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--cache", choices=CACHES, default=None, help="default: what the model is calibrated for")
    parser.add_argument("--strict", action="store_true", help="fail rather than fall back to a slower implementation")
    common.add_model_arguments(parser)


def run(args: argparse.Namespace) -> None:
    import torch

    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    if args.strict and args.cache == "dynamic":
        raise ValueError("--strict is about the quantized cache and contradicts --cache dynamic")
    tokenizer = common.load_tokenizer(args.model)
    model = common.load_model(args.model, args.device, args.dtype)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("--prompt has no tokens")
    cache = _build_cache(model, args)
    with torch.no_grad():
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            max_new_tokens=args.max_new_tokens,
            **cache,
        )
    new = output[0, inputs["input_ids"].shape[1] :]
    print(args.prompt + tokenizer.decode(new, skip_special_tokens=True))
    print()
    print(_memory(next(iter(cache.values()))))


def _build_cache(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The keyword argument that hands ``generate`` its cache; built here so that its bytes can be read afterwards."""
    from transformers import DynamicCache

    from ..compat import cache_kwargs
    from ..generation import make_cache
    from ..methods import methods_on

    name = args.cache or ("lowbit" if methods_on(model) else "dynamic")
    if name == "dynamic":
        if args.strict:
            raise ValueError(f"--strict asks for the quantized cache, but {args.model} is not calibrated")
        return cache_kwargs(DynamicCache(config=model.config.get_text_config(decoder=True)))
    return cache_kwargs(make_cache(model, name, strict=args.strict))


def _memory(cache: Any) -> str:
    from transformers import DynamicCache

    from ..evaluation.storage import full_cache_bytes

    if isinstance(cache, DynamicCache):
        return f"full-precision cache: {common.format_bytes(full_cache_bytes(cache))}"
    return str(cache.memory_report())
