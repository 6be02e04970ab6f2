"""Nearest codebook entry: Triton kernel."""

import torch
import triton
import triton.language as tl


def vq_encode_triton(vectors: torch.Tensor, tables: torch.Tensor, half_norms: torch.Tensor) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.vq_encode`."""
    steps, tokens, heads, _ = vectors.shape
    groups, _, channels = tables.shape[2:]
    codes = torch.empty(tokens, heads, groups, dtype=torch.uint8, device=vectors.device)
    if tokens == 0:
        return codes
    block = 16 if tokens <= 16 else 64
    grid = (heads * groups, triton.cdiv(tokens, block))
    _encode_kernel[grid](
        vectors, tables, half_norms, codes, tokens, *vectors.stride(),
        HEADS=heads, GROUPS=groups, C=channels, G=steps * channels, G_PAD=max(16, steps * channels), BLOCK=block,
        # bf16, fp16 and the fp16 entries are exact in TF32, so its products are exact; fp32 vectors are not.
        PRECISION="ieee" if vectors.dtype == torch.float32 else "tf32",
        num_warps=4,
    )  # fmt: skip
    return codes


@triton.jit
def _encode_kernel(
    vectors, tables, half_norms, codes, tokens, stride_t, stride_n, stride_h, stride_d,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one (head, group) against its 256 joint entries; coordinates are ordered (step, channel)."""
    head_group = tl.program_id(0)
    head = head_group // GROUPS
    group = head_group % GROUPS
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    coordinate = tl.arange(0, G_PAD)
    step = coordinate // C
    channel = coordinate % C
    live = coordinate < G
    entry = tl.arange(0, 256)

    x_ptr = vectors + token.to(tl.int64)[:, None] * stride_n + head.to(tl.int64) * stride_h
    x_ptr += step.to(tl.int64)[None, :] * stride_t + (group * C + channel)[None, :] * stride_d
    x = tl.load(x_ptr, mask=(token < tokens)[:, None] & live[None, :], other=0.0).to(tl.float32)
    slice_size: tl.constexpr = HEADS * GROUPS * 256 * C
    e_ptr = tables + (step * slice_size + channel)[:, None] + ((head_group * 256 + entry) * C)[None, :]
    e = tl.load(e_ptr, mask=live[:, None], other=0.0).to(tl.float32)
    score = tl.dot(x, e, input_precision=PRECISION) - tl.load(half_norms + head_group * 256 + entry)[None, :]
    code = tl.argmax(score, 1, tie_break_left=True)
    tl.store(codes + token.to(tl.int64) * (HEADS * GROUPS) + head_group, code.to(tl.uint8), mask=token < tokens)
