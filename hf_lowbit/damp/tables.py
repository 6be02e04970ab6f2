"""Measure column scalings and choose from them: J(c) on the selection split (paper, appendix A.2, eq. 16)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_lowbit_kernels import DampPlan

from ..config import DAMPConfig
from . import scaling
from .capture import LayerTrajectory, Trajectories
from .risk import RowStats, mean, risk, row_errors, stratified_shares
from .selectors import select, weights_of


@dataclass(frozen=True)
class LayerTables:
    """What one layer's choice of scaling and rows needs to know: means, fp64, on the CPU. C candidates.

    Rows are quantized one by one, so the error of a mixed-precision state is, row by row, that of the low format or
    that of FP16: one table serves every set of rows.

    Attributes:
        candidates: the scalings, ``[C]``.
        orders, scales: their column tables, int64 and fp32 ``[C, HV, dv]``.
        stats: of the fitting split, all rows low, one for each candidate.
        low, high: E[e W] on the selection split with all rows low, and with all rows in FP16, ``[C, HV, dk]``; for each
            weight of the capture, "retention" and perhaps "readout".
    """

    candidates: tuple[scaling.Candidate, ...]
    orders: torch.Tensor
    scales: torch.Tensor
    stats: list[RowStats]
    low: dict[str, torch.Tensor]
    high: dict[str, torch.Tensor]

    @property
    def dk(self) -> int:
        """Key rows of a head."""
        return self.low["retention"].shape[-1]


@dataclass(frozen=True)
class LayerChoice:
    """What was chosen for one layer.

    Attributes:
        tables: what it was chosen from.
        rows: protected rows under each candidate, int64 ``[C, HV, K]``.
        objective: J(c) of each head under each candidate, ``[C, HV]`` (paper, eq. 16), with the selector's weights.
        candidate: index of each head's candidate, int64 ``[HV]``.
    """

    tables: LayerTables
    rows: torch.Tensor
    objective: torch.Tensor
    candidate: torch.Tensor

    def plan(self) -> DampPlan:
        """The tables as the kernels take them, on the CPU."""
        head = torch.arange(len(self.candidate))
        at = self.candidate, head
        return DampPlan.from_rows(
            self.rows[at],
            self.tables.dk,
            self.tables.scales.shape[-1],
            perm_v=self.tables.orders[at],
            column_scale=self.tables.scales[at],
        )


def layer_tables(
    layer: LayerTrajectory,
    trajectories: Trajectories,
    splits: dict[str, list[int]],
    config: DAMPConfig,
    candidates: tuple[scaling.Candidate, ...],
) -> LayerTables:
    """Measure the candidates on one layer, with the real quantizer."""
    heads, dk, dv = layer.states.shape[1:]
    low, high = layer.layout(config, 0), layer.layout(config, dk)
    anchors, shares = {}, {}
    for name in ("fitting", "selection"):
        anchors[name] = trajectories.anchors(splits[name])
        shares[name] = stratified_shares([trajectories.domains[i] for i in splits[name]], trajectories.per_sequence)

    energy = columns = 0
    for part, states, _ in layer.chunks(anchors["fitting"]):
        squares = states.square()
        energy = energy + mean(squares.sum(-1), shares["fitting"][part])
        columns = columns + mean(squares.mean(-2), shares["fitting"][part])
    kept = mean(layer.retention[anchors["fitting"]], shares["fitting"])

    made = [scaling.tables(candidate, columns.sqrt()) for candidate in candidates]
    no_rows = torch.empty(heads, 0, dtype=torch.long, device=layer.device)
    plans = [DampPlan.from_rows(no_rows, dk, dv, perm_v=order, column_scale=scale) for order, scale in made]
    zeros = torch.zeros(len(plans), heads, dk, dtype=torch.float64, device=layer.device)
    error = zeros.clone()
    fitted, select_low, select_high = ({name: zeros.clone() for name in layer.weights} for _ in range(3))
    for part, states, weights in layer.chunks(anchors["fitting"]):
        for c, plan in enumerate(plans):
            e = row_errors(states, plan, low)
            error[c] += mean(e, shares["fitting"][part])
            for name, weight in weights.items():
                fitted[name][c] += risk(e, weight, shares["fitting"][part])
    for part, states, weights in layer.chunks(anchors["selection"]):
        for c, plan in enumerate(plans):
            e_low, e_high = row_errors(states, plan, low), row_errors(states, plan, high)
            for name, weight in weights.items():
                select_low[name][c] += risk(e_low, weight, shares["selection"][part])
                select_high[name][c] += risk(e_high, weight, shares["selection"][part])
    energy, error = energy.cpu(), error.cpu()
    fitted, select_low, select_high = (
        {name: values.cpu() for name, values in by_weight.items()} for by_weight in (fitted, select_low, select_high)
    )
    read = fitted.get("readout", [None] * len(plans))
    return LayerTables(
        candidates,
        torch.stack([order for order, _ in made]).cpu(),
        torch.stack([scale for _, scale in made]).cpu(),
        [RowStats(energy, error[c], kept, fitted["retention"][c], read[c]) for c in range(len(plans))],
        select_low,
        select_high,
    )


def choose(measured: list[LayerTables], config: DAMPConfig) -> list[LayerChoice]:
    """Rows under every candidate, J(c), and the candidate: of each head, or one for the model.

    The global candidate has the smallest sum of J over layers and heads (inferred).
    """
    choices = []
    for position, layer in enumerate(measured):
        k = config.high_rows(layer.dk)
        rows = []
        for stats in layer.stats:
            # Seeded anew: random rows must be the same under every candidate, or J would pick the luckiest draw.
            generator = torch.Generator().manual_seed((config.seed << 16) + position)
            rows.append(select(config.selector, stats, k, generator))
        rows = torch.stack(rows)
        low, high = (by_weight[weights_of(config.selector)] for by_weight in (layer.low, layer.high))
        protected = torch.zeros_like(low, dtype=torch.bool).scatter_(-1, rows, True)
        objective = torch.where(protected, high, low).sum(-1)
        choices.append(LayerChoice(layer, rows, objective, objective.argmin(0)))
    if config.scaling == "global":
        best = int(total_objective(choices).argmin())
        choices = [
            LayerChoice(choice.tables, choice.rows, choice.objective, torch.full_like(choice.candidate, best))
            for choice in choices
        ]
    return choices


def total_objective(choices: list[LayerChoice]) -> torch.Tensor:
    """J(c) summed over layers and heads, ``[C]``."""
    return torch.stack([choice.objective.sum(1) for choice in choices]).sum(0)
