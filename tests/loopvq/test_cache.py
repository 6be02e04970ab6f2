"""LoopVQCache against an independent decoding loop, and every operation transformers may ask of a cache."""

import copy
import pickle

import pytest
import torch
from launches import Launches
from oracle import Oracle

from hf_lowbit import LoopVQCache
from hf_lowbit.compat import CACHE_ARG


def oracle_of(model, window=64):
    codebooks = [layer.self_attn.loopvq for layer in model.model.layers]
    tables = {
        side: [torch.stack([cb.table(side, t) for t in range(cb.grouping.steps)]) for cb in codebooks]
        for side in ("key", "value")
    }
    weights = {k: v.float() for k, v in model.state_dict().items() if v.is_floating_point()}
    metric = None
    if codebooks[0].has_metric:
        metric = {side: [getattr(cb, f"{side}_metric").view(torch.float16) for cb in codebooks] for side in tables}
    return Oracle(weights, model.config, tables, metric, codebooks[0].grouping.steps_per_code, window)


def generate(model, rows, new_tokens, cache=None, **options):
    """Greedy continuation [B, new] of a list of token rows, left-padded; logits too."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
    cache = cache if cache is not None else LoopVQCache(model, **options)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True, **{CACHE_ARG: cache},
    )  # fmt: skip
    return out.sequences[:, longest:], torch.stack(out.logits, 1), cache


CASES = {
    "half-bit": dict(bits=0.5),
    "quarter-bit": dict(bits=0.25),
    "two-bit": dict(bits=2),
    "cq": dict(bits=0.5, loop_group_size=1, encoder_metric="none"),
    "paper": dict(bits=0.5, encoder_metric="none"),
    "pairs": dict(bits=1, loop_group_size=2),
    "one-step": dict(bits=1, total_ut_steps=1),
    "gqa": dict(bits=0.5, num_attention_heads=4),
    "six-steps": dict(bits=0.5, loop_group_size=2, total_ut_steps=6, num_hidden_layers=1),
    "head-96": dict(bits=0.5, head_dim=96),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_independent_loop(case, make_coded_model, prompt):
    model = make_coded_model(**CASES[case])
    ids = prompt(83)
    expected, expected_logits = oracle_of(model).generate(ids, 40, chunk=1000)
    tokens, logits, cache = generate(model, [ids], 40)
    assert cache.coded_tokens[0] > 0
    torch.testing.assert_close(logits[0], expected_logits, atol=2e-3, rtol=1e-3)
    assert torch.equal(tokens[0], expected)


def test_600_decoded_tokens_equal_the_independent_loop(make_coded_model, prompt):
    model = make_coded_model(num_hidden_layers=1, total_ut_steps=4)
    expected, _ = oracle_of(model).generate(prompt(20), 600, chunk=1000)
    tokens, _, cache = generate(model, [prompt(20)], 600)
    assert torch.equal(tokens[0], expected)
    assert cache.coded_tokens == [8 * ((619 - 8 - 64) // 8)]
    assert len(set(expected.tolist())) > 10  # a text stuck on one token would prove little


@pytest.mark.parametrize("chunk", [8, 50, 96])
def test_prefill_in_chunks_equals_the_loop_with_the_same_chunks(chunk, make_coded_model, prompt):
    model = make_coded_model()
    expected, expected_logits = oracle_of(model).generate(prompt(300), 30, chunk=chunk)
    tokens, logits, _ = generate(model, [prompt(300)], 30, prefill_chunk_size=chunk)
    torch.testing.assert_close(logits[0], expected_logits, atol=2e-3, rtol=1e-3)
    assert torch.equal(tokens[0], expected)


@pytest.mark.parametrize("chunk", [2048, 40])
def test_left_padded_rows_get_the_tokens_they_get_alone(chunk, make_coded_model, prompt):
    model = make_coded_model()
    rows = [prompt(n, seed=n) for n in (150, 97, 30, 1, 80)]
    tokens, _, cache = generate(model, rows, 90, prefill_chunk_size=chunk)
    for i, row in enumerate(rows):
        alone, _, single = generate(model, [row], 90, prefill_chunk_size=chunk)
        assert torch.equal(tokens[i], alone[0]), f"row of {len(row)} tokens"
        assert cache.coded_tokens[i] == single.coded_tokens[0]


def test_codes_are_written_once(make_coded_model, prompt):
    model = make_coded_model()
    _, _, cache = generate(model, [prompt(100)], 20)
    before = [store.codes[..., : cache.coded_tokens[0] // 8, :, :, :].clone() for store in cache._stores]
    step = torch.tensor([[5]])
    for _ in range(40):
        model(step, **{CACHE_ARG: cache})
    for store, old in zip(cache._stores, before):
        assert torch.equal(store.codes[:, :, :, : old.shape[3]], old)
    assert cache.coded_tokens[0] // 8 > before[0].shape[3]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 71, 72, 79, 80, 81, 87, 88, 89])
def test_window_borders(count, make_coded_model, prompt):
    model = make_coded_model()
    expected, _ = oracle_of(model).generate(prompt(count), 12, chunk=1000)
    tokens, _, cache = generate(model, [prompt(count)], 12)
    assert torch.equal(tokens[0], expected)
    held = count + 11
    assert cache.coded_tokens[0] == 8 * (max(0, held - 72) // 8)


def test_layers_share_what_a_pass_must_wait_for(make_coded_model, prompt):
    """What is counted on the device or sent from the host is made once a pass, not in every layer."""

    def waits(layers, ids, mask=None):
        model = make_coded_model(num_hidden_layers=layers)
        cache = LoopVQCache(model, prefill_chunk_size=96)
        with torch.no_grad(), Launches() as launches:
            model(ids, attention_mask=mask, **{CACHE_ARG: cache})
        return [launches.names.count(name) for name in ("nonzero", "tril", "argsort")]

    ids = torch.stack([prompt(250), prompt(250, seed=1)])
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    for given in (None, mask):
        assert waits(1, ids, given) == waits(3, ids, given)


def test_window_of_16_and_256(make_coded_model, prompt):
    model = make_coded_model()
    for window in (16, 256):
        expected, _ = oracle_of(model, window).generate(prompt(300), 20, chunk=1000)
        tokens, _, _ = generate(model, [prompt(300)], 20, recent_window=window)
        assert torch.equal(tokens[0], expected)


def test_several_turns_equal_one_prompt_in_the_same_pieces(make_coded_model, prompt):
    model = make_coded_model()
    first, _, cache = generate(model, [prompt(90)], 20)
    history = torch.cat([prompt(90), first[0], prompt(30, seed=5)])
    second, _, _ = generate(model, [history], 20, cache=cache)
    oracle = oracle_of(model)
    oracle.generate(prompt(90), 19, chunk=1000)
    expected, _ = oracle.generate(history[109:], 20, chunk=1000)
    assert torch.equal(second[0], expected)


def test_reorder_select_and_repeat_move_whole_rows(make_coded_model, prompt):
    model = make_coded_model()
    rows = [prompt(n, seed=n) for n in (140, 100, 60)]
    _, _, cache = generate(model, rows, 10)
    step = torch.tensor([[3], [4], [5]])
    expected = model(step, **{CACHE_ARG: copy.deepcopy(cache)}).logits

    swapped = copy.deepcopy(cache)
    swapped.reorder_cache(torch.tensor([2, 0, 0]))
    logits = model(step[[2, 0, 0]], **{CACHE_ARG: swapped}).logits
    torch.testing.assert_close(logits, expected[[2, 0, 0]], atol=1e-5, rtol=1e-5)

    picked = copy.deepcopy(cache)
    picked.batch_select_indices(torch.tensor([1]))
    torch.testing.assert_close(model(step[[1]], **{CACHE_ARG: picked}).logits, expected[[1]], atol=1e-5, rtol=1e-5)

    doubled = copy.deepcopy(cache)
    doubled.batch_repeat_interleave(2)
    again = model(step.repeat_interleave(2, 0), **{CACHE_ARG: doubled}).logits
    torch.testing.assert_close(again, expected.repeat_interleave(2, 0), atol=1e-5, rtol=1e-5)


def test_beam_search_keeps_rows_apart(make_coded_model, prompt):
    model = make_coded_model()
    ids = torch.stack([prompt(100), prompt(100, seed=1)])
    settings = dict(max_new_tokens=30, num_beams=3, do_sample=False, eos_token_id=None)
    both = model.generate(ids, cache_implementation="loopvq", **settings)
    for i in range(2):
        alone = model.generate(ids[i : i + 1], cache_implementation="loopvq", **settings)
        assert torch.equal(both[i], alone[0])


def test_crop_inside_the_window_and_refusal_beyond(make_coded_model, prompt):
    model = make_coded_model()
    _, _, cache = generate(model, [prompt(120)], 1)
    expected = model(torch.tensor([[9]]), **{CACHE_ARG: copy.deepcopy(cache)}).logits
    model(torch.tensor([[1, 2, 3]]), **{CACHE_ARG: cache})
    cache.crop(-3)
    assert cache.get_seq_length() == 120
    torch.testing.assert_close(model(torch.tensor([[9]]), **{CACHE_ARG: cache}).logits, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="written once"):
        cache.crop(-80)
    with pytest.raises(ValueError, match="written once"):
        cache.crop(-1000)
    assert cache.get_seq_length() == 121  # a refused crop changes nothing


def test_prompt_lookup_decoding_runs_and_crops(make_coded_model, prompt):
    model = make_coded_model()
    ids = prompt(20).repeat(6)[None]
    out = model.generate(
        ids, max_new_tokens=40, prompt_lookup_num_tokens=4, do_sample=False, eos_token_id=None,
        cache_implementation="loopvq",
    )  # fmt: skip
    assert out.shape == (1, 160)


def test_drafts_are_cut_to_what_can_be_cropped(make_coded_model, prompt, monkeypatch):
    """Look-up in a text that repeats itself proposes all 100 tokens, of which a random model takes few."""
    model, ids = make_coded_model(), prompt(120).repeat(2)[None]
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "cache_implementation": "loopvq"}
    removed, crop = [], LoopVQCache.crop
    monkeypatch.setattr(LoopVQCache, "crop", lambda self, n: removed.append(n) or crop(self, n))
    window = {"cache_config": {"recent_window": 16}}
    out = model.generate(ids, prompt_lookup_num_tokens=100, **window, **options)
    assert out.shape == (1, 270) and removed
    # Shorter than the window, drafts are as long as asked for.
    assert (
        model.generate(ids, prompt_lookup_num_tokens=100, **options | {"cache_implementation": "dynamic"}).shape[1]
        == 270
    )


def test_reset_forgets_everything(make_coded_model, prompt):
    model = make_coded_model()
    first, _, cache = generate(model, [prompt(120)], 10)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.memory_report().codes_reserved == 0
    again, _, _ = generate(model, [prompt(120)], 10, cache=cache)
    assert torch.equal(first, again)


def test_deepcopy_shares_codebooks_and_nothing_else(make_coded_model, prompt):
    model = make_coded_model()
    _, _, cache = generate(model, [prompt(120)], 2)
    clone = copy.deepcopy(cache)
    assert clone.codebooks[0] is cache.codebooks[0]
    assert clone._stores[0].codes.data_ptr() != cache._stores[0].codes.data_ptr()
    model(torch.tensor([[9]]), **{CACHE_ARG: clone})
    assert clone.get_seq_length() == cache.get_seq_length() + 1


@pytest.mark.parametrize(("bits", "group"), [(2, None), (1, None), (0.5, None), (0.25, None), (0.5, 1), (0.25, 2)])
def test_measured_bits_are_exact(bits, group, make_coded_model, prompt):
    model = make_coded_model(bits=bits, loop_group_size=group)
    _, _, cache = generate(model, [prompt(200), prompt(90)], 3)
    report = cache.memory_report()
    assert report.bits_per_element == bits
    assert report.codes == sum(
        s.codes[:, :, r, : c // 8].nbytes for s in cache._stores for r, c in enumerate(cache.coded_tokens)
    )
    assert report.total == report.codes_reserved + report.window + report.scratch + report.codebooks
    assert report.full_precision == (202 + 92) * 2 * 4 * 2 * 2 * 64 * 4
    assert str(report.codes_reserved) in str(report).replace(",", "")


def test_capacity_grows_by_shares(make_coded_model, prompt, monkeypatch):
    model = make_coded_model(num_hidden_layers=1)
    _, _, cache = generate(model, [prompt(90)], 1)
    grown = []
    original = type(cache._stores[0]).grow
    monkeypatch.setattr(
        type(cache._stores[0]), "grow", lambda self, pages: (grown.append(pages), original(self, pages))
    )
    for _ in range(240):
        model(torch.tensor([[7]]), **{CACHE_ARG: cache})
    assert 1 <= len(grown) <= 5


def test_construction_allocates_nothing(make_coded_model):
    cache = LoopVQCache(make_coded_model())
    report = cache.memory_report()
    assert report.codes_reserved == report.window == report.scratch == 0 and report.bits_per_element is None


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_row_without_tokens_is_refused(make_coded_model, prompt):
    model = make_coded_model()
    ids = torch.stack([prompt(5), prompt(5)])
    mask = torch.tensor([[1] * 5, [0] * 5])
    cache = LoopVQCache(model)
    with pytest.raises(ValueError, match=r"rows \[1\].*no token"):
        model(ids, attention_mask=mask, **{CACHE_ARG: cache})
    assert cache.get_seq_length() == 0
    model(ids, **{CACHE_ARG: cache})  # nothing was left half-done


def test_wrong_mask_batch_or_options_are_refused(make_coded_model, make_model, prompt):
    model = make_coded_model()
    cache = LoopVQCache(model)
    model(prompt(10)[None], **{CACHE_ARG: cache})
    with pytest.raises(ValueError, match="holds 1 rows and got 2"):
        model(torch.ones(2, 3, dtype=torch.long), **{CACHE_ARG: cache})
    with pytest.raises(ValueError, match=r"\[1, 13\]"):
        model(prompt(3)[None], attention_mask=torch.ones(1, 3), **{CACHE_ARG: cache})
    with pytest.raises(ValueError, match="multiple of 8"):
        LoopVQCache(model, recent_window=60)
    with pytest.raises(ValueError, match="at least 8"):
        LoopVQCache(model, prefill_chunk_size=4)
    with pytest.raises(ValueError, match="carries no LoopVQ codebooks"):
        LoopVQCache(make_model())


def test_a_cache_of_another_model_is_refused(make_coded_model, make_model, prompt):
    cache = LoopVQCache(make_coded_model())
    for other in (make_coded_model(seed=1), make_model()):
        with pytest.raises(ValueError, match="made for another model"):
            other(prompt(10)[None], **{CACHE_ARG: cache})


def test_unknown_options_and_empty_input_are_refused(make_coded_model, prompt):
    model = make_coded_model()
    with pytest.raises(ValueError, match=r"unknown options \['recentwindow'\]"):
        model.generate(prompt(10)[None], cache_implementation="loopvq", cache_config={"recentwindow": 64})
    for name in ("strict", "cuda_graphs"):
        with pytest.raises(ValueError, match=f"{name}='no' must be True or False"):
            model.generate(prompt(10)[None], cache_implementation="loopvq", cache_config={name: "no"})
    with pytest.raises(TypeError, match="pass a loaded one"):
        LoopVQCache(model.config)
    cache = LoopVQCache(model)
    model(prompt(10)[None], **{CACHE_ARG: cache})
    with pytest.raises(ValueError, match="no new tokens"):
        model(prompt(10)[None, :0], **{CACHE_ARG: cache})
    with pytest.raises(ValueError, match="the prompt has no tokens; give at least one"):
        model(prompt(10)[None, :0], **{CACHE_ARG: LoopVQCache(model)})
    with pytest.raises(ValueError, match="no rows; pass at least one"):
        model(torch.zeros(0, 10, dtype=torch.long), **{CACHE_ARG: LoopVQCache(model)})


def test_strict_refuses_the_reference_path(make_coded_model, prompt):
    model = make_coded_model()
    with pytest.raises(RuntimeError, match="strict=True"):
        model(prompt(10)[None], **{CACHE_ARG: LoopVQCache(model, strict=True, backend="reference")})


def test_a_failed_forward_pass_is_not_silently_continued(make_coded_model, prompt, monkeypatch):
    model = make_coded_model()
    cache = LoopVQCache(model)
    model(prompt(10)[None], **{CACHE_ARG: cache})
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(prompt(1)[None], **{CACHE_ARG: cache})
    with pytest.raises(RuntimeError, match="did not finish"):
        model(prompt(1)[None], **{CACHE_ARG: cache})
    cache.reset()
    model(prompt(10)[None], **{CACHE_ARG: cache})


def test_rotated_keys_are_refused(make_coded_model):
    cache = LoopVQCache(make_coded_model())
    with pytest.raises(TypeError, match="before RoPE"):
        cache.update(torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 1, 64), 0)


def test_pickling_is_refused_with_a_reason(make_coded_model):
    with pytest.raises(TypeError, match="cannot be pickled: it shares codebooks"):
        pickle.dumps(LoopVQCache(make_coded_model(bits=0.5)))
