"""Early exit: which loop's hidden state each token uses, and what labels do."""

import ouro_reference as reference
import pytest
import torch

from hf_lowbit.models.ouro.modeling_ouro import exit_distribution


STEPS = 4
TOLERANCE = {"atol": 2e-5, "rtol": 1e-5}


@pytest.fixture
def case(make_model, ids):
    model = make_model(total_ut_steps=STEPS)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    states, gates, _ = reference.ouro_forward(weights, model.config, ids)
    head = weights["lm_head.weight"]
    logits = torch.stack([h @ head.T for h in states], dim=2)  # [B, n, T, vocab]
    return model, logits, states, gates, head


def at_threshold(logits, gates, threshold):
    step = reference.threshold_step(gates, threshold)
    assert len(step.unique()) > 1, "the case must mix several loops, or it tests nothing"
    return torch.take_along_dim(logits, step[..., None, None], dim=2)[:, :, 0]


MATRIX = {
    "default-last": ({}, lambda c: c[1][:, :, -1]),
    "step0": ({"exit_at_step": 0}, lambda c: c[1][:, :, 0]),
    "step2": ({"exit_at_step": 2}, lambda c: c[1][:, :, 2]),
    "step-last": ({"exit_at_step": 3}, lambda c: c[1][:, :, 3]),
    "step-out-of-range": ({"exit_at_step": 4}, lambda c: c[1][:, :, -1]),
    "step-negative": ({"exit_at_step": -1}, lambda c: c[1][:, :, -1]),
    "threshold0.5": ({"exit_threshold": 0.5}, lambda c: at_threshold(c[1], c[3], 0.5)),
    "threshold0.8": ({"exit_threshold": 0.8}, lambda c: at_threshold(c[1], c[3], 0.8)),
    "threshold0": ({"exit_threshold": 0.0}, lambda c: c[1][:, :, 0]),
    "threshold1": ({"exit_threshold": 1.0}, lambda c: c[1][:, :, -1]),
    "weighted": ({"use_weighted_exit": True}, lambda c: reference.expected_logits(c[2], c[3], c[4])),
    "step-before-threshold": ({"exit_at_step": 1, "exit_threshold": 0.0}, lambda c: c[1][:, :, 1]),
    "threshold-before-weighted": (
        {"exit_threshold": 0.5, "use_weighted_exit": True},
        lambda c: at_threshold(c[1], c[3], 0.5),
    ),
    "hub-rule-kills-weighted": (
        {"use_hub_exit_rule": True, "exit_threshold": 1.5, "use_weighted_exit": True},
        lambda c: c[1][:, :, -1],
    ),
}


@pytest.mark.parametrize("name", MATRIX)
def test_exit_matrix(case, ids, name):
    arguments, expected = MATRIX[name]
    with torch.no_grad():
        torch.testing.assert_close(case[0](ids, **arguments).logits, expected(case), **TOLERANCE)


@pytest.mark.parametrize("name", ["step2", "threshold0.5", "weighted"])
def test_base_model_returns_the_chosen_hidden_state(case, ids, name):
    arguments, expected = MATRIX[name]
    model = case[0]
    with torch.no_grad():
        out = model.model(ids, **arguments, output_hidden_states=True)
        torch.testing.assert_close(model.lm_head(out.last_hidden_state), expected(case), **TOLERANCE)
    assert out.hidden_states[-1] is out.last_hidden_state


def test_config_is_the_default_and_arguments_win(case, ids):
    model, logits, _, gates, _ = case
    with torch.no_grad():
        model.config.early_exit_threshold = 0.5
        torch.testing.assert_close(model(ids).logits, at_threshold(logits, gates, 0.5), **TOLERANCE)
        torch.testing.assert_close(model(ids, exit_threshold=1.0).logits, logits[:, :, -1], **TOLERANCE)
        model.config.early_exit_step = 1
        torch.testing.assert_close(model(ids).logits, logits[:, :, 1], **TOLERANCE)
        torch.testing.assert_close(model(ids, exit_at_step=0).logits, logits[:, :, 0], **TOLERANCE)
        torch.testing.assert_close(
            model(ids, exit_at_step=-1, exit_threshold=1.0).logits, logits[:, :, -1], **TOLERANCE
        )


def test_hub_rule_leaves_early_at_threshold_one_in_bf16(make_model, ids):
    # lam_0 = sigmoid(6.5) = 0.9985 rounds to 1.0 in bf16: the hub code leaves after loop 0 although the threshold is 1.
    model = make_model(total_ut_steps=STEPS, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.early_exit_gate.weight.zero_()
        model.model.early_exit_gate.bias.fill_(6.5)
        first, last = model(ids, exit_at_step=0).logits, model(ids, exit_at_step=STEPS - 1).logits
        assert not torch.equal(first, last)
        assert torch.equal(model(ids).logits, last)
        assert torch.equal(model(ids, use_hub_exit_rule=True).logits, first)


def test_all_loops_are_cached_whatever_the_exit(case, ids):
    model = case[0]
    with torch.no_grad():
        full = model(ids).logits
        from hf_lowbit.compat import get_cache

        cache = get_cache(model(ids[:, :8], exit_at_step=0))
        torch.testing.assert_close(model(ids[:, 8:], cache=cache).logits, full[:, 8:], **TOLERANCE)


def test_generate_takes_exit_arguments(case, ids):
    model, logits, *_ = case
    out = model.generate(ids, max_new_tokens=1, do_sample=False, exit_at_step=1)
    assert torch.equal(out[:, -1], logits[:, -1, 1].argmax(-1))


@pytest.mark.parametrize(
    "arguments", [{}, {"exit_at_step": 0}, {"exit_threshold": 0.3}], ids=["", "step", "threshold"]
)
def test_labels_give_the_expected_logits_and_their_loss(case, ids, arguments):
    model, _, states, gates, head = case
    expected = reference.expected_logits(states, gates, head)
    labels = ids.clone()
    labels[0, :4] = -100
    with torch.no_grad():
        out = model(ids, labels=labels, **arguments)
    torch.testing.assert_close(out.logits, expected, **TOLERANCE)
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, loss, **TOLERANCE)


def test_plain_last_loop_loss(case, ids):
    model, logits, *_ = case
    with torch.no_grad():
        out = model(ids, labels=ids, use_expected_loss=False)
    torch.testing.assert_close(out.logits, logits[:, :, -1], **TOLERANCE)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1, -1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, loss, **TOLERANCE)


@pytest.mark.parametrize("steps", [1, 2, 5], ids=lambda t: f"T{t}")
def test_exit_distribution_sums_to_one(steps):
    gates = 3 * torch.randn(3, 7, steps, generator=torch.Generator().manual_seed(1))
    p = exit_distribution(gates)
    assert p.shape == gates.shape and (p >= 0).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(3, 7))
    torch.testing.assert_close(p, torch.stack(reference.exit_probabilities(list(gates.unbind(-1))), -1))


def test_one_loop_ignores_every_exit_argument(make_model, ids):
    model = make_model(total_ut_steps=1)
    with torch.no_grad():
        plain = model(ids).logits
        for arguments in ({"exit_at_step": 0}, {"exit_threshold": 0.1}, {"use_weighted_exit": True}, {"labels": ids}):
            torch.testing.assert_close(model(ids, **arguments).logits, plain)
