"""Table of encoding: its share of a prefill and of a decode step."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import hf_lowbit

from ..compat import CACHE_ARG
from ..config import PAGE
from ..loopvq.codebook import LoopVQCodebook
from ..loopvq.prefill import EvenChunk
from .looped import capture_steps, filled_loopvq_cache
from .report import Options, Report
from .shapes import LOOPED, attach_random_codebooks, build_looped
from .timing import Stamp


METHOD = """Random weights of the model's shape. Prefill: LoopVQCache on random tokens, with CUDA events around the cache's work of
turning states into codes in every layer. commit_share: all of it (encoding, writing codes and window; idle gaps between its
kernels count too), encode_share: the encoder's calls alone; both over the time of the whole prefill,
medians of several runs. Decode: steps of the model under CUDA graphs, timed one by one; encode_share = (time of a step that
encodes a page - time of a step that does not) / time of 8 steps."""
MODELS = ("ouro1.4b",)


def run(report: Report, options: Options) -> None:
    lengths = options.choose(options.tokens, (2048, 8192, 32768), (96,))
    batch = options.one("batches", 1, 1)
    device, runs, steps = options.device, 2 if options.tiny else 3, (2 if options.tiny else 6) * PAGE
    model = build_looped(LOOPED[report.model], device, max(lengths) + 4096)
    for tokens in lengths:
        for bits in options.bits:
            attach_random_codebooks(model, bits)
            fields = {"batch": batch, "tokens": tokens, "bits": bits}
            report.measure(lambda: prefill_shares(model, batch, tokens, runs, device), part="prefill", **fields)
            report.measure(lambda: decode_share(model, batch, tokens, steps, device), part="decode", **fields)


@torch.no_grad()
def prefill_shares(model, batch: int, tokens: int, runs: int, device: str) -> dict:
    """Shares of a prefill's time."""
    ids = torch.randint(1, model.config.vocab_size, (batch, tokens), device=device)
    rows = []
    for _ in range(1 + runs):
        with spans(EvenChunk, "commit", device) as commits:
            with spans(LoopVQCodebook, "encode_chunk", device) as encodes:
                start = Stamp(device)
                model(ids, use_cache=True, logits_to_keep=1, **{CACHE_ARG: hf_lowbit.LoopVQCache(model)})
                end = Stamp(device)
        total = start.until(end)
        commit, encode = (sum(a.until(b) for a, b in found) for found in (commits, encodes))
        rows.append({"prefill_s": total, "commit_share": commit / total, "encode_share": encode / total})
    return {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}


@contextmanager
def spans(owner: type, method: str, device: str) -> Iterator[list[tuple[Stamp, Stamp]]]:
    """Beginning and end of every call of a method, in the device's time."""
    original, found = getattr(owner, method), []

    @functools.wraps(original)
    def timed(*args, **kwargs):
        start = Stamp(device)
        result = original(*args, **kwargs)
        found.append((start, Stamp(device)))
        return result

    setattr(owner, method, timed)
    try:
        yield found
    finally:
        setattr(owner, method, original)


@torch.no_grad()
def decode_share(model, batch: int, tokens: int, steps: int, device: str) -> dict:
    """Share of the steps that encode a page."""
    cache = filled_loopvq_cache(model, batch, tokens, max_cache_len=tokens + 4 * PAGE + steps)
    capture_steps(model, cache, batch, tokens, device)
    token = torch.ones((batch, 1), dtype=torch.long, device=device)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(steps):
        start = Stamp(device)
        model(token, **{CACHE_ARG: cache})
        end = Stamp(device)
        times[cache._step.pages > 0].append(start.until(end))
    with_page, without = statistics.median(times[True]), statistics.median(times[False])
    of_eight = with_page + (PAGE - 1) * without
    return {
        "step_ms": 1e3 * of_eight / PAGE,
        "step_with_page_ms": 1e3 * with_page,
        "step_without_page_ms": 1e3 * without,
        "encode_share": (with_page - without) / of_eight,
        "replayed": cache.graph_replays,
    }
