"""Steps of hybrid caches as graphs, without a GPU: a capture records the operations, a replay repeats them."""

import copy
import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parent))  # hybrid_models.py, whatever pytest's import mode

from hybrid_models import NAMES, hybrid_model, tokens  # noqa: E402
from loopvq_models import generate  # noqa: E402
from tape import TapeGraphs, record_as_one  # noqa: E402

from hf_lowbit.compat import CACHE_ARG  # noqa: E402
from hf_lowbit.damp import state  # noqa: E402
from hf_lowbit.errors import FallbackError  # noqa: E402
from hf_lowbit.generation import make_cache  # noqa: E402
from hf_lowbit.loopvq import cache as cache_module  # noqa: E402
from hf_lowbit.loopvq import codebook  # noqa: E402


METHODS = {"codes": ("loopvq",), "both": ("loopvq", "damp")}


class HostGraphs(TapeGraphs):
    def held(self):
        stores = [tensor for store in self.cache._stores for tensor in (store.pages, store.window)]
        return [*stores, *self.cache._state_tensors()]


@pytest.fixture(autouse=True)
def one_operation_each(monkeypatch):
    for module, name in ((state, "damp_update"), (cache_module, "vq_decode_attention"), (codebook, "vq_encode_pages")):
        record_as_one(monkeypatch, module, name)


def with_graphs(model, wanted=None, **options):
    cache = make_cache(model, **options)
    cache._graphs = HostGraphs(model.model, wanted)
    cache._graphs.cache = cache
    return cache


@pytest.mark.compat
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_replayed_steps_equal_eager_ones(methods, name):
    model = hybrid_model(methods, name)
    if name == "qwen3_5_moe" or name == "qwen3_next":
        model.set_experts_implementation("grouped_mm")
    rows = [tokens(n, seed=n)[0] for n in (60, 41)]
    eager, graphs = make_cache(model), with_graphs(model)
    expected, logits = generate(model, rows, 40, eager)
    found, own = generate(model, rows, 40, graphs)
    assert graphs.graph_replays > 30 and graphs._graphs.captures <= 3
    assert torch.equal(found, expected)
    torch.testing.assert_close(own, logits, atol=1e-5, rtol=1e-5)
    assert graphs.coded_tokens == eager.coded_tokens
    for a, b in zip(graphs._state_tensors(), eager._state_tensors(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS)
def test_whatever_moves_states_between_steps_is_noticed(methods):
    model = hybrid_model(methods)

    @torch.no_grad()
    def story(cache):
        logits = []

        def feed(ids, pieces):
            logits.extend(model(x, **{CACHE_ARG: cache}).logits for x in ids.split(pieces, 1))

        feed(tokens(50, rows=2), [46, 1, 1, 1, 1])
        cache.reorder_cache(torch.tensor([1, 0]))
        feed(tokens(12, rows=2, seed=1), [1] * 4 + [4] + [1] * 4)
        cache.batch_repeat_interleave(2)
        feed(tokens(5, rows=4, seed=2), [1] * 5)
        logits.append(
            model(tokens(1, rows=4, seed=3), output_hidden_states=True, **{CACHE_ARG: cache}).hidden_states[2]
        )
        cache.reset()
        feed(tokens(45, seed=4), [40] + [1] * 5)
        return logits

    eager, graphs = story(make_cache(model)), (played := with_graphs(model)) and story(played)
    assert played.graph_replays >= 10
    for a, b in zip(graphs, eager, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    twin = copy.deepcopy(played)
    assert not twin._graphs._captured


def test_beams_replay():
    model = hybrid_model()
    results = []
    for cache in (make_cache(model), with_graphs(model)):
        results.append(generate(model, [tokens(40, seed=i)[0] for i in range(2)], 25, cache, num_beams=2)[0])
    assert torch.equal(*results) and cache.graph_replays > 15


def test_experts_that_are_looked_up_on_the_host_are_not_captured():
    model = hybrid_model(name="qwen3_5_moe")
    model.set_experts_implementation("eager")
    cache = with_graphs(model)
    generate(model, [tokens(30)[0]], 6, cache)
    assert cache.graph_replays == cache._graphs.captures == 0


def test_where_there_are_no_graphs_it_says_why():
    model = hybrid_model()
    cache = make_cache(model)
    assert not cache.uses_cuda_graphs
    with pytest.raises(FallbackError, match="cuda_graphs=True is not possible here"):
        make_cache(model, cuda_graphs=True)
    assert "slow reference path" in cache._graph_obstacle()
    wanted = with_graphs(model, wanted=True)
    ids = tokens(30)
    with torch.no_grad():
        model(ids[:, :28], **{CACHE_ARG: wanted})
        model(ids[:, 28:29], **{CACHE_ARG: wanted})
        with pytest.raises(FallbackError, match="no graph_key"):
            model(ids[:, 29:], output_hidden_states=True, **{CACHE_ARG: wanted})
        assert model(ids[:, 29:], **{CACHE_ARG: wanted}).logits.isfinite().all()
