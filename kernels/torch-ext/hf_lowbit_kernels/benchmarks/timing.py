"""Medians of calls, replayed from a CUDA graph so that launches from Python do not count."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Sequence

import torch


def median_us(
    calls: Sequence[Callable[[], object]], budget_s: float, *, device: str = "cuda", in_graph: int = 8
) -> float:
    """Median time of one call in microseconds.

    On CUDA a graph replays all calls, so that launches from Python do not count; elsewhere the clock on the wall times
    them.

    Args:
        calls: functions on different inputs of the same size, together larger than the L2 cache.
        budget_s: seconds to spend on repetitions; a few are made in any case.
        device: where the inputs are.
        in_graph: calls that a graph holds at least, against the time of its own launch.

    What the calls return is kept until the end, so that each has its own memory.
    """
    if torch.device(device).type != "cuda":
        return _wall_median_us(calls, budget_s)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    calls = list(calls) * max(1, in_graph // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    times, deadline = [], time.monotonic() + budget_s
    while len(times) < 7 or (time.monotonic() < deadline and len(times) < 400):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    del graph, kept
    return statistics.median(times)


def _wall_median_us(calls, budget_s: float) -> float:
    for call in calls:
        call()
    times, deadline = [], time.monotonic() + budget_s
    while len(times) < 3 or (time.monotonic() < deadline and len(times) < 400):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append(1e6 * (time.perf_counter() - start) / len(calls))
    return statistics.median(times)


def guarded(label: str, function, *args, **kwargs) -> dict:
    """One failing configuration must not end the run: its row says what was wrong."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        traceback.print_exc(limit=3)
        print(f"{label} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
