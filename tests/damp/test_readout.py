"""W^out against perturbed states that run on in fp64, and rows that only W^out ranks right."""

import inspect

import pytest
import torch
from damp_models import build_model, tokens
from test_calibration import SMALL, changed, planted
from transformers import DynamicCache

from hf_lowbit.compat import cache_kwargs
from hf_lowbit.config import DAMPConfig
from hf_lowbit.damp import calibration, capture
from hf_lowbit.damp.capture import LayerTrajectory, Trajectories
from hf_lowbit.damp.readout import extend_readout, with_responses
from hf_lowbit.damp.risk import RowStats, mean, retention, risk, row_errors
from hf_lowbit.damp.selectors import select
from hf_lowbit.damp.spec import FUNCTIONS, DeltaSpec
from hf_lowbit.damp.splits import split
from hf_lowbit_kernels import DampLayout, DampPlan, damp_pack, damp_unpack


CONFIG = DAMPConfig(
    sequences=3, prompt_tokens=9, decode_tokens=40, windows=(0,), window_tokens=40, anchors=(5, 7, 20), horizon=16,
    continuation="text",
)  # fmt: skip


def run_on(state, q, k, v, g, beta):
    """The recurrence as the paper writes it, fp64: state ``[HV, dk, dv]``, inputs ``[T, ...]``; ``[T, HV, dv]``."""

    def normal(x):
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    repeats = v.shape[1] // q.shape[1]
    q, k = (normal(x.double()).repeat_interleave(repeats, 1) for x in (q, k))
    outputs = []
    for q_t, k_t, v_t, g_t, beta_t in zip(q * q.shape[-1] ** -0.5, k, v.double(), g.double(), beta.double()):
        state = state * (g_t if g_t.dim() == 2 else g_t[:, None]).exp()[..., None]
        read = (state * k_t[..., None]).sum(1)
        state = state + k_t[..., None] * (beta_t[:, None] * (v_t - read))[:, None]
        outputs.append((state * q_t[..., None]).sum(1))
    return torch.stack(outputs)


@torch.no_grad()
def logged_inputs(model, ids, monkeypatch):
    """Per layer ``(q, k, v, g, beta)`` of all tokens, ``[B, T, ...]``."""
    layers, logged = DeltaSpec.of(model).layers, []
    for modeling, kind in DeltaSpec.of(model).modelings:
        for name in FUNCTIONS[kind]:

            def logging(*args, _original=getattr(modeling, name), **kwargs):
                given = inspect.signature(_original).bind(*args, **kwargs).arguments
                logged.append([given[x] for x in ("query", "key", "value", "g", "beta")])
                return _original(*args, **kwargs)

            monkeypatch.setattr(modeling, name, logging)
    model(ids, use_cache=True, **cache_kwargs(DynamicCache(config=model.config)))
    monkeypatch.undo()
    assert len(logged) == len(layers)
    return logged


@pytest.mark.compat
@pytest.mark.parametrize("architecture", ["qwen3_5", "kimi_linear", "olmo_hybrid"])
def test_equals_what_perturbed_rows_do_to_later_outputs(architecture, monkeypatch):
    model = build_model(architecture)
    ids = tokens(49, rows=3)
    inputs = logged_inputs(model, ids, monkeypatch)
    monkeypatch.setattr(capture, "SEGMENT", 6)  # horizons overlap and consist of several segments, one of 1 token
    assert {1, 2, 5, 6} <= {end - start for start, end in capture.segments(CONFIG)}
    found = capture.collect(model, DeltaSpec.of(model), ids, CONFIG, batch_size=2, readout=True, progress=False)
    generator = torch.Generator().manual_seed(0)
    for layer, given in zip(found.layers, inputs):
        heads, dk, dv = layer.states.shape[1:]
        assert layer.readout.shape == (9, heads, dk) and layer.readout.dtype == torch.float32
        for sequence, anchor in ((0, 5), (1, 20), (2, 7)):
            row = found.anchors([sequence])[CONFIG.anchors.index(anchor)]
            after = [x[sequence, 9 + anchor : 9 + anchor + 16] for x in given]
            state = layer.states[row].double()
            clean = run_on(state, *after)
            for u in range(dk):
                error = torch.randn(heads, dv, generator=generator, dtype=torch.float64)
                changed_state = state.clone()
                changed_state[:, u] += error
                effect = (run_on(changed_state, *after) - clean).square().sum((0, 2)) / error.square().sum(1)
                torch.testing.assert_close(layer.readout[row, :, u].double(), effect, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("architecture", ["qwen3_5", "kimi_linear"])
def test_independent_errors_of_all_rows_add_up(architecture, monkeypatch):
    """The expected squared error of the outputs is sum_u e_u W^out_u."""
    model = build_model(architecture)
    ids = tokens(49, rows=1)
    inputs = logged_inputs(model, ids, monkeypatch)
    found = capture.collect(model, DeltaSpec.of(model), ids, CONFIG, readout=True, progress=False)
    generator = torch.Generator().manual_seed(1)
    for layer, given in zip(found.layers, inputs):
        after = [x[0, 14:30] for x in given]
        state = layer.states[0].double()
        clean = run_on(state, *after)
        size = torch.rand(state.shape[1], generator=generator, dtype=torch.float64)
        total = torch.zeros(len(state), dtype=torch.float64)
        for _ in range(40):
            noise = torch.randn(state.shape, generator=generator, dtype=torch.float64) * size[:, None]
            total += (run_on(state + noise, *after) - clean).square().sum((0, 2)) / 40
        expected = (layer.readout[0].double() * size.square()).sum(1) * state.shape[2]
        torch.testing.assert_close(total, expected, rtol=0.25, atol=0)


@pytest.mark.compat
@pytest.mark.parametrize("architecture", ["qwen3_5", "kimi_linear"])
def test_the_rest_of_a_capture_stays_the_same(architecture):
    model = build_model(architecture)
    ids, spec = tokens(49, rows=3), DeltaSpec.of(model)
    plain = capture.collect(model, spec, ids, CONFIG, progress=False)
    found = capture.collect(model, spec, ids, CONFIG, readout=True, progress=False)
    for a, b in zip(plain.layers, found.layers):
        assert a.readout is None and list(a.weights) == ["retention"] and list(b.weights) == ["retention", "readout"]
        torch.testing.assert_close(a.states, b.states, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a.retention, b.retention, rtol=1e-5, atol=0)


def test_bfloat16_models():
    model = build_model().bfloat16()
    ids = tokens(49, rows=3)
    half = capture.collect(model, DeltaSpec.of(model), ids, CONFIG, readout=True, progress=False).layers[0].readout
    full = capture.collect(model.float(), DeltaSpec.of(model), ids, CONFIG, readout=True, progress=False)
    assert half.dtype == torch.float32
    # The first layer sees nearly the same inputs.
    torch.testing.assert_close(half.mean((0, 2)), full.layers[0].readout.mean((0, 2)), rtol=0.05, atol=0)


def test_states_that_are_not_finite():
    model = build_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = float("inf")
    ids = tokens(49, rows=3).where(tokens(49, rows=3) != 5, 6)
    ids[2, 33] = 5  # after the last anchor's state, within its horizon
    with pytest.raises(ValueError, match="of layer 0 is not finite on calibration sequence 2"):
        capture.collect(model, DeltaSpec.of(model), ids, CONFIG, readout=True, progress=False)


def test_a_row_that_is_read_is_found_where_decay_and_energy_mislead():
    """Row 1 has the most energy and error, row 2 the longest memory, and no query looks at either; row 5 is read."""
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    generator = torch.Generator().manual_seed(0)
    batch, length, dk, dv = 4, 32, 8, 32
    queries = torch.randn(batch, length, 1, dk, generator=generator) * 0.05
    queries[..., 5] = 1
    queries[..., [1, 2]] = 0
    keys = torch.zeros_like(queries)
    keys[..., 0] = 1  # nothing is mixed into rows 1, 2 and 5
    values = torch.randn(batch, length, 1, dv, generator=generator)
    decay = torch.full((batch, length, 1, dk), 0.9).log()
    decay[..., 2] = 0
    beta = torch.full((batch, length, 1), 0.5)
    states = torch.randn(batch, 1, dk, dv, generator=generator)
    states[:, :, 1] *= 8
    states[:, :, 2] *= 5
    states[:, :, 5] *= 1.5

    function = modeling.chunk_kimi_delta_attention
    options = dict(g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
    clean, _, *response = with_responses(function, queries, keys, values, initial_state=states, **options)
    weights = retention(decay)
    read = extend_readout(None, torch.zeros(batch, 1, dk), *response)[1]
    share = torch.full((batch,), 1 / batch, dtype=torch.float64)
    plan = DampPlan.identity(1, dk, dv)
    e = row_errors(states, plan, DampLayout(dk, dv, 0, 8))
    made = RowStats(
        mean(states.square().sum(-1), share),
        mean(e, share),
        mean(weights, share),
        risk(e, weights, share),
        risk(e, read, share),
    )
    chosen = {name: select(name, made, 1).item() for name in ("damp", "energy", "error", "retention", "readout")}
    assert chosen == {"damp": 2, "energy": 1, "error": 1, "retention": 2, "readout": 5}

    def damage(row):
        """Squared output error after all rows but one were stored in INT8."""
        plan, layout = DampPlan.from_rows(torch.tensor([[row]]), dk, dv), DampLayout(dk, dv, 1, 8)
        stored = damp_unpack(damp_pack(states, plan, layout), plan, layout)
        out, _ = function(queries, keys, values, initial_state=stored, output_final_state=True, **options)
        return (out - clean).square().sum().item()

    assert damage(5) < 0.2 * min(damage(1), damage(2))


def with_readout(captured: Trajectories, shape) -> Trajectories:
    """Planted trajectories with W^out: ``shape(weights)`` of random ones."""
    generator = torch.Generator().manual_seed(5)
    layers = [
        LayerTrajectory(
            layer.index, layer.kind, layer.device, layer.states, layer.retention, layer.log_decay,
            shape(torch.rand(layer.states.shape[:3], generator=generator)),
        )
        for layer in captured.layers
    ]  # fmt: skip
    return Trajectories(captured.config, captured.domains, layers, captured.seconds)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_rows_and_objective_follow_the_weights_of_the_selector(kind):
    def shape(weights):
        weights[:, :, 7] *= 1000
        return weights

    captured = with_readout(planted(kind=kind), shape)
    made = {name: calibration.plan(captured, changed(selector=name, rows=3)) for name in ("readout", "damp", "error")}
    assert len(captured.memo) == 1
    plans, choices = made["readout"]
    at = captured.anchors(split(captured.domains, 0)["selection"])
    share = torch.full((len(at),), 1 / len(at), dtype=torch.float64)
    for layer, plan, choice, other in zip(captured.layers, plans, choices, made["damp"][1]):
        assert all(7 in rows for rows in plan.perm_k[:, :3].tolist())
        e = row_errors(layer.states[at], plan, layer.layout(SMALL, 3))
        chosen = choice.objective.gather(0, choice.candidate[None])[0]
        torch.testing.assert_close(risk(e, layer.readout[at], share).sum(1), chosen, rtol=1e-6, atol=0)
        assert (other.objective.amin(0) > 2 * chosen).all()  # J of the other selectors is with W
    report = calibration.describe(
        captured, changed(selector="readout", rows=3), split(captured.domains, 0), plans, choices
    )
    values = report.to_dict()
    assert values["readout"]["rows"] == 3 and 0 <= values["readout"]["overlap"] < 3
    assert values["readout"]["spread"]["p10"] < values["readout"]["spread"]["p50"] < 1
    head = values["layers"][0]["heads"][0]
    assert len(head["readout"]) == 16 and max(range(16), key=head["readout"].__getitem__) == 7
    assert head["readout_weight"]["p90"] > head["readout_weight"]["p10"]
    assert values["validation"]["risk_share"] > 0.9  # row 7 has nearly all of it
    assert "rows are those of damp" in report.summary()


def test_without_the_weights():
    with pytest.raises(ValueError, match=r"collect\(..., readout=True\)"):
        calibration.plans_for(planted(), changed(selector="readout"))


@pytest.mark.parametrize("architecture", ["qwen3_5", "kimi_linear"])
def test_fit(architecture):
    model, sequences = build_model(architecture), tokens(50, rows=6)
    config = changed(selector="readout")
    plans, report = calibration.fit(model, config, sequences, progress=False)
    again, _ = calibration.fit(model, config, sequences, progress=False)
    other, _ = calibration.fit(model, changed(selector="readout", seed=1), sequences, progress=False)
    assert all(torch.equal(a.perm_k, b.perm_k) and torch.equal(a.perm_v, b.perm_v) for a, b in zip(plans, again))
    assert not all(torch.equal(a.perm_k, b.perm_k) for a, b in zip(plans, other))  # other splits
    assert DAMPConfig.from_dict(report.to_dict()["config"]) == config
    assert report.readout["overlap"] > report.stability["chance"]
    without = calibration.fit(model, SMALL, sequences, progress=False)[1]
    assert without.readout == {} and "readout" not in without.layers[0]["heads"][0]
