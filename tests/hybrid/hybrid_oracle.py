"""An independent decoding loop for a Qwen3.5 text model on low-bit caches, for one unpadded row, in plain fp32.

It shares no code with the package or with transformers. Attention keeps the keys before RoPE and the values of every
token in full precision, and substitutes a token's reconstruction wherever a query sees it as a code. Gated delta rules
run token by token; a state is rounded at the end of each forward pass.
"""

import torch
from torch.nn import functional as F


SINKS, PAGE = 8, 8


class HybridOracle:
    """Args:
    weights: state dict of a Qwen3.5 causal LM (fp32).
    config: its config.
    codes: by decoder layer, ``{"key": (table, metric), "value": ...}`` with table fp16 ``[H, NG, 256, c]`` and metric
        ``[H, D]`` or None. Tables of keys are those of channels in the order of :meth:`spread`.
    states: by decoder layer, (perm_k ``[HV, dk]``, perm_v ``[HV, dv]``, column_scale ``[HV, dv]``, protected rows);
        empty: states are not rounded.
    window: W.
    """

    def __init__(self, weights, config, codes, states, window):
        self.w, self.c, self.tables, self.plans, self.window = weights, config, codes, states, window
        self.dim, self.kv, self.heads = config.head_dim, config.num_key_value_heads, config.num_attention_heads
        self.turned = int(self.dim * config.rope_parameters["partial_rotary_factor"])
        theta = config.rope_parameters["rope_theta"]
        self.freq = 1.0 / theta ** (torch.arange(0, self.turned, 2).float() / self.turned)
        self.kept = {}  # (side, layer) -> list of [H, D], keys before RoPE
        self.states, self.tails, self.length = {}, {}, 0

    def norm(self, x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c.rms_norm_eps) * (1 + self.w[name])

    # -- attention ---------------------------------------------------------------------------------------------------

    def rope(self, x, positions):
        """x ``[n, heads, D]``: channel i turns with i + r/2, channels from r on stay."""
        half = self.turned // 2
        angle = positions.float()[:, None] * self.freq
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b, rest = x[..., :half], x[..., half : self.turned], x[..., self.turned :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def order(self):
        """Position of each channel in the codes: the two halves of the turned ones begin the two halves of a head."""
        half, rest = self.turned // 2, (self.dim - self.turned) // 2
        names = list(range(self.dim))
        turned, others = names[: self.turned], names[self.turned :]
        return torch.tensor([*turned[:half], *others[:rest], *turned[half:], *others[rest:]])

    def seen(self, side, layer, p):
        """Token p of a layer as a code shows it, ``[H, D]``."""
        table, metric = self.tables[layer][side]
        x = self.kept[side, layer][p].double()
        order = self.order() if side == "key" else torch.arange(self.dim)
        shape = (self.kv, -1, 1, table.shape[-1])
        weight = 1.0 if metric is None else metric.double().reshape(shape)
        cost = (weight * (table.double() - x[:, order].reshape(shape)).square()).sum(-1)
        nearest = cost.argmin(-1)[..., None, None].expand(-1, -1, 1, table.shape[-1])
        out = torch.empty(self.kv, self.dim)
        out[:, order] = table.float().gather(2, nearest).reshape(self.kv, self.dim)
        return out

    def coded(self):
        if not self.tables:
            return range(0)
        return range(SINKS, SINKS + PAGE * (max(0, self.length - SINKS - self.window) // PAGE))

    def attention(self, x, layer):
        p, count = f"model.layers.{layer}.self_attn.", len(x)
        query, gate = (x @ self.w[p + "q_proj.weight"].T).view(count, self.heads, 2 * self.dim).chunk(2, -1)
        query = self.norm(query, p + "q_norm.weight")
        key = self.norm((x @ self.w[p + "k_proj.weight"].T).view(count, self.kv, self.dim), p + "k_norm.weight")
        value = (x @ self.w[p + "v_proj.weight"].T).view(count, self.kv, self.dim)
        self.kept.setdefault(("key", layer), []).extend(key)
        self.kept.setdefault(("value", layer), []).extend(value)
        total, coded = torch.arange(self.length + count), self.coded()
        keys, values = (
            torch.stack(
                [self.seen(side, layer, t) if t in coded else self.kept[side, layer][t] for t in total.tolist()]
            )
            for side in ("key", "value")
        )
        ratio = self.heads // self.kv
        keys, values = self.rope(keys, total).repeat_interleave(ratio, 1), values.repeat_interleave(ratio, 1)
        score = torch.einsum("qhd,khd->hqk", self.rope(query, total[self.length :]), keys) * self.dim**-0.5
        score = score.masked_fill(total[None, None] > total[None, self.length :, None], float("-inf"))
        out = torch.einsum("hqk,khd->qhd", score.softmax(-1), values)
        return (out * gate.sigmoid()).reshape(count, -1) @ self.w[p + "o_proj.weight"].T

    # -- gated delta rule --------------------------------------------------------------------------------------------

    def rounded(self, state, layer):
        """INT8 in groups of 32 stored columns, protected rows in FP16; state ``[HV, dk, dv]``."""
        perm_k, perm_v, scale, protected = self.plans[layer]
        out = torch.empty_like(state)
        for head in range(len(state)):
            rows, columns = perm_k[head].long(), perm_v[head].long()
            stored = (state[head] / scale[head])[rows][:, columns]
            codes = stored.clone()
            codes[:protected] = stored[:protected].half().float()
            for first in range(0, stored.shape[1], 32):
                low = stored[protected:, first : first + 32]
                step = low.abs().amax(1, keepdim=True) / 127
                codes[protected:, first : first + 32] = torch.round(low / step.clamp_min(1e-30)) * step
            back = torch.empty_like(codes)
            back[rows[:, None], columns[None]] = codes
            out[head] = back * scale[head]
        return out

    def delta(self, x, layer):
        p, c, count = f"model.layers.{layer}.linear_attn.", self.c, len(x)
        heads, groups = c.linear_num_value_heads, c.linear_num_key_heads
        dk, dv = c.linear_key_head_dim, c.linear_value_head_dim
        mixed = x @ self.w[p + "in_proj_qkv.weight"].T
        filters = self.w[p + "conv1d.weight"][:, 0]  # [channels, 4]
        size = filters.shape[1]
        past = self.tails.get(layer, torch.zeros(size - 1, mixed.shape[1]))
        past = torch.cat([past, mixed])
        self.tails[layer] = past[-(size - 1) :]
        mixed = F.silu(torch.stack([(past[t : t + size] * filters.T).sum(0) for t in range(count)]))
        query, key, value = mixed.split([groups * dk, groups * dk, heads * dv], -1)
        query, key = (y.view(count, groups, dk).repeat_interleave(heads // groups, 1) for y in (query, key))
        query, key = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (query, key))
        value = value.reshape(count, heads, dv)
        beta = (x @ self.w[p + "in_proj_b.weight"].T).sigmoid()
        decay = F.softplus(x @ self.w[p + "in_proj_a.weight"].T + self.w[p + "dt_bias"])
        decay = (-self.w[p + "A_log"].exp() * decay).exp()
        state = self.states.get(layer, torch.zeros(heads, dk, dv))
        out = []
        for t in range(count):
            state = decay[t][:, None, None] * state
            error = value[t] - torch.einsum("hkv,hk->hv", state, key[t])
            state = state + beta[t][:, None, None] * key[t][:, :, None] * error[:, None]
            out.append(torch.einsum("hkv,hk->hv", state, query[t] * dk**-0.5))
        self.states[layer] = self.rounded(state, layer) if self.plans else state
        out = torch.stack(out)
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + c.rms_norm_eps) * self.w[p + "norm.weight"]
        out = out * F.silu((x @ self.w[p + "in_proj_z.weight"].T).view_as(out))
        return out.reshape(count, -1) @ self.w[p + "out_proj.weight"].T

    # -- the model ---------------------------------------------------------------------------------------------------

    def forward(self, ids):
        """Feed ids as one piece; returns logits [n, V]."""
        hidden = self.w["model.embed_tokens.weight"][ids]
        for i, kind in enumerate(self.c.layer_types):
            p = f"model.layers.{i}."
            mixer = self.attention if kind == "full_attention" else self.delta
            hidden = hidden + mixer(self.norm(hidden, p + "input_layernorm.weight"), i)
            x = self.norm(hidden, p + "post_attention_layernorm.weight")
            gate = F.silu(x @ self.w[p + "mlp.gate_proj.weight"].T)
            hidden = hidden + (gate * (x @ self.w[p + "mlp.up_proj.weight"].T)) @ self.w[p + "mlp.down_proj.weight"].T
        self.length += len(ids)
        return self.norm(hidden, "model.norm.weight") @ self.w["lm_head.weight"].T

    @torch.no_grad()
    def feed(self, ids, pieces):
        """Logits ``[sum(pieces), V]`` of ids in pieces of these lengths."""
        return torch.cat([self.forward(piece) for piece in ids.split(pieces)])
