"""How much of a row's error later queries read: W^out, an extension of the paper's retention weight (inferred).

An error R of the state after update t reaches the output of update t + j as ``R^T x_j`` with

    x_j = (A_{t+j} ... A_{t+1})^T q_{t+j},    A = (I - beta k k^T) diag(a),

so independent errors in the rows cost ``sum_u e_u W^out_u`` squared output, with ``W^out_u = sum_{j=1..H} x_{j,u}^2``.
W knows the decays in A only, neither what keys erase nor where queries look. There is no term for j = 0: update t reads
its state before that is rounded.

The columns of a state do not mix, so the model's own recurrence gives x_j: with dk more columns that start as the
identity and get zeros written, those columns end as ``A_T ... A_1`` and their outputs are the x_j.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def with_responses(
    original: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call a model's recurrence over T tokens and get, beside its results, how they depend on the state before them.

    Args:
        original: one of the functions of a modeling file (:data:`~hf_lowbit.damp.spec.FUNCTIONS`).
        query, key, value: ``[B, T, H or HV, dk]`` twice and ``[B, T, HV, dv]``.
        args, kwargs: the rest, ``initial_state`` (``[B, HV, dk, dv]`` or None) by name.

    Returns:
        The output ``[B, T, HV, dv]`` and the state fp32 ``[B, HV, dk, dv]``, as the function gives them; the responses
        x_1 .. x_T ``[B, T, HV, dk]`` in the output's dtype; and the transition ``A_T ... A_1``, fp32
        ``[B, HV, dk, dk]``.
    """
    (batch, length, heads, dv), dk = value.shape, key.shape[-1]
    state = kwargs.get("initial_state")
    if state is None:
        state = torch.zeros(batch, heads, dk, dv, device=value.device)
    identity = torch.eye(dk, device=value.device, dtype=state.dtype).expand(batch, heads, dk, dk)
    kwargs |= {"initial_state": torch.cat((state, identity), -1), "output_final_state": True}
    value = torch.cat((value, value.new_zeros(batch, length, heads, dk)), -1)
    out, state = original(query, key, value, *args, **kwargs)
    # Contiguous: models view the output, and a slice would keep the identity's columns alive in the cache.
    return out[..., :dv].contiguous(), state[..., :dv].contiguous(), out[..., dv:], state[..., dv:].contiguous()


def extend_readout(
    effect: torch.Tensor | None, weight: torch.Tensor, responses: torch.Tensor, transition: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """W^out in pieces: add the updates of one call to what earlier ones gave.

    Args:
        effect: product of the transitions since the anchor, fp32 ``[B, HV, dk, dk]``; None at the anchor.
        weight: W^out so far, fp32 ``[B, HV, dk]`` (zeros at the anchor).
        responses, transition: from :func:`with_responses`.

    Returns:
        The new ``(effect, weight)``.
    """
    x = responses.float().transpose(1, 2)
    if effect is None:
        return transition.float(), weight + x.square().sum(2)
    return transition.float() @ effect, weight + (x @ effect).square().sum(2)
