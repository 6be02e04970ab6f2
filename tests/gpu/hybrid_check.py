"""A hybrid checkpoint on a GPU: codes and packed states, Triton kernels against the reference path, and what they cost.

    python tests/gpu/hybrid_check.py MODEL texts.jsonl        # e.g. shared/models/gdn-mini shared/eval/calibration.jsonl

Calibrates for both methods on a few short sequences (the tables are real, and poor), then decodes the same tokens with
both paths. Exits with 1 if they differ by more than a fraction of what quantization itself changes.
"""

import sys
import time
import warnings

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import hf_lowbit
from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.data import read_texts
from hf_lowbit.generation import make_cache


CONFIG = hf_lowbit.LowBitConfig(
    loopvq=hf_lowbit.LoopVQConfig(bits=2, sequences=6, sequence_length=384, epochs=1, learning_rate=0.01),
    damp=hf_lowbit.DAMPConfig(
        sequences=6, prompt_tokens=64, decode_tokens=256, windows=(0,), window_tokens=256, anchors=(64, 128), horizon=128,
        continuation="text",
    ),
)  # fmt: skip
PIECES = [256, 64] + [1] * 96


@torch.no_grad()
def feed(model, cache, ids):
    return torch.cat([model(x, **{CACHE_ARG: cache}).logits.float() for x in ids.split(PIECES, 1)], 1)


def timed(label, function):
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = function()
    torch.cuda.synchronize()
    print(f"{label}: {time.perf_counter() - began:.1f} s", flush=True)
    return out


def main(name, texts_file):
    warnings.filterwarnings("ignore", "half of the codebooks")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).cuda().eval()
    texts = read_texts(texts_file, 16)
    report = timed("calibration", lambda: hf_lowbit.calibrate(model, tokenizer, CONFIG, dataset=texts, progress=False))
    print(report.summary())
    rows = [tokenizer(text, truncation=True, max_length=sum(PIECES))["input_ids"] for text in texts[:4]]
    ids = torch.tensor(rows, device="cuda")
    failed = False
    for dtype, limit in ((torch.float32, 0.05), (torch.bfloat16, 0.5)):
        model.to(dtype)
        stock = feed(model, DynamicCache(config=model.config.get_text_config(decoder=True)), ids)
        logits = {}
        for backend in ("triton", "reference"):
            cache = make_cache(model, backend=backend)
            logits[backend] = timed(f"{dtype} {backend}", lambda: feed(model, cache, ids))
            assert (cache.backend, cache.states.backend) == (backend, backend)
            print(
                f"  {cache.graph_replays} of 96 steps replayed as CUDA graphs; {cache._graphs.problem or 'no obstacle'}"
            )
        effect = (logits["reference"] - stock).abs().mean()
        apart = (logits["triton"] - logits["reference"]).abs().mean()
        finite = all(value.isfinite().all() for value in logits.values())
        passed = bool(finite and apart < limit * effect)
        failed |= not passed
        print(f"{dtype}: quantization moves logits by {effect:.3g}, the paths differ by {apart:.3g}, allowed {limit:g} of "
              f"that: {'ok' if passed else 'FAILED'}")  # fmt: skip
    encoded = tokenizer([texts[0][:600], texts[1][:900]], return_tensors="pt", padding=True, padding_side="left")
    inputs = {key: encoded[key].cuda() for key in ("input_ids", "attention_mask")}
    greedy = dict(max_new_tokens=64, do_sample=False, eos_token_id=None)
    for cache_name in ("lowbit", "loopvq", "damp", "dynamic"):
        model.generate(**inputs, **greedy | {"max_new_tokens": 2}, cache_implementation=cache_name)
        timed(f"generate 64 tokens, {cache_name}", lambda: model.generate(
            **inputs, **greedy, cache_implementation=cache_name))  # fmt: skip
    timed("generate 64 tokens, lowbit without CUDA graphs", lambda: model.generate(
        **inputs, **greedy, cache_implementation="lowbit", cache_config={"cuda_graphs": False}))  # fmt: skip
    cache = make_cache(model, strict=True)
    print(f"strict: attention on {cache.backend}, states on {cache.states.backend}")
    model.generate(**inputs, **greedy, **{CACHE_ARG: cache})
    print(cache.memory_report())
    sys.exit(failed)


if __name__ == "__main__":
    main(*sys.argv[1:])
