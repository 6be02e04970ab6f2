"""Splits, J(c), plans, report; on planted trajectories where the answer is known, and on tiny models."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from damp_models import build_model, tokens
from torch import nn

from hf_lowbit.config import DAMPConfig
from hf_lowbit.damp import calibration, capture, scaling
from hf_lowbit.damp.attach import attach_damp, damp_tables
from hf_lowbit.damp.capture import LayerTrajectory, Trajectories
from hf_lowbit.damp.report import describe, overlap, spearman, worst_share
from hf_lowbit.damp.risk import risk, row_errors, stratified_shares
from hf_lowbit.damp.selectors import top_rows
from hf_lowbit.damp.spec import DeltaSpec
from hf_lowbit.damp.splits import SPLITS, deal, split
from hf_lowbit.data import calibration_sequences, read_texts


SMALL = DAMPConfig(
    sequences=6, prompt_tokens=10, decode_tokens=40, windows=(0,), window_tokens=40, anchors=(8, 16), horizon=24,
    continuation="text",
)  # fmt: skip


def changed(**changes):
    return DAMPConfig(**{**SMALL.to_dict(), **changes})


def planted(layers=2, heads=2, dk=16, dv=64, sequences=6, kind="kda", domains=None, alike=False, shape=None, seed=0):
    """Trajectories without a model. ``shape(states [A, HV, dk, dv], weights)`` changes a layer's random ones."""
    generator = torch.Generator().manual_seed(seed)
    anchors = sequences * 2
    made = []
    for index in range(layers):
        states = torch.randn(2 if alike else anchors, heads, dk, dv, generator=generator)
        weights = 1 + 20 * torch.rand((len(states), heads, dk)[: 3 if kind == "kda" else 2], generator=generator)
        if shape is not None:
            states, weights = shape(states, weights)
        if alike:
            states, weights = (x.repeat(sequences, *[1] * (x.dim() - 1)) for x in (states, weights))
        decay = -torch.rand((sequences, heads, dk)[: 3 if kind == "kda" else 2], generator=generator)
        made.append(LayerTrajectory(index, kind, torch.device("cpu"), states, weights, decay))
    domains = ["all"] * sequences if domains is None else domains
    return Trajectories(SMALL, domains, made, {"reference states": 0.0})


def report_of(trajectories, config):
    plans, choices = calibration.plan(trajectories, config)
    return describe(trajectories, config, split(trajectories.domains, config.seed), plans, choices)


# -- splits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [{"all": 12}, {"math": 4, "code": 8, "general": 12}, {"a": 3, "b": 4, "c": 4}])
def test_splits_are_disjoint_balanced_and_seeded(counts):
    domains = [name for name, count in counts.items() for _ in range(count)]
    found = split(domains, seed=1)
    assert tuple(found) == SPLITS
    assert sorted(i for part in found.values() for i in part) == list(range(len(domains)))
    sizes = [len(part) for part in found.values()]
    assert max(sizes) - min(sizes) <= 1
    for part in found.values():
        have = Counter(domains[i] for i in part)
        assert all(have[name] in (count // 3, -(-count // 3)) for name, count in counts.items())
    assert split(domains, seed=1) == found and split(domains, seed=2) != found


def test_halves():
    domains = ["a", "b"] * 5
    first, second = deal(domains, 2, seed=0)
    assert not set(first) & set(second) and len(first) == len(second) == 5
    assert {Counter(domains[i] for i in half)["a"] for half in (first, second)} == {2, 3}


def test_too_few_sequences():
    with pytest.raises(ValueError, match="at least 3 sequences, one for each of the splits.*got 2"):
        split(["all"] * 2, 0)
    with pytest.raises(ValueError, match="got 0"):
        split([], 0)
    with pytest.raises(ValueError, match="of domain 'code'.*got 2"):
        split(["math"] * 4 + ["code"] * 2, 0)


# -- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits, zero_point", [(8, False), (4, False), (4, True)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_objective_is_that_of_the_real_mixed_format(bits, zero_point, kind, monkeypatch):
    """J(c) put together from two tables equals the error of packed mixed-precision states, FP16 rounding included."""
    monkeypatch.setattr(capture, "CHUNK", 3 * 2 * 16 * 64)  # several chunks of 3 anchors
    # Large states, so that FP16 rounding shows.
    captured = planted(kind=kind, domains=["a"] * 3 + ["b"] * 3, shape=lambda s, w: (s * 900, w))
    config = changed(low_bits=bits, zero_point=zero_point, rows=5)
    plans, choices = calibration.plan(captured, config)
    held_out = split(captured.domains, config.seed)["selection"]
    at, shares = captured.anchors(held_out), stratified_shares([captured.domains[i] for i in held_out], 2)
    for layer, plan, choice in zip(captured.layers, plans, choices):
        e = row_errors(layer.states[at], plan, layer.layout(config, 5))
        j = risk(e, layer.retention[at], shares).sum(1)
        chosen = choice.objective.gather(0, choice.candidate[None])[0]
        torch.testing.assert_close(j, chosen, rtol=1e-6, atol=0)
        assert torch.equal(choice.candidate, choice.objective.argmin(0))
        protected = e.gather(2, plan.perm_k[:, :5].long().expand(len(e), -1, -1))
        assert (protected > 0).any()  # FP16 is not exact here


def test_rows_come_from_the_fitting_split_only():
    fitting = split(["all"] * 6, 0)["fitting"]

    def shape(states, weights):
        for sequence in range(6):
            row = 3 if sequence in fitting else 9
            states[2 * sequence : 2 * sequence + 2, :, row] *= 100
        return states, weights

    for plan in calibration.plans_for(planted(shape=shape), changed(rows=1)):
        assert plan.perm_k[:, 0].tolist() == [3, 3]


def test_planted_column_scaling_is_preferred():
    columns = torch.exp2(torch.arange(64) % 8 - 4.0)

    def shape(states, weights):
        states[:, 0] *= columns  # head 0: uneven columns, mixed; head 1: alike
        return states, weights

    captured = planted(dv=64, sequences=9, shape=shape)
    report = report_of(captured, changed(rows=2, sequences=9))
    j = report.objective
    assert j["per_head"] <= j["global"] < j["none"]
    for layer in report.layers:
        uneven, even = layer["heads"]
        assert uneven["candidate"] not in ("none", "order")
        assert min(uneven["objective"]) < 0.8 * uneven["objective"][0]
        assert min(even["objective"]) > 0.95 * even["objective"][0]
    head = calibration.plans_for(captured, changed(rows=2, sequences=9))[0]
    assert torch.corrcoef(torch.stack((head.column_scale[0].log(), columns.log())))[0, 1] > 0.95
    assert report.validation["objective"] < report.validation["uniform"]


def test_global_and_no_scaling():
    captured = planted(shape=lambda s, w: (s * torch.exp2(torch.arange(64) % 6.0), w))
    everywhere, choices = calibration.plan(captured, changed(scaling="global"))
    index = {int(c) for choice in choices for c in choice.candidate}
    assert len(index) == 1
    total = sum(choice.objective.sum(1) for choice in choices)
    assert index == {int(total.argmin())}
    for plan in calibration.plans_for(captured, changed(scaling="none")):
        assert (plan.column_scale == 1).all() and torch.equal(plan.perm_v.long(), torch.arange(64).expand(2, 64))
    assert not torch.equal(everywhere[0].column_scale, torch.ones(2, 64))


def test_one_capture_serves_many_configurations():
    captured = planted()
    made = {}
    for selector in ("damp", "error", "energy", "retention", "random"):
        for rows in (0, 2, 16):
            made[selector, rows] = calibration.plans_for(captured, changed(selector=selector, rows=rows))
    assert len(captured.memo) == 1
    assert all(torch.equal(a.perm_k, made["damp", 2][i].perm_k) is False for i, a in enumerate(made["random", 2]))
    for layer, plan in zip(captured.layers, made["retention", 2]):
        at = captured.anchors(split(captured.domains, 0)["fitting"])
        best = top_rows(layer.retention[at].double().mean(0), 2)
        assert torch.equal(plan.perm_k[:, :2].long(), best)
    calibration.plans_for(captured, changed(low_bits=4))
    calibration.plans_for(captured, changed(seed=1))
    assert len(captured.memo) == 3


def test_random_rows_do_not_depend_on_the_scaling():
    captured = planted(shape=lambda s, w: (s * torch.exp2(torch.arange(64) % 6.0), w))
    plans = [
        calibration.plans_for(captured, changed(selector="random", rows=3, scaling=x)) for x in ("none", "per_head")
    ]
    for a, b in zip(*plans):
        assert torch.equal(a.perm_k, b.perm_k) and not torch.equal(a.column_scale, b.column_scale)
    _, choices = calibration.plan(captured, changed(selector="random", rows=3))
    assert (choices[0].rows == choices[0].rows[0]).all()
    assert not torch.equal(choices[0].rows, choices[1].rows)  # layers draw different rows


def test_more_rows_than_there_are():
    with pytest.raises(ValueError, match="rows=17"):
        calibration.plans_for(planted(), changed(rows=17))


def test_retention_cannot_rank_gdn_rows():
    with pytest.raises(ValueError, match="share one decay"):
        calibration.plans_for(planted(kind="gdn"), changed(selector="retention"))


# -- figures ---------------------------------------------------------------------------------------------------------


def test_stability_of_identical_halves():
    report = report_of(planted(alike=True), changed(rows=4))
    assert report.stability["overlap"] == report.stability["rows"] == 4
    assert report.stability["spearman"] == pytest.approx(1)


def test_stability_of_noise_is_chance():
    # All rows alike: which ones err more is luck. 64 heads, so the mean overlap is known to about 0.1.
    noise = planted(layers=1, heads=64, dk=32, dv=32, shape=lambda s, w: (s, torch.ones_like(w)))
    report = report_of(noise, changed(rows=8, scaling="none"))
    assert report.stability["chance"] == 2
    assert abs(report.stability["overlap"] - 2) < 0.6
    assert abs(report.stability["spearman"]) < 0.1


def test_overlap_and_spearman():
    assert overlap(torch.tensor([[0, 1, 5], [2, 3, 4]]), torch.tensor([[1, 5, 7], [5, 6, 7]])).tolist() == [2, 0]
    scores = torch.tensor([[1.0, 5.0, 2.0, 9.0]])
    assert spearman(scores, scores.exp()).item() == pytest.approx(1)
    assert spearman(scores, -scores).item() == pytest.approx(-1)
    assert spearman(scores, torch.zeros(1, 4)).isnan().item()
    # Ties share their mean rank: ranks 0.5 0.5 2 against 0 1 2.
    assert spearman(torch.tensor([[1.0, 1, 2]]), torch.tensor([[1.0, 2, 3]])).item() == pytest.approx(0.75**0.5)


def test_worst_share():
    errors = torch.ones(1, 16)
    errors[0, 3] = 15
    assert worst_share(errors).item() == pytest.approx(16 / 30)


def test_report_figures():
    captured = planted(layers=1, heads=1, shape=lambda s, w: (torch.cat((s[:, :, :1] * 30, s[:, :, 1:]), 2), w))
    report = report_of(captured, changed(rows=2, scaling="none"))
    head = report.layers[0]["heads"][0]
    assert 0 in head["rows"] and len(head["rows"]) == 2
    assert len(head["risk"]) == len(head["error"]) == len(head["energy"]) == 16
    assert max(range(16), key=head["error"].__getitem__) == 0
    assert head["max_abs"] == pytest.approx(captured.layers[0].states.abs().max().item())
    assert head["retention"]["p10"] < head["retention"]["p50"] < head["retention"]["p90"]
    assert report.error_share["before"] == report.error_share["after"] > 0.9
    assert report.validation["error_share"] > 0.9 and report.validation["risk_share"] > 0.7
    decay = captured.layers[0].log_decay.double().mean(0).exp().flatten()
    assert report.decay["kda"]["p50"] == pytest.approx(decay.sort().values[8].item(), rel=1e-6)
    assert report.objective["none"] == report.objective["global"] == report.objective["per_head"]


def test_report_of_dead_heads_is_json():
    report = report_of(planted(shape=lambda s, w: (s * torch.tensor([0.0, 1.0])[:, None, None], w)), SMALL)
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert json.loads(text)["layers"][0]["heads"][0]["error_share"] == [None, None]
    assert "nan" not in report.summary()


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("architecture, kind", [("qwen3_5", "gdn"), ("kimi_linear", "kda")])
def test_fit(architecture, kind):
    model = build_model(architecture)
    sequences = tokens(50, rows=6)
    domains = ["math", "code"] * 3
    plans, report = calibration.fit(model, SMALL, list(sequences), domains=domains, fingerprint="abc", progress=False)
    attach_damp(model, SMALL, plans)
    for plan, table in zip(plans, damp_tables(model), strict=True):
        assert torch.equal(plan.perm_k, table.plan().perm_k)
    values = report.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["fingerprint"] == "abc" and values["domains"] == {"math": 3, "code": 3}
    assert values["config"] == SMALL.to_dict()
    assert [layer["kind"] for layer in values["layers"]] == [kind] * 3
    j = values["objective"]
    assert 0 < j["per_head"] <= j["global"] <= j["none"]
    assert sum(j["chosen"].values()) == sum(len(layer["heads"]) for layer in values["layers"])
    assert list(j["candidates"]) == [candidate.name for candidate in scaling.candidates()]
    assert 0 < values["validation"]["objective"] < values["validation"]["uniform"]
    assert list(values["seconds"]) == ["reference states", "scalings and rows", "validation"]
    for plan, layer in zip(plans, values["layers"]):
        rows = [head["rows"] for head in layer["heads"]]
        assert plan.perm_k[:, : len(rows[0])].tolist() == rows
    assert "Spearman" in report.summary()

    again, _ = calibration.fit(model, SMALL, sequences, domains=domains, progress=False)
    for a, b in zip(plans, again):
        assert torch.equal(a.perm_k, b.perm_k) and torch.equal(a.perm_v, b.perm_v)
        assert torch.equal(a.column_scale, b.column_scale)


def test_fit_refuses_before_it_runs_the_model(monkeypatch):
    model = build_model()
    monkeypatch.setattr(model, "forward", None)
    sequences = tokens(50, rows=6)
    with pytest.raises(ValueError, match="share one decay"):
        calibration.fit(model, changed(selector="retention"), sequences)
    with pytest.raises(ValueError, match="rows=17"):
        calibration.fit(model, changed(rows=17), sequences)
    with pytest.raises(ValueError, match="at least 3 sequences"):
        calibration.fit(model, SMALL, sequences[:2])
    with pytest.raises(ValueError, match="sequence 0 has 49 tokens and needs 50"):
        calibration.fit(model, SMALL, sequences[:, :49])
    with pytest.raises(TypeError, match="has none"):
        calibration.fit(nn.Linear(2, 2), SMALL, sequences)


SHARED = Path(os.environ.get("HF_LOWBIT_SHARED", Path(__file__).resolve().parents[3] / "shared"))


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not here (set HF_LOWBIT_SHARED)")
@pytest.mark.parametrize("name", ["gdn-mini", "kda-mini"])
def test_trained_models(name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(SHARED / "models" / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "models" / name)
    config = DAMPConfig(
        sequences=3, prompt_tokens=32, decode_tokens=256, windows=(0,), window_tokens=256, anchors=(64, 128, 192),
        horizon=64, continuation="text",
    )  # fmt: skip
    texts = read_texts(SHARED / "eval" / "calibration.jsonl")
    sequences = calibration_sequences(texts, tokenizer, 3, 288)
    plans, report = calibration.fit(model, config, sequences, progress=False)
    assert len(plans) == len(DeltaSpec.of(model).layers) == 6
    # Trained states have rows that matter more, and other texts agree on them.
    assert report.validation["objective"] < 0.8 * report.validation["uniform"]
    assert report.stability["overlap"] > 2 * report.stability["chance"]
    assert report.stability["spearman"] > 0.3
    assert report.validation["risk_share"] > 2 / 8
