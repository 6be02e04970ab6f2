"""Public operations: argument checks, then the CUDA or Triton kernel or the reference.

All implementations of an operation share one signature, so this file is also the place where they could be
registered as torch custom ops.
"""

from typing import Literal

import torch

from .on_device import capability, on_device
from .rope_tables import RopeTables
from .vq_attention_cuda import cuda_kernel_problem, cuda_layout_problem, is_entry_major, vq_decode_attention_cuda
from .vq_attention_reference import vq_decode_attention_reference
from .vq_encode_cuda import encode_cuda_problem, vq_encode_cuda
from .vq_encode_reference import vq_encode_reference


try:
    from .vq_attention_triton import vq_decode_attention_triton
    from .vq_encode_triton import vq_encode_triton
except ModuleNotFoundError as error:
    # Only a missing triton is expected (macOS, CPU-only installs); anything else should be heard.
    if error.name is None or error.name.partition(".")[0] != "triton":
        raise
    vq_decode_attention_triton = vq_encode_triton = None


Backend = Literal["auto", "cuda", "triton", "reference"]

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHANNELS = (1, 2, 4, 8, 16, 32)
JOINT_SIZES = (4, 8, 16, 32)
MAX_HEAD_DIM = 256
CUDA_TOKENS = 256  # fewer leave most warps of the encoder's CUDA kernel idle


def attention_backend(
    device: torch.device | str,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    channels: int | None = None,
    sinks: int = 8,
) -> tuple[Literal["cuda", "triton", "reference"], str]:
    """Which implementation ``backend="auto"`` runs, and why: ``("reference", "triton is not installed")``.

    The reference is right everywhere but decodes every code in full precision; a caller can warn once or refuse.

    Args:
        device: where the tensors are.
        head_dim: D.
        group: query heads per kv head.
        dtype: the query's dtype.
        channels: c, channels of a code. None: never the CUDA kernel.
        sinks: leading tokens in full precision.
    """
    device = torch.device(device)
    problem = _triton_problem(vq_decode_attention_triton, device, dtype)
    if problem is not None:
        return "reference", problem
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        return "reference", f"there is no kernel for head_dim {head_dim} (even, at most {MAX_HEAD_DIM})"
    if channels is not None and cuda_kernel_problem(device, head_dim, group, channels, dtype, sinks) is None:
        return "cuda", "CUDA kernel for Hopper GPUs"
    return "triton", f"Triton kernel on {device.type}, {group} query heads per kv head"


def vq_decode_attention(
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
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attention of one new token per row over coded and full-precision keys and values.

    Position p of a row is read from the window if ``p < sinks`` (slot p) or ``p >= sinks + n_coded`` (slot ``sinks +
    (p - sinks) % R``), else from the codes (token ``j = p - sinks`` at page ``j // 8``, slot ``j % 8``). Scores,
    softmax, sums and rotations are fp32; the CUDA kernel multiplies, and rotates within 16 tokens, in fp16. A row alone
    equals the row in any batch, bit for bit. A row of length 0 gives zeros.

    The kernels' bits also follow from 16-byte alignment of data pointers and strides, which fresh tensors have.

    Args:
        query: ``[B, Hq, D]`` after RoPE, bf16, fp16 or fp32. Query head h uses kv head ``h // (Hq // H)``.
        k_codes, v_codes: uint8 ``[B, P, H, 8, NG]``, keys before RoPE. In memory the inner three dimensions are
            contiguous, as ``[H, 8, NG]`` or, needed by the CUDA kernel, as ``[H, NG, 8]`` (see `group_major`).
        k_table, v_table: fp16 ``[H, NG, 256, c]``; ``NG * c = D``; c is 1, 2, 4, 8, 16 or 32. Contiguous or, needed by
            the CUDA kernel and by it alone, `entry_major`.
        k_window, v_window: ``[B, H, sinks + R, D]``, innermost contiguous; keys before RoPE.
        lengths: int32 ``[B]``, tokens of each row, the current one included.
        n_coded: int32 ``[B]``, coded tokens of each row.
        rope: tables with ``offset = sinks`` that cover every position below ``lengths``.
        scale: factor on the scores, usually ``D ** -0.5``.
        sinks: S, leading tokens kept in full precision.
        max_coded: upper bound of ``n_coded``, known on the host; at most ``8 * P``. Nothing else is read on the host,
            so the call can be captured in a CUDA graph.
        num_splits: slices of a row's codes computed in parallel; default: from the head count. It changes the order of
            sums, so keep it constant wherever results must agree bit for bit.
        backend: "auto" runs the kernel that `attention_backend` names, else the reference. The CUDA kernel also needs
            both layouts above; with others "auto" takes the Triton kernel.

    Returns:
        ``[B, Hq, D]`` in the query's dtype.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit, or the backend that was asked for is impossible here.
    """
    available, reason = _attention_backend_of(query, k_window, k_table, sinks)
    layout_problem = None
    if "cuda" in (available, backend):
        layout_problem = cuda_layout_problem(query, k_codes, v_codes, k_table, v_table, k_window, v_window, rope)
    if backend == "auto" and available == "cuda" and layout_problem is not None:
        available = "triton"
    name = _choose(backend, available, reason, query.device)
    _check_attention(
        query, k_codes, v_codes, k_table, v_table, k_window, v_window, lengths, n_coded,
        rope, sinks, max_coded, num_splits,
    )  # fmt: skip
    if name == "cuda" and layout_problem is not None:
        raise ValueError(f'backend="cuda" does not take these tensors: {layout_problem}.')
    if name == "triton" and not (k_table.is_contiguous() and v_table.is_contiguous()):
        why = f", and the CUDA kernel does not take these tensors: {layout_problem}" if layout_problem else ""
        raise ValueError(f'backend="triton" needs contiguous tables, not entry-major ones{why}.')
    run = {
        "cuda": vq_decode_attention_cuda,
        "triton": on_device(vq_decode_attention_triton, query.device),
        "reference": vq_decode_attention_reference,
    }[name]
    return run(
        query, k_codes, v_codes, k_table, v_table, k_window, v_window, lengths, n_coded, rope, scale,
        sinks=sinks, max_coded=max_coded, num_splits=num_splits,
    )  # fmt: skip


def vq_encode(
    vectors: torch.Tensor,
    tables: torch.Tensor,
    half_norms: torch.Tensor,
    metric: torch.Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Nearest joint entry of every group: one code for the T_c steps that share it.

    ``codes[n, h, g] = argmax_r sum_m <tables[m, h, g, r], metric[m, h, at] * vectors[m, n, h, at]> - half_norms[h, g, r]``
    with ``at = g*c : (g+1)*c``, fp32 sums, the lowest r on ties. Near ties may resolve differently between backends:
    compare objectives, not codes. The CUDA kernel rounds metric times entry to 16 bits.

    Args:
        vectors: ``[T_c, N, H, D]`` bf16, fp16 or fp32, any strides, N >= 0; keys before RoPE.
        tables: fp16 ``[T_c, H, NG, 256, c]`` contiguous, ``T_c * c`` in 4, 8, 16, 32.
        half_norms: fp32 ``[H, NG, 256]`` contiguous, half the squared length of each entry under the metric; without
            one, from `half_norms` of the same tables.
        metric: fp32 ``[T_c, H, D]`` contiguous, weights of the coordinates; None: all 1. With 16-bit vectors the Triton
            kernel's products are exact for weights that fp16 holds.
        backend: "auto" runs the CUDA kernel on Hopper GPUs for bf16 and fp16 vectors, ``T_c * c`` of 8, 16 or 32 and at
            least 256 tokens, else the Triton kernel on CUDA, else the reference.

    Returns:
        uint8 ``[N, H, NG]``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the backend that was asked for is impossible here.
    """
    _check_encode(vectors, tables, half_norms, metric)
    available, reason = attention_backend(vectors.device, 2, 1, vectors.dtype)
    if backend == "cuda" or (backend == "auto" and available == "triton" and vectors.shape[1] >= CUDA_TOKENS):
        problem = encode_cuda_problem(vectors.device, vectors.dtype, len(tables), tables.shape[4])
        available, reason = ("cuda", "") if problem is None else (available, problem)
    name = _choose(backend, available, reason, vectors.device)
    run = {
        "cuda": vq_encode_cuda,
        "triton": on_device(vq_encode_triton, vectors.device),
        "reference": vq_encode_reference,
    }[name]
    return run(vectors, tables, half_norms, metric)


def _triton_problem(kernel, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no Triton kernel runs on such tensors, or None. ``kernel`` is None where triton is missing."""
    if kernel is None:
        return "triton is not installed"
    if device.type != "cuda":
        return f"there is no kernel for {device.type} tensors"
    if torch.version.hip is None and capability(device) < (8, 0):
        return "the kernels need compute capability 8.0 or newer"
    if dtype not in MODEL_DTYPES:
        return f"there is no kernel for {dtype}"
    return None


def _attention_backend_of(query, k_window, k_table, sinks) -> tuple[str, str]:
    group = query.shape[1] // max(1, k_window.shape[1])
    return attention_backend(query.device, query.shape[-1], group, query.dtype, k_table.shape[-1], sinks)


def group_major(codes: torch.Tensor) -> torch.Tensor:
    """The same codes ``[..., 8, NG]`` with memory in the order ``[..., NG, 8]``."""
    return codes.transpose(-1, -2).contiguous().transpose(-1, -2)


def _choose(backend: str, available: str, reason: str, device: torch.device) -> str:
    if backend == "auto":
        return available
    if backend == "reference":
        return backend
    if backend not in ("triton", "cuda"):
        raise ValueError(f'backend must be "auto", "cuda", "triton" or "reference", got {backend!r}.')
    if available == backend or (
        backend == "triton" and (available == "cuda" or device.type == "cpu" and _interpreted())
    ):
        return backend
    raise ValueError(f'backend="{backend}" is not possible: {reason}. Use "auto" or "reference".')


def _interpreted() -> bool:
    """Triton runs on CPU tensors when TRITON_INTERPRET=1 was set before the import."""
    if vq_decode_attention_triton is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def _check_attention(
    query, k_codes, v_codes, k_table, v_table, k_window, v_window, lengths, n_coded,
    rope, sinks, max_coded, num_splits,
) -> None:  # fmt: skip
    _require(query.dim() == 3, "query", query, "[B, Hq, D]")
    batch, query_heads, head_dim = query.shape
    v_shape = tuple(v_window.shape)
    fits = k_window.dim() == 4 and k_window.shape == v_shape
    _require(fits, "k_window", k_window, f"[B, H, S + R, D], the shape of v_window, which is {v_shape}")
    heads, slots = k_window.shape[1:3]
    window_shape = (batch, heads, slots, head_dim)
    _require(k_window.shape == window_shape, "k_window", k_window, f"[{batch}, H, S + R, {head_dim}]")
    if query_heads % heads:
        raise ValueError(f"query has {query_heads} heads, which is no multiple of the {heads} kv heads.")
    if slots <= sinks:
        raise ValueError(f"k_window has {slots} slots; it needs more than the {sinks} sinks.")
    v_shape = tuple(v_table.shape)
    fits = k_table.dim() == 4 and k_table.shape == v_shape
    _require(fits, "k_table", k_table, f"[H, NG, 256, c], the shape of v_table, which is {v_shape}")
    groups, entries, channels = k_table.shape[1:]
    if k_table.shape[0] != heads or entries != 256 or groups * channels != head_dim or channels not in CHANNELS:
        raise ValueError(
            f"k_table has shape {tuple(k_table.shape)}; allowed is [{heads}, {head_dim} / c, 256, c] "
            f"with c in {CHANNELS}."
        )
    for name, codes in (("k_codes", k_codes), ("v_codes", v_codes)):
        _require(
            codes.dim() == 5 and codes.shape[0] == batch and codes.shape[2:] == (heads, 8, groups),
            name, codes, f"[{batch}, P, {heads}, 8, {groups}]",
        )  # fmt: skip
        if codes.dtype != torch.uint8:
            raise ValueError(f"{name} is {codes.dtype}; codes are torch.uint8.")
        if codes.stride()[2:] not in ((8 * groups, groups, 1), (8 * groups, 1, 8)):
            raise ValueError(
                f"{name} has strides {codes.stride()}; the inner three dimensions must be contiguous as [H, 8, NG] or "
                "as [H, NG, 8]."
            )
    if not 0 <= max_coded <= 8 * min(k_codes.shape[1], v_codes.shape[1]):
        raise ValueError(
            f"max_coded is {max_coded}, but the pages hold {8 * min(k_codes.shape[1], v_codes.shape[1])} tokens; "
            "allocate more pages."
        )
    for name, table in (("k_table", k_table), ("v_table", v_table)):
        if table.dtype != torch.float16 or not (table.is_contiguous() or is_entry_major(table)):
            raise ValueError(
                f"{name} must be torch.float16, contiguous or entry-major, got {table.dtype}, strides {table.stride()}."
            )
    for name, counts in (("lengths", lengths), ("n_coded", n_coded)):
        if counts.dtype != torch.int32 or counts.shape != (batch,) or not counts.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32 [{batch}], got {counts.dtype} {tuple(counts.shape)}.")
    for name, tensor in (("query", query), ("k_window", k_window), ("v_window", v_window)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; the last dimension must be contiguous.")
    if rope.offset != sinks:
        raise ValueError(
            f"rope was built for offset {rope.offset}, but sinks is {sinks}; build it with offset={sinks}."
        )
    if rope.offset_cos.shape[1] * 2 != head_dim:
        raise ValueError(f"rope was built for head_dim {rope.offset_cos.shape[1] * 2}, the query has {head_dim}.")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits must be at least 1 or None, got {num_splits}.")
    _require_one_device(
        query=query, k_codes=k_codes, v_codes=v_codes, k_table=k_table, v_table=v_table, k_window=k_window,
        v_window=v_window, lengths=lengths, n_coded=n_coded, rope=rope.base_cos,
    )  # fmt: skip


def _check_encode(vectors, tables, half_norms, metric=None) -> None:
    fits = vectors.dim() == 4 and vectors.is_floating_point()
    _require(fits, "vectors", vectors, "[T_c, N, H, D] bf16, fp16 or fp32")
    _require(tables.dim() == 5, "tables", tables, "[T_c, H, NG, 256, c]")
    steps, _, heads, head_dim = vectors.shape
    groups, channels = tables.shape[2], tables.shape[4]
    if tables.shape != (steps, heads, groups, 256, channels) or groups * channels != head_dim:
        raise ValueError(
            f"tables have shape {tuple(tables.shape)}; vectors of shape {tuple(vectors.shape)} need "
            f"[{steps}, {heads}, {head_dim} / c, 256, c]."
        )
    if channels not in CHANNELS or steps * channels not in JOINT_SIZES:
        raise ValueError(
            f"{steps} steps x {channels} channels per code is not supported; c must be in {CHANNELS} and "
            f"T_c * c in {JOINT_SIZES}."
        )
    if tables.dtype != torch.float16 or not tables.is_contiguous():
        raise ValueError(f"tables must be contiguous torch.float16, got {tables.dtype}, strides {tables.stride()}.")
    _require(half_norms.shape == (heads, groups, 256), "half_norms", half_norms, f"[{heads}, {groups}, 256]")
    if half_norms.dtype != torch.float32 or not half_norms.is_contiguous():
        raise ValueError(f"half_norms must be contiguous torch.float32, got {half_norms.dtype}.")
    if metric is not None:
        fits = metric.shape == (steps, heads, head_dim) and metric.dtype == torch.float32 and metric.is_contiguous()
        _require(fits, "metric", metric, f"[{steps}, {heads}, {head_dim}], contiguous torch.float32")
    _require_one_device(vectors=vectors, tables=tables, half_norms=half_norms, metric=metric)


def _require(ok: bool, name: str, tensor: torch.Tensor, allowed: str) -> None:
    if not ok:
        is_ = f"shape {tuple(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}"
        raise ValueError(f"{name} has {is_}; expected {allowed}.")


def _require_one_device(**tensors: torch.Tensor | None) -> None:
    """All on the device of the first: the CUDA C++ kernels take addresses, and would read another device's as theirs."""
    (first, like), *others = tensors.items()
    device = like.device
    for name, tensor in others:
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} and {first} on {device}; move both to one device.")
