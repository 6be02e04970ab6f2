"""Table of output tokens per second against batch size, 2K tokens in and 4K out, and the batch where each side peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .looped import (
    SDPA,
    FullPrecisionCache,
    bytes_per_request,
    capture_steps,
    check_captured,
    fastest_attention,
    filled_loopvq_cache,
    graph_fields,
    measure,
    set_loopvq_length,
)
from .prefill import prefill
from .report import Options, Report
from .shapes import LOOPED, attach_random_codebooks, build_looped
from .timing import Peak, release


METHOD = """Random weights of the model's shape. The time of a whole batch is not measured token by token but composed: TPOT is
measured through model.generate, under CUDA graphs, with caches of full capacity that hold random states or codes of the
first, the middle and the last length; decode_s is their integral over all output tokens (trapezoids; TPOT is linear in the
length). prefill_s is the measured prefill of a few rows of tokens_in tokens, times batch over these rows, so that caches
decide about the largest batch and not activations of a prompt. tokens_per_s =
batch * tokens_out / (prefill_s + decode_s). largest: the largest batch whose cache and steps fit into the memory of the
card, found by allocation. bf16: as in table decode (keys rotated once, fastest SDPA backend, a CUDA graph)."""
MODELS = ("ouro1.4b", "ouro2.6b")
SPARE = 2**30  # bytes left for activations of a step, when the first guess of the largest batch is made
SPARE_TOKENS = 64  # that steps may add to the last length
PREFILL_ROWS = 4
TINY_BATCH = 2  # stands for the largest where memory would hold millions of tiny requests


def run(report: Report, options: Options) -> None:
    device = options.device
    shape = LOOPED[report.model]
    tokens_in, tokens_out = (96, 48) if options.tiny else (2048, 4096)
    if options.tokens is not None:
        if len(options.tokens) != 2:
            raise ValueError(f"throughput takes two numbers of tokens, in and out; got {list(options.tokens)}.")
        tokens_in, tokens_out = options.tokens
    total = tokens_in + tokens_out
    lengths = (tokens_in, tokens_in + tokens_out // 2, total)
    report.settings = {"tokens_in": tokens_in, "tokens_out": tokens_out, "lengths": lengths}
    model = build_looped(shape, device, total + 4096)
    arms = (None, *options.bits)

    # First the largest batches, then smaller ones in turn: whatever the budget cuts off, the peaks are there.
    for first in (True, False):
        for bits in arms:
            if bits is not None:
                attach_random_codebooks(model, bits)
            fields = {"arm": "bf16" if bits is None else "loopvq"} | ({} if bits is None else {"bits": bits})
            if first:
                prefill_row(report, model, bits, tokens_in, options, fields)
                if options.batches is None:
                    largest_row(report, model, bits, total, lengths, fields, shape.token_bytes() * total)
                continue
            default = (4, 16) if bits is None else (16, 64, 192)
            for batch in options.choose(options.batches, default, (1,)):
                report.measure(lambda: point(report, model, bits, batch, lengths, total), **fields, batch=batch)


def prefill_row(report: Report, model, bits: float | None, tokens: int, options: Options, fields: dict) -> None:
    def one() -> dict:
        rows = 2 if options.tiny else PREFILL_ROWS
        seconds = prefill(model, bits, rows, tokens, options.device)["seconds"]
        return {"prefill_rows": rows, "prefill_s_per_row": seconds / rows}

    report.measure(one, **fields)


def largest_row(report: Report, model, bits, total: int, lengths, fields: dict, full_bytes: int) -> None:
    """The largest batch that fits, going down from a guess."""
    device = report.options.device

    def one() -> dict:
        per_row = full_bytes if bits is None else bytes_per_request(filled_loopvq_cache(model, 1, total))
        release(device)
        guess = TINY_BATCH
        if not report.options.tiny:
            guess = (torch.cuda.mem_get_info()[0] - SPARE) // per_row
        batch, row = first_that_fits(
            candidates(guess), lambda n: point(report, model, bits, n, lengths, total), device
        )
        return {"batch": batch, "largest": True, "bytes_per_request": per_row, **row}

    report.measure(one, **fields)


def candidates(guess: int) -> Iterator[int]:
    """Batches to try, from a guess down in steps of 2 %, at least 1."""
    batch = max(1, guess)
    while batch >= 1:
        yield batch
        batch = min(batch - 1, int(0.98 * batch))


def first_that_fits(batches: Iterator[int], attempt: Callable[[int], dict], device: str) -> tuple[int, dict]:
    """The first batch that ``attempt`` does not run out of memory with, and what it returned.

    Raises:
        torch.OutOfMemoryError: none of them.
    """
    for batch in batches:
        try:
            return batch, attempt(batch)
        except torch.OutOfMemoryError:
            pass  # the traceback holds the tensors: give them back after it is gone
        release(device)
    raise torch.OutOfMemoryError("not even one request fits")


def point(report: Report, model, bits: float | None, batch: int, lengths: tuple[int, ...], total: int) -> dict:
    """Tokens per second of one batch size."""
    device = report.options.device
    peak = Peak(device)
    if bits is None:
        best, times = fastest_attention(model, batch, total)
        cache = FullPrecisionCache(model, batch, lengths[0], SDPA[best], capacity=total)
        extra = {"sdpa": best, "sdpa_us": times}
    else:
        cache = filled_loopvq_cache(model, batch, total, max_cache_len=total + SPARE_TOKENS)
        capture_steps(model, cache, batch, lengths[0], device)
        extra = {}
    tpot, pages = [], 1 if report.options.tiny or batch >= 128 else 2
    for tokens in lengths:
        if bits is None:
            cache.set_length(tokens)
        else:
            set_loopvq_length(cache, batch, tokens)
        tpot.append(measure(model, cache, batch, tokens, pages, device)["tpot_ms"])
        check_captured(cache)
    fields = graph_fields(model, cache) | {"peak_bytes": peak.bytes()}
    decode = integral(lengths, [t / 1e3 for t in tpot])
    per_row = prefill_of(report, bits)
    result = {"tpot_ms": tpot, "decode_s": decode} | extra | fields
    if per_row is not None:
        result["prefill_s"] = batch * per_row
        result["tokens_per_s"] = batch * (lengths[-1] - lengths[0]) / (result["prefill_s"] + decode)
    return result


def prefill_of(report: Report, bits: float | None) -> float | None:
    """Measured seconds of a row's prefill, or None if that failed."""
    for row in report.rows:
        if "prefill_s_per_row" in row and row.get("bits") == bits:
            return row["prefill_s_per_row"]
    return None


def integral(points: tuple[int, ...], values: list[float]) -> float:
    """Of a piecewise linear function through ``values`` at ``points``."""
    pairs = zip(points, points[1:], values, values[1:])
    return sum((b - a) * (u + v) / 2 for a, b, u, v in pairs)
