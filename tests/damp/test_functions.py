"""Patched recurrence functions: reversible, invisible to stock caches, and never silently wrong."""

import functools
import types

import pytest
import torch
from damp_models import build_model, identity_plans, layouts, tokens
from transformers import DynamicCache

from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.damp.cache import DAMPStateCache
from hf_lowbit.damp.functions import is_patched, patch_delta_rules, unpatch_delta_rules
from hf_lowbit.damp.spec import FUNCTIONS, DeltaSpec
from hf_lowbit.damp.state import PackedState
from hf_lowbit_kernels import DampLayout, DampPlan


@pytest.fixture(params=["qwen3_5", "kimi_linear"])
def unpatched(request):
    """(model, modeling file, kind), with the stock functions in place."""
    model = build_model(request.param)
    [(modeling, kind)] = DeltaSpec.of(model).modelings
    unpatch_delta_rules(modeling, kind)
    yield model, modeling, kind
    unpatch_delta_rules(modeling, kind)


def functions(modeling, kind):
    return [getattr(modeling, name) for name in FUNCTIONS[kind]]


def test_patching_is_idempotent_and_reversible(unpatched):
    _, modeling, kind = unpatched
    stock = functions(modeling, kind)
    assert not is_patched(modeling, kind)
    patch_delta_rules(modeling, kind)
    once = functions(modeling, kind)
    patch_delta_rules(modeling, kind)
    assert is_patched(modeling, kind) and functions(modeling, kind) == once
    assert [f.__name__ for f in once] == [f.__name__ for f in stock]
    unpatch_delta_rules(modeling, kind)
    assert functions(modeling, kind) == stock
    unpatch_delta_rules(modeling, kind)
    assert functions(modeling, kind) == stock


def test_making_a_cache_patches_and_importing_does_not(unpatched):
    model, modeling, kind = unpatched
    assert not is_patched(modeling, kind)
    DAMPStateCache(model, plans=identity_plans(model), layouts=layouts(model))
    assert is_patched(modeling, kind)


def test_a_wrapper_around_a_wrapper(unpatched):
    """Calibration wraps the functions, too, with functools.wraps, whichever comes first."""
    _, modeling, kind = unpatched
    name = FUNCTIONS[kind][1]
    patch_delta_rules(modeling, kind)
    ours = getattr(modeling, name)

    @functools.wraps(ours)
    def outer(*args, **kwargs):
        return ours(*args, **kwargs)

    setattr(modeling, name, outer)
    assert not is_patched(modeling, kind)
    unpatch_delta_rules(modeling, kind)
    assert getattr(modeling, name) is outer  # not ours to take away
    setattr(modeling, name, ours)
    assert ours.__wrapped__ is not outer


@torch.no_grad()
def test_stock_caches_pass_through(unpatched):
    model, modeling, kind = unpatched
    ids = tokens(12, 2)

    def logits():
        cache = DynamicCache(config=model.config)
        pieces = (ids[:, :6], ids[:, 6:11], ids[:, 11:])
        return torch.cat([model(piece, **{CACHE_ARG: cache}).logits for piece in pieces], 1)

    before = logits()
    patch_delta_rules(modeling, kind)
    assert torch.equal(logits(), before)


@torch.no_grad()
def test_unpatching_under_a_used_cache_says_what_happened(unpatched):
    model, modeling, kind = unpatched
    cache = DAMPStateCache(model, plans=identity_plans(model), layouts=layouts(model))
    ids = tokens(8)
    model(ids[:, :6], **{CACHE_ARG: cache})
    unpatch_delta_rules(modeling, kind)
    with pytest.raises(RuntimeError, match="put back"):
        model(ids[:, 6:7], **{CACHE_ARG: cache})


@pytest.mark.parametrize("count", [1, 3])
def test_packed_sequences_are_refused(unpatched, count):
    _, modeling, kind = unpatched
    patch_delta_rules(modeling, kind)
    state = PackedState(DampPlan.identity(2, 8, 32), DampLayout(8, 32, high_rows=1))
    state.encode(torch.zeros(1, 2, 8, 32))
    x = torch.zeros(1, count, 2, 8)
    g = x if kind == "kda" else x[..., 0]
    function = functions(modeling, kind)[0 if count == 1 else 1]
    with pytest.raises(ValueError, match="cu_seqlens"):
        function(
            x, x, torch.zeros(1, count, 2, 32), g=g, beta=x[..., 0], initial_state=state, output_final_state=True,
            cu_seqlens=torch.tensor([0, count]),
        )  # fmt: skip


def test_an_unknown_modeling_file_is_refused():
    with pytest.raises(TypeError, match="torch_recurrent_gated_delta_rule"):
        patch_delta_rules(types.ModuleType("modeling_other"), "gdn")


@torch.no_grad()
def test_a_many_token_call_of_the_one_token_function_rounds_once(unpatched):
    """The models do not do that; if one ever does, the state must still be written."""
    _, modeling, kind = unpatched
    patch_delta_rules(modeling, kind)
    layout = DampLayout(8, 32, high_rows=0, low_bits=32)
    state = PackedState(DampPlan.identity(2, 8, 32), layout)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1, 2, 8, 32, generator=generator)
    state.encode(start)
    q, k = torch.randn(2, 1, 3, 2, 8, generator=generator)
    v = torch.randn(1, 3, 2, 32, generator=generator)
    g = -torch.rand(1, 3, 2, 8, generator=generator)
    g = g if kind == "kda" else g[..., 0]
    beta = torch.rand(1, 3, 2, generator=generator)
    step = functions(modeling, kind)[0]
    out, same = step(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)
    expected, final = step(q, k, v, g=g, beta=beta, initial_state=start, output_final_state=True)
    assert same is state and torch.equal(out, expected) and torch.equal(state.decode(), final)
