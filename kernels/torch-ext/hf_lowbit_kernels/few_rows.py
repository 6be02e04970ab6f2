"""Matrix products of one or a few rows: argument checks, then the Triton kernel or PyTorch.

With so few rows a product is as fast as its weights can be read. Here every program reads whole rows of the matrix, all
loads under way at once, and SwiGLU follows without a launch of its own.
"""

import torch

from .elementwise_ops import _pick
from .elementwise_reference import swiglu_reference
from .ops import Backend, _require


try:
    from .few_rows_triton import few_rows_linear_triton, few_rows_swiglu_triton
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "triton":
        raise
    few_rows_linear_triton = few_rows_swiglu_triton = None


def few_rows_linear(x: torch.Tensor, weight: torch.Tensor, *, backend: Backend = "auto") -> torch.Tensor:
    """``x @ weight.T``, fp32 sums, rounded once. Every row reads the matrix (from L2): meant for 1 to 4 rows.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32.
        weight: ``[N, K]``, same dtype.
        backend: "auto" runs the Triton kernel on CUDA, else the reference, `torch.nn.functional.linear`.

    Returns:
        ``[..., N]``.

    Raises:
        ValueError: shapes do not fit, or ``backend="triton"`` is impossible here.
    """
    _check(x, weight)
    return _pick(backend, few_rows_linear_triton, few_rows_linear_reference, x, weight)(x, weight)


def few_rows_swiglu(x: torch.Tensor, weight: torch.Tensor, *, backend: Backend = "auto") -> torch.Tensor:
    """``swiglu(x @ gate.T, x @ up.T)`` of a merged matrix, each product rounded before; as `few_rows_linear`.

    Args:
        x: ``[..., K]``.
        weight: ``[2 N, K]``: gate, then up.

    Returns:
        ``[..., N]``.
    """
    _check(x, weight)
    _require(len(weight) % 2 == 0, "weight", weight, "[2 N, K]")
    return _pick(backend, few_rows_swiglu_triton, few_rows_swiglu_reference, x, weight)(x, weight)


def few_rows_linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Same contract as `few_rows_linear`."""
    return torch.nn.functional.linear(x, weight)


def few_rows_swiglu_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Same contract as `few_rows_swiglu`."""
    return swiglu_reference(*torch.nn.functional.linear(x, weight).chunk(2, dim=-1))


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    _require(weight.dim() == 2 and weight.shape[1:] == x.shape[-1:], "weight", weight, f"[N, {x.shape[-1]}]")
