"""An independent decoding loop in plain PyTorch, for one unpadded row.

It shares no code with the package: it keeps the full-precision keys (before RoPE) and values of every token, and
substitutes a token's reconstruction wherever loopvq.md section 1 says that a query sees it as a code. Nearest entries
are found by explicit distances in fp64.
"""

import torch


SINKS, PAGE = 8, 8


class Oracle:
    """Args:
    weights: state dict of an Ouro causal LM (fp32).
    config: its config.
    tables: ``tables[side][layer]`` fp16 ``[T, H, NG, 256, c]``.
    metric: ``metric[side][layer]`` ``[T, H, D]``, weights of the coordinates in the encoder's distance, or None.
    steps_per_code: T_c.
    window: W.
    """

    def __init__(self, weights, config, tables, metric, steps_per_code, window):
        self.w, self.c, self.tables, self.tc, self.window = weights, config, tables, steps_per_code, window
        self.metric = metric
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.layers, self.steps = config.head_dim, config.num_hidden_layers, config.total_ut_steps
        theta = config.rope_parameters["rope_theta"]
        self.freq = 1.0 / theta ** (torch.arange(0, self.dim, 2).float() / self.dim)
        self.keys, self.values = {}, {}  # (layer, step) -> list of [H, D]
        self.codes = {}  # (side, layer, block, p) -> [H, NG]
        self.decoded = {}  # (side, layer, step, p) -> [H, D]

    def norm(self, x, name):
        return self.w[name] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c.rms_norm_eps)

    def rope(self, x, positions):
        angle = positions.float()[:, None] * self.freq
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., : self.dim // 2], x[..., self.dim // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def code(self, side, layer, block, p):
        key = (side, layer, block, p)
        if key not in self.codes:
            store = self.keys if side == "key" else self.values
            table = self.tables[side][layer].double()  # [T, H, NG, 256, c]
            cost = 0
            for step in range(block * self.tc, (block + 1) * self.tc):
                x = store[layer, step][p].double().reshape(self.kv, -1, 1, table.shape[-1])  # [H, NG, 1, c]
                weight = 1.0
                if self.metric is not None:
                    weight = self.metric[side][layer][step].double().reshape(self.kv, -1, 1, table.shape[-1])
                cost = cost + (weight * (table[step] - x).square()).sum(-1)
            self.codes[key] = cost.argmin(-1)
        return self.codes[key]

    def seen(self, side, layer, step, p):
        key = (side, layer, step, p)
        if key not in self.decoded:
            codes = self.code(side, layer, step // self.tc, p)
            table = self.tables[side][layer][step].float()
            h, g = torch.meshgrid(torch.arange(codes.shape[0]), torch.arange(codes.shape[1]), indexing="ij")
            self.decoded[key] = table[h, g, codes].reshape(self.kv, self.dim)
        return self.decoded[key]

    def coded(self, position):
        """Tokens seen as codes by a query at `position` (chunks: by every query of a chunk that begins there)."""
        return PAGE * (max(0, position - SINKS - self.window) // PAGE)

    def forward(self, ids):
        """Feed ids as one chunk; returns logits [n, V]."""
        first = len(self.keys.get((0, 0), []))
        count = len(ids)
        n_coded = self.coded(first)
        total = torch.arange(first + count)
        positions = total[first:]
        hidden = self.w["model.embed_tokens.weight"][ids]
        for step in range(self.steps):
            for i in range(self.layers):
                p = f"model.layers.{i}."
                x = self.norm(hidden, p + "input_layernorm.weight")
                q = (x @ self.w[p + "self_attn.q_proj.weight"].T).view(count, self.heads, self.dim)
                k = (x @ self.w[p + "self_attn.k_proj.weight"].T).view(count, self.kv, self.dim)
                v = (x @ self.w[p + "self_attn.v_proj.weight"].T).view(count, self.kv, self.dim)
                self.keys.setdefault((i, step), []).extend(k)
                self.values.setdefault((i, step), []).extend(v)
                coded = range(SINKS, SINKS + n_coded)
                keys = [self.seen("key", i, step, t) if t in coded else self.keys[i, step][t] for t in total.tolist()]
                vals = [
                    self.seen("value", i, step, t) if t in coded else self.values[i, step][t] for t in total.tolist()
                ]
                keys, vals = self.rope(torch.stack(keys), total), torch.stack(vals)
                q = self.rope(q, positions)
                ratio = self.heads // self.kv
                keys, vals = keys.repeat_interleave(ratio, 1), vals.repeat_interleave(ratio, 1)
                score = torch.einsum("qhd,khd->hqk", q, keys) * self.dim**-0.5
                score = score.masked_fill(total[None, None] > positions[None, :, None], float("-inf"))
                out = torch.einsum("hqk,khd->qhd", score.softmax(-1), vals).reshape(count, -1)
                out = out @ self.w[p + "self_attn.o_proj.weight"].T
                hidden = hidden + self.norm(out, p + "input_layernorm_2.weight")
                x = self.norm(hidden, p + "post_attention_layernorm.weight")
                gate = torch.nn.functional.silu(x @ self.w[p + "mlp.gate_proj.weight"].T)
                x = (gate * (x @ self.w[p + "mlp.up_proj.weight"].T)) @ self.w[p + "mlp.down_proj.weight"].T
                hidden = hidden + self.norm(x, p + "post_attention_layernorm_2.weight")
            hidden = self.norm(hidden, "model.norm.weight")
        return hidden @ self.w["lm_head.weight"].T

    @torch.no_grad()
    def generate(self, ids, new_tokens, chunk):
        """Greedy tokens and their logits [new, V]: prompt in chunks, then token by token."""
        for i in range(0, len(ids), chunk):
            logits = self.forward(ids[i : i + chunk])[-1]
        tokens, all_logits = [], []
        for _ in range(new_tokens):
            all_logits.append(logits)
            tokens.append(int(logits.argmax()))
            logits = self.forward(torch.tensor(tokens[-1:]))[-1]
        return torch.tensor(tokens), torch.stack(all_logits)
