"""Calibrating at load and after it, saving, loading, refusing: the artifact's life."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig

import hf_lowbit
from hf_lowbit import LoopVQConfig, LowBitConfig, artifact
from hf_lowbit.loopvq.attach import has_loopvq, loopvq_codebooks


CONFIG = dict(bits=1, recent_window=16, sequences=4, sequence_length=96, epochs=1, learning_rate=0.01,
              kmeans_iterations=5, kmeans_vectors=400)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:half of the codebooks")


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<eos>": 0, **{chr(32 + i): i + 1 for i in range(80)}}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>", padding_side="left")


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(0)
    return ["".join(chr(32 + int(i)) for i in torch.randint(80, (120,), generator=generator)) for _ in range(6)]


@pytest.fixture
def model_dir(make_model, tmp_path):
    make_model().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def calibrated(model_dir, tokenizer, texts):
    return AutoModelForCausalLM.from_pretrained(
        model_dir,
        quantization_config=LowBitConfig(loopvq=LoopVQConfig(**CONFIG), dataset=texts, tokenizer=tokenizer),
    )


def logits_and_codes(model, ids):
    cache = hf_lowbit.LoopVQCache(model)
    with torch.no_grad():
        for i in range(0, len(ids), 20):
            out = model(ids[None, i : i + 20], **{hf_lowbit.compat.CACHE_ARG: cache}).logits
    return out, [s.codes[:, :, :, : cache.coded_tokens[0] // 8] for s in cache._stores]


def assert_same(a, b, ids):
    (logits_a, codes_a), (logits_b, codes_b) = logits_and_codes(a, ids), logits_and_codes(b, ids)
    assert codes_a[0].numel() > 0
    assert torch.equal(logits_a, logits_b)
    assert all(torch.equal(x, y) for x, y in zip(codes_a, codes_b))


def test_calibration_at_load_equals_calibration_after_it(calibrated, model_dir, tokenizer, texts, prompt):
    later = AutoModelForCausalLM.from_pretrained(model_dir)
    assert not has_loopvq(later)
    report = hf_lowbit.calibrate(later, tokenizer, LoopVQConfig(**CONFIG), dataset=texts, progress=False)
    assert report.held_out and report.seconds
    assert_same(calibrated, later, prompt(120))
    for model in (calibrated, later):
        hf_lowbit.assert_quantized(model)
        assert model.config.quantization_config.loopvq.loop_group_size == 4  # resolved, not "whatever fits"
        assert model.config.quantization_config.dataset is None


def test_save_and_load_give_bit_identical_codes_and_logits(calibrated, tmp_path, prompt):
    calibrated.save_pretrained(tmp_path / "a")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert_same(calibrated, loaded, prompt(120))
    loaded.save_pretrained(tmp_path / "b")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "b"), calibrated, prompt(120))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_sharded_checkpoints_work(calibrated, tmp_path, prompt):
    calibrated.save_pretrained(tmp_path / "a", max_shard_size="200KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "a"), calibrated, prompt(120))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loading_in_another_dtype_keeps_every_entry(calibrated, tmp_path, dtype):
    calibrated.to(torch.bfloat16).save_pretrained(tmp_path / "a")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=dtype)
    for x, y in zip(loopvq_codebooks(calibrated), loopvq_codebooks(loaded)):
        assert torch.equal(x.key_table, y.key_table) and torch.equal(x.value_table, y.value_table)
        x.float(), x.half()  # a cast of the module must not touch the bit patterns either
        assert x.key_table.dtype == torch.int16


def test_calibrated_model_uses_its_cache_and_names_choose(calibrated, model_dir, prompt):
    ids = prompt(60)[None]
    settings = dict(max_new_tokens=40, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    name = hf_lowbit.compat.CACHE_ARG
    default = calibrated.generate(ids, **settings)
    assert isinstance(getattr(default, name), hf_lowbit.LoopVQCache)
    assert getattr(default, name).window == CONFIG["recent_window"]
    for named in ("loopvq", "lowbit"):
        out = calibrated.generate(ids, cache_implementation=named, cache_config={"recent_window": 32}, **settings)
        assert isinstance(getattr(out, name), hf_lowbit.LoopVQCache) and getattr(out, name).window == 32
    plain = AutoModelForCausalLM.from_pretrained(model_dir)
    dynamic = calibrated.generate(ids, cache_implementation="dynamic", **settings)
    assert not isinstance(getattr(dynamic, name), hf_lowbit.LoopVQCache)
    assert torch.equal(dynamic.sequences, plain.generate(ids, **settings).sequences)
    uncached = calibrated.generate(ids, use_cache=False, **settings)
    assert getattr(uncached, name) is None and torch.equal(uncached.sequences, dynamic.sequences)
    static = calibrated.generate(ids, cache_implementation="static", **settings)
    assert torch.equal(static.sequences, dynamic.sequences)
    with pytest.raises(ValueError, match="carries no codebooks"):
        plain.generate(ids, cache_implementation="loopvq", **settings)
    with pytest.raises(ValueError, match="both a cache object"):
        calibrated.generate(
            ids, cache_implementation="loopvq", **{name: hf_lowbit.LoopVQCache(calibrated)}, **settings
        )


def test_no_name_of_ours_reaches_a_generation_config(calibrated, tmp_path, prompt):
    calibrated.generate(prompt(20)[None], max_new_tokens=2, cache_implementation="loopvq")
    assert calibrated.generation_config.cache_implementation is None
    calibrated.save_pretrained(tmp_path / "a")
    text = (tmp_path / "a" / "generation_config.json").read_text()
    assert not any(name in text for name in ("loopvq", "lowbit", "damp"))
    assert "auto_map" not in (tmp_path / "a" / "config.json").read_text()
    GenerationConfig.from_pretrained(tmp_path / "a")


def test_people_without_the_package_can_load_config_and_generation_config(calibrated, tmp_path):
    calibrated.save_pretrained(tmp_path / "a")
    code = (
        "import sys; from transformers import GenerationConfig, PreTrainedConfig;"
        f"GenerationConfig.from_pretrained({str(tmp_path / 'a')!r});"
        f"c, _ = PreTrainedConfig.get_config_dict({str(tmp_path / 'a')!r});"
        "assert c['quantization_config']['quant_method'] == 'lowbit';"
        "assert 'hf_lowbit' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_base_model_loads_with_its_codebooks(calibrated, tmp_path):
    calibrated.save_pretrained(tmp_path / "a")
    base = AutoModel.from_pretrained(tmp_path / "a")
    for x, y in zip(loopvq_codebooks(calibrated), loopvq_codebooks(base)):
        assert torch.equal(x.key_table, y.key_table)


def test_calibrating_again_replaces_the_codebooks(calibrated, tokenizer, texts):
    before = loopvq_codebooks(calibrated)[0].key_table.clone()
    hf_lowbit.calibrate(calibrated, tokenizer, LoopVQConfig(**{**CONFIG, "bits": 0.5}), dataset=texts, progress=False)
    after = loopvq_codebooks(calibrated)[0].key_table
    assert after.shape != before.shape
    assert artifact.describe(calibrated)["loopvq"]["bits"] == 0.5


def test_describe_and_expected_tensors_match_the_file(calibrated, tmp_path):
    calibrated.save_pretrained(tmp_path / "a")
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    for name, shape in artifact.expected_tensors(calibrated).items():
        assert shapes[name] == shape
    described = artifact.describe(calibrated)
    # layers, K and V, steps, heads, D, and of each 256 entries and one weight in fp16
    assert described["codebook_bytes"] == 2 * 2 * 4 * 2 * 64 * (256 + 1) * 2
    assert described["fingerprint"] == artifact.weights_fingerprint(calibrated)


# -- refusals ----------------------------------------------------------------------------------------------------------


def edit(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


KEY = "model.layers.0.self_attn.loopvq.key_table"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["model.layers.1.mlp.up_proj.weight"].mul_(1.1), "fitted to other weights"),
        (lambda t: t["model.layers.0.self_attn.k_proj.weight"][0, 0].add_(0.5), "fitted to other weights"),
        (lambda t: t.pop(KEY), "key_table is missing"),
        (lambda t: t.pop("lowbit_fingerprint"), "lowbit_fingerprint is missing"),
        (lambda t: t.update({KEY: t[KEY][:2].clone()}), "has shape"),
        (lambda t: t[KEY].zero_(), "is constant"),
        (lambda t: t[KEY][0].fill_(0x7E00), "NaN or Inf"),
        (lambda t: t[KEY.replace("table", "metric")][0].zero_(), "not positive"),
    ],
    ids=[
        "other-weights",
        "one-weight",
        "no-table",
        "no-fingerprint",
        "short-table",
        "zero-table",
        "nan-table",
        "zero-metric",
    ],
)
def test_damaged_or_foreign_artifacts_are_refused(calibrated, tmp_path, change, message):
    calibrated.save_pretrained(tmp_path / "a")
    edit(tmp_path / "a", change)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "a")


def test_truncated_file_is_refused(calibrated, tmp_path):
    calibrated.save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(Exception, match="truncated or damaged|incomplete|invalid|SafetensorError"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "a")


def test_settings_that_do_not_match_the_tables_are_refused(calibrated, tmp_path):
    calibrated.save_pretrained(tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    before = dict(config["quantization_config"]["loopvq"])
    # Tables of the same shape: only the digest notices.
    config["quantization_config"]["loopvq"] |= {
        "bits": 2 * before["bits"],
        "loop_group_size": before["loop_group_size"] // 2,
    }
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"bits={2 * before['bits']}, .* was edited"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    config["quantization_config"]["loopvq"] = before | {"recent_window": 16}  # a default of the cache may be edited
    path.write_text(json.dumps(config))
    assert hf_lowbit.LoopVQCache(AutoModelForCausalLM.from_pretrained(tmp_path / "a")).window == 16
    del config["quantization_config"]["digest"]
    config["quantization_config"]["loopvq"]["bits"] = 0.25
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has shape"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    config["quantization_config"]["loopvq"] |= {"bits": 1.0, "encoder_metric": "none"}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="holds tables that these settings do not have"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    config["quantization_config"]["format_version"] = 99
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="format version 99"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "a")


def test_calibration_needs_data_a_tokenizer_and_a_looped_model(model_dir, tokenizer, texts, tmp_path):
    load = AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match="dataset="):
        load(model_dir, quantization_config=LowBitConfig(loopvq=LoopVQConfig(**CONFIG)))
    with pytest.raises(ValueError, match="needs a method"):
        LowBitConfig()
    model = load(model_dir)
    for data in ([], ["too short"]):
        with pytest.raises(ValueError):
            hf_lowbit.calibrate(model, tokenizer, LoopVQConfig(**CONFIG), dataset=data, progress=False)
    with pytest.raises(ValueError, match="loop_group_size=8"):
        hf_lowbit.calibrate(model, tokenizer, LoopVQConfig(**{**CONFIG, "loop_group_size": 8}), dataset=texts)
    assert not has_loopvq(model) and not hasattr(model, "hf_quantizer")  # a refused calibration leaves nothing
    with pytest.raises(RuntimeError, match="full-precision cache"):
        hf_lowbit.assert_quantized(model)


def test_a_failed_calibration_leaves_the_model_as_it_was(make_model, tokenizer, texts, monkeypatch):
    model = make_model()
    monkeypatch.setattr("hf_lowbit.loopvq.calibration.Finetuner.run", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf_lowbit.calibrate(model, tokenizer, LoopVQConfig(**CONFIG), dataset=texts, progress=False)
    assert not has_loopvq(model) and not model.training
    assert all(p.requires_grad for p in model.parameters())


def test_fingerprint_sees_weights_and_settings_but_not_dtype(make_model):
    a, b = make_model(), make_model()
    print_of = artifact.weights_fingerprint
    assert print_of(a) == print_of(b)
    assert print_of(a) == print_of(make_model().to(torch.bfloat16))
    assert print_of(make_model().to(torch.bfloat16)) == print_of(make_model().to(torch.bfloat16).to(torch.float16))
    with torch.no_grad():
        weight = b.model.layers[0].mlp.down_proj.weight
        weight[[0, 1]] = weight[[1, 0]].clone()  # same values in another order
    assert print_of(a) != print_of(b)
    assert print_of(a) != print_of(make_model(rope_theta=5000.0))


def test_registration_can_be_repeated():
    import importlib

    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    reloaded = importlib.reload(sys.modules["hf_lowbit.quantizer"])
    assert AUTO_QUANTIZER_MAPPING["lowbit"] is reloaded.LowBitQuantizer
