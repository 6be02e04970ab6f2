"""Anchors and W of the segmented replay against a run of one token at a time."""

import inspect

import pytest
import torch
from damp_models import ARCHITECTURES, build_model, tokens
from torch import nn
from transformers import DynamicCache

from hf_lowbit.compat import cache_kwargs
from hf_lowbit.config import DAMPConfig
from hf_lowbit.damp import capture
from hf_lowbit.damp.spec import FUNCTIONS, DeltaSpec


pytestmark = pytest.mark.compat

CONFIG = DAMPConfig(
    sequences=3, prompt_tokens=9, decode_tokens=70, windows=(0, 30), window_tokens=40, anchors=(7, 20), horizon=16,
    continuation="text",
)  # fmt: skip


def changed(**changes):
    return DAMPConfig(**{**CONFIG.to_dict(), **changes})


@torch.no_grad()
def token_by_token(model, ids, monkeypatch):
    """Per layer: states after every token ``[T, B, HV, dk, dv]`` and the g it was made with ``[T, B, ...]``."""
    layers = DeltaSpec.of(model).layers
    logged = []
    for modeling, kind in DeltaSpec.of(model).modelings:
        for name in FUNCTIONS[kind]:

            def logging(*args, _original=getattr(modeling, name), **kwargs):
                logged.append(inspect.signature(_original).bind(*args, **kwargs).arguments["g"])
                return _original(*args, **kwargs)

            monkeypatch.setattr(modeling, name, logging)
    cache = DynamicCache(config=model.config)
    states = [[] for _ in layers]
    for t in range(ids.shape[1]):
        model(ids[:, t : t + 1], use_cache=True, **cache_kwargs(cache))
        for found, layer in zip(states, layers):
            found.append(cache.layers[layer.index].recurrent_states[0].clone())
    monkeypatch.undo()
    decays = [torch.cat(logged[i :: len(layers)], 1).transpose(0, 1) for i in range(len(layers))]
    return [torch.stack(found) for found in states], decays


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_a_run_of_single_tokens(architecture, monkeypatch):
    model = build_model(architecture)
    ids = tokens(79, rows=3)
    states, decays = token_by_token(model, ids, monkeypatch)
    # Segments of 11: anchors and horizons consist of several.
    monkeypatch.setattr(capture, "SEGMENT", 11)
    found = capture.collect(model, DeltaSpec.of(model), ids, CONFIG, batch_size=2, progress=False)
    assert len(found.layers) == 3 and found.per_sequence == 4 and found.domains == ["all"] * 3
    ends = [9 + window + anchor for window in (0, 30) for anchor in (7, 20)]
    for layer, expected, g in zip(found.layers, states, decays):
        assert layer.states.dtype == torch.float32
        for sequence in range(3):
            for j, (row, end) in enumerate(zip(found.anchors([sequence]).tolist(), ends)):
                # The state after `end` tokens; W from the decays of the 16 tokens that come next.
                state = expected[end - 1, sequence]
                atol = 1e-5 * max(1, state.abs().max().item())
                torch.testing.assert_close(layer.states[row], state, rtol=1e-5, atol=atol)
                a = g[end : end + 16, sequence].double().exp()
                weight = torch.ones_like(a[0])
                for i in range(1, 17):
                    weight += a[:i].square().prod(0)
                torch.testing.assert_close(layer.retention[row].double(), weight, rtol=1e-5, atol=0)
        # Both windows together have 80 updates; those that lie in both count twice.
        total = g[9:49].double().sum(0) + g[39:79].double().sum(0)
        torch.testing.assert_close(layer.log_decay.double(), total / 80, rtol=1e-4, atol=1e-6)
    assert {layer.retention.dim() for layer in found.layers} == {3 if architecture == "kimi_linear" else 2}


def test_cut_where_states_and_decays_begin_and_end():
    parts = list(capture.segments(CONFIG))
    assert parts[0][0] == 0 and parts[-1][1] == 79
    assert all(a[1] == b[0] for a, b in zip(parts, parts[1:]))
    assert {9, 16, 29, 32, 39, 45, 46, 49, 59, 62, 75, 79} <= {end for _, end in parts}
    long = list(capture.segments(DAMPConfig()))
    assert long[-1][1] == 1024 + 2048 + 1024 and max(end - start for start, end in long) == capture.SEGMENT


def test_the_model_is_left_as_it_was():
    model = build_model()
    spec = DeltaSpec.of(model)
    modeling, kind = spec.modelings[0]
    before = [getattr(modeling, name) for name in FUNCTIONS[kind]]
    model.train()
    model.lm_head.eval()
    capture.collect(model, spec, tokens(79, rows=3), CONFIG, progress=False)
    assert [getattr(modeling, name) for name in FUNCTIONS[kind]] == before
    assert model.training and not model.lm_head.training
    assert not any(layer.module._forward_pre_hooks for layer in spec.layers)


def test_bfloat16_model_keeps_fp32_states():
    model = build_model().bfloat16()
    found = capture.collect(model, DeltaSpec.of(model), tokens(79, rows=3), CONFIG, progress=False)
    states = found.layers[0].states
    assert states.dtype == torch.float32 and not torch.equal(states, states.bfloat16().float())


def test_generated_continuation():
    model = build_model()
    model.generation_config.eos_token_id = 0
    ids, spec = tokens(20, rows=3), DeltaSpec.of(model)
    short = dict(prompt_tokens=20, windows=(0,), window_tokens=24, decode_tokens=30, anchors=(8,), seed=3)
    state = torch.get_rng_state()
    whole = torch.cat(capture._continue(model, ids.split(2), 24, 3, _Bar()))
    assert torch.equal(torch.get_rng_state(), state)
    assert whole.shape == (3, 44) and torch.equal(whole[:, :20], ids) and (whole[:, 20:] != 0).all()
    assert not torch.equal(torch.cat(capture._continue(model, ids.split(2), 24, 4, _Bar())), whole)

    options = dict(batch_size=2, progress=False)
    generated = capture.collect(model, spec, ids, changed(continuation="generate", **short), **options)
    text = capture.collect(model, spec, whole, changed(**{**short, "decode_tokens": 24}), **options)
    assert torch.equal(generated.layers[1].states, text.layers[1].states)
    assert set(generated.seconds) == {"generating", "reference states"}


def test_prompts_of_one_token_can_be_continued():
    model = build_model("kimi_linear")
    [written] = capture._continue(model, [tokens(1, rows=2)], 5, 0, _Bar())
    assert written.shape == (2, 6)


class _Bar:
    def update(self, count):
        pass


def test_sequences_are_cut():
    config = changed(continuation="generate")
    assert capture.cut([list(range(30)), torch.arange(12)], config).tolist() == [list(range(9))] * 2
    assert capture.cut(torch.zeros(2, 100), CONFIG).shape == (2, 79)
    # What comes after the last window is not asked for.
    assert capture.cut(torch.zeros(2, 79), changed(decode_tokens=4000)).shape == (2, 79)


@pytest.mark.parametrize(
    "continuation, need", [("text", "needs 79.*70 up to the end of the last window"), ("generate", "needs 9")]
)
def test_too_short_sequences(continuation, need):
    with pytest.raises(ValueError, match=f"sequence 1 has 8 tokens and {need}"):
        capture.cut([torch.zeros(90), torch.zeros(8)], changed(continuation=continuation))


def test_no_sequences_and_wrong_labels():
    with pytest.raises(ValueError, match="got none"):
        capture.cut([], CONFIG)
    model = build_model()
    with pytest.raises(ValueError, match="2 domain labels for 3"):
        capture.collect(model, DeltaSpec.of(model), tokens(79, rows=3), CONFIG, domains=["a", "b"])


@pytest.mark.parametrize("architecture", ["qwen3_5", "kimi_linear"])
def test_states_that_are_not_finite(architecture):
    model = build_model(architecture)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[5] = float("inf")
    ids = tokens(79, rows=3).where(tokens(79, rows=3) != 5, 6)
    ids[1, 40] = 5
    with pytest.raises(ValueError, match="state of layer 0 is not finite on calibration sequence 1"):
        capture.collect(model, DeltaSpec.of(model), ids, CONFIG, progress=False)


def test_a_layer_that_goes_its_own_way(monkeypatch):
    model = build_model()
    spec = DeltaSpec.of(model)
    monkeypatch.setattr(spec.layers[1].module, "forward", lambda hidden_states, **kwargs: hidden_states)
    before = [getattr(spec.modelings[0][0], name) for name in FUNCTIONS["gdn"]]
    with pytest.raises(RuntimeError, match="layer 1 did not call .*use_kernels"):
        capture.collect(model, spec, tokens(79, rows=3), CONFIG, progress=False)
    assert [getattr(spec.modelings[0][0], name) for name in FUNCTIONS["gdn"]] == before


def test_models_without_such_layers():
    with pytest.raises(TypeError, match="has none"):
        DeltaSpec.of(nn.Linear(2, 2))
