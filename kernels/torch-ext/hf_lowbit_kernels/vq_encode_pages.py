"""Pages that leave a window become codes: one launch for keys and values, where the states lie and the codes belong."""

from typing import NamedTuple

import torch

from .on_device import on_device
from .ops import Backend, _check_encode, _choose, _require, _require_one_device, attention_backend
from .vq_encode_reference import vq_encode_reference


try:
    from .vq_encode_pages_triton import vq_encode_pages_triton
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "triton":
        raise
    vq_encode_pages_triton = None


class PageCoder(NamedTuple):
    """What the encoder knows of keys, or of values.

    Attributes:
        tables: fp16 ``[T_c, H, NG, 256, c]`` contiguous, ``T_c * c`` in 4, 8, 16, 32.
        half_norms: fp32 ``[H, NG, 256]`` contiguous, under the metric.
        metric: fp32 ``[T_c, H, D]`` contiguous, weights of the coordinates; None: all 1.
    """

    tables: torch.Tensor
    half_norms: torch.Tensor
    metric: torch.Tensor | None


def vq_encode_pages(
    window: torch.Tensor,
    codes: torch.Tensor,
    key: PageCoder,
    value: PageCoder,
    rows: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """``codes[side, rows[i], pages[i]]`` become `vq_encode` of the window's states under the metric, at ``slots[i]``.

    Args:
        window: ``[T_c, 2, B, H, S, D]`` bf16, fp16 or fp32, innermost contiguous; 2: keys before RoPE, values.
        codes: uint8 ``[2, B, P, H, 8, NG]``, changed in place; any strides.
        key, value: both with a metric or both without.
        rows, pages: int64 ``[n]``, read on the device only. A (row, page) given twice gets the codes of one of them.
        slots: int64 ``[n, 8]`` contiguous, places in the window of a page's tokens.
        backend: "auto" runs the Triton kernel on CUDA, else the reference.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or ``backend="triton"`` is impossible here.
    """
    _require(window.dim() == 6 and window.shape[1] == 2, "window", window, "[T_c, 2, B, H, S, D]")
    check_coders(window, codes, key, value)
    count = len(rows)
    for name, index, shape in (("rows", rows, (count,)), ("pages", pages, (count,)), ("slots", slots, (count, 8))):
        fits = index.shape == shape and index.dtype == torch.int64 and index.is_contiguous()
        _require(fits, name, index, f"{list(shape)}, contiguous torch.int64")
    _require_one_device(window=window, codes=codes, rows=rows, pages=pages, slots=slots)
    available, reason = attention_backend(window.device, 2, 1, window.dtype)
    if window.stride(-1) != 1:
        raise ValueError(f"window has strides {window.stride()}; the last dimension must be contiguous.")
    name = _choose(backend, available, reason, window.device)
    kernel = name == "triton"
    run = on_device(vq_encode_pages_triton, window.device) if kernel else vq_encode_pages_reference
    run(window, codes, key, value, rows, pages, slots)


def check_coders(window: torch.Tensor, codes: torch.Tensor, key: PageCoder, value: PageCoder) -> None:
    """ValueError unless both coders fit a window ``[T_c, 2, B, H, S, D]`` and each other, and codes fit all of them."""
    batch, heads = window.shape[2:4]
    for coder in (key, value):
        _check_encode(window.select(1, 0).select(1, 0).transpose(1, 2), *coder)
        if (coder.metric is None) != (key.metric is None) or coder.tables.shape != key.tables.shape:
            raise ValueError("key and value need tables of one shape, and both a metric or neither.")
    groups = key.tables.shape[2]
    fits = codes.dim() == 6 and codes.shape[:2] == (2, batch) and codes.shape[3:] == (heads, 8, groups)
    _require(fits and codes.dtype == torch.uint8, "codes", codes, f"[2, {batch}, P, {heads}, 8, {groups}] torch.uint8")


def vq_encode_pages_reference(
    window: torch.Tensor,
    codes: torch.Tensor,
    key: PageCoder,
    value: PageCoder,
    rows: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Same contract as `vq_encode_pages`."""
    states = window[:, :, rows.unsqueeze(1), :, slots].flatten(0, 1)  # [n * 8, T_c, 2, H, D]
    for i, coder in enumerate((key, value)):
        new = vq_encode_reference(states[:, :, i].transpose(0, 1), *coder)  # [n * 8, H, NG]
        codes[i, rows, pages] = new.unflatten(0, (-1, 8)).transpose(1, 2)
