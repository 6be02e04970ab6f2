"""Pages that leave a window become codes: Triton kernel."""

import torch
import triton
import triton.language as tl

from .vq_encode_triton import nearest


def vq_encode_pages_triton(
    window: torch.Tensor, codes: torch.Tensor, key, value, rows: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """Same contract as `hf_lowbit_kernels.vq_encode_pages`."""
    steps, _, _, heads, _, _ = window.shape
    groups, _, channels = key.tables.shape[2:]
    count, joint = len(rows), steps * channels
    if count == 0:
        return
    block = 16 if count <= 2 else 64  # tokens
    weighted = key.metric is not None
    _encode_pages_kernel[heads * groups, triton.cdiv(8 * count, block), 2](
        window, codes, key.tables, value.tables, key.half_norms, value.half_norms,
        key.metric if weighted else window, value.metric if weighted else window, rows, pages, slots,
        8 * count, *window.stride()[:5], *codes.stride(),
        HEADS=heads, GROUPS=groups, C=channels, G=joint, G_PAD=max(16, joint), BLOCK=block, WEIGHTED=weighted,
        EXACT=window.dtype == torch.float32, num_warps=4,
    )  # fmt: skip


@triton.jit
def _encode_pages_kernel(
    window, codes, k_tables, v_tables, k_norms, v_norms, k_metric, v_metric, rows, pages, slots,
    tokens, stride_wt, stride_ws, stride_wb, stride_wh, stride_wn,
    stride_cs, stride_cb, stride_cp, stride_ch, stride_cn, stride_cg,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr,
    BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one (head, group), keys or values, against the 256 joint entries; see `_encode_kernel`."""
    head_group = tl.program_id(0)
    head = (head_group // GROUPS).to(tl.int64)
    group = head_group % GROUPS
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    alive = token < tokens
    row = tl.load(rows + token // 8, mask=alive, other=0)
    page = tl.load(pages + token // 8, mask=alive, other=0)
    slot = tl.load(slots + token, mask=alive, other=0)
    coordinate = tl.arange(0, G_PAD)
    step = coordinate // C
    channel = group * C + coordinate % C
    live = coordinate < G

    x_ptr = window + (row * stride_wb + head * stride_wh + slot * stride_wn)[:, None]
    x_ptr += (step.to(tl.int64) * stride_wt + channel)[None, :]
    to = codes + row * stride_cb + page * stride_cp + head * stride_ch + (token % 8) * stride_cn + group * stride_cg
    weight_at = (step * HEADS + head) * (GROUPS * C) + channel
    entry_at = (step * (HEADS * GROUPS * 256 * C) + coordinate % C)[:, None]
    entry_at += ((head_group * 256 + tl.arange(0, 256)) * C)[None, :]
    norm_at = head_group * 256 + tl.arange(0, 256)
    mask = alive[:, None] & live[None, :]
    if tl.program_id(2) == 0:
        code = nearest(
            x_ptr, k_tables + entry_at, k_norms + norm_at, k_metric + weight_at, mask, live, WEIGHTED, EXACT
        )
        tl.store(to, code, mask=alive)
    else:
        code = nearest(
            x_ptr + stride_ws, v_tables + entry_at, v_norms + norm_at, v_metric + weight_at, mask, live, WEIGHTED,
            EXACT,
        )  # fmt: skip
        tl.store(to + stride_cs, code, mask=alive)
