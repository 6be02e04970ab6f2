"""Codes to vectors and codebook norms: plain PyTorch on every device."""

import torch


def vq_decode(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look up codes.

    Args:
        codes: uint8 ``[..., H, NG]``.
        table: ``[H, NG, 256, c]``, fp16 or another floating dtype.

    Returns:
        ``[..., H, NG * c]`` in the dtype of ``table``.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    if codes.shape[-2:] != table.shape[:2]:
        raise ValueError(
            f"codes end in {tuple(codes.shape[-2:])}, the table has {table.shape[0]} heads x {table.shape[1]} groups; "
            "pass the table of the same layer, step and kind (key or value)."
        )
    return _look_up(codes, table, _first_entries(table))


def decode_heads(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """`vq_decode` head by head: of codes ``[H, n, NG]``, ``[H, n, NG * c]``, contiguous."""
    return _look_up(codes, table, _first_entries(table).unsqueeze(1))


def _first_entries(table: torch.Tensor) -> torch.Tensor:
    """Where each group begins in a table as one list of entries: int32 ``[H, NG]``."""
    heads, groups, entries = table.shape[:3]
    first = torch.arange(heads * groups, dtype=torch.int32, device=table.device) * entries
    return first.view(heads, groups)


def _look_up(codes: torch.Tensor, table: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    # On a CPU index_select takes a quarter of the time that indexing takes.
    rows = table.reshape(-1, table.shape[3]).index_select(0, (codes.contiguous() + first).flatten())
    return rows.view(*codes.shape[:-1], codes.shape[-1] * table.shape[3])


def half_norms(tables: torch.Tensor) -> torch.Tensor:
    """0.5 * squared norm of every joint entry, from the rounded fp16 values.

    Args:
        tables: fp16 ``[T_c, H, NG, 256, c]``, the tables of the steps that share one code.

    Returns:
        fp32 ``[H, NG, 256]``.
    """
    return 0.5 * tables.float().square().sum(dim=(0, -1))
