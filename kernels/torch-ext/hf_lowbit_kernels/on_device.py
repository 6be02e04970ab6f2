"""What a device can do, and Triton launches where the tensors are."""

import functools

import torch


@functools.cache  # asked for at every launch, and PyTorch takes some microseconds
def capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability of a device."""
    return torch.cuda.get_device_capability(device)


def on_device(kernel, device: torch.device):
    """``kernel``, launched on that device: Triton launches on the current one, wherever the tensors are."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return kernel

    def guarded(*args, **kwargs):
        with torch.cuda.device(device):
            return kernel(*args, **kwargs)

    return guarded
