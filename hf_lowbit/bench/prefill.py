"""Table of prefill: time and peak memory of a prompt, full-precision cache against LoopVQ in chunks."""

from __future__ import annotations

import statistics

import torch
from transformers import DynamicCache

import hf_lowbit

from ..compat import CACHE_ARG
from .report import Options, Report
from .shapes import LOOPED, attach_random_codebooks, build_looped
from .timing import Peak, release, repeat


METHOD = """Random weights of the model's shape, random tokens, one forward pass over the prompt that keeps the last logits and
fills a new cache: transformers' DynamicCache in bf16, or LoopVQCache, which splits prompts into chunks of
prefill_chunk_size tokens. Medians after one warm-up. peak_bytes is torch.cuda.max_memory_allocated above weights and
codebooks, activations included; held_bytes what the cache holds afterwards."""
MODELS = ("ouro1.4b",)


def run(report: Report, options: Options) -> None:
    lengths = options.choose(options.tokens, (2048, 8192, 32768), (96, 192))
    batch = options.one("batches", 1, 1)
    model = build_looped(LOOPED[report.model], options.device, max(lengths) + 16)
    for tokens in lengths:
        fields = {"batch": batch, "tokens": tokens}
        full = report.measure(lambda: prefill(model, None, batch, tokens, options.device), arm="bf16", **fields)
        for bits in options.bits:
            attach_random_codebooks(model, bits)

            def coded() -> dict:
                row = prefill(model, bits, batch, tokens, options.device)
                return row | ({"time_ratio": row["seconds"] / full["seconds"]} if "seconds" in full else {})

            report.measure(coded, arm="loopvq", **fields, bits=bits)


@torch.no_grad()
def prefill(model, bits: float | None, batch: int, tokens: int, device: str) -> dict:
    """Median ``seconds`` of a prefill, and its memory."""
    ids = torch.randint(1, model.config.vocab_size, (batch, tokens), device=device)

    def fill():
        cache = DynamicCache() if bits is None else hf_lowbit.LoopVQCache(model)
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE_ARG: cache})
        return cache

    seconds = statistics.median(repeat(fill, device, limit_s=6.0))
    release(device)
    peak = Peak(device)
    cache = fill()
    if bits is None:
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    else:
        held = cache.memory_report().per_request
    return {
        "seconds": seconds,
        "tokens_per_s": batch * tokens / seconds,
        "peak_bytes": peak.bytes(),
        "held_bytes": held,
    }
