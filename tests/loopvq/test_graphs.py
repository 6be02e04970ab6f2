"""Decode steps as graphs, without a GPU: a replay is played by calling the captured function again.

What a real graph cannot see (host state, moved tensors) is checked at every replay.
"""

import copy
import warnings

import pytest
import torch
from loopvq_models import generate

from hf_lowbit import LoopVQCache
from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.errors import FallbackError
from hf_lowbit.evaluation.storage import _tensors
from hf_lowbit.graphs import StepGraphs
from hf_lowbit.loopvq import cache as cache_module


class HostGraphs(StepGraphs):
    """Captures and replays on the host. Like a graph's, its outputs stay where they are and are overwritten."""

    captures = 0
    cache = None

    def _find_problem(self):
        return self._hook_problem()

    def _warm_up(self, embeds, forward):
        return forward(embeds)

    def _addresses(self):
        owners = (self.cache._stores, self.cache._rope, self.cache._step, self._embeds)
        return {t.data_ptr() for owner in owners for t in _tensors(owner, set()) if t.numel()}

    def _capture(self, forward):
        self.captures += 1
        outputs, addresses, kind = forward(self._embeds), self._addresses(), self.cache._step.pages

        def replay():
            assert self._addresses() == addresses and self.cache._step.pages == kind
            for name, value in forward(self._embeds).items():
                outputs[name].copy_(value)

        return replay, outputs


def with_graphs(model, wanted=None, **options):
    cache = LoopVQCache(model, **options)
    cache._graphs = HostGraphs(model.model, wanted)
    cache._graphs.cache = cache
    return cache


@pytest.fixture
def small_growth(monkeypatch):
    monkeypatch.setattr(cache_module, "STEP_PAGES", 6)


def same_codes(one, other):
    assert one.coded_tokens == other.coded_tokens and max(one.coded_tokens) > 0
    for a, b in zip(one._stores, other._stores):
        assert torch.equal(a.window, b.window)
        for row, coded in enumerate(one.coded_tokens):
            assert torch.equal(a.codes[:, :, row, : coded // 8], b.codes[:, :, row, : coded // 8])


def test_rows_of_every_phase_over_many_pages_equal_eager_steps(make_coded_model, prompt, small_growth):
    model = make_coded_model(num_hidden_layers=1)
    rows = [prompt(n, seed=n) for n in (150, 97, 30, 1, 80)]
    eager, graphs = LoopVQCache(model), with_graphs(model)
    for cache in (eager, graphs):
        cache.expect_length = lambda longest: None  # so that codes grow step by step
    expected, logits = generate(model, rows, 200, eager)
    tokens, found = generate(model, rows, 200, graphs)
    assert torch.equal(tokens, expected) and torch.equal(found, logits)
    same_codes(graphs, eager)
    counted = graphs._graphs
    assert graphs._capacity > 2 * 6  # it grew several times, and only then were graphs captured again
    assert 199 - 30 < counted.replays < 199 and counted.captures <= 20


@pytest.mark.parametrize("case", [dict(bits=0.25), dict(loop_group_size=2, encoder_metric="none")], ids=str)
def test_one_row_equals_eager_steps(case, make_coded_model, prompt):
    model = make_coded_model(**case)
    eager, graphs = LoopVQCache(model), with_graphs(model)
    expected, logits = generate(model, [prompt(60)], 120, eager)
    tokens, found = generate(model, [prompt(60)], 120, graphs)
    assert torch.equal(tokens, expected) and torch.equal(found, logits)
    same_codes(graphs, eager)
    # Two kinds of steps, with and without a page; generate() said how long it gets, so that nothing grew in between.
    assert graphs._graphs.captures == 2 and graphs.graph_replays == 119 - 2


def test_beams_replay(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    results = []
    for cache in (LoopVQCache(model), with_graphs(model)):
        results.append(generate(model, [prompt(90), prompt(90, 1)], 40, cache, num_beams=3)[0])
    assert torch.equal(*results)
    assert cache.graph_replays > 30 and cache._graphs.captures == 2


def test_two_turns_and_everything_that_changes_a_cache_between_steps(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)

    @torch.no_grad()
    def conversation(cache):
        logits = []

        def steps(rows, count):
            for i in range(count):
                token = (torch.arange(rows) * 7 + i).remainder(80)[:, None] + 1
                logits.append(model(token, **{CACHE_ARG: cache}).logits)

        def turn(rows, count):
            model(torch.stack([prompt(count, seed=i) for i in range(rows)]), **{CACHE_ARG: cache})

        turn(3, 100)
        steps(3, 20)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        steps(3, 10)
        turn(3, 30)
        steps(3, 10)
        cache.crop(-4)
        steps(3, 10)
        cache.batch_select_indices(torch.tensor([2, 1]))
        steps(2, 10)
        cache.batch_repeat_interleave(2)
        steps(4, 10)
        before = len(logits)
        clone = copy.deepcopy(cache)
        steps(4, 4)
        if isinstance(clone._graphs, HostGraphs):
            clone._graphs.cache = clone
        cache = clone
        steps(4, 4)
        assert all(torch.equal(a, b) for a, b in zip(logits[before:], logits[before + 4 :]))
        return logits, cache

    expected, _ = conversation(LoopVQCache(model))
    cache = with_graphs(model)
    logits, _ = conversation(cache)
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))
    assert cache.graph_replays > 40
    cache.reset()
    assert cache._graphs.nbytes == 0 and not cache._graphs._captured


@torch.no_grad()
def test_outputs_are_not_overwritten_by_later_steps(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    cache = with_graphs(model)
    model(prompt(20)[None], **{CACHE_ARG: cache})
    outs = [model.model(torch.tensor([[i + 1]]), **{CACHE_ARG: cache}).last_hidden_state for i in range(6)]
    copies = [out.clone() for out in outs]
    model(torch.tensor([[9]]), **{CACHE_ARG: cache})
    assert cache.graph_replays == 6
    assert all(torch.equal(a, b) for a, b in zip(outs, copies)) and not torch.equal(outs[4], outs[5])


@torch.no_grad()
@pytest.mark.parametrize(
    "rule",
    [dict(exit_threshold=0.5), dict(use_weighted_exit=True), dict(exit_at_step=1), dict(output_loop_states=True)],
    ids=str,
)
def test_exit_rules_are_captured_apart(rule, make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    eager, graphs = LoopVQCache(model), with_graphs(model)
    for cache in (eager, graphs):
        model(prompt(90)[None], **{CACHE_ARG: cache})
    for i in range(12):
        options = rule if 4 <= i < 8 else {}
        a, b = (
            model(torch.tensor([[i + 1]]), output_hidden_states=i > 8, **{CACHE_ARG: cache}, **options)
            for cache in (eager, graphs)
        )
        assert torch.equal(a.logits, b.logits)
        if "output_loop_states" in options:
            assert torch.equal(a.loop_hidden_states, b.loop_hidden_states) and torch.equal(a.exit_gates, b.exit_gates)
        if i > 8:
            assert len(b.hidden_states) == 5 and all(map(torch.equal, a.hidden_states, b.hidden_states))
    assert graphs.graph_replays > 6


@torch.no_grad()
def test_other_weights_or_hooks_drop_the_graphs(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    cache = with_graphs(model)

    def turn(count=3):
        model(prompt(20)[None], **{CACHE_ARG: cache})
        for i in range(count):
            model(torch.tensor([[i + 1]]), **{CACHE_ARG: cache})

    turn()
    turn()
    assert cache._graphs.captures == 1  # a prompt in between changes nothing
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight.data = mlp.up_proj.weight.data.clone()
    turn()
    assert cache._graphs.captures == 2
    weight = model.model.embed_tokens.weight  # as model.to() does: seen at the next step, without a prompt
    weight.data = weight.data.clone()
    for _ in range(2):
        model(torch.tensor([[5]]), **{CACHE_ARG: cache})
    assert cache._graphs.captures == 3

    seen = []
    handle = mlp.register_forward_hook(lambda *args: seen.append(1))
    turn(5)
    assert not cache.uses_cuda_graphs and "layers.0.mlp" in cache._graphs.problem
    assert len(seen) == 6 * 4
    handle.remove()
    turn()
    assert cache.uses_cuda_graphs


@torch.no_grad()
def test_hooks_that_transformers_installs_do_not_count(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    model(prompt(5)[None], output_hidden_states=True, use_cache=False)
    assert any(module._forward_hooks for module in model.modules())
    assert with_graphs(model).uses_cuda_graphs


@torch.no_grad()
def test_a_cache_of_another_model_is_refused_after_a_capture(make_coded_model, prompt):
    model, other = make_coded_model(num_hidden_layers=1), make_coded_model(num_hidden_layers=1, seed=1)
    cache = with_graphs(model)
    model(prompt(20)[None], **{CACHE_ARG: cache})
    for _ in range(4):
        model(torch.tensor([[5]]), **{CACHE_ARG: cache})
    assert cache.graph_replays
    with pytest.raises(ValueError, match="made for another model"):
        other(torch.tensor([[5]]), **{CACHE_ARG: cache})


def test_a_failed_capture_is_told_once_and_costs_nothing_but_speed(make_coded_model, prompt, monkeypatch):
    model = make_coded_model(num_hidden_layers=1)
    expected, logits = generate(model, [prompt(90)], 30, LoopVQCache(model))
    cache = with_graphs(model)

    def fail(self, forward):
        forward(self._embeds)
        raise RuntimeError("out of handles")

    monkeypatch.setattr(HostGraphs, "_capture", fail)
    with pytest.warns(UserWarning, match="without CUDA graphs.*out of handles") as caught:
        tokens, found = generate(model, [prompt(90)], 30, cache)
    assert len([w for w in caught if "CUDA graphs" in str(w.message)]) == 1
    assert torch.equal(tokens, expected) and torch.equal(found, logits)
    assert not cache.uses_cuda_graphs and cache.graph_replays == 0

    strict = with_graphs(model, wanted=True)
    with pytest.raises(FallbackError, match="out of handles"):
        generate(model, [prompt(90)], 30, strict)
    strict._graphs.wanted = None
    with torch.no_grad():
        model(torch.tensor([[5]]), **{CACHE_ARG: strict})  # nothing was left half-done


@torch.no_grad()
def test_what_cannot_be_captured_runs_eagerly_or_is_refused_when_asked_for(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    with pytest.raises(FallbackError, match="on cpu, and graphs need CUDA"):
        LoopVQCache(model, cuda_graphs=True)
    cache = LoopVQCache(model)
    assert not cache.uses_cuda_graphs and "cuda_graphs=False" in repr(cache)
    assert "asked for" in LoopVQCache(model, cuda_graphs=False)._graphs.problem

    cache = with_graphs(model, wanted=True)
    assert cache.uses_cuda_graphs and "cuda_graphs=True" in repr(cache)
    model(prompt(20)[None], **{CACHE_ARG: cache})
    token = torch.tensor([[5]])
    with torch.enable_grad(), pytest.raises(FallbackError, match="no_grad"):
        model(token, **{CACHE_ARG: cache})
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(FallbackError, match="autocast"):
        model(token, **{CACHE_ARG: cache})
    model.train()
    with pytest.raises(FallbackError, match="training mode"):
        model(token, **{CACHE_ARG: cache})
    model.eval()
    assert cache.get_seq_length() == 20
    cache._graphs.wanted = None
    for _ in range(4):
        with torch.enable_grad():
            model(token, **{CACHE_ARG: cache})
    assert cache.graph_replays == 0 and cache.get_seq_length() == 24


@torch.no_grad()
def test_a_model_that_promises_nothing_is_not_captured(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    cache = with_graphs(model)
    model(prompt(20)[None], **{CACHE_ARG: cache})
    run = cache.run
    cache.run = lambda embeds, mask, forward_chunk: run(embeds, mask, lambda *args: forward_chunk(*args))
    for _ in range(4):
        model(torch.tensor([[5]]), **{CACHE_ARG: cache})
    assert cache.graph_replays == 0


def test_inference_mode_and_no_grad_mix(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    cache = with_graphs(model)
    logits = []
    for i in range(40):
        with torch.inference_mode() if i % 3 == 0 else torch.no_grad():
            ids = prompt(90)[None] if i == 0 else torch.tensor([[i]])
            logits.append(model(ids, **{CACHE_ARG: cache}).logits[:, -1].clone())
    plain = LoopVQCache(model)
    with torch.no_grad():
        expected = [
            model(prompt(90)[None] if i == 0 else torch.tensor([[i]]), **{CACHE_ARG: plain}).logits[:, -1]
            for i in range(40)
        ]
    assert all(torch.equal(a, b) for a, b in zip(logits, expected)) and cache.graph_replays > 30


# -- room --------------------------------------------------------------------------------------------------------------


def test_room_is_what_generate_needs_and_no_more(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    cache = LoopVQCache(model)
    generate(model, [prompt(100)], 100, cache)
    assert cache._capacity == (199 - 8 - 64) // 8 + 1
    generate(model, [prompt(230)], 20, cache)
    assert cache._capacity == (249 - 8 - 64) // 8 + 1


def test_max_cache_len_reserves_once(make_coded_model, prompt, monkeypatch):
    model = make_coded_model(num_hidden_layers=1)
    grown = []
    monkeypatch.setattr("hf_lowbit.loopvq.store.LayerStore.grow", lambda self, pages: grown.append(pages))
    out = model.generate(
        prompt(90)[None], max_new_tokens=60, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
        cache_implementation="loopvq", cache_config={"max_cache_len": 150, "cuda_graphs": None},
    )  # fmt: skip
    cache = getattr(out, CACHE_ARG)
    assert cache._capacity == (150 - 8 - 64) // 8 + 1 and not grown
    report = cache.memory_report()
    assert report.codes_reserved == sum(store.pages.nbytes for store in cache._stores)
    with pytest.raises(ValueError, match="max_cache_len=0"):
        LoopVQCache(model, max_cache_len=0)


def test_no_warning_without_a_gpu(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, [prompt(20)], 4, LoopVQCache(model))
