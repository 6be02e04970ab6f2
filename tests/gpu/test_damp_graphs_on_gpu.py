"""Decode steps of DAMP caches as real CUDA graphs, with the Triton update."""

import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "damp"))

from damp_models import build_model, layouts, random_plans, tokens  # noqa: E402

from hf_lowbit.compat import CACHE_ARG  # noqa: E402
from hf_lowbit.damp import decode  # noqa: E402
from hf_lowbit.damp.cache import DAMPStateCache  # noqa: E402
from hf_lowbit.damp.full_precision import FullStateCache  # noqa: E402
from hf_lowbit.errors import FallbackError  # noqa: E402


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAMES = ["qwen3_5", "kimi_linear", "olmo_hybrid"]
_models = {}


def gpu_model(name, dtype=torch.float32):
    if (name, dtype) not in _models:
        _models[name, dtype] = model = build_model(name).to("cuda", dtype)
        if name == "kimi_linear" and dtype == torch.float32:
            model.set_experts_implementation("batched_mm")  # PyTorch's grouped product reads on the host but for bf16
    return _models[name, dtype]


@pytest.fixture(scope="module", autouse=True)
def free_models():
    yield
    _models.clear()


@pytest.fixture(autouse=True)
def small_places(monkeypatch):
    """Several graphs in a short text."""
    monkeypatch.setattr(decode, "SMALLEST", 16)


def pair(model, low_bits=8, **options):
    """A cache that runs eagerly and one that captures, or says why it cannot."""
    options |= dict(plans=random_plans(model), layouts=layouts(model, 2, low_bits), strict=True)
    return tuple(DAMPStateCache(model, cuda_graphs=graphs, **options) for graphs in (False, True))


def left_padded(*lengths):
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for i, n in enumerate(lengths):
        ids[i, max(lengths) - n :] = tokens(n, seed=i)[0]
    return ids.cuda(), (ids != 0).long().cuda()


def generate(model, ids, cache, count, **options):
    out = model.generate(
        ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, **{CACHE_ARG: cache}, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits, 1)


@torch.no_grad()
def feed(model, cache, ids, prompt):
    """Logits of a prompt's last token and of the tokens after it, one by one."""
    logits = [model(ids[:, :prompt], **{CACHE_ARG: cache}).logits[:, -1]]
    for i in range(prompt, ids.shape[1]):
        logits.append(model(ids[:, i : i + 1], **{CACHE_ARG: cache}).logits[:, -1])
    return torch.stack(logits, 1).float()


@pytest.mark.parametrize("name", NAMES)
def test_generate_gives_the_tokens_of_eager_steps(name):
    """Without rounding, which would turn a difference in the last bit into one of a code."""
    model = gpu_model(name)
    ids, mask = left_padded(21, 9, 1)
    eager, graphs = pair(model, low_bits=32)
    expected, found = (generate(model, ids, cache, 24, attention_mask=mask) for cache in (eager, graphs))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-3, rtol=1e-3)
    # 24, 32 and 48 places: each kind of step runs once before it is captured and replayed.
    assert graphs.graph_replays >= 23 - 3 and eager.graph_replays == 0
    assert graphs.get_seq_length() == eager.get_seq_length() == 44


@pytest.mark.parametrize("name", NAMES)
def test_packed_states_are_updated_as_in_eager_steps(name):
    model = gpu_model(name)
    ids = torch.cat([left_padded(20, 20)[0], tokens(30, rows=2, seed=5).cuda()], 1)
    eager, graphs = pair(model)
    exact, _ = pair(model, low_bits=32)
    expected, found, unrounded = (feed(model, cache, ids, 20) for cache in (eager, graphs, exact))
    assert (found - expected).abs().mean() < 0.05 * (expected - unrounded).abs().mean()
    assert graphs.graph_replays >= 20


def test_the_write_counters_of_stochastic_rounding_go_on_inside_of_the_graph():
    model = gpu_model("qwen3_5")
    eager, graphs = pair(model, rounding="stochastic", seed=3)
    ids = tokens(40, rows=2).cuda()
    expected, found = (feed(model, cache, ids, 20) for cache in (eager, graphs))
    steps = [layer.state.tensors["steps"].tolist() for cache in (eager, graphs) for layer in cache.delta_layers]
    assert steps == 6 * [[21, 21]] and graphs.graph_replays >= 12
    assert (found - expected).abs().mean() < 0.02 * expected.abs().mean()


def test_beams_and_a_second_turn():
    model = gpu_model("qwen3_5")
    ids, mask = left_padded(20, 20)
    eager, graphs = pair(model, low_bits=32)
    expected, found = (
        generate(model, ids, cache, 20, attention_mask=mask, num_beams=3)[0] for cache in (eager, graphs)
    )
    assert torch.equal(found, expected) and graphs.graph_replays >= 12
    texts = []
    for cache in pair(model, low_bits=32):
        text = ids[:1]
        for turn in (tokens(9, seed=2), tokens(1, seed=3)):
            text = generate(model, torch.cat([text, turn.cuda()], 1), cache, 12)[0]
        texts.append(text)
    assert torch.equal(*texts)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_steps_wait_for_nothing(name, monkeypatch):
    monkeypatch.setattr(decode, "SMALLEST", 64)  # one kind of step
    model = gpu_model(name)
    _, cache = pair(model)
    ids = tokens(24, rows=2).cuda()
    feed(model, cache, ids, 20)
    before, token = cache.graph_replays, ids[:, :1].clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(16):
            out = model(token, **{CACHE_ARG: cache})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.graph_replays == before + 16 and cache.get_seq_length() == 40
    assert torch.isfinite(out.logits).all()


@torch.no_grad()
def test_experts_are_captured_if_nothing_is_looked_up_on_the_host():
    model = gpu_model("qwen3_5_moe", torch.bfloat16)
    ids = tokens(40, rows=2).cuda()
    eager, graphs = pair(model)
    expected, found = (feed(model, cache, ids, 20) for cache in (eager, graphs))
    assert graphs.graph_replays >= 12
    assert (found - expected).abs().mean() < 0.05 * expected.abs().mean()
    implementation = model.config._experts_implementation
    model.set_experts_implementation("eager")
    try:
        with pytest.raises(FallbackError, match="experts_implementation='eager'"):
            model(ids[:, :1], **{CACHE_ARG: graphs})
        before = graphs.graph_replays
        graphs._graphs.wanted = None
        assert model(ids[:, :1], **{CACHE_ARG: graphs}).logits.isfinite().all() and graphs.graph_replays == before
    finally:
        model.set_experts_implementation(implementation)


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_fp32_states_replay_too(name):
    """The other side of comparisons of speed."""
    model = gpu_model(name)
    ids, mask = left_padded(20, 3)
    eager, graphs = (FullStateCache(model, cuda_graphs=asked) for asked in (False, True))
    expected, found = (generate(model, ids, cache, 16, attention_mask=mask) for cache in (eager, graphs))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-3, rtol=1e-3)
    assert graphs.graph_replays >= 10
