"""Collect the vectors and Fisher weights that k-means fits (paper eq. 3): one forward and backward per sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..compat import CACHE_ARG
from .capture import FisherCapture
from .codebook import SIDES
from .grouping import Grouping
from .spec import LoopSpec


WEIGHT_FLOOR = 1e-4  # of the mean weight: a token no gradient reached still counts a little
MIN_EFFECTIVE = 32  # effective points, in the median group, below which most entries would never see a weight


@dataclass
class FisherData:
    """Attributes:
    states: per side and layer, ``[T, H, n, D]`` in model dtype, keys before RoPE.
    weights: per side and layer, fp32 ``[nB, H, NG, n]``, mean 1 per group.
    sensitivity: per side and layer, fp32 ``[T, H, D]``, squared gradient of each coordinate, summed over tokens.
    step_share: per side, the share of each loop step in the squared gradient (sums to 1).
    effective: effective number of points behind the median group's codebook, ``(sum w)^2 / sum w^2``.
    """

    states: dict[str, list[torch.Tensor]]
    weights: dict[str, list[torch.Tensor]]
    sensitivity: dict[str, list[torch.Tensor]]
    step_share: dict[str, list[float]]
    effective: float

    def vectors(self, side: str, layer: int, grouping: Grouping, device) -> tuple[torch.Tensor, torch.Tensor]:
        """k-means problems of one layer: vectors fp32 ``[nB*H*NG, n, G]`` and weights fp32 ``[nB*H*NG, n]``."""
        states = self.states[side][layer].to(device).float()
        blocks = states.unflatten(0, (grouping.blocks, grouping.steps_per_code))  # [nB, T_c, H, n, D]
        coupled = grouping.couple(blocks.transpose(0, 1))  # [nB, H, n, NG, G]
        weights = self.weights[side][layer].to(device)
        return coupled.transpose(2, 3).flatten(0, 2).contiguous(), weights.flatten(0, 2).contiguous()


def _storage_device(spec: LoopSpec, tokens: int, dtype: torch.dtype, device: torch.device) -> torch.device:
    """Keep the captured states beside the model if they take at most half of the free memory, else in host memory."""
    if device.type != "cuda":
        return device
    need = 2 * spec.slots * spec.kv_heads * spec.head_dim * tokens * dtype.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    return device if need < free // 2 else torch.device("cpu")


def collect(model, spec: LoopSpec, grouping: Grouping, sequences: torch.Tensor, config, progress) -> FisherData:
    """Run the model over the sequences and keep states and Fisher weights of at most ``config.kmeans_vectors`` tokens.

    Positions below ``config.sink_tokens`` (never coded) and the last one (no gradient reaches it) are left out.

    Args:
        model: causal LM in full precision; its weights are not touched and need no gradients.
        sequences: token ids ``[N, n]``.
        config: a LoopVQConfig.
        progress: wraps an iterable in a progress bar: ``progress(iterable, desc=...)``.

    Raises:
        ValueError: a captured state is NaN or Inf, missing, or the same at two loop steps.
    """
    count = sequences.shape[1]
    generator = torch.Generator().manual_seed(config.seed)
    per_sequence = max(1, min(count - 1 - config.sink_tokens, config.kmeans_vectors // len(sequences)))
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    dtype, device = embed.weight.dtype, embed.weight.device
    storage = _storage_device(spec, per_sequence * len(sequences), dtype, device)
    states = {side: [[] for _ in spec.layers] for side in SIDES}
    weights = {side: [[] for _ in spec.layers] for side in SIDES}
    sensitivity: dict[str, list] = {side: [0.0] * len(spec.layers) for side in SIDES}

    for ids in progress(sequences, desc="Fisher weights"):
        ids = ids.unsqueeze(0).to(device)
        capture = FisherCapture(spec, grouping, config.sink_tokens)
        with torch.enable_grad():
            embeds = embed(ids).detach().requires_grad_(True)
            hidden = model.base_model(inputs_embeds=embeds, use_cache=True, **{CACHE_ARG: capture}).last_hidden_state
            logits = head(hidden[0, :-1]).float()
            # A sum, not a mean: gradients of single tokens stay far from fp16's underflow; only ratios matter later.
            F.cross_entropy(logits, ids[0, 1:].to(logits.device), reduction="sum").backward()
        kept = config.sink_tokens + torch.randperm(count - 1 - config.sink_tokens, generator=generator)[:per_sequence]
        kept = kept.sort().values
        for side in SIDES:
            for layer in range(len(spec.layers)):
                steps = capture.states[side][layer]
                _check(steps, side, layer)
                picked = torch.stack([state[0][:, kept.to(state.device)] for state in steps])
                states[side][layer].append(picked.to(storage))
                sensitivity[side][layer] = sensitivity[side][layer] + capture.step_sensitivity(side, layer)
                grads = capture.weights[side][layer]
                weights[side][layer].append(grads[..., kept.to(grads.device)].to(storage))
        del capture, hidden, logits, embeds

    effective = []
    for side in SIDES:
        for layer in range(len(spec.layers)):
            states[side][layer] = torch.cat(states[side][layer], dim=2)
            w = torch.cat(weights[side][layer], dim=-1)
            if not torch.isfinite(w).all():
                raise ValueError(f"the {side} gradients of layer {layer} hold NaN or Inf; try float32 or bfloat16.")
            mean = w.mean(-1, keepdim=True)
            w = torch.where(mean > 0, w / mean.clamp_min(1e-38), torch.ones_like(w)).clamp_min_(WEIGHT_FLOOR)
            effective.append((w.sum(-1).square() / w.square().sum(-1)).flatten().cpu())
            weights[side][layer] = w
    shares = {}
    for side in SIDES:
        by_step = sum(layer.double().sum((1, 2)).cpu() for layer in sensitivity[side])
        shares[side] = (by_step / by_step.sum().clamp_min(1e-300)).tolist()
    return FisherData(states, weights, sensitivity, shares, float(torch.cat(effective).median()))


def _check(steps: list, side: str, layer: int) -> None:
    missing = [step for step, state in enumerate(steps) if state is None]
    if missing:
        raise ValueError(
            f"layer {layer} handed over no {side}s at loop steps {missing}: the model's forward does not call "
            "attend() for every (layer, step)."
        )
    for step, state in enumerate(steps):
        if not torch.isfinite(state).all():
            raise ValueError(
                f"NaN or Inf in the {side}s of layer {layer}, loop step {step}, on the calibration data; check the "
                "checkpoint, or load it in float32 or bfloat16."
            )
        if step and torch.equal(state, steps[step - 1]):
            raise ValueError(
                f"the {side}s of layer {layer} are the same at loop steps {step - 1} and {step}; the model does not "
                "loop (or its hook reports the wrong step)."
            )
