"""Launches that overlap the end of the kernel before them (programmatic dependent launch, Hopper and newer).

A decode step is hundreds of kernels of some microseconds each. Launched this way, a kernel is on the chip, with norm weights
or codebooks on their way, when the one before it ends: it first touches only what no kernel of the step writes, and then
waits (``griddepcontrol.wait``) until everything before it is complete. It lets its own successor in only after that, so that
at most two kernels overlap. A product of few rows has the first pieces of its matrix on their way then, in registers: asking for
the matrix in the L2 cache instead took longer than it saved.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


_thread = threading.local()


@contextmanager
def overlapping_launches() -> Iterator[None]:
    """Inside, kernels that can will overlap the one before them.

    The caller promises that weights, norms, codebooks and RoPE tables are written by no kernel that may still run, and numbers
    of tokens (``lengths``, ``n_coded``) not by the kernel right before the one that reads them. Where a device or Triton does
    not know such launches nothing changes.
    """
    before = getattr(_thread, "overlap", False)
    _thread.overlap = True
    try:
        yield
    finally:
        _thread.overlap = before


def overlaps(device: torch.device) -> bool:
    """Whether launches on a device overlap now."""
    return getattr(_thread, "overlap", False) and device.type == "cuda" and _possible(device)


@functools.cache
def _possible(device: torch.device) -> bool:
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        from triton.language.extra.cuda import gdc_wait  # noqa: F401  came along with the launch option
    except ImportError:
        return False
    return True


def overlap_options(device: torch.device) -> dict:
    """Launch options of a Triton kernel with an ``OVERLAP`` constant."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}
