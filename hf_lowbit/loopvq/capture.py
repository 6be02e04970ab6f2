"""Full-precision attention behind the KVAttention hook, and what calibration records there.

All loop steps run the same modules, so states are keyed by the (layer, step) of the call, never by counting calls:
activation checkpointing calls a layer twice.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .codebook import SIDES
from .grouping import Grouping
from .spec import LoopSpec, rotate


class PlainAttention:
    """Causal full-precision attention over one unpadded piece of text, no history; a `KVAttention`."""

    def run(self, inputs_embeds, attention_mask, forward_chunk):
        if attention_mask is not None:
            raise ValueError("calibration runs on unpadded sequences; pass attention_mask=None.")
        batch, count, _ = inputs_embeds.shape
        positions = torch.arange(count, device=inputs_embeds.device).expand(batch, count)
        return forward_chunk(inputs_embeds, positions)

    def attend(self, query, key, value, cos, sin, *, layer, step, module):
        out = F.scaled_dot_product_attention(
            rotate(query, cos, sin),
            rotate(key, cos, sin),
            value,
            is_causal=True,
            scale=module.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2)


class StateCapture(PlainAttention):
    """Also keeps the keys before RoPE and the values of every (layer, step): ``states[side][layer][step]``,
    each ``[B, H, n, D]`` in model dtype."""

    def __init__(self, spec: LoopSpec):
        self.states = {side: [[None] * spec.steps for _ in spec.layers] for side in SIDES}

    def attend(self, query, key, value, cos, sin, *, layer, step, module):
        self.states["key"][layer][step] = key.detach()
        self.states["value"][layer][step] = value.detach()
        return super().attend(query, key, value, cos, sin, layer=layer, step=step, module=module)

    def block(self, side: str, layer: int, grouping: Grouping, block: int) -> torch.Tensor:
        """``[T_c, B, H, n, D]`` states of one block's steps."""
        size = grouping.steps_per_code
        return torch.stack(self.states[side][layer][block * size : (block + 1) * size])


class FisherCapture(StateCapture):
    """Also sums squared gradients of the loss over the elements of each code: the k-means weights (paper eq. 3).

    After ``backward``, ``weights[side][layer]`` is fp32 ``[nB, H, NG, n]``, and ``sensitivity[side][layer]`` fp32
    ``[T, H, D]`` is the squared gradient of each coordinate, summed over the tokens from ``first`` on.
    """

    def __init__(self, spec: LoopSpec, grouping: Grouping, first: int = 0):
        super().__init__(spec)
        self.grouping, self.first = grouping, first
        self.weights: dict[str, list] = {side: [None] * len(spec.layers) for side in SIDES}
        self.sensitivity = {side: [[None] * spec.steps for _ in spec.layers] for side in SIDES}

    def attend(self, query, key, value, cos, sin, *, layer, step, module):
        for side, state in (("key", key), ("value", value)):
            state.register_hook(lambda grad, side=side: self._add(side, layer, step, grad))
        return super().attend(query, key, value, cos, sin, layer=layer, step=step, module=module)

    def step_sensitivity(self, side: str, layer: int) -> torch.Tensor:
        """fp32 ``[T, H, D]``; zero at a step that the loss does not depend on (early exit).

        Raises:
            ValueError: the loss depends on no step of this layer.
        """
        reached = [step for step in self.sensitivity[side][layer] if step is not None]
        if not reached:
            raise ValueError(
                f"the loss does not depend on the {side}s of layer {layer}; is the model detached somewhere?"
            )
        return torch.stack([torch.zeros_like(reached[0]) if s is None else s for s in self.sensitivity[side][layer]])

    def _add(self, side: str, layer: int, step: int, grad: torch.Tensor) -> None:
        # fp32 before squaring: squares of about 1e-10 would vanish in fp16.
        squared = grad.detach().float().square()[0]  # [H, n, D]
        self.sensitivity[side][layer][step] = squared[:, self.first :].sum(1)
        squared = squared.unflatten(-1, (self.grouping.groups, -1)).sum(-1)  # [H, n, NG]
        if self.weights[side][layer] is None:
            heads, count, groups = squared.shape
            self.weights[side][layer] = squared.new_zeros(self.grouping.blocks, heads, groups, count)
        self.weights[side][layer][step // self.grouping.steps_per_code] += squared.transpose(1, 2)
