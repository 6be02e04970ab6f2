"""Fused passes of Ouro: the same numbers, few launches, and weights that stay what they were."""

import copy
import os
import re
from collections import Counter

import pytest
import torch
from launches import count_as_on_a_gpu
from safetensors.torch import load_file
from test_graphs import with_graphs
from torch import nn

from hf_lowbit import LoopVQCache
from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.models.ouro import OuroForCausalLM
from hf_lowbit.models.ouro import fused as fused_module
from hf_lowbit.models.ouro.fused import merged_weight


interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


def state(model):
    return model.model.fused_decode


@torch.no_grad()
def steps(model, backend, prompt_ids, count, **options):
    """Outputs of a prompt and ``count`` single tokens, and the cache."""
    state(model).backend = backend
    cache = LoopVQCache(model)
    outputs = [model(prompt_ids, **{CACHE_ARG: cache})]
    for i in range(count):
        token = torch.full((len(prompt_ids), 1), i % 80 + 1)
        outputs.append(model(token, **{CACHE_ARG: cache}, **options))
    return outputs, cache


def linears(model):
    for layer in model.model.layers:
        yield layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj
        yield layer.mlp.gate_proj, layer.mlp.up_proj


def is_packed(model):
    return all(merged_weight(some) is not None for some in linears(model))


@pytest.mark.parametrize(
    "sizes",
    [dict(), dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, hidden_size=72, intermediate_size=52)],
    ids=["plain", "gqa"],
)
@pytest.mark.parametrize(
    ("backend", "few_rows", "count"),
    [
        ("reference", 0, 20),
        ("reference", 2, 20),
        pytest.param("triton", 0, 10, marks=interpreted),
    ],
)
def test_steps_equal_those_of_the_layers(backend, few_rows, count, sizes, make_coded_model, prompt):
    model = make_coded_model(**sizes)
    state(model).few_rows = few_rows
    ids = torch.stack([prompt(87), prompt(87, 1)])  # the first token fills a page
    expected, plain_cache = steps(model, "off", ids, count)
    assert "off" in state(model).problem
    found, cache = steps(model, backend, ids, count)
    assert state(model).problem is None and is_packed(model)
    assert cache.coded_tokens == plain_cache.coded_tokens and min(cache.coded_tokens) >= 16
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.logits, b.logits, atol=2e-4, rtol=2e-4)
    for a, b in zip(cache._stores, plain_cache._stores):
        torch.testing.assert_close(a.window, b.window, atol=2e-4, rtol=2e-4)


def test_roundings_are_those_of_the_layers(make_coded_model, prompt):
    """In bf16 one rounding more or less would be felt at once; the order of sums may touch a last bit now and then."""
    model = make_coded_model(num_hidden_layers=1, total_ut_steps=4).to(torch.bfloat16)
    expected, _ = steps(model, "off", prompt(20)[None], 8)
    found, _ = steps(model, "reference", prompt(20)[None], 8)
    a, b = (torch.cat([out.logits for out in outs[1:]]).float() for outs in (found, expected))
    assert (a - b).norm() < 2e-3 * b.norm()


@pytest.mark.parametrize(
    "options",
    [dict(output_hidden_states=True), dict(output_loop_states=True), dict(exit_threshold=0.5), dict(exit_at_step=1)],
    ids=str,
)
def test_everything_a_forward_can_return(options, make_coded_model, prompt):
    model = make_coded_model()
    expected, _ = steps(model, "off", prompt(20)[None], 2, **options)
    found, _ = steps(model, "reference", prompt(20)[None], 2, **options)
    for name in ("logits", "loop_hidden_states", "exit_gates"):
        torch.testing.assert_close(found[-1].get(name), expected[-1].get(name), atol=1e-4, rtol=1e-4)
    if "output_hidden_states" in options:
        assert len(found[-1].hidden_states) == 9
        for a, b in zip(found[-1].hidden_states, expected[-1].hidden_states, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


# -- launches ----------------------------------------------------------------------------------------------------------


def launches_per_layer_step(make_coded_model, prompt, monkeypatch, backend, rows=1, length=90, few_rows=0):
    """The difference of two depths, so that what happens once per loop drops out."""
    counts = []
    for depth in (1, 2):
        model = make_coded_model(num_hidden_layers=depth)
        with monkeypatch.context() as patch, torch.no_grad():
            launches = count_as_on_a_gpu(patch)
            state(model).backend, state(model).few_rows = backend, few_rows
            cache = LoopVQCache(model)
            model(prompt(length).expand(rows, -1), **{CACHE_ARG: cache})
            token = torch.full((rows, 1), 7)
            model(token, **{CACHE_ARG: cache})  # makes what later steps find
            with launches:
                model(token, **{CACHE_ARG: cache})
            counts.append(launches.names)
    return (len(counts[1]) - len(counts[0])) / 4, counts


@pytest.mark.parametrize("rows", [1, 3])
def test_at_most_nine_launches_per_layer_step(rows, make_coded_model, prompt, monkeypatch):
    count, (one, _) = launches_per_layer_step(make_coded_model, prompt, monkeypatch, "auto", rows)
    assert count <= 9
    kernels = ["vq_decode_attention", "rope_store", "swiglu"]
    assert all(one.count(name) == 4 for name in kernels) and one.count("norm_add_norm") == 8
    assert len(one) - 4 * 9 <= 32  # once per loop or token: embedding, RoPE's angles, lengths, norms, head


def test_few_rows_are_eight_launches_and_many_are_not(make_coded_model, prompt, monkeypatch):
    count, (one, _) = launches_per_layer_step(make_coded_model, prompt, monkeypatch, "auto", rows=2, few_rows=2)
    assert count <= 8 and one.count("few_rows_swiglu") == 4 and one.count("few_rows_linear") == 12
    count, (one, _) = launches_per_layer_step(make_coded_model, prompt, monkeypatch, "auto", rows=3, few_rows=2)
    assert "few_rows_linear" not in one and one.count("swiglu") == 4


def test_a_page_of_codes_is_one_launch_per_layer(make_coded_model, prompt, monkeypatch):
    # 8 sinks, 64 recent tokens: with the 88th token the second page leaves the window.
    count, (one, _) = launches_per_layer_step(make_coded_model, prompt, monkeypatch, "auto", length=86)
    assert one.count("vq_encode_pages") == 1 and count <= 9 + 1 / 4


def test_prompts_run_fused_with_q_k_and_v_apart(make_coded_model, prompt, monkeypatch):
    """Merged, keys and values that wait for their block's last step would keep the queries in memory."""
    counts = []
    for depth in (1, 2):
        model = make_coded_model(num_hidden_layers=depth)
        with monkeypatch.context() as patch, torch.no_grad():
            launches = count_as_on_a_gpu(patch)
            with launches:
                model(prompt(30)[None], **{CACHE_ARG: LoopVQCache(model)})
            counts.append(Counter(launches.names))
    layer = counts[1] - counts[0]  # of one layer, four loop steps
    assert layer["norm_add_norm"] == 8 and layer["swiglu"] == 4
    assert layer["mm"] == 24  # q, k, v, o_proj, gate and up in one, down_proj
    assert not {"silu", "rsqrt", "mean"} & set(layer)


def test_launches_overlap_in_steps_only(make_coded_model, prompt, monkeypatch):
    model, entered = make_coded_model(num_hidden_layers=1), []
    original = fused_module.overlapping_launches
    monkeypatch.setattr(fused_module, "overlapping_launches", lambda: entered.append(1) or original())
    steps(model, "reference", prompt(20)[None], 0)
    assert not entered
    steps(model, "reference", prompt(20)[None], 1)
    assert len(entered) == 4  # loop steps of one token


def test_the_counter_counts(make_coded_model, prompt, monkeypatch):
    count, _ = launches_per_layer_step(make_coded_model, prompt, monkeypatch, "off")
    assert count > 30  # in fp32; casts come on top in bf16


# -- weights -----------------------------------------------------------------------------------------------------------


def test_merged_weights_cost_nothing_and_change_nothing(make_coded_model, prompt, tmp_path):
    model = make_coded_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    steps(model, "reference", prompt(20)[None], 2)
    assert is_packed(model) and state(model).packings == 4
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path / "after")
    files = [load_file(tmp_path / place / "model.safetensors") for place in ("before", "after")]
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert (tmp_path / "before/model.safetensors").stat().st_size == (
        tmp_path / "after/model.safetensors"
    ).stat().st_size
    again = OuroForCausalLM.from_pretrained(tmp_path / "after")
    assert all(torch.equal(value, before[name]) for name, value in again.state_dict().items())
    torch.save(model, tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())


def test_moving_or_copying_the_model_merges_again(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    ids = prompt(20)[None]
    expected, _ = steps(model, "reference", ids, 2)
    clone = copy.deepcopy(model)
    assert is_packed(model) and not is_packed(clone)
    found, _ = steps(clone, "reference", ids, 2)
    assert is_packed(clone) and state(clone).packings == 4 and torch.equal(found[-1].logits, expected[-1].logits)
    moved = model.to(torch.float64).to(torch.float32)
    assert not is_packed(moved)
    found, _ = steps(moved, "reference", ids, 2)
    assert is_packed(moved) and torch.equal(found[-1].logits, expected[-1].logits)


def test_a_step_notices_weights_that_lie_where_they_lay_but_are_merged_no_more(make_coded_model, prompt):
    """As after model.cpu().cuda(), when the allocator hands out the same memory piece by piece."""
    model = make_coded_model(num_hidden_layers=1)
    _, cache = steps(model, "reference", prompt(20)[None], 1)
    packings = state(model).packings
    kept = []
    for some in linears(model):
        for linear in some:
            kept.append(linear.weight.data)
            linear.weight.data = torch.from_numpy(linear.weight.detach().numpy())
            assert linear.weight.data_ptr() == kept[-1].data_ptr() and linear.weight.storage_offset() == 0
    assert not is_packed(model)
    with torch.no_grad():
        model(torch.ones((1, 1), dtype=torch.long), **{CACHE_ARG: cache})
    assert is_packed(model) and state(model).packings == packings + 2


def test_training_goes_on_with_merged_weights(make_coded_model, prompt):
    ids = prompt(20)[None]
    losses = []
    for backend in ("off", "reference"):
        model = make_coded_model(num_hidden_layers=1)
        steps(model, backend, ids, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.train()
        for _ in range(3):
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:])) and losses[2] < losses[0]
    assert is_packed(model)
    model.eval()
    expected, _ = steps(copy.deepcopy(model), "off", ids, 2)
    found, _ = steps(model, "reference", ids, 2)  # reads the trained weights
    torch.testing.assert_close(found[-1].logits, expected[-1].logits, atol=1e-4, rtol=1e-4)


class Adapted(nn.Module):
    """A linear with a low-rank addition, as LoRA puts in place of a layer's own."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a, self.b = (
            nn.Linear(base.in_features, 4, bias=False),
            nn.Linear(4, base.out_features, bias=False),
        )

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_projections_that_are_not_plain_are_called(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    layer = model.model.layers[0]
    layer.self_attn.k_proj = Adapted(layer.self_attn.k_proj)
    seen = []
    layer.mlp.up_proj.register_forward_hook(lambda module, args, out: seen.append(out.shape) or 2 * out)
    expected, _ = steps(model, "off", prompt(20)[None], 4)
    for state(model).few_rows in (0, 1):
        seen.clear()
        found, _ = steps(model, "reference", prompt(20)[None], 4)
        assert state(model).problem is None and len(seen) == 4 * 5 and state(model).packings == 0
        torch.testing.assert_close(found[-1].logits, expected[-1].logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *args: None), "mlp has forward hooks"),
        (lambda model: setattr(model.model.norm, "forward", lambda x: 2 * x), "norm has .* forward of its own"),
        (lambda model: setattr(model.model.layers[0], "input_layernorm_2", nn.Identity()), "is a Identity"),
        (lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.GELU()), "GELU"),
        (lambda model: model.model.layers[0].input_layernorm.double(), "is torch.float64"),
        (lambda model: model.train(), "training"),
    ],
    ids=["hook", "forward", "class", "activation", "dtype", "training"],
)
def test_what_a_fused_step_would_skip_is_a_problem(change, reason, make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1, total_ut_steps=4)
    change(model)
    state(model).backend = "reference"
    embeds = model.model.embed_tokens(prompt(1)[None]).detach()
    with torch.no_grad():
        assert state(model).weights(model.model, embeds) is None
    assert re.search(reason, state(model).problem)


def test_gradients_autocast_and_cpus_run_the_layers(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    cache = LoopVQCache(model)
    token = prompt(1)[None]
    with torch.no_grad():
        model(prompt(20)[None], **{CACHE_ARG: cache})
        model(token, **{CACHE_ARG: cache})
    assert "cpu" in state(model).problem and not is_packed(model)
    state(model).backend = "reference"
    model(token, **{CACHE_ARG: cache})
    assert "gradients" in state(model).problem and not is_packed(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert state(model).weights(model.model, model.model.embed_tokens(token)) is None
    assert "autocast" in state(model).problem


# -- graphs ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_graphs_replay_fused_steps_and_forget_them_when_weights_move(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1)
    state(model).backend = "reference"
    cache, other = with_graphs(model), LoopVQCache(model)
    tokens = [torch.tensor([[i + 1]]) for i in range(6)]

    def turn(kept):
        model(prompt(20)[None], **{CACHE_ARG: kept})
        return torch.cat([model(token, **{CACHE_ARG: kept}).logits for token in tokens])

    found = turn(cache)
    assert cache._graphs.captures == 1 and state(model).problem is None  # merged at the prompt, before any step
    state(model).backend = "off"
    torch.testing.assert_close(turn(other), found, atol=1e-4, rtol=1e-4)
    model(tokens[0], **{CACHE_ARG: cache})
    model(tokens[0], **{CACHE_ARG: cache})
    assert cache._graphs.captures == 2  # not the graph of fused steps
    for layer in model.model.layers:  # as loading other weights would
        layer.mlp.up_proj.weight.data = layer.mlp.up_proj.weight.data.clone()
    state(model).backend = "reference"
    turn(other)  # merges again: what the first cache's graphs read may be freed
    replays = cache.graph_replays
    state(model).backend = "off"
    model(tokens[0], **{CACHE_ARG: cache})
    assert cache.graph_replays == replays
