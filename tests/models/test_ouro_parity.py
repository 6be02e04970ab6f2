"""The port against the plain-PyTorch definition: values, hidden states, gradients."""

import ouro_reference as reference
import pytest
import torch


TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}  # fp32, logits of order one, a handful of layers


def reference_logits(model, ids, mask=None):
    weights = dict(model.named_parameters())
    states, gates, layers = reference.ouro_forward(weights, model.config, ids, mask)
    return states[-1] @ weights["lm_head.weight"].T, states, gates, layers


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["mha", "gqa2", "mqa"])
@pytest.mark.parametrize("steps", [1, 2, 4], ids=lambda t: f"T{t}")
def test_logits(make_model, ids, steps, kv_heads, attn):
    model = make_model(total_ut_steps=steps, num_key_value_heads=kv_heads, attn=attn)
    with torch.no_grad():
        expected, *_ = reference_logits(model, ids)
        torch.testing.assert_close(model(ids).logits, expected, **TOLERANCE)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, **TOLERANCE)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_left_padded_logits(make_model, ids, attn):
    model = make_model(total_ut_steps=3, attn=attn)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected, *_ = reference_logits(model, ids, mask)
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(logits[0, 5:], expected[0, 5:], **TOLERANCE)
    torch.testing.assert_close(logits[1], expected[1], **TOLERANCE)


def test_loop_states_gates_and_layer_outputs(make_model, ids):
    model = make_model(total_ut_steps=3, attn="eager")
    steps, layers = 3, model.config.num_hidden_layers
    with torch.no_grad():
        _, states, gates, layer_outputs = reference_logits(model, ids)
        out = model.model(ids, output_loop_states=True, output_hidden_states=True, output_attentions=True)
    assert out.loop_hidden_states.shape == (*ids.shape, steps, model.config.hidden_size)
    assert out.exit_gates.shape == (*ids.shape, steps)
    torch.testing.assert_close(out.loop_hidden_states, torch.stack(states, 2), **TOLERANCE)
    torch.testing.assert_close(out.exit_gates, torch.stack(gates, 2), **TOLERANCE)
    torch.testing.assert_close(out.last_hidden_state, states[-1], **TOLERANCE)

    assert len(out.hidden_states) == steps * layers + 1
    for got, expected in zip(out.hidden_states[:-1], layer_outputs):
        torch.testing.assert_close(got, expected, **TOLERANCE)
    assert out.hidden_states[-1] is out.last_hidden_state
    assert len(out.attentions) == steps * layers
    assert out.attentions[0].shape == (2, 4, 13, 13)


def test_nothing_extra_is_returned_unasked(make_model, ids):
    out = make_model()(ids)
    assert out.hidden_states is None and out.attentions is None
    assert out.loop_hidden_states is None and out.exit_gates is None


def test_return_dict_false_gives_a_tuple(make_model, ids):
    model = make_model()
    with torch.no_grad():
        logits, *_ = model(ids, return_dict=False, use_cache=False)
        torch.testing.assert_close(logits, model(ids).logits)


@pytest.mark.parametrize("keep", [1, 4, torch.tensor([0, 5])], ids=["last", "last4", "positions"])
def test_logits_to_keep(make_model, ids, keep):
    model = make_model()
    with torch.no_grad():
        full, part = model(ids).logits, model(ids, logits_to_keep=keep).logits
    torch.testing.assert_close(part, full[:, -keep:] if isinstance(keep, int) else full[:, keep])


def test_inputs_embeds(make_model, ids):
    model = make_model()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)
    with pytest.raises(ValueError, match="exactly one"):
        model()


@pytest.mark.parametrize("steps", [1, 3], ids=lambda t: f"T{t}")
def test_gradients_equal_the_plain_forward(make_model, ids, steps):
    model = make_model(total_ut_steps=steps).train()
    model(ids, labels=ids).loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    weights = dict(model.named_parameters())
    states, gates, _ = reference.ouro_forward(weights, model.config, ids)
    logits = reference.expected_logits(states, gates, weights["lm_head.weight"])
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # With one loop the gate has no effect on the loss: the reference computes a zero gradient, the port none.
    for name, gradient in expected.items():
        got = gradients.get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(got, gradient, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_gradient_is_the_finite_difference(make_model, ids):
    model = make_model(total_ut_steps=3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    direction = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}

    def loss(parameters):
        logits = torch.func.functional_call(model, parameters, (ids,)).logits.double()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")

    def shifted(shift):
        return loss({n: p.detach() + shift * direction[n] for n, p in model.named_parameters()})

    loss(dict(model.named_parameters())).backward()
    slope = sum((p.grad * direction[n]).sum() for n, p in model.named_parameters() if p.grad is not None)
    step = 1e-4
    with torch.no_grad():
        difference = (shifted(step) - shifted(-step)) / (2 * step)
    # RMSNorm computes in fp32 even in a float64 model: the loss (~60) is exact to ~1e-6, its slope to ~1e-2 of ~100
    torch.testing.assert_close(slope, difference, rtol=5e-3, atol=0.05)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing_changes_nothing(make_model, ids, reentrant):
    model = make_model(total_ut_steps=3).train()
    plain = model(ids, labels=ids)
    plain.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    out = model(ids, labels=ids)
    out.loss.backward()
    torch.testing.assert_close(out.loss, plain.loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_generate_in_training_mode_with_gradient_checkpointing(make_model, ids):
    # No backward pass, so the cache must survive: transformers 5.17 would drop it and continue from one token.
    model = make_model(total_ut_steps=2)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    model.train()
    model.gradient_checkpointing_enable()
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)


def test_compiles_without_graph_breaks(make_model, ids):
    model = make_model(total_ut_steps=2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids).logits)
