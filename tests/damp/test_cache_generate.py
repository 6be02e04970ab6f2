"""`DAMPStateCache` under ``generate()``: padding, beams, several turns, pieces of a prompt, refusals."""

import pytest
import torch
from damp_models import ARCHITECTURES, build_model, identity_plans, layouts, random_plans, tokens
from transformers import DynamicCache

from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.damp.cache import DAMPStateCache


PAD = 0


def packed_cache(model, low_bits=8, **options):
    return DAMPStateCache(model, plans=random_plans(model), layouts=layouts(model, 2, low_bits), **options)


def generate(model, ids, cache, count=12, **options):
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD, **options}
    return model.generate(ids, max_new_tokens=count, **{CACHE_ARG: cache}, **options)


@torch.no_grad()
def greedy_by_hand(model, cache, pieces, count):
    """Feed the pieces ``[B, n]``, then ``count`` greedy tokens one by one; returns them ``[B, count]``."""
    for piece in pieces:
        logits = model(piece, **{CACHE_ARG: cache}).logits
    out = [logits[:, -1].argmax(-1, keepdim=True)]
    for _ in range(count - 1):
        out.append(model(out[-1], **{CACHE_ARG: cache}).logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(out, 1)


def left_padded(lengths):
    """Prompts of several lengths in one batch: (ids, attention_mask, the prompts)."""
    prompts = [tokens(n, seed=i)[0] for i, n in enumerate(lengths)]
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, prompt in zip(ids, prompts, strict=True):
        row[len(row) - len(prompt) :] = prompt
    return ids, (ids != PAD).long(), prompts


@pytest.mark.compat
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_those_of_a_hand_written_loop(name):
    model, ids = build_model(name), tokens(21, rows=2)
    out = generate(model, ids, packed_cache(model))
    assert torch.equal(out[:, 21:], greedy_by_hand(model, packed_cache(model), [ids], 12))


@pytest.mark.compat
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_left_padded_row_gets_the_tokens_it_gets_alone(name, rounding):
    model = build_model(name)
    ids, mask, prompts = left_padded([33, 1, 4, 18])
    options = {"rounding": rounding, "seed": 3}
    together = generate(model, ids, packed_cache(model, **options), attention_mask=mask)
    for row, prompt in zip(together, prompts, strict=True):
        alone = generate(model, prompt[None], packed_cache(model, **options))
        assert row[33:].tolist() == alone[0, len(prompt) :].tolist()


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_padding_leaves_no_trace_in_a_packed_state(name):
    model = build_model(name)
    ids, mask, prompts = left_padded([40, 7])
    padded, alone = packed_cache(model), packed_cache(model)
    model(ids, attention_mask=mask, **{CACHE_ARG: padded})
    model(prompts[1][None], **{CACHE_ARG: alone})
    for a, b in zip(padded.delta_layers, alone.delta_layers, strict=True):
        row, expected = a.state.decode()[1], b.state.decode()[0]
        # Chunks of 64 begin elsewhere in a padded row, so sums differ in the last bits and a code by one at most.
        assert (row - expected).abs().mean() < 1e-4 * expected.abs().mean()


@pytest.mark.compat
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_beams_with_quantization_off_are_the_stock_caches(name):
    model = build_model(name)
    ids, mask, _ = left_padded([12, 5])
    ours = DAMPStateCache(model, plans=identity_plans(model), layouts=layouts(model, 0, 32), backend="model")
    stock = DynamicCache(config=model.config)
    options = dict(num_beams=3, num_return_sequences=3, attention_mask=mask)
    assert torch.equal(generate(model, ids, ours, **options), generate(model, ids, stock, **options))


@pytest.mark.compat
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "olmo_hybrid"])
def test_a_beams_score_is_that_of_its_tokens_fed_to_a_cache_of_their_own(name, rounding):
    """So after every reordering each beam went on from the state of its own past, and no other."""
    model, ids, count = build_model(name), tokens(9, rows=2), 8
    options = {"rounding": rounding, "seed": 1}
    out = generate(
        model, ids, packed_cache(model, **options), count, num_beams=3, num_return_sequences=3, length_penalty=0.0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    parents = out.beam_indices[:, :count] % 3
    assert any(len(set(row.tolist())) > 1 for row in parents)  # beams did change places
    for i, sequence in enumerate(out.sequences):
        cache, total = packed_cache(model, **options), 0.0
        with torch.no_grad():
            logits = model(sequence[None, :9], **{CACHE_ARG: cache}).logits[0, -1]
            for token in sequence[9:]:
                total += logits.log_softmax(-1)[token].item()
                logits = model(token.view(1, 1), **{CACHE_ARG: cache}).logits[0, -1]
        assert total == pytest.approx(out.sequences_scores[i].item(), abs=5e-3)
    spread = out.sequences_scores.view(2, 3)
    assert (spread[:, 0] - spread[:, 2] > 0.02).all()  # or the tolerance would prove nothing


@pytest.mark.compat
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_several_turns_with_one_cache(name):
    model = build_model(name)
    turns = [tokens(n, seed=n) for n in (14, 1, 6)]
    cache, by_hand = packed_cache(model, 4), packed_cache(model, 4)
    text = turns[0][:, :0]
    pending = text
    for turn in turns:
        prompt = torch.cat([text, turn], 1)
        text = generate(model, prompt, cache, 5)
        # The newest token of a turn is fed with the next turn: generate() returns before it would be.
        new = greedy_by_hand(model, by_hand, [torch.cat([pending, turn], 1)], 5)
        assert torch.equal(text[:, prompt.shape[1] :], new)
        pending = new[:, -1:]
        assert cache.get_seq_length() == text.shape[1] - 1
    cache.reset()
    assert torch.equal(generate(model, turns[0], cache, 5), generate(model, turns[0], packed_cache(model, 4), 5))


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_a_prompt_in_pieces_is_rounded_after_each_piece(name):
    model = build_model(name)
    ids, mask, prompts = left_padded([30, 11])
    out = generate(model, ids, packed_cache(model, 4), attention_mask=mask, prefill_chunk_size=8)
    pieces = [prompts[0][None, i : i + 8] for i in range(0, 30, 8)]
    assert torch.equal(out[:1, 30:], greedy_by_hand(model, packed_cache(model, 4), pieces, 12))
    # Columns 24 to 30 are the second row's last piece; its first token is in column 19.
    pieces = [prompts[1][None, i:j] for i, j in ((0, 5), (5, 11))]
    assert torch.equal(out[1:, 30:], greedy_by_hand(model, packed_cache(model, 4), pieces, 12))


def test_sampling_with_several_sequences_per_prompt():
    model, ids = build_model("qwen3_5"), tokens(6)
    torch.manual_seed(0)
    out = generate(model, ids, packed_cache(model), 8, do_sample=True, num_return_sequences=4)
    assert out.shape == (4, 14) and len({tuple(row.tolist()) for row in out}) > 1


@pytest.mark.compat
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "olmo_hybrid"])
def test_assisted_decoding_is_refused(name):
    model, ids = build_model(name), tokens(6)
    for options in ({"assistant_model": build_model(name, seed=1)}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises((ValueError, RuntimeError), match="(?i)stateful|cannot drop tokens|crop"):
            generate(model, ids, packed_cache(model), **options)
