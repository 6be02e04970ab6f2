"""Clocks of the tables: CUDA events on a GPU, the wall elsewhere."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch
from transformers.generation.streamers import BaseStreamer

from ..config import PAGE


class Stamp:
    """A point in the device's time."""

    def __init__(self, device: str):
        self.event = None
        if device == "cpu":
            self.time = time.perf_counter()
        else:
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def until(self, later: Stamp) -> float:
        """Seconds from here to ``later``; waits for the device."""
        if self.event is None:
            return later.time - self.time
        later.event.synchronize()
        return self.event.elapsed_time(later.event) / 1e3


class Clock(BaseStreamer):
    """When each token of ``generate`` reached the host."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass

    def gaps(self, skip: int) -> list[float]:
        """Seconds between tokens, without the first ``skip``."""
        return [b - a for a, b in zip(self.times[skip:], self.times[skip + 1 :])]


def median_of_pages(gaps: list[float]) -> float:
    """Median over means of 8 steps: one of 8 encodes a page, and every mean holds one such step."""
    pages = [sum(gaps[i : i + PAGE]) / PAGE for i in range(0, len(gaps) - PAGE + 1, PAGE)]
    return statistics.median(pages)


def repeat(function: Callable[[], object], device: str, *, times: int = 3, limit_s: float = 10.0) -> list[float]:
    """Seconds of each run of ``function`` after one warm-up, at least one and at most ``times`` within ``limit_s``."""
    function()
    taken: list[float] = []
    while len(taken) < times and (not taken or sum(taken) + taken[-1] < limit_s):
        start = Stamp(device)
        function()
        taken.append(start.until(Stamp(device)))
    return taken


def release(device: str) -> None:
    """Give back what deleted caches and graphs held."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Peak:
    """Peak of allocated GPU memory above what is allocated now, in bytes; None on a CPU, which does not count."""

    def __init__(self, device: str):
        self.device = device
        if device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def bytes(self) -> int | None:
        return None if self.device == "cpu" else torch.cuda.max_memory_allocated() - self.before
