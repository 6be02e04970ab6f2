"""Triton launches where the tensors are."""

import torch


def on_device(kernel, device: torch.device):
    """``kernel``, launched on that device: Triton launches on the current one, wherever the tensors are."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return kernel

    def guarded(*args, **kwargs):
        with torch.cuda.device(device):
            return kernel(*args, **kwargs)

    return guarded
