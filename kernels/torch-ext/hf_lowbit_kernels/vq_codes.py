"""Codes to vectors and codebook norms: plain PyTorch on every device."""

import torch


def vq_decode(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look up codes.

    Args:
        codes: uint8 ``[..., H, NG]``.
        table: fp16 ``[H, NG, 256, c]``.

    Returns:
        fp16 ``[..., H, NG * c]``.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    heads, groups, entries, channels = table.shape
    if codes.shape[-2:] != (heads, groups):
        raise ValueError(
            f"codes end in {tuple(codes.shape[-2:])}, the table has {heads} heads x {groups} groups; "
            "pass the table of the same layer, step and kind (key or value)."
        )
    first = torch.arange(heads * groups, device=codes.device).view(heads, groups) * entries
    rows = table.reshape(heads * groups * entries, channels)[codes.long() + first]
    return rows.flatten(-2)


def half_norms(tables: torch.Tensor) -> torch.Tensor:
    """0.5 * squared norm of every joint entry, from the rounded fp16 values.

    Args:
        tables: fp16 ``[T_c, H, NG, 256, c]``, the tables of the steps that share one code.

    Returns:
        fp32 ``[H, NG, 256]``.
    """
    return 0.5 * tables.float().square().sum(dim=(0, -1))
