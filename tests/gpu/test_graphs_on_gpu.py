"""Decode steps as real CUDA graphs, on the CUDA and on the Triton kernel."""

import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "loopvq"))

from loopvq_models import build_model, random_codebooks  # noqa: E402

from hf_lowbit import LoopVQCache, LoopVQConfig  # noqa: E402
from hf_lowbit.compat import CACHE_ARG  # noqa: E402
from hf_lowbit.loopvq import cache as cache_module  # noqa: E402


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def coded_model(head_dim=128, bits=0.5):
    return random_codebooks(build_model(head_dim=head_dim), LoopVQConfig(bits=bits)).to("cuda", torch.bfloat16)


@pytest.fixture(scope="module", params=[128, 64], ids=["head128", "head64"])
def model(request):
    """On Hopper, head_dim 128 takes the CUDA kernel and 64 the Triton kernel."""
    return coded_model(request.param)


def prompts(*counts):
    """Left-padded ids and mask of seeded rows."""
    ids, mask = torch.zeros(len(counts), max(counts), dtype=torch.long), torch.zeros(len(counts), max(counts))
    for i, count in enumerate(counts):
        ids[i, max(counts) - count :] = torch.randint(1, 89, (count,), generator=torch.Generator().manual_seed(i))
        mask[i, max(counts) - count :] = 1
    return ids.cuda(), mask.long().cuda()


def generate(model, cache, ids, mask, count, **options):
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, output_logits=True,
        return_dict_in_generate=True, **{CACHE_ARG: cache}, **options,
    )  # fmt: skip


def pair(model, **options):
    return LoopVQCache(model, cuda_graphs=False, **options), LoopVQCache(model, cuda_graphs=True, **options)


@pytest.mark.parametrize("counts", [(90,), (150, 97, 30, 1, 80)], ids=["one", "padded"])
def test_generate_gives_the_tokens_of_eager_steps(counts, model):
    ids, mask = prompts(*counts)
    eager, graphs = pair(model)
    expected, out = (generate(model, cache, ids, mask, 100) for cache in (eager, graphs))
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected.logits), atol=1e-3, rtol=1e-3)
    assert graphs.coded_tokens == eager.coded_tokens
    # Two kinds of steps in the first case, four in the second, of which each runs once before it is captured.
    assert graphs.graph_replays >= 99 - 4 and eager.graph_replays == 0


def test_beams(model):
    ids, mask = prompts(100, 100)
    eager, graphs = pair(model)
    expected, out = (generate(model, cache, ids, mask, 40, num_beams=3) for cache in (eager, graphs))
    assert torch.equal(out.sequences, expected.sequences)
    assert graphs.graph_replays > 30


def test_two_turns_with_one_cache(model):
    eager, graphs = pair(model)
    texts = []
    for cache in (eager, graphs):
        ids, mask = prompts(90)
        for _ in range(2):
            ids = generate(model, cache, ids, mask, 40).sequences
            ids = torch.cat([ids, prompts(30)[0]], dim=1)
            mask = torch.ones_like(ids)
        texts.append(ids)
    assert torch.equal(*texts)
    assert graphs.graph_replays > 60


def test_growing_codes(model, monkeypatch):
    monkeypatch.setattr(cache_module, "STEP_PAGES", 4)
    monkeypatch.setattr(LoopVQCache, "expect_length", lambda self, longest: None)
    ids, mask = prompts(90, 60)
    eager, graphs = pair(model)
    expected, out = (generate(model, cache, ids, mask, 200) for cache in (eager, graphs))
    assert torch.equal(out.sequences, expected.sequences)
    assert graphs._capacity > 20 and 120 < graphs.graph_replays < 190


def test_graphs_are_the_default_and_need_no_word(model):
    ids, mask = prompts(90)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=None, return_dict_in_generate=True
    )
    cache = getattr(out, CACHE_ARG)
    assert cache.uses_cuda_graphs and cache.graph_replays >= 27 and "cuda_graphs=True" in repr(cache)
    hopper = torch.cuda.get_device_capability()[0] == 9
    assert cache.backend == ("cuda" if hopper and model.config.head_dim == 128 else "triton")


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 3])
def test_a_replayed_step_waits_for_nothing(rows, model):
    cache = LoopVQCache(model, cuda_graphs=True)
    ids, mask = prompts(*[100 + 3 * i for i in range(rows)])
    model(ids, attention_mask=mask, **{CACHE_ARG: cache})
    token = torch.full((rows, 1), 7, device="cuda")
    for _ in range(40):  # every kind of step is captured
        model(token, **{CACHE_ARG: cache})
    before, mode = cache.graph_replays, torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(16):
            out = model(token, **{CACHE_ARG: cache})
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert cache.graph_replays == before + 16
    assert torch.isfinite(out.logits).all()


@torch.no_grad()
def test_many_steps_in_flight_keep_their_own_numbers(model):
    """Without a synchronization in between, the host runs ahead of the device and must not overwrite its lengths."""
    eager, graphs = pair(model)
    logits = []
    for cache in (eager, graphs):
        ids, mask = prompts(100)
        model(ids, **{CACHE_ARG: cache})
        token = ids[:, :1].clone()
        logits.append(torch.cat([model(token, **{CACHE_ARG: cache}).logits[:, -1] for _ in range(120)]))
    torch.testing.assert_close(logits[0], logits[1], atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_a_step_that_cannot_be_captured_falls_back(monkeypatch):
    model = coded_model()
    cache = LoopVQCache(model)
    ids, _ = prompts(100)
    expected = LoopVQCache(model, cuda_graphs=False)
    for kept in (cache, expected):
        model(ids, **{CACHE_ARG: kept})
    norm = model.model.layers[0].input_layernorm
    plain = norm.forward
    # A synchronization is what a capture does not allow.
    monkeypatch.setattr(norm, "forward", lambda x: plain(x) if bool((x == x).all()) else x)
    token = ids[:, :1].clone()
    model(token, **{CACHE_ARG: cache})
    with pytest.warns(UserWarning, match="without CUDA graphs"):
        model(token, **{CACHE_ARG: cache})
    for _ in range(10):
        out = model(token, **{CACHE_ARG: cache})
    for _ in range(12):
        want = model(token, **{CACHE_ARG: expected})
    torch.testing.assert_close(out.logits, want.logits, atol=1e-3, rtol=1e-3)
    assert cache.graph_replays == 0 and torch.cuda.current_stream() == torch.cuda.default_stream()
    healthy = LoopVQCache(coded_model(), cuda_graphs=True)  # the failed capture left the device usable
    del healthy
