"""The small operations of a decoder layer around its matrices: the specification, in plain PyTorch.

They round where the models' own code rounds: after every operation, to the dtype of the tensors, except inside of the
normalization and of SiLU, which are fp32.
"""

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.rms_norm`."""
    exact = x.float()
    normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def norm_add_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    eps: float,
    next_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `hf_lowbit_kernels.norm_add_norm`."""
    residual = residual + rms_norm_reference(x, weight, eps)
    return residual, rms_norm_reference(residual, next_weight, next_eps)


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.swiglu`."""
    return torch.nn.functional.silu(gate) * up


def rope_store_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
    *,
    rotate_key: bool,
) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.rope_store`."""
    row = torch.arange(query.shape[0], device=query.device)
    keys[row, :, slot] = rotate(key, cos, sin) if rotate_key else key
    values[row, :, slot] = value
    return rotate(query, cos, sin)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split RoPE of ``[B, heads, ..., D]`` by ``[B or 1, ..., D]``: channel i turns with channel i + D/2.

    The dtype is the one that PyTorch promotes to.
    """
    first, second = states.chunk(2, dim=-1)
    return states * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)
