"""Peak GPU memory of prefilling a prompt: full-precision cache against LoopVQ at several chunk sizes.

    python examples/prefill_memory.py CALIBRATED_MODEL --tokens 1800 --chunks 256 2048 --json OUT.json

Peaks are `torch.cuda.max_memory_allocated` above what was allocated before the forward pass (the weights and the
codebooks), so they hold the cache, the chunk's states and the activations. `held` is what stays allocated afterwards.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

import hf_lowbit
from hf_lowbit.compat import CACHE_ARG


@torch.no_grad()
def measure(model, ids, make_cache) -> dict:
    def run():
        cache = make_cache()
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE_ARG: cache})
        return cache

    run()  # kernels compiled, workspaces allocated
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cache = run()
    torch.cuda.synchronize()
    result = {"peak": torch.cuda.max_memory_allocated() - before, "held": torch.cuda.memory_allocated() - before}
    if hasattr(cache, "memory_report"):
        result["report"] = cache.memory_report().to_dict()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or Hub id of a calibrated model")
    parser.add_argument("--tokens", type=int, default=1800)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("peak memory is read from CUDA's allocator; this machine has no CUDA device")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).cuda().eval()
    hf_lowbit.assert_quantized(model)
    ids = torch.randint(
        1, model.config.vocab_size, (1, args.tokens), generator=torch.Generator().manual_seed(0)
    ).cuda()
    caches = {"full": lambda: DynamicCache(config=model.config)}
    for chunk in args.chunks:
        caches[f"loopvq, chunk {chunk}"] = lambda chunk=chunk: hf_lowbit.LoopVQCache(model, prefill_chunk_size=chunk)
    results = {name: measure(model, ids, make_cache) for name, make_cache in caches.items()}
    for name, result in results.items():
        share = result["peak"] / results["full"]["peak"]
        print(f"{name:<22} peak {result['peak']:>14,} B ({share:.3f} of full)   held {result['held']:>14,} B")
    if args.json:
        settings = {"tokens": args.tokens, "dtype": args.dtype, "device": torch.cuda.get_device_name()}
        args.json.write_text(json.dumps({"settings": settings, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
