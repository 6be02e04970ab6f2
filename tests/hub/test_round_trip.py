"""Push a calibrated model and load it elsewhere: bit-identical codes and logits; harmless without the package."""

import json


PUSH = """
import sys, torch, tiny_model, hf_lowbit
from hf_lowbit.compat import cache_kwargs
from hf_lowbit.model_card import model_card
from huggingface_hub import HfApi

model, tokenizer = tiny_model.build_model(), tiny_model.build_tokenizer()
report = hf_lowbit.calibrate(model, tokenizer, tiny_model.LOOPVQ, dataset=tiny_model.texts(6), progress=False)
model.push_to_hub("tester/tiny")
tokenizer.push_to_hub("tester/tiny")
card = model_card(model, report.to_dict(), "someone/base", repo_id="tester/tiny")
# Not card.push_to_hub: it has its metadata checked at huggingface.co, wherever HF_ENDPOINT points.
HfApi().upload_file(path_or_fileobj=str(card).encode(), path_in_repo="README.md", repo_id="tester/tiny")
"""

# Runs a prompt and some tokens through the cache and keeps everything that comes out.
RECORD = """
def record(model, tokenizer, path):
    # Weights mapped from a file sit at odd addresses, where the CPU's matrix-vector product sums in another order
    # (1e-6 in the logits of single tokens). Copies put both models at aligned ones; no value changes.
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    ids = torch.tensor([tokenizer(tiny_model.texts(1, seed=7)[0])["input_ids"]])
    cache = hf_lowbit.LoopVQCache(model)
    with torch.no_grad():
        pieces = [ids[:, :80], *ids[:, 80:].split(1, dim=1)]
        logits = [model(input_ids=piece, use_cache=True, **cache_kwargs(cache)).logits for piece in pieces]
    codes = [store.codes[:, :, :, : cache.coded_tokens[0] // 8].clone() for store in cache._stores]
    torch.save({"logits": torch.cat(logits, 1), "codes": codes, "state": model.state_dict()}, path)

record(model, tokenizer, sys.argv[1])
"""

LOAD = """
import sys, torch, tiny_model, hf_lowbit
from hf_lowbit.compat import cache_kwargs
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("tester/tiny")
tokenizer = AutoTokenizer.from_pretrained("tester/tiny")
hf_lowbit.assert_quantized(model)
"""

# Somebody without the package: hf_lowbit must not be imported, and nothing in the repository may ask for it.
WITHOUT = """
import sys, json
from transformers import GenerationConfig
from huggingface_hub import hf_hub_download

config = GenerationConfig.from_pretrained("tester/tiny")
config.validate(strict=True)
for name in ("generation_config.json", "config.json"):
    print(json.dumps(json.load(open(hf_hub_download("tester/tiny", name)))))
assert not any(name.split(".")[0].startswith("hf_lowbit") for name in sys.modules)
"""


def test_push_and_load(hub, run_client, tmp_path):
    import torch

    run_client(PUSH + RECORD, "pushed.pt")
    files = hub.repos["tester/tiny"].files
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
    } <= files.keys()
    run_client(LOAD + RECORD, "loaded.pt", home="elsewhere")

    pushed, loaded = (torch.load(tmp_path / name) for name in ("pushed.pt", "loaded.pt"))
    assert torch.equal(pushed["logits"], loaded["logits"])
    assert pushed["codes"] and all(torch.equal(a, b) for a, b in zip(pushed["codes"], loaded["codes"], strict=True))
    assert pushed["state"].keys() == loaded["state"].keys()
    assert all(torch.equal(value, loaded["state"][name]) for name, value in pushed["state"].items())
    assert any("table" in name for name in pushed["state"])

    # The card has what people need first.
    _, metadata, body = files["README.md"].decode().split("---\n", 2)
    assert "base_model: someone/base" in metadata and body.splitlines()[1].startswith("import hf_lowbit")
    assert '"tester/tiny"' in body

    generation, config = map(json.loads, run_client(WITHOUT, home="without")[0].splitlines())
    for name in ("loopvq", "lowbit"):
        assert name not in json.dumps(generation)
    assert generation.get("cache_implementation") is None
    assert "auto_map" not in config and config["quantization_config"]["quant_method"] == "lowbit"
