"""Fit the codebooks of a looped model: Fisher weights, k-means, fine-tuning."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm

from ..compat import is_activation_checkpointing, set_activation_checkpointing
from ..config import PAGE, LoopVQConfig
from .codebook import SIDES, LoopVQCodebook
from .encoder import fisher_metric
from .finetune import Entries, Finetuner
from .fisher import MIN_EFFECTIVE, collect
from .grouping import Grouping
from .kmeans import weighted_kmeans
from .resume import Checkpoints
from .spec import LoopSpec


@dataclass
class CalibrationReport:
    """What a calibration did; everything in it was measured.

    Attributes:
        config: the LoopVQConfig as a dict.
        sequences: how many sequences were used for k-means, fine-tuning and holding out.
        grouping: T, T_c, G, c, NG and nB.
        seconds: wall time by stage.
        step_share: share of each loop step in the squared gradient, for keys and values.
        effective_points: effective number of points behind the median codebook of 256 entries.
        kmeans_objective: weighted squared error summed over all problems, by layer and side, first and last iteration.
        reseeded, duplicates: empty entries that were moved; problems in which some entry serves no vector.
        learning_rate, probes: the step size used, and the held-out KL of each candidate.
        losses: training KL (nats) of every iteration.
        held_out: held-out KL (nats) of the k-means codebooks and after each epoch.
        best_epoch: the epoch that was kept, 0 = the k-means codebooks.
        early_kl: mean KL at positions that see no code (numeric noise).
    """

    config: dict[str, Any]
    grouping: dict[str, int]
    sequences: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    step_share: dict[str, list[float]] = field(default_factory=dict)
    effective_points: float = 0.0
    kmeans_objective: dict[str, list[float]] = field(default_factory=dict)
    reseeded: int = 0
    duplicates: int = 0
    learning_rate: float | None = None
    probes: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    best_epoch: int = 0
    early_kl: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; a KL that is not finite (a step size that diverged) becomes None."""
        return _finite(asdict(self))

    def summary(self) -> str:
        """A few lines for a terminal."""
        lines = [
            f"LoopVQ, {self.config['bits']:g} bit an element: {self.grouping['channels']} channels x "
            f"{self.grouping['steps_per_code']} loop steps per code",
            f"held-out KL: k-means {self.held_out[0]:.4g} nats",
        ]
        if len(self.held_out) > 1:
            lines[-1] += (
                ", fine-tuning did not lower it"
                if self.best_epoch == 0
                else (
                    f", fine-tuned {self.held_out[self.best_epoch]:.4g} "
                    f"(epoch {self.best_epoch} of {len(self.held_out) - 1}, step size {self.learning_rate:g})"
                )
            )
        lines.append("seconds: " + ", ".join(f"{stage} {value:.1f}" for stage, value in self.seconds.items()))
        return "\n".join(lines)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _frozen(model):
    """Evaluation mode, no parameter gradients, activation checkpointing; everything as before afterwards."""
    training = {name: module.training for name, module in model.named_modules()}
    requires = {name: p.requires_grad for name, p in model.named_parameters()}
    checkpointing = is_activation_checkpointing(model)
    model.requires_grad_(False)
    # transformers checkpoints activations in training mode only; these models have no other train-time behaviour.
    set_activation_checkpointing(model, True)
    model.train()
    try:
        yield
    finally:
        if not checkpointing:
            set_activation_checkpointing(model, False)
        for name, module in model.named_modules():
            module.training = training.get(name, False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(requires.get(name, False))


MAX_HELD_OUT = 8


def split(sequences: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A quarter of the sequences (at least one, at most 8) is held out, drawn with the seed: (train, held_out).

    Nothing is fitted to the held-out ones, k-means included: on sequences it has seen, k-means looks better than it is,
    and fine-tuning would be stopped too early.
    """
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed))
    count = min(MAX_HELD_OUT, max(1, len(sequences) // 4))
    return sequences[order[count:]], sequences[order[:count]]


def fit(
    model,
    config: LoopVQConfig,
    sequences: torch.Tensor,
    *,
    fingerprint: str,
    extra: torch.Tensor | None = None,
    resume_dir: str | None = None,
    progress: bool = True,
) -> tuple[list[LoopVQCodebook], CalibrationReport]:
    """Fit the codebooks of every layer.

    Args:
        model: looped causal LM in full precision; it is left as it was.
        config: what to fit.
        sequences: token ids int64 ``[N, n]``, unpadded; a part is held out (:func:`split`).
        fingerprint: of the model's weights; a resumed calibration must have the same.
        extra: more sequences ``[M, n]`` for fine-tuning only, never held out (texts the model wrote itself, say).
        resume_dir: directory for intermediate states; an interrupted calibration with the same arguments goes on there.
        progress: show progress bars.

    Returns:
        One codebook per layer, on the layer's device, and the report.

    Raises:
        ValueError: sizes that do not divide, sequences too short to see a code, NaN in activations.
    """
    spec = LoopSpec.of(model)
    grouping = Grouping.of(config, spec.steps, spec.head_dim)
    shortest = config.sink_tokens + config.recent_window + 2 * PAGE
    if sequences.ndim != 2 or len(sequences) < 2 or sequences.shape[1] < shortest:
        raise ValueError(
            f"calibration needs at least 2 sequences of at least {shortest} tokens (sinks + window + two pages), so that "
            f"some tokens are coded; got {tuple(sequences.shape)}."
        )
    if extra is not None and (extra.ndim != 2 or extra.shape[1] != sequences.shape[1]):
        raise ValueError(
            f"extra sequences {tuple(extra.shape)} must be as long as the others, {sequences.shape[1]} tokens."
        )
    train, held_out = split(sequences, config.seed)
    tuning = train if extra is None else torch.cat([train, extra])
    key = {
        "config": config.to_dict(),
        "fingerprint": fingerprint,
        "dtype": str(model.dtype),
        "data": hashlib.sha256(torch.cat([tuning, held_out]).numpy().tobytes()).hexdigest(),
    }
    checkpoints = Checkpoints(resume_dir, key)
    report = CalibrationReport(
        config=config.to_dict(),
        grouping={
            "steps": grouping.steps,
            "steps_per_code": grouping.steps_per_code,
            "group_size": grouping.group_size,
            "channels": grouping.channels,
            "groups": grouping.groups,
            "blocks": grouping.blocks,
        },
        sequences={"kmeans": len(train), "fine-tuning": len(tuning), "held_out": len(held_out)},
    )

    def bar(iterable, desc):
        return tqdm(iterable, desc=desc, disable=not progress, leave=False)

    with _frozen(model):
        start, metric = _kmeans(model, spec, grouping, config, train, report, checkpoints, bar)
        began = time.perf_counter()
        tuner = Finetuner(
            model, spec, grouping, config, metric, tuning, held_out, bar, checkpoints.save, checkpoints.load
        )
        tuned = tuner.run(start)
        report.seconds["fine-tuning"] = time.perf_counter() - began
    report.learning_rate = tuned.learning_rate
    report.probes = {f"{rate:g}": kl for rate, kl in tuned.probes.items()}
    report.losses, report.held_out = tuned.losses, tuned.held_out
    report.best_epoch, report.early_kl = tuned.best_epoch, tuned.early_kl

    codebooks = []
    for layer, attention in enumerate(spec.layers):
        codebook = LoopVQCodebook(grouping, spec.kv_heads, metric is not None, attention.k_proj.weight.device)
        for side in SIDES:
            codebook.store(side, tuned.tables[side][layer], None if metric is None else metric[side][layer])
        codebooks.append(codebook)
    return codebooks, report


def _kmeans(model, spec, grouping, config, sequences, report, checkpoints, bar) -> tuple[Entries, Entries | None]:
    devices = [attention.k_proj.weight.device for attention in spec.layers]
    known = checkpoints.load("kmeans")
    if known is None:
        began = time.perf_counter()
        data = collect(model, spec, grouping, sequences, config, bar)
        collected = time.perf_counter()
        known = {
            "tables": {side: [] for side in SIDES},
            "metric": {side: [] for side in SIDES} if config.encoder_metric == "fisher" else None,
            "objective": {},
            "reseeded": 0,
            "duplicates": 0,
            "step_share": data.step_share,
            "effective_points": data.effective,
        }
        generator = torch.Generator().manual_seed(config.seed)
        for layer in bar(range(len(spec.layers)), desc="k-means"):
            for side in SIDES:
                vectors, weights = data.vectors(side, layer, grouping, devices[layer])
                scale = torch.ones((), device=devices[layer])
                if known["metric"] is not None:
                    metric = fisher_metric(data.sensitivity[side][layer].to(devices[layer]), grouping)
                    known["metric"][side].append(metric)
                    # k-means in coordinates where the metric is the plain distance
                    steps = metric.unflatten(0, (grouping.blocks, -1)).transpose(0, 1)
                    scale = grouping.couple(steps).flatten(0, 2).unsqueeze(1).sqrt()  # [problems, 1, G]
                    vectors *= scale
                solved = weighted_kmeans(vectors, weights, iterations=config.kmeans_iterations, generator=generator)
                shape = (grouping.blocks, spec.kv_heads, grouping.groups, 256, grouping.group_size)
                known["tables"][side].append((solved.entries / scale).view(shape))
                known["objective"][f"{side}.{layer}"] = [solved.objective[0], solved.objective[-1]]
                known["reseeded"] += solved.reseeded
                known["duplicates"] += solved.duplicates
                data.states[side][layer] = data.weights[side][layer] = None  # the largest tensors of a calibration
        known["seconds"] = {"Fisher weights": collected - began, "k-means": time.perf_counter() - collected}
        checkpoints.save("kmeans", known)
    if known["effective_points"] < MIN_EFFECTIVE:
        warnings.warn(
            f"half of the codebooks rest on fewer than {known['effective_points']:.0f} effective points (weights are "
            f"uneven) and have 256 entries; {MIN_EFFECTIVE} or more are advised. Use more or longer sequences.",
            stacklevel=5,  # the caller of calibrate()
        )
    report.seconds.update(known["seconds"])
    report.step_share, report.effective_points = known["step_share"], known["effective_points"]
    report.kmeans_objective = known["objective"]
    report.reseeded, report.duplicates = known["reseeded"], known["duplicates"]
    tables, metric = (
        None if part is None else {side: [t.to(d) for t, d in zip(part[side], devices)] for side in SIDES}
        for part in (known["tables"], known["metric"])
    )
    return tables, metric
