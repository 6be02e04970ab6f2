"""What a DAMP calibration measured: objectives, error concentration, decays, stability, the check on held-out data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hf_lowbit_kernels import DampPlan

from ..config import DAMPConfig
from .capture import LayerTrajectory, Trajectories
from .risk import mean, risk, row_errors, stratified_shares
from .selectors import top_rows, weights_of
from .splits import deal
from .tables import LayerChoice, total_objective


# Rows whose share of the error is reported (paper, figure 2c: the worst 12.5 %).
WORST = 1 / 8
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


@dataclass
class DampReport:
    """What a calibration did; everything in it was measured. J is in squared state units, times W.

    With the selector "readout", J, C and shares of risk are made with W^out for W.

    Attributes:
        config: the DAMPConfig as a dict.
        fingerprint: of the weights.
        domains: sequences of each domain.
        splits: sequence numbers of the fitting, selection and validation splits.
        seconds: wall time by stage.
        objective: J on the selection split, summed over layers and heads: ``"none"`` (columns as they are, protected
            rows chosen for them), ``"global"`` (best candidate for all), ``"per_head"`` (best for each head),
            ``"candidates"`` (name -> J), ``"global_candidate"``, and how many heads chose each (``"chosen"``).
        error_share: share of a head's low-precision error in its worst 12.5 % of rows, mean over heads, with columns
            as they are (``"before"``) and scaled as chosen (``"after"``); no rows protected, all sequences.
        decay: quantiles of exp(E[g]) over heads (``"gdn"``) or key channels of all heads (``"kda"``).
        stability: rows chosen by C from two disjoint domain-balanced halves of all sequences, with the scaling fixed:
            mean number of common rows (``"overlap"`` of ``"rows"``; ``"chance"`` is K^2 / dk) and mean Spearman
            correlation of C over a head's rows (``"spearman"``).
        validation: the frozen plan on the validation split: ``"objective"`` J, ``"uniform"`` J of the low format alone
            (no scaling, no protected rows), and the share of the low format's error and risk that lies in the
            protected rows (``"error_share"``, ``"risk_share"``, means over heads).
        readout: where W^out was captured: mean number of rows that E[e W^out] and E[e W] have in common among the
            ``"rows"`` highest of a head (``"overlap"``, on the fitting split and with each head's own scaling), and
            quantiles over all rows of E[W^out] relative to the mean of its head (``"spread"``).
        layers: ``{"layer", "kind", "heads": [...]}``; a head has ``rows`` (protected), ``risk``, ``error`` and
            ``energy`` of all rows (C, E[e], E||S_u||^2 on the fitting split), ``retention`` (quantiles of W),
            ``max_abs`` (max |S|), ``candidate``, ``objective`` (J of each candidate, in the order of
            ``objective["candidates"]``), ``validation`` (J), ``error_share`` [before, after]; and where W^out
            was captured ``readout`` (E[e W^out] of all rows) and ``readout_weight`` (quantiles of W^out).
    """

    config: dict[str, Any]
    fingerprint: str | None = None
    domains: dict[str, int] = field(default_factory=dict)
    splits: dict[str, list[int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    error_share: dict[str, float] = field(default_factory=dict)
    decay: dict[str, dict[str, float]] = field(default_factory=dict)
    stability: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    readout: dict[str, Any] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, five significant digits; what is not finite (shares of heads without error) becomes None."""
        return _plain(asdict(self))

    def summary(self) -> str:
        """A few lines for a terminal."""
        config, j, check, stable = self.config, self.objective, self.validation, self.stability
        heads = sum(len(layer["heads"]) for layer in self.layers)
        decays = "; ".join(
            f"{kind} " + " / ".join(f"{value:.4g}" for value in quantiles.values())
            for kind, quantiles in self.decay.items()
        )
        read = []
        if self.readout:
            spread = " / ".join(f"{value:.3g}" for value in self.readout["spread"].values())
            read.append(
                f"readout: {self.readout['overlap']:.1f} of {self.readout['rows']:g} rows are those of damp; W^out of a "
                f"row over its head's mean, 10/50/90 %: {spread}"
            )
        return "\n".join(
            [
                f"DAMP, INT{config['low_bits']} with {stable['rows']:g} FP16 rows a head chosen by "
                f"{config['selector']}: {len(self.layers)} layers, {heads} heads",
                f"J on the selection split: columns as they are {j['none']:.4g}, one scaling {j['global']:.4g} "
                f"({j['global_candidate']}), a scaling per head {j['per_head']:.4g}",
                f"validation: J {check['objective']:.4g} (low format alone {check['uniform']:.4g}); protected rows hold "
                f"{check['error_share']:.0%} of the error, {check['risk_share']:.0%} of the risk",
                f"stability between halves: {stable['overlap']:.1f} of {stable['rows']:g} rows in common (chance "
                f"{stable['chance']:.1f}), Spearman {stable['spearman']:.3f}",
                f"worst 12.5 % of rows hold {self.error_share['before']:.0%} of the error, "
                f"{self.error_share['after']:.0%} after scaling; decay exp(E[g]) 10/50/90 %: {decays}",
                *read,
                "seconds: " + ", ".join(f"{stage} {value:.1f}" for stage, value in self.seconds.items()),
            ]
        )


def describe(
    captured: Trajectories,
    config: DAMPConfig,
    splits: dict[str, list[int]],
    plans: Sequence[DampPlan],
    choices: Sequence[LayerChoice],
) -> DampReport:
    """Measure what was chosen: on the validation split, between two halves, and in figures for each head."""
    report = DampReport(captured.config.to_dict() | _fitted(config), domains=dict(Counter(captured.domains)))
    report.splits = splits
    candidates = choices[0].tables.candidates
    total = total_objective(choices)
    chosen = torch.cat([choice.candidate for choice in choices]).bincount(minlength=len(candidates))
    report.objective = {
        "none": total[0].item(),
        "global": total.min().item(),
        "per_head": sum(choice.objective.amin(0).sum().item() for choice in choices),
        "global_candidate": candidates[int(total.argmin())].name,
        "candidates": {candidate.name: value.item() for candidate, value in zip(candidates, total)},
        "chosen": {candidate.name: int(count) for candidate, count in zip(candidates, chosen)},
    }
    measured = [
        _describe_layer(layer, captured, config, splits["validation"], plan, choice)
        for layer, plan, choice in zip(captured.layers, plans, choices, strict=True)
    ]
    report.layers = [layer for layer, _ in measured]
    merged = {name: torch.cat([part[name] for _, part in measured]) for name in measured[0][1]}
    report.error_share = {name: merged[name].nanmean().item() for name in ("before", "after")}
    report.stability = {
        "rows": merged["rows"].mean().item(),
        "overlap": merged["overlap"].mean().item(),
        "chance": merged["chance"].mean().item(),
        "spearman": merged["spearman"].nanmean().item(),
    }
    report.validation = {
        "objective": merged["objective"].sum().item(),
        "uniform": merged["uniform"].sum().item(),
        "error_share": merged["error_share"].nanmean().item(),
        "risk_share": merged["risk_share"].nanmean().item(),
    }
    if "readout" in merged:
        report.readout = {
            "rows": report.stability["rows"],
            "overlap": merged["readout_overlap"].mean().item(),
            "spread": _quantiles(merged["readout"]),
        }
    shares = stratified_shares(captured.domains)
    for kind in sorted({layer.kind for layer in captured.layers}):
        decays = [mean(layer.log_decay, shares).exp().flatten() for layer in captured.layers if layer.kind == kind]
        report.decay[kind] = _quantiles(torch.cat(decays))
    return report


def _fitted(config: DAMPConfig) -> dict[str, Any]:
    """The settings that a fit takes from its own configuration; the others say what was captured."""
    names = ("low_bits", "rows", "zero_point", "rounding", "selector", "scaling", "seed")
    return {name: getattr(config, name) for name in names}


def _describe_layer(
    layer: LayerTrajectory,
    captured: Trajectories,
    config: DAMPConfig,
    held_out: list[int],
    plan: DampPlan,
    choice: LayerChoice,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The layer's entry in the report, and figures of its heads (fp64 ``[HV]``)."""
    heads, dk, dv = layer.states.shape[1:]
    k = choice.rows.shape[-1]
    low, mixed = layer.layout(config, 0), layer.layout(config, k)
    plain = DampPlan.identity(heads, dk, dv, device=layer.device)
    everything = torch.arange(len(layer.states))
    before, after, protected = [], [], []
    for _, states, _ in layer.chunks(everything):
        before.append(row_errors(states, plain, low).cpu())
        after.append(row_errors(states, plan, low).cpu())
        protected.append(row_errors(states, plan, mixed).cpu())
    before, after, protected = torch.cat(before), torch.cat(after), torch.cat(protected)

    def over(sequences: list[int]):
        """Anchors and shares of a part of the sequences."""
        shares = stratified_shares([captured.domains[i] for i in sequences], captured.per_sequence)
        return captured.anchors(sequences), shares

    def risk_of(errors: torch.Tensor, sequences: list[int]) -> torch.Tensor:
        at, shares = over(sequences)
        return risk(errors[at], layer.weights[weights_of(config.selector)][at], shares)

    rows = choice.rows[choice.candidate, torch.arange(heads)]
    is_protected = torch.zeros(heads, dk, dtype=torch.bool).scatter_(1, rows, True)
    at, shares = over(held_out)
    held_error, held_risk = mean(after[at], shares), risk_of(after, held_out)
    objective = risk_of(protected, held_out).sum(1)
    halves = [risk_of(after, half) for half in deal(captured.domains, 2, config.seed + 1)]
    first, second = (top_rows(half, k) for half in halves)
    _, shares = over(list(range(len(captured.domains))))
    share_before, share_after = worst_share(mean(before, shares)), worst_share(mean(after, shares))
    figures = {
        "rows": torch.full((heads,), float(k), dtype=torch.float64),
        "chance": torch.full((heads,), k * k / dk, dtype=torch.float64),
        "overlap": overlap(first, second).double(),
        "spearman": spearman(*halves),
        "before": share_before,
        "after": share_after,
        "objective": objective,
        "uniform": risk_of(before, held_out).sum(1),
        "error_share": torch.where(is_protected, held_error, 0.0).sum(1) / held_error.sum(1),
        "risk_share": torch.where(is_protected, held_risk, 0.0).sum(1) / held_risk.sum(1),
    }
    fitted = choice.tables.stats
    entry = {
        "layer": layer.index,
        "kind": layer.kind,
        "heads": [
            {
                "rows": rows[h].tolist(),
                "risk": fitted[c].risk[h].tolist(),
                "error": fitted[c].error[h].tolist(),
                "energy": fitted[c].energy[h].tolist(),
                "retention": _quantiles(layer.retention[:, h].flatten()),
                "max_abs": layer.states[:, h].abs().max().item(),
                "candidate": choice.tables.candidates[c].name,
                "objective": choice.objective[:, h].tolist(),
                "validation": objective[h].item(),
                "error_share": [share_before[h].item(), share_after[h].item()],
            }
            for h, c in enumerate(choice.candidate.tolist())
        ],
    }
    if layer.readout is not None:
        chosen = list(enumerate(choice.candidate.tolist()))
        read, risky = (torch.stack([getattr(fitted[c], x)[h] for h, c in chosen]) for x in ("readout", "risk"))
        weight = mean(layer.readout, shares)
        figures["readout"] = weight / weight.mean(1, keepdim=True)
        figures["readout_overlap"] = overlap(top_rows(read, k), top_rows(risky, k)).double()
        for h, head in enumerate(entry["heads"]):
            head["readout"] = read[h].tolist()
            head["readout_weight"] = _quantiles(layer.readout[:, h].flatten())
    return entry, figures


def worst_share(errors: torch.Tensor) -> torch.Tensor:
    """Share of each head's error that lies in its worst 12.5 % of rows: ``[HV, dk]`` to ``[HV]``; NaN without error."""
    count = max(1, round(errors.shape[1] * WORST))
    return errors.topk(count, 1).values.sum(1) / errors.sum(1)


def overlap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """How many rows two choices ``[HV, K]`` have in common, ``[HV]``."""
    return (first[:, :, None] == second[:, None]).sum((1, 2))


def spearman(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Rank correlation of two scores ``[HV, dk]``, ``[HV]``; equal scores share their mean rank. NaN for constant ones."""

    def ranks(x):
        smaller = (x[:, None] < x[:, :, None]).sum(-1)
        equal = (x[:, None] == x[:, :, None]).sum(-1)
        centred = smaller + (equal - 1) / 2
        return centred.double() - centred.double().mean(1, keepdim=True)

    a, b = ranks(first), ranks(second)
    return (a * b).sum(1) / (a.square().sum(1) * b.square().sum(1)).sqrt()


def _quantiles(values: torch.Tensor) -> dict[str, float]:
    ordered = values.double().flatten().sort().values
    return {name: ordered[round(q * (len(ordered) - 1))].item() for name, q in QUANTILES.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value
