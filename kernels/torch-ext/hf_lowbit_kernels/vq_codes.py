"""Codes to vectors and codebook norms: plain PyTorch on every device."""

import torch


def vq_decode(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look up codes. No gradient flows through it.

    Args:
        codes: uint8 ``[..., H, NG]``.
        table: ``[H, NG, 256, c]``, fp16 or another floating dtype.

    Returns:
        ``[..., H, NG * c]`` in the dtype of ``table``.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    heads, groups = table.shape[:2]
    if codes.shape[-2:] != (heads, groups):
        raise ValueError(
            f"codes end in {tuple(codes.shape[-2:])}, the table has {heads} heads x {groups} groups; "
            "pass the table of the same layer, step and kind (key or value)."
        )
    return _look_up(codes, table, _first_entries(table))


def decode_heads(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """As `vq_decode`, of codes ``[H, n, NG]``: ``[H, n, NG * c]``."""
    return _look_up(codes, table, _first_entries(table).unsqueeze(1))


def _first_entries(table: torch.Tensor) -> torch.Tensor:
    """Where a group's entries begin in a table as one list of entries; int32 ``[H, NG]``."""
    heads, groups, entries = table.shape[:3]
    return torch.arange(0, heads * groups * entries, entries, dtype=torch.int32, device=table.device).view(
        heads, groups
    )


# An entry is copied as one number of its size, which is ten times faster on a CPU than copying its few elements.
WIDE = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16}


def _look_up(codes: torch.Tensor, table: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    entries = table.detach().reshape(-1, table.shape[3])
    size = entries.element_size()
    width = next(width for width in WIDE if entries.shape[1] * size % width == 0)
    if entries.storage_offset() * size % width:
        entries = entries.clone()
    index = (codes.contiguous() + first).view(-1)
    found = entries.view(WIDE[width]).squeeze(1).index_select(0, index)
    return found.view(table.dtype).view(*codes.shape[:-1], codes.shape[-1] * table.shape[3])


def half_norms(tables: torch.Tensor) -> torch.Tensor:
    """0.5 * squared norm of every joint entry, from the rounded fp16 values.

    Args:
        tables: fp16 ``[T_c, H, NG, 256, c]``, the tables of the steps that share one code.

    Returns:
        fp32 ``[H, NG, 256]``.
    """
    return 0.5 * tables.float().square().sum(dim=(0, -1))
