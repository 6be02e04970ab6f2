"""Nearest codebook entry: Triton kernel for every GPU, dtype and shape."""

import torch
import triton
import triton.language as tl


def vq_encode_triton(
    vectors: torch.Tensor, tables: torch.Tensor, half_norms: torch.Tensor, metric: torch.Tensor | None = None
) -> torch.Tensor:
    """Same contract as `hf_lowbit_kernels.vq_encode`."""
    steps, tokens, heads, _ = vectors.shape
    groups, _, channels = tables.shape[2:]
    codes = torch.empty(tokens, heads, groups, dtype=torch.uint8, device=vectors.device)
    if tokens == 0:
        return codes
    block = 16 if tokens <= 16 else 64
    grid = (heads * groups, triton.cdiv(tokens, block))
    _encode_kernel[grid](
        vectors, tables, half_norms, half_norms if metric is None else metric, codes, tokens, *vectors.stride(),
        HEADS=heads, GROUPS=groups, C=channels, G=steps * channels, G_PAD=max(16, steps * channels), BLOCK=block,
        WEIGHTED=metric is not None, EXACT=vectors.dtype == torch.float32, num_warps=4,
    )  # fmt: skip
    return codes


@triton.jit
def _encode_kernel(
    vectors, tables, half_norms, metric, codes, tokens, stride_t, stride_n, stride_h, stride_d,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr,
    BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, EXACT: tl.constexpr,
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
    slice_size: tl.constexpr = HEADS * GROUPS * 256 * C
    e_ptr = tables + (step * slice_size + channel)[:, None] + ((head_group * 256 + entry) * C)[None, :]
    weight_ptr = metric + (step * (HEADS * GROUPS) + head_group) * C + channel
    mask = (token < tokens)[:, None] & live[None, :]
    code = nearest(x_ptr, e_ptr, half_norms + head_group * 256 + entry, weight_ptr, mask, live, WEIGHTED, EXACT)
    tl.store(codes + token.to(tl.int64) * (HEADS * GROUPS) + head_group, code, mask=token < tokens)


@triton.jit
def nearest(
    x_ptr, e_ptr, norm_ptr, weight_ptr, mask, live, WEIGHTED: tl.constexpr, EXACT: tl.constexpr
):  # fmt: skip
    """uint8 ``[BLOCK]``: the entry with the largest score of each vector. EXACT: fp32 vectors, multiplied in fp32."""
    x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    if WEIGHTED:
        x *= tl.load(weight_ptr, mask=live, other=0.0)[None, :]
    e = tl.load(e_ptr, mask=live[:, None], other=0.0).to(tl.float32)
    if EXACT:
        score = tl.dot(x, e, input_precision="ieee")
    elif WEIGHTED:
        # TF32 holds 11 bits. A 16-bit state times an fp16 weight has at most 22, so two parts hold it, and as the entries
        # have 11, all products are exact. Cut, not rounded: what is left has the other 11 bits at most.
        high = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        score = tl.dot(high, e, input_precision="tf32")
        score = tl.dot(x - high, e, score, input_precision="tf32")
    else:
        score = tl.dot(x, e, input_precision="tf32")  # bf16, fp16 and the entries are exact in TF32
    return tl.argmax(score - tl.load(norm_ptr)[None, :], 1, tie_break_left=True).to(tl.uint8)
