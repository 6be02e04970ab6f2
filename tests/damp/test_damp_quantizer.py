"""Calibrating at load and after it, saving, loading, refusing: the life of a DAMP artifact."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig


sys.path.insert(0, str(Path(__file__).parent))  # damp_models.py, whatever pytest's import mode

from damp_models import ARCHITECTURES, build_model, random_plans, tokens  # noqa: E402

import hf_lowbit  # noqa: E402
from hf_lowbit import DAMPConfig, DAMPStateCache, LoopVQConfig, LowBitConfig, artifact, generation  # noqa: E402
from hf_lowbit.compat import CACHE_ARG  # noqa: E402
from hf_lowbit.damp.attach import attach_damp, damp_tables, has_damp  # noqa: E402
from hf_lowbit.data import domain_sequences  # noqa: E402
from hf_lowbit.model_card import model_card  # noqa: E402
from hf_lowbit.quantizer import mark_quantized  # noqa: E402


CONFIG = dict(rows=2, sequences=3, prompt_tokens=8, decode_tokens=24, windows=(0,), window_tokens=24, anchors=(8, 16),
              horizon=8, continuation="text")  # fmt: skip
GREEDY = dict(max_new_tokens=24, do_sample=False, eos_token_id=None)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<eos>": 0, **{chr(32 + i): i + 1 for i in range(80)}}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>", padding_side="left")


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(0)
    return ["".join(chr(32 + int(i)) for i in torch.randint(80, (40,), generator=generator)) for _ in range(6)]


def with_tables(model, config=None, seed=0):
    """The model with random tables, as a calibration would leave it."""
    config = config or DAMPConfig(**CONFIG)
    attach_damp(model, config, random_plans(model, rows=config.rows, seed=seed))
    artifact.attach_fingerprint(model, artifact.weights_fingerprint(model))
    mark_quantized(model, LowBitConfig(damp=config, fingerprint=artifact.stored_fingerprint(model)))
    generation.enable(model)
    return model


@pytest.fixture(params=["qwen3_5", "kimi_linear"])
def model(request):
    return with_tables(build_model(request.param))


def assert_same_tables(a, b):
    for x, y in zip(damp_tables(a), damp_tables(b), strict=True):
        for (name, value), (_, other) in zip(x.named_buffers(), y.named_buffers(), strict=True):
            assert value.dtype == other.dtype and torch.equal(value, other), name


def run(model, ids=None, **kwargs):
    out = model.generate(tokens(9, rows=2) if ids is None else ids, return_dict_in_generate=True, **GREEDY, **kwargs)
    return out.sequences, getattr(out, CACHE_ARG)


# -- calibration -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    build_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def later(model_dir, tokenizer, texts):
    """A model that was calibrated after loading, and the report."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    report = hf_lowbit.calibrate(model, tokenizer, DAMPConfig(**CONFIG), dataset=texts, progress=False)
    return model, report


def test_calibration_at_load_equals_calibration_after_it(model_dir, later, tokenizer, texts):
    config = LowBitConfig(damp=DAMPConfig(**CONFIG), dataset=texts, tokenizer=tokenizer)
    at_load = AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=config)
    assert_same_tables(at_load, later[0])
    for model in (at_load, later[0]):
        hf_lowbit.assert_quantized(model)
        assert isinstance(run(model)[1], DAMPStateCache)
        assert model.config.quantization_config.damp == DAMPConfig(**CONFIG)
        assert model.config.quantization_config.dataset is None


def test_calibration_changes_no_weight_and_reports(model_dir, later):
    model, report = later
    plain = AutoModelForCausalLM.from_pretrained(model_dir)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert json.loads(json.dumps(report.to_dict()))["config"]["rows"] == 2 and report.summary()
    assert {tuple(t.perm_k.shape) for t in damp_tables(model)} == {(4, 16)}


def test_rows_are_resolved_before_they_are_saved(tokenizer, texts):
    model = build_model()
    hf_lowbit.calibrate(model, tokenizer, DAMPConfig(**{**CONFIG, "rows": None}), dataset=texts, progress=False)
    assert model.config.quantization_config.damp.rows == 2  # an eighth of 16


def test_calibrating_again_replaces_the_tables(tokenizer, texts):
    model = with_tables(build_model())
    before = [t.perm_k.clone() for t in damp_tables(model)]
    hf_lowbit.calibrate(model, tokenizer, DAMPConfig(**{**CONFIG, "rows": 3}), dataset=texts, progress=False)
    assert any(not torch.equal(a, t.perm_k) for a, t in zip(before, damp_tables(model)))
    assert artifact.describe(model)["layers"][0]["rows"] == 3


def test_domains_take_equal_parts(tokenizer, texts):
    labels = list("aabbcc")
    sequences, domains = domain_sequences(texts, labels, tokenizer, 3, 32)
    assert domains == ["a", "b", "c"] and sequences.shape == (3, 32)
    for row, own in zip(sequences, (texts[:2], texts[2:4], texts[4:])):
        assert any(row.tolist() == tokenizer(text)["input_ids"][:32] for text in own)
    with pytest.raises(ValueError, match="domain 'b': too little"):
        domain_sequences(texts, ["a", "a", "a", "b", "c", "c"], tokenizer, 6, 32)
    with pytest.raises(ValueError, match="cannot cover 3 domains"):
        domain_sequences(texts, labels, tokenizer, 2, 32)
    records = [{"text": text, "domain": label} for text, label in zip(texts, "aaabbb")]
    model = build_model()
    report = hf_lowbit.calibrate(
        model, tokenizer, DAMPConfig(**{**CONFIG, "sequences": 6}), dataset=records, progress=False
    )
    assert report.domains == {"a": 3, "b": 3}
    with pytest.raises(ValueError, match="1 of 6 calibration texts have a 'domain'"):
        mixed = [records[0], *texts[1:]]
        hf_lowbit.calibrate(model, tokenizer, DAMPConfig(**CONFIG), dataset=mixed, progress=False)


def test_what_damp_cannot_do_is_refused_and_leaves_nothing(tokenizer, texts, tmp_path):
    model = build_model("kimi_linear")  # its attention has no keys before RoPE to hand over
    stock, config = type(model), DAMPConfig(**CONFIG)

    def refused(error, message, config=config, **options):
        with pytest.raises(error, match=message):
            hf_lowbit.calibrate(model, tokenizer, config, **{"dataset": texts, "progress": False, **options})

    refused(ValueError, "extra texts", extra_dataset=texts)
    refused(ValueError, "cannot be resumed", resume_dir=tmp_path)
    refused(ValueError, "too little calibration data", dataset=["short"])
    refused(ValueError, "needs dataset=", dataset=None)
    refused(ValueError, "list of texts, or the path of a JSONL file of them, not int", dataset=5)
    refused(ValueError, "text 1 must be a string .* not list", dataset=["a", ["b"]])
    refused(ValueError, "takes a LoopVQConfig, DAMPConfig or LowBitConfig .* not dict", {"rows": 2})
    with pytest.raises(ValueError, match="needs the model's tokenizer.* not NoneType"):
        hf_lowbit.calibrate(model, None, config, dataset=texts, progress=False)
    refused(ValueError, "rows=33", DAMPConfig(**{**CONFIG, "rows": 33}))
    refused(TypeError, "Method 'damp' works on this model", LoopVQConfig())
    refused(TypeError, "Method 'damp' works on this model", LowBitConfig(damp=config, loopvq=LoopVQConfig()))
    assert type(model) is stock and not has_damp(model) and not hasattr(model, "hf_quantizer")
    with pytest.raises(RuntimeError, match="full-precision cache"):
        hf_lowbit.assert_quantized(model)


def test_a_model_without_delta_rules_is_refused_before_its_weights_are_read(tmp_path, tokenizer, texts, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=90, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    monkeypatch.setattr(LlamaForCausalLM, "_load_pretrained_model", lambda *a, **k: 1 / 0)
    config = LowBitConfig(damp=DAMPConfig(**CONFIG), dataset=texts, tokenizer=tokenizer)
    with pytest.raises(TypeError, match="gated delta-rule layers"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


# -- save and load ---------------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_save_and_load_give_the_same_tables_and_tokens(name, tmp_path):
    model = with_tables(build_model(name))
    expected, cache = run(model)
    assert isinstance(cache, DAMPStateCache)
    model.save_pretrained(tmp_path / "a")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert_same_tables(model, loaded)
    assert torch.equal(run(loaded)[0], expected)
    loaded.save_pretrained(tmp_path / "b")
    first, second = (load_file(tmp_path / folder / "model.safetensors") for folder in "ab")
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.compat
def test_bf16_round_trip(model, tmp_path):
    model.save_pretrained(tmp_path / "fp32")
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
    artifact.detach(model)
    model.save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    assert {n: p.dtype for n, p in first.named_parameters()} == {n: p.dtype for n, p in plain.named_parameters()}
    assert torch.equal(run(first, cache_implementation="dynamic")[0], run(plain)[0])
    first.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert_same_tables(first, loaded)
    assert torch.equal(run(loaded)[0], run(first)[0])
    assert_same_tables(first, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


def test_sharded_checkpoints_and_bare_decoders(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_tables(model, loaded)
    base = AutoModel.from_pretrained(tmp_path)
    assert_same_tables(model, base) and not isinstance(base, generation.LowBitGenerationMixin)


@pytest.mark.compat
def test_a_model_that_also_sees_images(tmp_path):
    from damp_models import _COMMON, _GROUPED
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = dict(
        depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, num_position_embeddings=16
    )
    ids = dict(image_token_id=85, video_token_id=86, vision_start_token_id=87, vision_end_token_id=88)
    config = Qwen3_5Config(text_config={**_COMMON, **_GROUPED}, vision_config=vision, tie_word_embeddings=False, **ids)
    torch.manual_seed(0)
    model = with_tables(Qwen3_5ForConditionalGeneration(config).eval())
    prompt = tokens(9, rows=2) % 80 + 1
    expected, cache = run(model, prompt)
    assert isinstance(cache, DAMPStateCache)
    model.save_pretrained(tmp_path)
    for cls in (Qwen3_5ForConditionalGeneration, AutoModelForCausalLM):  # the latter leaves the vision tower out
        loaded = cls.from_pretrained(tmp_path)
        assert_same_tables(model, loaded)
        assert torch.equal(run(loaded, prompt)[0], expected)


def test_expected_tensors_and_describe_match_the_file(model, tmp_path):
    model.save_pretrained(tmp_path)
    stored = {
        artifact.parse_tensor_name(name): value for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    expected = artifact.expected_tensors(model)
    assert len(expected) == 3 * 3 + 1
    for name, shape in expected.items():
        if place := artifact.parse_tensor_name(name):
            assert tuple(stored[place].shape) == shape
    described = artifact.describe(model)
    assert described["fingerprint"] == artifact.weights_fingerprint(model)
    assert described["table_bytes"] == sum(value.nbytes for place, value in stored.items() if place)
    ids = tokens(9)
    cache = run(model, ids)[1]
    report = cache.memory_report()
    assert sum(layer["state_bytes"] for layer in described["layers"]) == report.state_bytes


def test_fingerprint_sees_weights_and_settings_but_not_dtype():
    print_of = artifact.weights_fingerprint
    plain = print_of(build_model())
    assert plain == print_of(build_model()) == print_of(build_model().to(torch.bfloat16))
    assert plain != print_of(build_model(seed=1))
    # The same shapes and values, another meaning of them.
    model = build_model("olmo_hybrid")
    before = print_of(model)
    model.config.linear_allow_neg_eigval = False
    assert print_of(model) != before


# -- the class of the model ------------------------------------------------------------------------------------------


def test_the_model_stays_what_it_was(model, tmp_path):
    stock = type(model)._class_without_lowbit
    assert isinstance(model, stock) and stock.__module__.startswith("transformers.")
    assert (type(model).__name__, type(model).__module__) == (stock.__name__, stock.__module__)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [stock.__name__] and "auto_map" not in config
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is type(model)
    generation.enable(model)  # again
    assert type(model).__mro__.count(generation.LowBitGenerationMixin) == 1
    artifact.detach(model)
    assert type(model) is stock and not has_damp(model) and not hasattr(model, "hf_quantizer")
    assert not isinstance(run(model)[1], DAMPStateCache)


def test_deepcopy_and_pickle(model):
    expected = run(model)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model) and other is not model
        assert_same_tables(model, other)
        sequences, cache = run(other)
        assert isinstance(cache, DAMPStateCache) and torch.equal(sequences, expected)


# -- generate --------------------------------------------------------------------------------------------------------


@pytest.mark.compat
def test_calibrated_model_uses_its_cache_and_names_choose(model, tmp_path):
    expected, cache = run(model)
    assert isinstance(cache, DAMPStateCache) and cache.rounding == "nearest"
    model.save_pretrained(tmp_path)
    for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        for name in ("damp", "lowbit"):
            out, cache = run(one, cache_implementation=name, cache_config={"rounding": "stochastic"})
            assert isinstance(cache, DAMPStateCache) and cache.rounding == "stochastic"
            assert torch.equal(run(one, cache_implementation=name)[0], expected)
        out, cache = run(one, cache_implementation="dynamic")
        assert not isinstance(cache, DAMPStateCache)
        own = DAMPStateCache(one)
        out, cache = run(one, **{CACHE_ARG: own})
        assert cache is own and torch.equal(out, expected)
        assert run(one, use_cache=False)[1] is None
    artifact.detach(model)
    assert torch.equal(run(model)[0], run(one, cache_implementation="dynamic")[0])  # `one` is the loaded model


def test_generate_splits_prompts_as_the_cache_asks(model):
    lengths = []
    hook = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(
            next(x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None).shape[1]
        ),
        with_kwargs=True,
    )
    out, _ = run(model, ids=tokens(20), cache_implementation="damp", cache_config={"prefill_chunk_size": 8})
    hook.remove()
    assert lengths[:4] == [8, 8, 4, 1]
    whole, _ = run(model, ids=tokens(20), cache_implementation="damp", prefill_chunk_size=8)
    assert torch.equal(out, whole)
    assert model.generation_config.prefill_chunk_size is None


def test_generate_refuses(model):
    def refused(message, **kwargs):
        with pytest.raises(ValueError, match=message):
            run(model, **kwargs)

    refused("asks for codebooks, but this .* is calibrated for 'damp'", cache_implementation="loopvq")
    refused("cache_config=5 must be a dict", cache_config=5)
    refused("unknown options \\['recent_window'\\]", cache_implementation="damp", cache_config={"recent_window": 8})
    refused("both a cache object", cache_implementation="damp", **{CACHE_ARG: DAMPStateCache(model)})
    refused("contradicts use_cache", cache_implementation="damp", use_cache=False)
    refused("assisted generation is not supported", ids=tokens(9), prompt_lookup_num_tokens=2)
    refused("assisted generation is not supported", ids=tokens(9), assistant_model=model)


def test_no_name_of_ours_reaches_a_generation_config(model, tmp_path):
    run(model, cache_implementation="damp")
    assert model.generation_config.cache_implementation is None
    model.save_pretrained(tmp_path)
    text = (tmp_path / "generation_config.json").read_text()
    assert not any(name in text for name in ("loopvq", "lowbit", "damp"))
    GenerationConfig.from_pretrained(tmp_path)


@pytest.mark.compat
def test_without_the_package_the_model_still_works(tmp_path):
    model = with_tables(build_model())
    model.save_pretrained(tmp_path)
    expected = run(model, cache_implementation="dynamic")[0]
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
ids = torch.tensor({tokens(9, rows=2).tolist()})
print(model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None).tolist())
assert "hf_lowbit" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected.tolist()
    assert "Unknown quantization type" in done.stderr and "UNEXPECTED" in done.stderr


# -- damage ----------------------------------------------------------------------------------------------------------


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


KEY = "model.layers.1.linear_attn.damp."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["model.layers.1.mlp.up_proj.weight"].mul_(1.1), "DAMP tables were fitted to other weights"),
        (lambda t: t["model.layers.0.linear_attn.A_log"][0].add_(0.5), "fitted to other weights"),
        (lambda t: t.pop(KEY + "perm_k"), "perm_k is missing"),
        (lambda t: t.pop("lowbit_fingerprint"), "lowbit_fingerprint is missing"),
        (lambda t: t.update({KEY + "perm_v": t[KEY + "perm_v"][:2].clone()}), "has shape"),
        (lambda t: t[KEY + "perm_k"].zero_(), "tables of layer 1 are wrong"),
        (lambda t: t[KEY + "perm_v"].fill_(99), "tables of layer 1 are wrong"),
        (lambda t: t[KEY + "column_scale"].zero_(), "tables of layer 1 are wrong"),
    ],
    ids=[
        "other-weights",
        "one-weight",
        "no-rows",
        "no-fingerprint",
        "short",
        "zero-rows",
        "wrong-columns",
        "zero-scale",
    ],
)
def test_damaged_or_foreign_artifacts_are_refused(tmp_path, change, message):
    with_tables(build_model()).save_pretrained(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_truncated_files_and_other_settings_are_refused(tmp_path):
    with_tables(build_model()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for changes, message in (
        ({"linear_value_head_dim": 48}, "has shape"),
        ({"linear_num_key_heads": 1}, "fitted to other weights|size mismatch|mismatch"),
    ):
        path.write_text(json.dumps(config | changes))
        with pytest.raises((ValueError, RuntimeError), match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    changed = copy.deepcopy(config)
    changed["quantization_config"]["damp"]["rows"] = 40
    del changed["quantization_config"]["digest"]
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="rows=40"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    path.write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(Exception, match="truncated or damaged|incomplete|invalid|SafetensorError"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# -- card ------------------------------------------------------------------------------------------------------------


def test_card_snippet_runs(later, tokenizer, tmp_path):
    model, report = later
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    card = str(model_card(model, report.to_dict(), "someone/base", repo_id=str(tmp_path)))
    _, metadata, body = card.split("---\n", 2)
    assert "base_model: someone/base" in metadata and "- damp" in metadata and "library_name: transformers" in metadata
    assert body.splitlines()[1].startswith("import hf_lowbit") and "2 key rows" in body
    assert f"{artifact.describe(model)['layers'][0]['state_bits_per_value']:.4g}-bit recurrent states" in body
    exec(compile(body.split("```python\n")[1].split("```")[0], "README.md", "exec"), {})
    with pytest.raises(ValueError, match="a calibrated model"):
        model_card(build_model())


@pytest.mark.parametrize("rows", [1, 3])
def test_settings_that_do_not_fit_the_tables_are_refused(model, tmp_path, rows):
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["quantization_config"]["damp"]["rows"] == 2
    config["quantization_config"]["damp"]["rows"] = rows
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"one of low_bits=8, rows={rows}, .* was edited"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    del config["quantization_config"]["digest"]  # the tables themselves do not fit either
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"not made for rows={rows}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change, message", [({"low_bits": 4}, "low_bits=4"), ({"zero_point": False}, "zero_point=False")]
)
def test_edited_settings_that_leave_no_trace_in_the_tables_are_refused(model, tmp_path, change, message):
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["damp"] |= {"rounding": "stochastic", "seed": 7}  # defaults of the cache
    path.write_text(json.dumps(config))
    assert DAMPStateCache(AutoModelForCausalLM.from_pretrained(tmp_path)).rounding == "stochastic"
    config["quantization_config"]["damp"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{message}.* was edited"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_options_beside_a_cache_object_are_refused(model):
    with pytest.raises(ValueError, match="give the options to the cache itself"):
        run(model, cache_config={"rounding": "stochastic"}, **{CACHE_ARG: DAMPStateCache(model)})


def test_described_bits_count_the_residual(model):
    plain = artifact.describe(model)["layers"][0]["state_bits_per_value"]
    config = dataclasses.replace(hf_lowbit.config.lowbit_config(model).damp, rounding="error_feedback")
    mark_quantized(model, LowBitConfig(damp=config, fingerprint=artifact.stored_fingerprint(model)))
    assert artifact.describe(model)["layers"][0]["state_bits_per_value"] > plain + 8
    with torch.no_grad():
        cache = DAMPStateCache(model)
        model(tokens(9), **{CACHE_ARG: cache})
    measured = cache.memory_report().state_bits_per_value
    assert artifact.describe(model)["layers"][0]["state_bits_per_value"] == measured


def test_options_of_another_type_are_refused(model):
    for options, message in (
        (
            {"prefill_chunk_size": 2.5},
            "prefill_chunk_size=2.5 must be an integer of at least 1, or None for whole prompts",
        ),
        ({"seed": "a"}, "seed='a' must be an integer"),
        ({"rounding": 3}, "rounding=3 is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            DAMPStateCache(model, **options)
    for build, message in (
        (lambda: LowBitConfig(damp=DAMPConfig(), format_version="1"), "format_version='1' must be an integer"),
        (lambda: DAMPConfig(windows=5), "windows=5 must be a tuple of integers"),
        (lambda: LoopVQConfig(learning_rates=0.1), "learning_rates=0.1 must be a tuple of numbers"),
        (lambda: LoopVQConfig(bits=[1]), r"bits=\[1\] is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


def test_a_pass_without_tokens_is_refused(model):
    empty = torch.zeros(1, 0, dtype=torch.long)
    with pytest.raises(ValueError, match="no new tokens: the cache holds 0 already.*at least one token"):
        model.generate(empty, max_new_tokens=2)
    cache = DAMPStateCache(model)
    with torch.no_grad():
        model(tokens(9), **{CACHE_ARG: cache})
        with pytest.raises(ValueError, match="the cache holds 9 already"):
            model(empty, **{CACHE_ARG: cache})
        assert model(tokens(1), **{CACHE_ARG: cache}).logits.isfinite().all()  # nothing was changed


def test_counts_of_another_type_are_refused():
    with pytest.raises(ValueError, match="low_bits=8.0"):
        DAMPConfig(low_bits=8.0)
