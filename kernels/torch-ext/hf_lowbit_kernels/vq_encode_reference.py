"""Nearest codebook entry: the specification, in plain PyTorch."""

import torch


# Bytes of fp32 scores held at a time; a 2048-token chunk of 16 heads x 32 groups would need 1.1 GB at once.
SCORE_BYTES = 64 * 2**20


def vq_encode_reference(
    vectors: torch.Tensor, tables: torch.Tensor, half_norms: torch.Tensor, metric: torch.Tensor | None = None
) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.vq_encode`; memory is bounded by `SCORE_BYTES` whatever the token count."""
    steps, tokens, heads, _ = vectors.shape
    groups, entries, channels = tables.shape[2:]
    size = steps * channels
    # Coordinates are ordered (step, channel) on both sides; any common order gives the same sum.
    joint = tables.float().permute(1, 2, 0, 4, 3).reshape(heads * groups, size, entries)
    norms = half_norms.reshape(heads * groups, 1, entries)
    codes = torch.empty(tokens, heads, groups, dtype=torch.uint8, device=vectors.device)
    chunk = max(1, SCORE_BYTES // (4 * heads * groups * entries))
    for first in range(0, tokens, chunk):
        part = vectors[:, first : first + chunk].float()
        if metric is not None:
            # Weighting the states leaves one set of tables for encoder and decoder.
            part = part * metric.unsqueeze(1)
        part = part.unflatten(-1, (groups, channels))
        part = part.permute(2, 3, 1, 0, 4).reshape(heads * groups, -1, size)
        scores = torch.baddbmm(norms, part, joint, beta=-1)
        # argmax returns the first of equal maxima.
        codes[first : first + chunk] = scores.argmax(-1).to(torch.uint8).view(heads, groups, -1).permute(2, 0, 1)
    return codes
