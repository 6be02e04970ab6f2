"""Decode attention over vector-quantized keys and values: the specification, in plain PyTorch."""

import torch

from .rope_tables import RopeTables
from .vq_codes import decode_heads


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
        in_codes = torch.arange(sinks, sinks + coded, device=query.device)
        cos, sin = rope.cos_sin(torch.cat([in_window, in_codes]), dtype)
        q = query[row].to(dtype).view(heads, query_heads // heads, head_dim)
        recent, full = slice(None, len(index)), slice(len(index), None)
        scores = [
            q @ _rotate(keys, cos[part], sin[part]).transpose(1, 2)
            for keys, part in (
                (k_window[row][:, index].to(dtype), recent),
                (_decode(k_codes[row], k_table, coded, dtype), full),
            )
        ]
        weights = torch.softmax(torch.cat(scores, dim=-1) * scale, dim=-1)
        attended = weights[..., recent] @ v_window[row][:, index].to(dtype)
        attended += weights[..., full] @ _decode(v_codes[row], v_table, coded, dtype)
        out[row] = attended.view(query_heads, head_dim).to(query.dtype)
    return out


def _window_positions(length: int, coded: int, sinks: int, device: torch.device) -> torch.Tensor:
    """Positions below ``length`` that are not codes: the sinks, then the recent tokens."""
    positions = torch.arange(length, device=device)
    return positions[(positions < sinks) | (positions >= sinks + coded)]


def _decode(codes: torch.Tensor, table: torch.Tensor, coded: int, dtype: torch.dtype) -> torch.Tensor:
    """The first ``coded`` tokens of one row's pages ``[P, H, 8, NG]`` as ``[H, coded, D]``."""
    codes = codes[: -(-coded // 8)].transpose(0, 1).flatten(1, 2)[:, :coded]
    if codes.numel() < table[..., 0].numel():
        return decode_heads(codes, table).to(dtype)
    return decode_heads(codes, table.to(dtype))  # fewer numbers to convert


def _rotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split RoPE: channel i turns with channel i + D/2."""
    out = torch.empty_like(keys)
    (first, second), (to_first, to_second) = keys.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin)
    return out
