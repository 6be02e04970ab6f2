"""Ouro in plain PyTorch, written from the design note alone: no transformers, no hf_lowbit, no cache.

The definition that the port is compared with. Reads the public weight names.
"""

import math

import torch


def rms_norm(x, weight, eps):
    x32 = x.float() if x.dtype != torch.float64 else x
    return weight * (x32 / torch.sqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x, positions, theta):
    """x [B, H, n, D], positions [B, n]: pairs (i, i + D/2) turned by position * theta^(-2i/D)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = (positions[:, None, :, None].float() * frequency).to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def attention(x, weights, prefix, config, positions, allowed):
    batch, length, _ = x.shape
    dim = config.head_dim

    def heads(name):
        return (x @ weights[f"{prefix}.{name}.weight"].T).view(batch, length, -1, dim).transpose(1, 2)

    theta = config.rope_parameters["rope_theta"]
    query = rotate(heads("q_proj"), positions, theta)
    key = rotate(heads("k_proj"), positions, theta)
    value = heads("v_proj")
    groups = query.shape[1] // key.shape[1]
    key = torch.stack([key[:, h // groups] for h in range(query.shape[1])], dim=1)
    value = torch.stack([value[:, h // groups] for h in range(query.shape[1])], dim=1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(dim)
    scores = scores.masked_fill(~allowed[:, None], float("-inf"))
    # a padding query sees nothing; its (unused) output must not be NaN
    weights_ = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    out = (weights_ @ value).transpose(1, 2).reshape(batch, length, -1)
    return out @ weights[f"{prefix}.o_proj.weight"].T


def mlp(x, weights, prefix):
    gate = x @ weights[f"{prefix}.gate_proj.weight"].T
    up = x @ weights[f"{prefix}.up_proj.weight"].T
    return (gate * torch.sigmoid(gate) * up) @ weights[f"{prefix}.down_proj.weight"].T


def ouro_forward(weights, config, input_ids, mask=None):
    """Hidden states H (T tensors [B, n, hidden]), gate logits g (T tensors [B, n]) and every layer's output."""
    eps = config.rms_norm_eps
    batch, length = input_ids.shape
    mask = torch.ones_like(input_ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    allowed = torch.ones(length, length).tril().bool()[None] & mask.bool()[:, None, :]

    h = weights["model.embed_tokens.weight"][input_ids]
    states, gates, layer_outputs = [], [], [h]
    for _ in range(config.total_ut_steps):
        for i in range(config.num_hidden_layers):
            p = f"model.layers.{i}"
            a = attention(
                rms_norm(h, weights[f"{p}.input_layernorm.weight"], eps),
                weights,
                f"{p}.self_attn",
                config,
                positions,
                allowed,
            )
            h = h + rms_norm(a, weights[f"{p}.input_layernorm_2.weight"], eps)
            m = mlp(rms_norm(h, weights[f"{p}.post_attention_layernorm.weight"], eps), weights, f"{p}.mlp")
            h = h + rms_norm(m, weights[f"{p}.post_attention_layernorm_2.weight"], eps)
            layer_outputs.append(h)
        h = rms_norm(h, weights["model.norm.weight"], eps)
        states.append(h)
        gates.append((h @ weights["model.early_exit_gate.weight"].T + weights["model.early_exit_gate.bias"])[..., 0])
    return states, gates, layer_outputs


def exit_probabilities(gates):
    """p_u = lam_u prod_{j<u} (1 - lam_j); the last takes the rest. List of [B, n] to list of [B, n]."""
    probabilities, remaining = [], torch.ones_like(gates[0])
    for u, gate in enumerate(gates):
        lam = torch.sigmoid(gate)
        probabilities.append(remaining if u == len(gates) - 1 else lam * remaining)
        remaining = remaining * (1 - lam)
    return probabilities


def threshold_step(gates, threshold):
    """Per token the first u with cumsum(p) >= threshold, else the last: [B, n]."""
    total = torch.zeros_like(gates[0])
    step = torch.full(gates[0].shape, len(gates) - 1)
    found = torch.zeros(gates[0].shape, dtype=torch.bool)
    for u, p in enumerate(exit_probabilities(gates)):
        total = total + p
        hit = (total >= threshold) & ~found
        step[hit] = u
        found |= hit
    return step


def expected_logits(states, gates, head):
    return sum(p[..., None] * (h @ head.T) for h, p in zip(states, exit_probabilities(gates)))
