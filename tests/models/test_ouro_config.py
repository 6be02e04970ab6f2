"""Configuration, registration, saving and loading: the hub's files unchanged, no remote code."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_lowbit.models.ouro import OuroConfig, OuroForCausalLM, OuroModel


pytestmark = pytest.mark.compat


HUB_CONFIGS = {"ouro_1.4b": 24, "ouro_2.6b": 48, "ouro_2.6b_thinking": 48}


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_hub_config_round_trip(hub_config_dir, tmp_path, name):
    raw = json.loads((hub_config_dir / f"{name}.json").read_text())
    assert "auto_map" in raw
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = AutoConfig.from_pretrained(tmp_path)  # no trust_remote_code, no question asked
    assert type(config) is OuroConfig
    assert config.rope_parameters == {"rope_theta": 1000000.0, "rope_type": "default"}
    assert config.num_hidden_layers == HUB_CONFIGS[name]
    assert config.num_cache_slots == 4 * HUB_CONFIGS[name]
    assert config.sliding_window is None
    assert config.dtype == torch.bfloat16
    assert not hasattr(config, "auto_map")

    config.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "auto_map" not in saved
    # whatever the hub's own code reads is still there under its own name
    renamed = {"auto_map", "torch_dtype", "transformers_version"}
    assert {key: saved[key] for key in raw if key not in renamed} == {k: v for k, v in raw.items() if k not in renamed}

    again = AutoConfig.from_pretrained(tmp_path / "saved")
    different = {"transformers_version", "_name_or_path"}
    assert {k: v for k, v in again.to_dict().items() if k not in different} == {
        k: v for k, v in config.to_dict().items() if k not in different
    }


@pytest.mark.parametrize("trust", [None, True, False])
def test_ours_wins_over_remote_code(hub_config_dir, tmp_path, trust):
    (tmp_path / "config.json").write_text((hub_config_dir / "ouro_1.4b.json").read_text())
    assert type(AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust)) is OuroConfig


def test_models_have_the_hub_weight_names(hub_config_dir):
    raw = json.loads((hub_config_dir / "ouro_1.4b.json").read_text())
    with torch.device("meta"):
        model = OuroForCausalLM(OuroConfig(**raw))
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    assert sum(p.numel() for p in model.parameters()) == 1_434_652_673
    assert shapes["model.layers.23.self_attn.k_proj.weight"] == (2048, 2048)
    assert shapes["model.layers.0.input_layernorm_2.weight"] == (2048,)
    assert shapes["model.layers.0.post_attention_layernorm_2.weight"] == (2048,)
    assert shapes["model.early_exit_gate.weight"] == (1, 2048) and shapes["model.early_exit_gate.bias"] == (1,)
    assert len(shapes) == 24 * 11 + 5


def test_rope_scaling_round_trip(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = OuroConfig(
        rope_theta=5000.0, rope_scaling=scaling, num_hidden_layers=1, max_position_embeddings=4096, head_dim=16
    )
    assert config.rope_parameters["rope_theta"] == 5000.0 and config.rope_parameters["factor"] == 4.0
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["rope_theta"] == 5000.0 and saved["rope_scaling"]["rope_type"] == "yarn"
    assert OuroConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


def test_rope_scaling_changes_the_model(make_model, ids):
    plain, scaled = make_model(), make_model(rope_scaling={"rope_type": "linear", "factor": 2.0})
    torch.testing.assert_close(scaled.model.rotary_emb.inv_freq * 2, plain.model.rotary_emb.inv_freq)
    assert scaled.model.rotary_emb.attention_scaling == 1.0
    assert not torch.allclose(scaled(ids).logits, plain(ids).logits)


def test_defaults_fill_in():
    config = OuroConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=None, num_hidden_layers=3)
    assert (config.head_dim, config.num_key_value_heads) == (16, 4)
    assert config.layer_types == ["full_attention"] * 3
    assert config.tie_word_embeddings is False and config.early_exit_step is None
    # an unused window, as the hub class's own default has it, is no window
    assert OuroConfig(sliding_window=4096, use_sliding_window=False).sliding_window is None


ERRORS = {
    "sliding-window": ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window=False"),
    "sliding-layers": ({"layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2}, "sliding window"),
    "linear-layers": ({"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2}, "only 'full_attention'"),
    "kv-heads": ({"num_attention_heads": 4, "num_key_value_heads": 3}, "multiple of num_key_value_heads"),
    "no-loops": ({"total_ut_steps": 0}, "at least 1"),
    "layer-count": ({"layer_types": ["full_attention"] * 3, "num_hidden_layers": 2}, "num_hidden_layers"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_config_errors(name):
    changes, message = ERRORS[name]
    with pytest.raises(Exception, match=message):  # @strict wraps the ValueError in its own class
        OuroConfig(**{"hidden_size": 64, "head_dim": 16, **changes})


def test_registration_survives_a_second_import():
    import importlib

    import hf_lowbit.models.ouro as package

    importlib.reload(package)
    config = AutoConfig.for_model("ouro", num_hidden_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=9)
    with torch.device("meta"):
        assert type(AutoModel.from_config(config)) is OuroModel
        assert type(AutoModelForCausalLM.from_config(config)) is OuroForCausalLM


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_save_and_load(make_model, ids, tmp_path, tied):
    model = make_model(tie_word_embeddings=tied, total_ut_steps=2)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(loaded(ids).logits, expected)
        base = AutoModel.from_pretrained(tmp_path)
        assert type(base) is OuroModel
        torch.testing.assert_close(loaded.lm_head(base(ids).last_hidden_state), expected)
    assert not (tmp_path / "modeling_ouro.py").exists()


@pytest.mark.shared
def test_hub_style_checkpoint_loads_completely(looped_mini):
    model, report = AutoModelForCausalLM.from_pretrained(looped_mini, output_loading_info=True)
    assert type(model) is OuroForCausalLM and model.dtype == torch.bfloat16
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert model.config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()


@pytest.mark.shared
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_hub_style_checkpoint_equals_the_reference(looped_mini, attn):
    import ouro_reference as reference

    model = AutoModelForCausalLM.from_pretrained(looped_mini, dtype=torch.float32, attn_implementation=attn)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    ids = torch.randint(1, 4096, (1, 24), generator=torch.Generator().manual_seed(0))
    states, _, _ = reference.ouro_forward(weights, model.config, ids)
    with torch.no_grad():
        logits = model(ids).logits
    torch.testing.assert_close(logits, states[-1] @ weights["lm_head.weight"].T, atol=2e-3, rtol=1e-3)
