"""Calibrating hybrid models for codes and for both methods, saving, loading, commands."""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


sys.path.insert(0, str(Path(__file__).parent))  # hybrid_models.py, whatever pytest's import mode
sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))

import tiny_model  # noqa: E402
from hybrid_models import NAMES, build_model, hybrid_model, tokens  # noqa: E402

import hf_lowbit  # noqa: E402
from hf_lowbit import DAMPConfig, LoopVQConfig, LowBitConfig, artifact  # noqa: E402
from hf_lowbit.cli.main import main  # noqa: E402
from hf_lowbit.compat import CACHE_ARG  # noqa: E402
from hf_lowbit.damp.attach import damp_tables, has_damp  # noqa: E402
from hf_lowbit.hybrid import HybridCache  # noqa: E402
from hf_lowbit.loopvq import finetune  # noqa: E402
from hf_lowbit.loopvq.attach import has_loopvq, loopvq_codebooks  # noqa: E402
from hf_lowbit.loopvq.calibration import fit  # noqa: E402
from hf_lowbit.loopvq.capture import StateCapture  # noqa: E402
from hf_lowbit.loopvq.grouping import Grouping  # noqa: E402
from hf_lowbit.loopvq.spec import LoopSpec  # noqa: E402
from hf_lowbit.loopvq.stock import handing_over_keys  # noqa: E402
from hf_lowbit.model_card import model_card  # noqa: E402


LOOPVQ = dict(bits=2, recent_window=8, sequences=4, sequence_length=48, epochs=0, kmeans_iterations=3)
DAMP = dict(rows=2, sequences=3, prompt_tokens=8, decode_tokens=24, windows=(0,), window_tokens=24, anchors=(8, 16),
            horizon=8, continuation="text")  # fmt: skip
GREEDY = dict(max_new_tokens=24, do_sample=False, eos_token_id=None)

pytestmark = pytest.mark.filterwarnings("ignore:half of the codebooks")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_model.build_tokenizer()


@pytest.fixture(scope="module")
def texts():
    return tiny_model.texts(8)


def tiny(name="qwen3_5", **changes):
    return build_model(name, vocab_size=257, **changes)


def buffers(model):
    return [
        buffer.clone() for tables in (*loopvq_codebooks(model), *damp_tables(model)) for buffer in tables.buffers()
    ]


def run(model, **kwargs):
    out = model.generate(tokens(30, rows=2), return_dict_in_generate=True, **GREEDY, **kwargs)
    return out.sequences, getattr(out, CACHE_ARG)


@pytest.fixture(scope="module")
def both(tokenizer, texts):
    """A model calibrated for both in one call, and the reports."""
    model = tiny()
    config = LowBitConfig(loopvq=LoopVQConfig(**LOOPVQ), damp=DAMPConfig(**DAMP))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "half of the codebooks")
        report = hf_lowbit.calibrate(model, tokenizer, config, dataset=texts, progress=False)
    return model, report


# -- calibration -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["loopvq", "damp"])
def test_one_method_after_the_other_gives_what_both_at_once_give(first, both, tokenizer, texts):
    model, stock = tiny(), {type(module) for module in tiny().modules()}
    configs = {"loopvq": LoopVQConfig(**LOOPVQ), "damp": DAMPConfig(**DAMP)}
    for name in (first, *(set(configs) - {first})):
        hf_lowbit.calibrate(model, tokenizer, configs[name], dataset=texts, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(buffers(model), buffers(both[0]), strict=True))
    assert model.config.quantization_config.to_dict() == both[0].config.quantization_config.to_dict()
    assert model.config.quantization_config.loopvq.loop_group_size == 1
    # Again with other settings: the other method's tables stay.
    kept = [table.perm_k.clone() for table in damp_tables(model)]
    hf_lowbit.calibrate(model, tokenizer, LoopVQConfig(**LOOPVQ | {"bits": 1}), dataset=texts, progress=False)
    assert all(torch.equal(a, table.perm_k) for a, table in zip(kept, damp_tables(model)))
    hf_lowbit.calibrate(model, tokenizer, DAMPConfig(**DAMP | {"rows": 3}), dataset=texts, progress=False)
    config = model.config.quantization_config
    assert (config.loopvq.bits, config.damp.rows) == (1, 3) and isinstance(run(model)[1], HybridCache)
    artifact.detach(model)
    assert {type(module) for module in model.modules()} == stock
    assert not has_damp(model) and not has_loopvq(model) and not hasattr(model, "hf_quantizer")


def test_tables_of_other_weights_are_not_kept(tokenizer, texts):
    model = hybrid_model(("damp",), vocab_size=257)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with pytest.warns(UserWarning, match="DAMP tables were fitted to other weights and are removed"):
        hf_lowbit.calibrate(model, tokenizer, LoopVQConfig(**LOOPVQ), dataset=texts, progress=False)
    assert not has_damp(model) and model.config.quantization_config.damp is None


def test_calibration_changes_no_weight_and_reports(both):
    model, report = both
    assert all(torch.equal(a, b) for a, b in zip(tiny().parameters(), model.parameters(), strict=True))
    assert set(json.loads(json.dumps(report.to_dict()))) == {"loopvq", "damp"} and "LoopVQ" in report.summary()
    described = artifact.describe(model)
    assert [layer["layer"] for layer in described["damp"]["layers"]] == [0, 1, 3]
    assert described["loopvq"]["layers"][0]["shape"] == [1, 2, 8, 256, 4]
    card = str(model_card(model, report.to_dict()))
    assert "codebooks and DAMP tables" in card and "loopvq: fine-tuning" in card and "damp: rounding" in card


def test_refusals_leave_nothing(tokenizer, texts, tmp_path):
    model, config = tiny(), LowBitConfig(loopvq=LoopVQConfig(**LOOPVQ), damp=DAMPConfig(**DAMP))
    stock = {type(module) for module in model.modules()}
    for options in (dict(extra_dataset=texts), dict(resume_dir=tmp_path)):
        with pytest.raises(ValueError, match="belong to one method"):
            hf_lowbit.calibrate(model, tokenizer, config, dataset=texts, progress=False, **options)
    with pytest.raises(ValueError, match="too little calibration data"):
        hf_lowbit.calibrate(model, tokenizer, LoopVQConfig(bits=2), dataset=texts, progress=False)
    with pytest.raises(ValueError, match="loop_group_size=2 does not divide the model's 1 loop steps"):
        bad = LoopVQConfig(**LOOPVQ | {"loop_group_size": 2})
        hf_lowbit.calibrate(model, tokenizer, bad, dataset=texts, progress=False)
    assert {type(module) for module in model.modules()} == stock and not has_loopvq(model)


@pytest.mark.parametrize("name", NAMES)
def test_fine_tuning_lowers_the_held_out_kl(name):
    model = build_model(name)
    sequences = torch.cat([tokens(48, seed=i) for i in range(6)])
    config = LoopVQConfig(**LOOPVQ | dict(bits=1, sequences=6, epochs=1, learning_rate=0.03, kmeans_vectors=128))
    with handing_over_keys(model):
        codebooks, report = fit(model, config, sequences, fingerprint="f", progress=False)
    assert len(codebooks) == 1 and report.early_kl < 1e-4
    assert 0 < report.held_out[report.best_epoch] <= report.held_out[0] and len(report.held_out) == 2


def test_the_gradient_of_entries_equals_finite_differences():
    model = build_model()
    config = LoopVQConfig(**LOOPVQ)
    spec, sequences = LoopSpec.of(model), torch.cat([tokens(48, seed=i) for i in range(2)])
    grouping = Grouping.of(config, 1, 32)
    model.requires_grad_(False)
    tuner = finetune.Finetuner(
        model, spec, grouping, config, None, sequences, sequences, lambda x, desc: x, None, None
    )
    generator = torch.Generator().manual_seed(0)
    tables = {s: [torch.randn(1, 2, 8, 256, 4, generator=generator).requires_grad_()] for s in ("key", "value")}
    with handing_over_keys(model):
        tuner.sequence_kl(sequences[0], tables).mean().backward()
        with torch.no_grad():
            capture = StateCapture(spec)
            teacher = finetune.logits_of(model, sequences[:1], capture)
            codes = finetune.encode_states(capture, grouping, tables, None)
            for side in ("key", "value"):
                grad = tables[side][0].grad
                for flat in grad.abs().flatten().topk(3).indices.tolist():
                    entry = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), grad.shape))
                    kl = []
                    for sign in (1, -1):
                        moved = {s: [t.detach().clone() for t in ts] for s, ts in tables.items()}
                        moved[side][0][entry] += sign * 5e-2
                        student = finetune.StudentAttention(grouping, moved, codes, tuner.mask)
                        student = finetune.logits_of(model, sequences[:1], student)
                        kl.append(float(finetune.per_token_kl(teacher.double(), student.double()).mean()))
                    assert grad[entry].item() == pytest.approx((kl[0] - kl[1]) / 1e-1, rel=0.03), side


# -- save and load -----------------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("methods", [("loopvq",), ("loopvq", "damp")], ids=["codes", "both"])
def test_save_and_load_give_the_same_tables_and_tokens(methods, name, tmp_path):
    model = hybrid_model(methods, name)
    expected, cache = run(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours, again = run(loaded)
    assert torch.equal(ours, expected) and type(again) is type(cache) and cache.coded_tokens == [24, 24]
    assert torch.equal(run(loaded, cache_implementation="dynamic")[0], run(build_model(name))[0])
    bf16 = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tables = [t for m in (loaded, bf16) for t in loopvq_codebooks(m)]
    assert torch.equal(tables[0].key_table, tables[1].key_table) and run(bf16)[0].shape == expected.shape


def test_a_checkpoint_without_one_methods_tables_is_refused(tmp_path):
    model = hybrid_model()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    stored = config["quantization_config"]
    del stored["damp"], stored["digest"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="tables that these settings do not have"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    hybrid_model(("damp",)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["loopvq"] = stored["loopvq"]
    del config["quantization_config"]["digest"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="key_table is missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_calibration_at_load(both, tokenizer, texts, tmp_path):
    tiny().save_pretrained(tmp_path)
    config = LowBitConfig(loopvq=LoopVQConfig(**LOOPVQ), damp=DAMPConfig(**DAMP), dataset=texts, tokenizer=tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert all(torch.equal(a, b) for a, b in zip(buffers(model), buffers(both[0]), strict=True))


# -- commands ----------------------------------------------------------------------------------------------------------


def test_commands(tokenizer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_lowbit.cli.main._quiet_logs", lambda: None)
    tiny().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model.write_texts(tmp_path / "texts.jsonl", 8)
    tiny_model.write_tasks(tmp_path / "tasks.jsonl")

    def call(*arguments):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    common = ("--data", tmp_path / "texts.jsonl", "--quiet", "--device", "cpu")
    damp = [
        f"--{name.replace('_', '-')}={','.join(map(str, v)) if isinstance(v, tuple) else v}"
        for name, v in DAMP.items()
    ]
    loopvq = [f"--{name.replace('_', '-')}={value}" for name, value in LOOPVQ.items()]
    call("calibrate", tmp_path / "model", "--method", "damp", "--output", tmp_path / "damp", *common, *damp)
    call("calibrate", tmp_path / "damp", "--method", "loopvq", "--output", tmp_path / "both", *common, *loopvq)
    report = json.loads((tmp_path / "both" / "calibration_report.json").read_text())
    assert report["damp"] == json.loads((tmp_path / "damp" / "calibration_report.json").read_text())
    assert report["loopvq"]["held_out"]
    call("calibrate", tmp_path / "both", "--output", tmp_path / "again", *common, *loopvq, "--seed", "1")
    again = json.loads((tmp_path / "again" / "calibration_report.json").read_text())
    assert again["damp"] == report["damp"] and again["loopvq"]["config"]["seed"] == 1
    stored, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("both", "model"))
    assert all(torch.equal(value, stored[name]) for name, value in plain.items())

    out = call("inspect", tmp_path / "both", "--verify")
    assert "method       loopvq" in out and "method       damp" in out and out.count("calibration  ") == 2
    found = json.loads(call("inspect", tmp_path / "both", "--json"))
    assert [layer["layer"] for layer in found["loopvq"]["layers"]] == [2] and len(found["damp"]["layers"]) == 3
    out = call("generate", tmp_path / "both", "--prompt", "bas bon dim fol cum gir", "--device", "cpu")
    assert "attention layers" in out and "recurrent layers" in out
    out = call(
        "eval", tmp_path / "both", "--text", tmp_path / "texts.jsonl", "--tasks", tmp_path / "tasks.jsonl", "--limit", "1",
        "--text-tokens", "90", "--text-prompt-tokens", "20", "--device", "cpu", "--quiet", "--json", tmp_path / "r.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["full"]["bits_per_element"] == 32 and result["quantized"]["bits_per_element"] == 2
    assert result["quantized"]["state_bits_per_value"] == 10 and result["full"]["state_bits_per_value"] == 32
    assert result["quantized"]["kl_mean"] > 0 and "bits per state value" in out
