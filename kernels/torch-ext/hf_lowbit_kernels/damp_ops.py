"""Public DAMP operations: argument checks, then the CUDA or Triton kernel or the reference."""

from typing import Literal

import torch

from .damp_layout import DampLayout, DampPlan, ErrorFeedback, Rounding
from .damp_reference import damp_update_reference, decode_records, encode_records, from_stored, to_stored
from .damp_update_cuda import damp_cuda_problem, damp_update_cuda
from .on_device import on_device
from .ops import MODEL_DTYPES, Backend, _choose, _require, _triton_problem


try:
    from .damp_triton import damp_update_triton
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "triton":
        raise
    damp_update_triton = None


def damp_backend(
    device: torch.device | str, dtype: torch.dtype, layout: DampLayout | None = None, *, nearest: bool = True
) -> tuple[Literal["cuda", "triton", "reference"], str]:
    """Which implementation ``backend="auto"`` runs, and why. Every `DampLayout` and rounding has a Triton kernel.

    Args:
        device: where the tensors are.
        dtype: the value's dtype.
        layout: of the states. None: never the CUDA kernel.
        nearest: whether low rows are rounded to nearest, which the CUDA kernel is for.
    """
    device = torch.device(device)
    problem = _triton_problem(damp_update_triton, device, dtype)
    if problem is not None:
        return "reference", problem
    if layout is not None and nearest and damp_cuda_problem(device, layout) is None:
        return "cuda", "CUDA kernel for Hopper GPUs"
    return "triton", f"Triton kernel on {device.type}"


def damp_pack(
    state: torch.Tensor,
    plan: DampPlan,
    layout: DampLayout,
    *,
    rounding: Rounding = None,
    check_finite: bool = False,
) -> torch.Tensor:
    """Packs states, as at the end of a prefill chunk (paper, appendix A.4). Plain PyTorch on every device.

    Args:
        state: ``[N, HV, dk, dv]`` floating point, in model coordinates.
        plan: tables of the layer.
        layout: sizes and low bits.
        rounding: default: nearest, ties to even. The residual of `ErrorFeedback` has one row per state.
        check_finite: refuse NaN and infinities (reads one value on the host). Otherwise they decode to NaN: in the
            high rows the element, in the low rows its group of 32 columns.

    Returns:
        uint8 ``[N, HV, tiles, record_bytes]``. Write it to a pool with ``records[slots] = ...``.

    Raises:
        ValueError: shapes or dtypes do not fit, or ``check_finite`` found a non-finite value.
    """
    expected = (plan.heads, layout.dk, layout.dv)
    fits = state.dim() == 4 and state.shape[1:] == expected
    _require(fits, "state", state, f"[N, {', '.join(map(str, expected))}]")
    _check_plan(plan, layout, state.device)
    if not state.is_floating_point():
        raise ValueError(f"state is {state.dtype}; give a floating-point tensor.")
    if check_finite and not bool(state.isfinite().all()):
        raise ValueError("state has NaN or infinite values; the model's recurrence overflowed before it was packed.")
    _check_rounding(rounding, layout, plan.heads, state.shape[0], state.shape[0], state.device)
    streams = getattr(rounding, "streams", None)
    if streams is None:
        streams = torch.arange(state.shape[0], device=state.device)
    encoded = encode_records(to_stored(state, plan, layout), layout, rounding, streams)
    return torch.nn.functional.pad(encoded, (0, layout.record_bytes - layout.used_bytes))


def damp_unpack(records: torch.Tensor, plan: DampPlan, layout: DampLayout) -> torch.Tensor:
    """fp32 states ``[N, HV, dk, dv]`` in model coordinates from uint8 ``[N, HV, tiles, record_bytes]``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _require(records.dim() == 4, "records", records, "[N, HV, tiles, record_bytes]")
    _check_records(records, plan, layout)
    _check_plan(plan, layout, records.device)
    return from_stored(decode_records(records, layout), plan, layout)


def damp_update(
    records: torch.Tensor,
    state_indices: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    plan: DampPlan,
    layout: DampLayout,
    *,
    scale: float | None = None,
    normalize: bool = True,
    rounding: Rounding = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """One token per row through the gated delta rule, on packed states, in place (paper, eqs. 1-4 and section 5.2).

    Per row and value head, fp32 arithmetic, S the decoded state::

        S <- diag(exp(g)) S;   S <- S + beta k (v - S^T k)^T;   out = S^T q;   S is stored packed

    The output is read from S before it is packed again. A row alone equals the row in any batch, bit for bit. The
    kernels may differ from the reference in the order of sums and in exp and rsqrt, hence by one code where a value
    lies next to a rounding border.

    Args:
        records: uint8 ``[slots, HV, tiles, record_bytes]``, changed in place. The inner three dimensions contiguous,
            the slot stride and the storage offset multiples of 16.
        state_indices: int32 or int64 ``[B]``: the slot of each row, no slot twice (a race otherwise). A negative
            index skips the row: zeros out, no state changed. An index past the pool gives NaN and changes nothing.
        query, key: ``[B, H, dk]`` bf16, fp16 or fp32, innermost contiguous. Value head h uses key head
            ``h // (HV // H)``.
        value: ``[B, HV, dv]``, innermost contiguous.
        g: log decay: ``[B, HV]`` (Gated DeltaNet) or ``[B, HV, dk]`` (KDA), innermost contiguous.
        beta: ``[B, HV]``, write strength.
        plan: tables of the layer, on the same device.
        layout: sizes and low bits.
        scale: factor on the query; default ``dk ** -0.5``.
        normalize: l2-normalise query and key first, ``x * rsqrt(sum(x^2) + 1e-6)``.
        rounding: default: nearest, ties to even. The residual of `ErrorFeedback` has one row per slot.
        backend: "auto" runs the kernel that `damp_backend` names, else the reference.

    Returns:
        ``[B, HV, dv]`` in the value's dtype. NaN and infinities in a state or an input stay in their (row, head):
        they give NaN or infinite outputs and are stored as NaN.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit, or the backend that was asked for is impossible here.
    """
    found = damp_backend(value.device, value.dtype, layout, nearest=rounding is None)
    name = _choose(backend, *found, value.device)
    _check_update(records, state_indices, query, key, value, g, beta, plan, layout, rounding)
    triton = on_device(damp_update_triton, value.device)
    run = {"cuda": damp_update_cuda, "triton": triton, "reference": damp_update_reference}[name]
    return run(
        records, state_indices, query, key, value, g, beta, plan, layout,
        scale=layout.dk**-0.5 if scale is None else float(scale), normalize=normalize, rounding=rounding,
    )  # fmt: skip


def _check_update(records, state_indices, query, key, value, g, beta, plan, layout, rounding) -> None:
    _require(value.dim() == 3, "value", value, "[B, HV, dv]")
    batch, heads, _ = value.shape
    _require(value.shape == (batch, plan.heads, layout.dv), "value", value, f"[B, {plan.heads}, {layout.dv}]")
    _require(query.dim() == 3 and query.shape[::2] == (batch, layout.dk), "query", query, f"[{batch}, H, {layout.dk}]")
    _require(key.shape == query.shape, "key", key, f"the query's {tuple(query.shape)}")
    if query.shape[1] == 0 or heads % query.shape[1]:
        raise ValueError(f"{heads} value heads are no multiple of the {query.shape[1]} key heads.")
    _require(
        g.shape == (batch, heads) or g.shape == (batch, heads, layout.dk),
        "g", g, f"[{batch}, {heads}] (one decay per head) or [{batch}, {heads}, {layout.dk}] (one per key channel)",
    )  # fmt: skip
    _require(beta.shape == (batch, heads), "beta", beta, f"[{batch}, {heads}]")
    _require(records.dim() == 4, "records", records, "[slots, HV, tiles, record_bytes]")
    _check_records(records, plan, layout)
    inner = (layout.state_bytes, layout.record_bytes, 1)
    if records.stride()[1:] != inner or records.stride(0) % 16 or records.storage_offset() % 16:
        raise ValueError(
            f"records have strides {records.stride()} and offset {records.storage_offset()}; the inner dimensions "
            f"must be contiguous {inner}, slot stride and offset multiples of 16. Allocate with DampLayout.zeros."
        )
    if state_indices.shape != (batch,) or state_indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"state_indices must be int32 or int64 [{batch}], got {state_indices.dtype} {tuple(state_indices.shape)}."
        )
    if state_indices.stride(0) != 1 and batch > 1:
        raise ValueError("state_indices must be contiguous.")
    tensors = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    for name, tensor in tensors.items():
        if tensor.dtype not in MODEL_DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}; allowed are bfloat16, float16 and float32.")
        if tensor.dim() == 3 and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; the last dimension must be contiguous.")
    for name, tensor in {**tensors, "state_indices": state_indices, "records": records}.items():
        if tensor.device != value.device:
            raise ValueError(f"{name} is on {tensor.device}, but value is on {value.device}; move one of them.")
    _check_plan(plan, layout, value.device)
    _check_rounding(rounding, layout, heads, batch, records.shape[0], value.device)


def _check_records(records, plan, layout) -> None:
    expected = layout.pool_shape(0, plan.heads)[1:]
    allowed = f"[slots, {', '.join(map(str, expected))}] for {layout}"
    _require(records.shape[1:] == expected, "records", records, allowed)
    if records.dtype != torch.uint8:
        raise ValueError(f"records are {records.dtype}; packed states are torch.uint8. Pack states with damp_pack.")


def _check_plan(plan, layout, device) -> None:
    if plan.perm_k.shape[1] != layout.dk or plan.perm_v.shape[1] != layout.dv:
        raise ValueError(
            f"the plan is for states of {plan.perm_k.shape[1]} x {plan.perm_v.shape[1]}, the layout for "
            f"{layout.dk} x {layout.dv}; use the plan that was calibrated for this layer."
        )
    if plan.perm_k.device != device:
        raise ValueError(f"the plan is on {plan.perm_k.device}, the tensors are on {device}; use plan.to().")


def _check_rounding(rounding, layout, heads, batch, slots, device) -> None:
    if isinstance(rounding, ErrorFeedback):
        residual, expected = rounding.residual, layout.residual_shape(slots, heads)
        if layout.low_bits == 32:
            raise ValueError("low_bits=32 rounds nothing, so there is no error to feed back; leave rounding out.")
        _require(residual.shape == expected, "rounding.residual", residual, str(list(expected)))
        aligned = residual.stride(0) % 8 == 0 and residual.storage_offset() % 8 == 0
        if residual.device != device or not aligned or (slots and not residual[0].is_contiguous()):
            raise ValueError(
                f"rounding.residual must be on {device} and contiguous but for the first dimension, got "
                f"{residual.device} with strides {residual.stride()}."
            )
        return
    for name in () if rounding is None else ("steps", "streams"):
        tensor = getattr(rounding, name)
        if tensor is None and name == "streams":
            continue
        if tensor.shape != (batch,) or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"rounding.{name} must be contiguous [{batch}] on {device}, got {tuple(tensor.shape)} on "
                f"{tensor.device}."
            )
