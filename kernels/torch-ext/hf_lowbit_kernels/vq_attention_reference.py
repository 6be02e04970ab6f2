"""Decode attention over vector-quantized keys and values: the specification, in plain PyTorch."""

import torch

from .rope_tables import RopeTables
from .vq_codes import vq_decode


def vq_decode_attention_reference(
    query: torch.Tensor,
    k_codes: torch.Tensor,
    v_codes: torch.Tensor,
    k_table: torch.Tensor,
    v_table: torch.Tensor,
    k_window: torch.Tensor,
    v_window: torch.Tensor,
    lengths: torch.Tensor,
    n_coded: torch.Tensor,
    rope: RopeTables,
    scale: float,
    *,
    sinks: int = 8,
    max_coded: int,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.vq_decode_attention`; ``max_coded`` and ``num_splits`` change nothing here.

    Rows are computed one by one, each from its own tokens only, so a row alone equals the row in any batch. All
    arithmetic is fp32, or fp64 when the query is fp64 (an oracle for tests). Reads ``lengths`` and ``n_coded`` on the
    host.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, query_heads, head_dim = query.shape
    heads = k_window.shape[1]
    out = torch.zeros_like(query)
    for row, (length, coded) in enumerate(zip(lengths.tolist(), n_coded.tolist())):
        if length == 0:
            continue
        in_window = _window_positions(length, coded, sinks, query.device)
        index = torch.where(in_window < sinks, in_window, sinks + (in_window - sinks) % (k_window.shape[2] - sinks))
        positions = torch.cat([in_window, torch.arange(sinks, sinks + coded, device=query.device)])
        keys = torch.cat([k_window[row][:, index].to(dtype), _decode(k_codes[row], k_table, coded).to(dtype)], 1)
        values = torch.cat([v_window[row][:, index].to(dtype), _decode(v_codes[row], v_table, coded).to(dtype)], 1)
        keys = _rotate(keys, *rope.cos_sin(positions, dtype))
        q = query[row].to(dtype).view(heads, query_heads // heads, head_dim)
        weights = torch.softmax(q @ keys.transpose(1, 2) * scale, dim=-1)
        out[row] = (weights @ values).view(query_heads, head_dim).to(query.dtype)
    return out


def _window_positions(length: int, coded: int, sinks: int, device: torch.device) -> torch.Tensor:
    """Positions below ``length`` that are not codes: the sinks, then the recent tokens."""
    positions = torch.arange(length, device=device)
    return positions[(positions < sinks) | (positions >= sinks + coded)]


def _decode(codes: torch.Tensor, table: torch.Tensor, coded: int) -> torch.Tensor:
    """The first ``coded`` tokens of one row's pages ``[P, H, 8, NG]`` as ``[H, coded, D]`` fp16."""
    pages = codes[: -(-coded // 8)].permute(0, 2, 1, 3)
    return vq_decode(pages.reshape(-1, *pages.shape[2:])[:coded], table).transpose(0, 1)


def _rotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split RoPE: channel i turns with channel i + D/2."""
    first, second = keys.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
