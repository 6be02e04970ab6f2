"""Push a calibrated hybrid model and load it elsewhere: bit-identical tables and states; harmless without the package."""

import json

import pytest


PUSH = """
import sys, torch, tiny_model, damp_models, hf_lowbit
from hf_lowbit.model_card import model_card
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM

damp_models.build_model("qwen3_5", vocab_size=257).save_pretrained("plain")
# Loaded, as model.to(bfloat16) would also round the frequencies of RoPE, which no file holds.
model = AutoModelForCausalLM.from_pretrained("plain", dtype=sys.argv[2])
tokenizer = tiny_model.build_tokenizer()
config = hf_lowbit.DAMPConfig(rows=2, sequences=3, prompt_tokens=8, decode_tokens=24, windows=(0,), window_tokens=24,
                              anchors=(8, 16), horizon=8)
report = hf_lowbit.calibrate(model, tokenizer, config, dataset=tiny_model.texts(6), progress=False)
model.push_to_hub("tester/hybrid")
tokenizer.push_to_hub("tester/hybrid")
card = model_card(model, report.to_dict(), "someone/base", repo_id="tester/hybrid")
HfApi().upload_file(path_or_fileobj=str(card).encode(), path_in_repo="README.md", repo_id="tester/hybrid")
"""

LOAD = """
import sys, torch, tiny_model, hf_lowbit
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("tester/hybrid")
tokenizer = AutoTokenizer.from_pretrained("tester/hybrid")
hf_lowbit.assert_quantized(model)
"""

# Everything that comes out of a prompt and some tokens.
RECORD = """
from hf_lowbit.compat import CACHE_ARG

model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)  # aligned
ids = torch.tensor([tokenizer(tiny_model.texts(1, seed=7)[0])["input_ids"][:40]])
out = model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
                     output_logits=True)
cache = getattr(out, CACHE_ARG)
assert isinstance(cache, hf_lowbit.DAMPStateCache)
records = [layer.state.tensors["records"] for layer in cache.delta_layers]
torch.save({"tokens": out.sequences, "logits": out.logits, "records": records, "state": model.state_dict()}, sys.argv[1])
"""

WITHOUT = """
import sys, json, torch
from transformers import AutoModelForCausalLM, GenerationConfig
from huggingface_hub import hf_hub_download

GenerationConfig.from_pretrained("tester/hybrid").validate(strict=True)
model = AutoModelForCausalLM.from_pretrained("tester/hybrid")
model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)
for name in ("generation_config.json", "config.json"):
    print(json.dumps(json.load(open(hf_hub_download("tester/hybrid", name)))))
assert not any(name.split(".")[0].startswith("hf_lowbit") for name in sys.modules)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_push_and_load(hub, run_client, tmp_path, dtype):
    import torch

    run_client(PUSH + RECORD, "pushed.pt", dtype)
    run_client(LOAD + RECORD, "loaded.pt", home="elsewhere")

    pushed, loaded = (torch.load(tmp_path / name) for name in ("pushed.pt", "loaded.pt"))
    assert torch.equal(pushed["tokens"], loaded["tokens"])
    for name in ("logits", "records"):
        assert len(pushed[name]) and all(torch.equal(a, b) for a, b in zip(pushed[name], loaded[name], strict=True))
    assert pushed["state"].keys() == loaded["state"].keys()
    assert all(torch.equal(value, loaded["state"][name]) for name, value in pushed["state"].items())
    assert pushed["state"]["lm_head.weight"].dtype == getattr(torch, dtype)
    assert sum(".damp." in name for name in pushed["state"]) == 9

    _, metadata, body = hub.repos["tester/hybrid"].files["README.md"].decode().split("---\n", 2)
    assert "base_model: someone/base" in metadata and body.splitlines()[1].startswith("import hf_lowbit")

    out, err = run_client(WITHOUT, home="without")
    assert "Unknown quantization type" in err
    generation, config = map(json.loads, out.splitlines()[-2:])
    assert not any(name in json.dumps(generation) for name in ("loopvq", "lowbit", "damp"))
    assert config["quantization_config"]["quant_method"] == "lowbit" and "auto_map" not in config
