"""Hybrid models on codes and packed states with the Triton kernels, on a real GPU."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache


sys.path.insert(0, str(Path(__file__).parents[1] / "hybrid"))

from hybrid_models import hybrid_model, tokens  # noqa: E402

from hf_lowbit.compat import CACHE_ARG  # noqa: E402
from hf_lowbit.generation import make_cache  # noqa: E402


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STATES = dict(linear_key_head_dim=128, linear_value_head_dim=128)
SHAPES = {  # the last as in the released models: 64 of 256 channels turn, 8 query heads for one of keys
    "qwen3_5": dict(head_dim=64, num_attention_heads=4),
    "olmo_hybrid": {},
    "qwen3_next": dict(head_dim=256, num_attention_heads=16, num_key_value_heads=2, hidden_size=128),
}


@torch.no_grad()
def feed(model, cache, ids, pieces):
    return torch.cat([model(x, **{CACHE_ARG: cache}).logits.float() for x in ids.split(pieces, 1)], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("methods", [("loopvq",), ("loopvq", "damp")], ids=["codes", "both"])
@pytest.mark.parametrize("name", SHAPES)
def test_triton_decoding_equals_the_reference(name, methods, dtype):
    sizes = SHAPES[name] | (STATES if name == "qwen3_5" else {})
    model = hybrid_model(methods, name, **sizes).to("cuda", dtype)
    if name == "qwen3_next" and dtype == torch.float32:
        model.set_experts_implementation("batched_mm")  # PyTorch's grouped product reads on the host but for bf16
    ids, pieces = tokens(160, rows=3).cuda(), [100, 20] + [1] * 40
    stock = feed(model, DynamicCache(config=model.config), ids, pieces)
    caches = {backend: make_cache(model, backend=backend) for backend in ("triton", "reference")}
    logits = {backend: feed(model, cache, ids, pieces) for backend, cache in caches.items()}
    effect = (logits["reference"] - stock).abs().mean()
    apart = (logits["triton"] - logits["reference"]).abs().mean()
    assert caches["triton"].coded_tokens == [8 * ((160 - 24) // 8)] * 3
    # Sums in another order move a code here and there; a bf16 model rounds each layer's output besides.
    assert apart < (0.05 * effect if dtype == torch.float32 else 3e-2 * stock.abs().mean())


@pytest.mark.parametrize("methods", [("loopvq",), ("loopvq", "damp")], ids=["codes", "both"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "olmo_hybrid"])
def test_generate_replays_graphs_of_the_kernels(name, methods):
    sizes = dict(head_dim=64, num_attention_heads=4, **STATES) if name == "qwen3_5" else {}
    model = hybrid_model(methods, name, **sizes).to("cuda", torch.bfloat16)
    mask = torch.ones(2, 90, dtype=torch.long, device="cuda")
    mask[1, :30] = 0
    found = []
    for wanted in (True, False):
        cache = make_cache(model, cuda_graphs=wanted, strict=True)
        out = model.generate(
            tokens(90, rows=2).cuda(), attention_mask=mask, max_new_tokens=60, do_sample=False, eos_token_id=None,
            return_dict_in_generate=True, output_logits=True, **{CACHE_ARG: cache},
        )  # fmt: skip
        assert cache.backend == "triton" and (cache.graph_replays > 50) == wanted
        found.append(torch.stack(out.logits).float())
    assert (found[0] - found[1]).abs().mean() < 0.05 * found[1].abs().mean()
