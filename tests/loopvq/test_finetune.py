"""Fisher weights, the two-pass objective and its gradient, and the training loop."""

import warnings

import pytest
import torch

from hf_lowbit import LoopVQConfig
from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.loopvq import calibration, finetune
from hf_lowbit.loopvq.capture import FisherCapture, PlainAttention
from hf_lowbit.loopvq.finetune import Finetuner, coded_before, visibility
from hf_lowbit.loopvq.grouping import Grouping
from hf_lowbit.loopvq.spec import LoopSpec


SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
             head_dim=32, total_ut_steps=2)  # fmt: skip


def quiet(iterable, desc=None):
    return iterable


def tuner_of(model, config, sequences):
    spec = LoopSpec.of(model)
    grouping = Grouping.of(config, spec.steps, spec.head_dim)
    return Finetuner(
        model, spec, grouping, config, None, sequences[1:], sequences[:1], quiet, lambda *a: None, lambda n: None
    )


def random_tables(tuner, seed=0):
    g, spec = tuner.grouping, tuner.spec
    generator = torch.Generator().manual_seed(seed)
    shape = (g.blocks, spec.kv_heads, g.groups, 256, g.group_size)
    return {s: [torch.randn(shape, generator=generator) for _ in spec.layers] for s in ("key", "value")}


def test_visibility_is_the_serving_rule():
    count, sinks, window = 150, 8, 64
    mask = visibility(count, sinks, window)
    for q in range(count):
        coded = 8 * (max(0, q - sinks - window) // 8)
        for p in range(count):
            as_code = sinks <= p < sinks + coded
            assert bool(mask[q, p]) == as_code
            assert bool(mask[q, count + p]) == (p <= q and not as_code)
        recent = q + 1 - sinks - coded
        if coded:
            assert window + 1 <= recent <= window + 8
    assert coded_before(torch.tensor([79, 80, 87, 88]), 8, 64).tolist() == [0, 8, 8, 16]


def test_plain_attention_is_the_models_own(make_model, prompt):
    model = make_model(num_attention_heads=4)
    ids = prompt(90)[None]
    with torch.no_grad():
        hooked = model(ids, use_cache=True, **{CACHE_ARG: PlainAttention()}).logits
        torch.testing.assert_close(hooked, model(ids, use_cache=False).logits, atol=1e-5, rtol=1e-5)


def test_fisher_weights_equal_explicit_gradients(make_model, prompt):
    """(RMSNorm works in fp32 inside, so steps are large.) d(loss)/d(state) by finite differences, for single elements of every side, layer and step."""
    model = make_model(**SMALL).double()
    spec, ids = LoopSpec.of(model), prompt(12)
    grouping = Grouping(2, 2, 8, 32)

    class Nudge(PlainAttention):
        def __init__(self, where=None, amount=0.0):
            self.where, self.amount = where, amount

        def attend(self, query, key, value, cos, sin, *, layer, step, module):
            if self.where and self.where[:2] == (layer, step):
                state = {"key": key, "value": value}[self.where[2]]
                bump = torch.zeros_like(state)
                bump[0, 0, self.where[3], self.where[4]] = self.amount
                key, value = (key + bump, value) if self.where[2] == "key" else (key, value + bump)
            return super().attend(query, key, value, cos, sin, layer=layer, step=step, module=module)

    def loss(attention, embeds=None):
        hidden = model.base_model(
            inputs_embeds=model.get_input_embeddings()(ids[None]) if embeds is None else embeds,
            use_cache=True, **{CACHE_ARG: attention},
        ).last_hidden_state  # fmt: skip
        return torch.nn.functional.cross_entropy(model.lm_head(hidden[0, :-1]), ids[1:], reduction="sum")

    capture = FisherCapture(spec, grouping)
    loss(capture, model.get_input_embeddings()(ids[None]).detach().requires_grad_()).backward()
    token, group = 4, 3
    for side in ("key", "value"):
        total = 0.0
        for step in range(2):
            for channel in range(group * 4, group * 4 + 4):
                up = loss(Nudge((0, step, side, token, channel), 2e-3)).item()
                down = loss(Nudge((0, step, side, token, channel), -2e-3)).item()
                total += ((up - down) / 4e-3) ** 2
        assert capture.weights[side][0][0, 0, group, token].item() == pytest.approx(total, rel=1e-2)


def test_gradient_of_entries_equals_finite_differences(make_model, prompt):
    model = make_model(**SMALL).double()
    config = LoopVQConfig(bits=1, recent_window=8, sequences=2, sequence_length=64)
    tuner = tuner_of(model, config, torch.stack([prompt(64), prompt(64, seed=1)]))
    tables = {s: [t.double().requires_grad_() for t in ts] for s, ts in random_tables(tuner).items()}
    ids = tuner.train[0]
    tuner.sequence_kl(ids, tables).mean().backward()

    spec = tuner.spec
    with torch.no_grad():
        from hf_lowbit.loopvq.capture import StateCapture

        capture = StateCapture(spec)
        finetune.logits_of(model, ids[None], capture)
        codes = finetune.encode_states(capture, tuner.grouping, tables, None)
    checked = 0
    for side in ("key", "value"):
        # an entry that a coded token uses: group 2, token 10 (its code matters, positions 24.. see it)
        entry = (0, 0, 2, int(codes[side][0][0][10, 0, 2]))
        for coordinate in (0, 3, 7):
            values = []
            for sign in (1, -1):
                moved = {s: [t.detach().clone() for t in ts] for s, ts in tables.items()}
                moved[side][0][entry][coordinate] += sign * 1e-2
                # assignments must not move with the probe: the objective is differentiated at fixed codes
                fixed = finetune.StudentAttention(tuner.grouping, moved, codes, tuner.mask)
                with torch.no_grad():
                    teacher = finetune.logits_of(model, ids[None], PlainAttention())
                    student = finetune.logits_of(model, ids[None], fixed)
                    values.append(kl64(teacher, student))
            numeric = (values[0] - values[1]) / 2e-2
            exact = tables[side][0].grad[entry][coordinate].item()
            assert exact == pytest.approx(numeric, rel=2e-2, abs=1e-5)
            checked += abs(exact) > 1e-4
    assert checked >= 3


def kl64(teacher, student):
    return float(finetune.per_token_kl(teacher.double(), student.double()).mean())


def test_positions_without_codes_have_no_kl(make_model, prompt):
    model = make_model()
    tuner = tuner_of(model, LoopVQConfig(bits=0.5), torch.stack([prompt(160), prompt(160, seed=1)]))
    with torch.no_grad():
        kl = tuner.sequence_kl(tuner.train[0], random_tables(tuner))
    assert kl[:80].abs().max() < 1e-5 and kl[80:].mean() > 1e-3
    assert tuner.blind == 80


def calibrated(model, prompt, directory=None, **changes):
    config = LoopVQConfig(**{**dict(bits=1, recent_window=16, sequences=8, sequence_length=96, epochs=2,
                             learning_rate=0.02, kmeans_iterations=10, kmeans_vectors=512), **changes})  # fmt: skip
    sequences = torch.stack([prompt(96, seed=i) for i in range(8)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "half of the codebooks")
        return calibration.fit(model, config, sequences, fingerprint="f", resume_dir=directory, progress=False)


def test_finetuning_lowers_held_out_kl_and_keeps_the_best_epoch(make_model, prompt):
    # Random models have nothing to generalize over: held-out KL falls a little, training KL clearly.
    books, report = calibrated(make_model(), prompt, epochs=3, learning_rate=0.005, encoder_metric="none")
    assert report.held_out[report.best_epoch] == min(report.held_out) < report.held_out[0]
    assert sum(report.losses[-6:]) < 0.9 * sum(report.losses[:6])
    assert len(report.losses) == 3 * 6 and len(report.held_out) == 4
    assert report.early_kl < 1e-5
    assert sum(report.step_share["key"]) == pytest.approx(1)
    assert books[0].key_table.dtype == torch.int16


def test_the_fisher_metric_lowers_the_kl_of_kmeans(make_model, prompt):
    """Of several models together: a single one may go either way, on another processor too."""
    total = {"none": 0.0, "fisher": 0.0}
    for seed in range(5):
        model = make_model(seed)
        with torch.no_grad():  # a model that hardly listens to its first loops: their coordinates matter little
            for layer in model.model.layers:
                layer.input_layernorm.weight *= torch.linspace(0.1, 3, 64)
        for metric in total:
            total[metric] += calibrated(model, prompt, epochs=0, encoder_metric=metric)[1].held_out[0]
    assert total["fisher"] < 0.98 * total["none"]


def test_same_seed_gives_the_same_artifact_and_leaves_the_model_alone(make_model, prompt):
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    a, _ = calibrated(model, prompt)
    b, _ = calibrated(model, prompt)
    for x, y in zip(a, b):
        assert torch.equal(x.key_table, y.key_table) and torch.equal(x.value_table, y.value_table)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.training and all(p.requires_grad for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    c, _ = calibrated(model, prompt, seed=1)
    assert not torch.equal(a[0].key_table, c[0].key_table)


def test_interrupted_calibration_resumes_to_the_same_artifact(make_model, prompt, tmp_path, monkeypatch):
    model = make_model()
    whole, whole_report = calibrated(model, prompt, epochs=3)
    original, calls = Finetuner.sequence_kl, []

    def dies(self, ids, tables):
        calls.append(1)
        if len(calls) == 2 + 6 + 2 + 3:  # in the second epoch
            raise KeyboardInterrupt
        return original(self, ids, tables)

    monkeypatch.setattr(Finetuner, "sequence_kl", dies)
    with pytest.raises(KeyboardInterrupt):
        calibrated(model, prompt, tmp_path, epochs=3)
    monkeypatch.setattr(Finetuner, "sequence_kl", original)
    monkeypatch.setattr(calibration, "collect", None)  # k-means must not run again
    resumed, report = calibrated(model, prompt, tmp_path, epochs=3)
    assert report.losses == whole_report.losses and report.held_out == whole_report.held_out
    for x, y in zip(whole, resumed):
        assert torch.equal(x.key_table, y.key_table) and torch.equal(x.value_table, y.value_table)


def test_resume_refuses_another_calibration(make_model, prompt, tmp_path):
    model = make_model(num_hidden_layers=1)
    calibrated(model, prompt, tmp_path, epochs=0)
    config = LoopVQConfig(bits=0.5, recent_window=16, sequences=8, sequence_length=96, epochs=0)
    with pytest.raises(ValueError, match="epochs was|sequences was|bits was"):
        calibration.fit(model, config, torch.stack([prompt(96)] * 2), fingerprint="f", resume_dir=tmp_path)


def test_step_size_is_chosen_on_held_out_kl(make_model, prompt):
    _, report = calibrated(make_model(num_hidden_layers=1), prompt, epochs=1, learning_rate="auto")
    assert set(report.probes) == {"0.003", "0.01", "0.03"}
    assert report.learning_rate == float(min(report.probes, key=report.probes.get))


def test_nan_activations_are_refused(make_model, prompt):
    model = make_model(num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] = float("nan")
    config = LoopVQConfig(recent_window=16, sequences=2, sequence_length=96, epochs=0)
    with pytest.raises(ValueError, match="NaN or Inf in the keys of layer 0, loop step 0"):
        calibration.fit(model, config, torch.stack([prompt(96)] * 2), fingerprint="f", progress=False)


def test_too_short_sequences_are_refused(make_model, prompt):
    with pytest.raises(ValueError, match="at least 88 tokens"):
        calibration.fit(make_model(), LoopVQConfig(), torch.stack([prompt(80)] * 4), fingerprint="f", progress=False)


def test_too_few_effective_points_are_reported(make_model, prompt):
    config = LoopVQConfig(bits=1, recent_window=16, sequences=2, sequence_length=96, epochs=0, kmeans_vectors=30)
    with pytest.warns(UserWarning, match="effective points"):
        calibration.fit(
            make_model(), config, torch.stack([prompt(96), prompt(96, seed=1)]), fingerprint="f", progress=False
        )


def test_models_without_loops_are_refused():
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                         num_attention_heads=2, vocab_size=11))  # fmt: skip
    with pytest.raises(TypeError, match="looped models"):
        LoopSpec.of(llama)
