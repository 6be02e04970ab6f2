"""Loop-aware fine-tuning of the codebooks against the full-precision output (paper section 4.2, eq. 6).

Two passes per sequence. Pass 1 (no gradients) runs the model in full precision: the teacher's distribution, and the
states that the current codebooks encode. Pass 2 runs it again with every (layer, step) attending to what serving would
see at each position: reconstructions of the coded tokens, the student's own states of the others. Assignments are
those of the serving encoder and are recomputed every iteration, so the gradient of an entry is exact and needs no
straight-through estimate (appendix A.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from ..compat import CACHE_ARG
from ..config import PAGE, LoopVQConfig
from .capture import PlainAttention, StateCapture
from .codebook import SIDES
from .encoder import encode, entry_norms
from .grouping import Grouping
from .spec import LoopSpec, rotate


Entries = dict[str, list[torch.Tensor]]  # per side and layer, fp32 [nB, H, NG, 256, G]


def coded_before(position: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    """How many tokens after the sinks a query at ``position`` sees as codes: ``8 * floor((q - S - W) / 8)``, >= 0."""
    return PAGE * ((position - sinks - window).clamp_min(0) // PAGE)


def visibility(count: int, sinks: int, window: int, device=None) -> torch.Tensor:
    """Who sees what during decoding: bool ``[n, 2n]``, reconstructions in columns [0, n), full precision in [n, 2n)."""
    positions = torch.arange(count, device=device)
    query, key = positions.unsqueeze(1), positions.unsqueeze(0)
    coded = (key >= sinks) & (key < sinks + coded_before(query, sinks, window))
    return torch.cat([coded, (key <= query) & ~coded], dim=1)


class StudentAttention(PlainAttention):
    """Attends to reconstructions where serving would see codes, and to the student's own states elsewhere.

    Args:
        tables: per side and layer, the entries ``[nB, H, NG, 256, G]`` to look up (gradients flow into them).
        codes: per side, layer and block, indices ``[n, H, NG]``.
        mask: from :func:`visibility`.
    """

    def __init__(self, grouping: Grouping, tables: Entries, codes: dict, mask: torch.Tensor):
        self.grouping, self.tables, self.codes, self.mask = grouping, tables, codes, mask

    def attend(self, query, key, value, cos, sin, *, layer, step, module):
        coded_key = self._lookup("key", layer, step, key)
        coded_value = self._lookup("value", layer, step, value)
        out = F.scaled_dot_product_attention(
            rotate(query, cos, sin),
            torch.cat([rotate(coded_key, cos, sin), rotate(key, cos, sin)], dim=2),
            torch.cat([coded_value, value], dim=2),
            attn_mask=self.mask.to(query.device),
            scale=module.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.transpose(1, 2)

    def _lookup(self, side: str, layer: int, step: int, like: torch.Tensor) -> torch.Tensor:
        block, member = divmod(step, self.grouping.steps_per_code)
        entries = self.tables[side][layer][block]  # [H, NG, 256, G]
        table = entries.unflatten(-1, (self.grouping.channels, -1))[..., member]  # [H, NG, 256, c]
        codes = self.codes[side][layer][block]
        heads, groups = codes.shape[1:]
        offsets = 256 * torch.arange(heads * groups, device=codes.device).view(heads, groups)
        found = F.embedding(codes.long() + offsets, table.flatten(0, 2))  # [n, H, NG, c]
        return found.flatten(-2).transpose(0, 1).unsqueeze(0).to(like.dtype)


def logits_of(model, ids: torch.Tensor, attention: PlainAttention) -> torch.Tensor:
    """fp32 logits ``[n, V]`` of one unpadded sequence ``[1, n]`` with ``attention`` in place of a cache."""
    hidden = model.base_model(input_ids=ids, use_cache=True, **{CACHE_ARG: attention}).last_hidden_state
    return model.get_output_embeddings()(hidden[0]).float()


def encode_states(capture: StateCapture, grouping: Grouping, tables: Entries, metric: Entries | None) -> dict:
    """Codes of captured states under the served encoder: fp16-rounded entries, norms of the rounded entries.

    Args:
        capture: one sequence's states.
        tables: per side and layer, entries fp32 ``[nB, H, NG, 256, G]``.
        metric: per side and layer, fp32 ``[T, H, D]``, or None.

    Returns, per side, layer and block, uint8 ``[n, H, NG]``.
    """
    codes: dict = {}
    for side in SIDES:
        codes[side] = []
        for layer, entries in enumerate(tables[side]):
            step_tables = grouping.step_tables(entries.detach().half())  # [T_c, nB, H, NG, 256, c]
            codes[side].append([])
            for block in range(grouping.blocks):
                table = step_tables[:, block].contiguous()
                states = capture.block(side, layer, grouping, block)[:, 0].transpose(1, 2)  # [T_c, n, H, D]
                weights = None
                if metric is not None:
                    weights = metric[side][layer].unflatten(0, (grouping.blocks, -1))[block]
                codes[side][layer].append(encode(states, table, entry_norms(table, weights), weights))
    return codes


def per_token_kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) in nats for each position; logits ``[n, V]`` fp32."""
    teacher, student = F.log_softmax(teacher, dim=-1), F.log_softmax(student, dim=-1)
    return (teacher.exp() * (teacher - student)).sum(-1)


@dataclass
class FinetuneResult:
    """Attributes:
    tables: entries of the epoch with the lowest held-out KL, per side and layer.
    learning_rate: the one used, or None without epochs.
    probes: held-out KL (nats) of each tried learning rate after one epoch.
    losses: training KL of every iteration of the final run.
    held_out: held-out KL before training and after every epoch.
    best_epoch: index into ``held_out``.
    early_kl: mean KL at positions that see no code (numeric noise only).
    """

    tables: Entries
    learning_rate: float | None = None
    probes: dict[float, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    best_epoch: int = 0
    early_kl: float = 0.0


class Finetuner:
    """Fine-tunes the codebooks of one model.

    Args:
        model: causal LM; every parameter is frozen while this runs.
        metric: per side and layer, the encoder's weights fp32 ``[T, H, D]``, or None.
        train, held_out: token ids ``[N, n]``.
        progress: wraps an iterable in a progress bar.
        save, load: keep and fetch a named state for resuming (see ``resume.py``).
    """

    def __init__(
        self,
        model,
        spec: LoopSpec,
        grouping: Grouping,
        config: LoopVQConfig,
        metric: Entries | None,
        train: torch.Tensor,
        held_out: torch.Tensor,
        progress: Callable,
        save: Callable[[str, dict], None],
        load: Callable[[str], dict | None],
    ):
        self.model, self.spec, self.grouping, self.config = model, spec, grouping, config
        self.metric, self.train, self.held_out = metric, train, held_out
        self.progress, self.save, self.load = progress, save, load
        self.device = model.get_input_embeddings().weight.device
        self.mask = visibility(train.shape[1], config.sink_tokens, config.recent_window, self.device)
        self.blind = config.sink_tokens + config.recent_window + PAGE  # queries below see no code

    def sequence_kl(self, ids: torch.Tensor, tables: Entries) -> torch.Tensor:
        """KL of each position of one sequence ``[n]``, with gradients into ``tables`` if they ask for them."""
        ids = ids.unsqueeze(0).to(self.device)
        with torch.no_grad():
            capture = StateCapture(self.spec)
            teacher = logits_of(self.model, ids, capture)
            codes = encode_states(capture, self.grouping, tables, self.metric)
            del capture
        student = logits_of(self.model, ids, StudentAttention(self.grouping, tables, codes, self.mask))
        return per_token_kl(teacher, student)

    @torch.no_grad()
    def evaluate(self, tables: Entries) -> tuple[float, float]:
        """Mean held-out KL, and its mean over positions that see no code, with the tables as they will be stored."""
        rounded = {side: [t.half().float() for t in tables[side]] for side in SIDES}
        losses = [self.sequence_kl(ids, rounded) for ids in self.held_out]
        early = torch.stack([loss[: self.blind].mean() for loss in losses]).mean()
        return float(torch.stack([loss.mean() for loss in losses]).mean()), float(early)

    def run(self, start: Entries) -> FinetuneResult:
        """Fine-tune from the k-means entries and return the best of all epochs, the start included."""
        kl, early = self.evaluate(start)
        result = FinetuneResult(tables=start, held_out=[kl], early_kl=early)
        noise = 1e-3 if self.model.get_input_embeddings().weight.dtype == torch.float32 else 5e-2
        if not early < noise:
            raise RuntimeError(
                f"positions that see no code already differ from full precision (KL {early:.3g} nats); the model's "
                "attention hook does not reproduce its own attention."
            )
        if self.config.epochs == 0:
            return result
        result.learning_rate = self._choose_learning_rate(start, result)
        self._train(start, result.learning_rate, self.config.epochs, result, resume=True)
        return result

    def _choose_learning_rate(self, start: Entries, result: FinetuneResult) -> float:
        if self.config.learning_rate != "auto":
            return float(self.config.learning_rate)
        known = self.load("probes") or {}
        for rate in self.config.learning_rates:
            if str(rate) not in known:
                probe = FinetuneResult(tables=start, held_out=list(result.held_out))
                self._train(start, rate, 1, probe, resume=False)
                known[str(rate)] = probe.held_out[-1]
                self.save("probes", known)
            result.probes[rate] = known[str(rate)]
        finite = {rate: kl for rate, kl in result.probes.items() if math.isfinite(kl)}
        if not finite:
            raise RuntimeError(f"fine-tuning diverged at every learning rate of {self.config.learning_rates}.")
        return min(finite, key=finite.get)

    def _train(self, start: Entries, rate: float, epochs: int, result: FinetuneResult, resume: bool) -> None:
        # One step size fits K and V of every layer only if each group is trained in units of its own scale. (Units that
        # also shrink with the metric were tried: worse, the demo model's held-out KL was 0.062 instead of 0.036.)
        scales = {s: [t.square().mean((-2, -1), keepdim=True).sqrt().clamp_min(1e-8) for t in start[s]] for s in SIDES}
        units = {s: [(t / c).requires_grad_(True) for t, c in zip(start[s], scales[s])] for s in SIDES}
        parameters = units["key"] + units["value"]
        optimizer = torch.optim.Adam(parameters, lr=rate)
        total = epochs * len(self.train)
        first = self._restore(parameters, optimizer, result) if resume else 0

        def tables() -> Entries:
            return {s: [u * c for u, c in zip(units[s], scales[s])] for s in SIDES}

        def frozen() -> Entries:
            with torch.no_grad():
                return {s: [(u * c).detach() for u, c in zip(units[s], scales[s])] for s in SIDES}

        for epoch in range(first, epochs):
            generator = torch.Generator().manual_seed(self.config.seed + 1 + epoch)
            order = torch.randperm(len(self.train), generator=generator)
            desc = f"fine-tuning, epoch {epoch + 1} of {epochs}, step size {rate:g}"
            for i, index in enumerate(self.progress(order, desc=desc)):
                if self.config.schedule == "cosine":
                    done = (epoch * len(self.train) + i) / total
                    optimizer.param_groups[0]["lr"] = rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
                optimizer.zero_grad(set_to_none=True)
                loss = self.sequence_kl(self.train[index], tables()).mean()
                loss.backward()
                optimizer.step()
                result.losses.append(float(loss.detach()))
            current = frozen()
            kl = self.evaluate(current)[0] if math.isfinite(result.losses[-1]) else float("inf")
            result.held_out.append(kl)
            if kl < result.held_out[result.best_epoch]:
                result.best_epoch, result.tables = len(result.held_out) - 1, current
            if resume:
                self._keep(parameters, optimizer, result, epoch + 1)

    def _keep(self, parameters, optimizer, result: FinetuneResult, epochs_done: int) -> None:
        self.save(
            "finetune",
            {
                "epochs_done": epochs_done,
                "parameters": [p.detach().cpu() for p in parameters],
                "optimizer": optimizer.state_dict(),
                "tables": {s: [t.cpu() for t in result.tables[s]] for s in SIDES},
                "losses": result.losses,
                "held_out": result.held_out,
                "best_epoch": result.best_epoch,
            },
        )

    def _restore(self, parameters, optimizer, result: FinetuneResult) -> int:
        state = self.load("finetune")
        if state is None:
            return 0
        with torch.no_grad():
            for parameter, value in zip(parameters, state["parameters"]):
                parameter.copy_(value)
        optimizer.load_state_dict(state["optimizer"])
        result.tables = {s: [t.to(p.device) for t, p in zip(state["tables"][s], result.tables[s])] for s in SIDES}
        result.losses, result.held_out = list(state["losses"]), list(state["held_out"])
        result.best_epoch = state["best_epoch"]
        return state["epochs_done"]
