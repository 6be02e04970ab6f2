"""What each low-bit cache of a hybrid model costs: packed states, codes for keys and values, and both.

    python examples/hybrid_kl.py ARTIFACT text.jsonl --texts 4 --tokens 512 --device cpu

ARTIFACT was calibrated for both methods. All caches read the same texts, a prompt at once and then token by token, so
that every position of every cache compares with the full-precision one over the same past.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.data import read_texts
from hf_lowbit.evaluation.storage import full_cache_bytes
from hf_lowbit.evaluation.teacher_forced import compare_on_texts
from hf_lowbit.generation import make_cache
from hf_lowbit.protocols import ForcedSchedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact")
    parser.add_argument("texts_file")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of each text")
    parser.add_argument("--prompt-tokens", type=int, default=80, help="at once; no code is visible before 80")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.artifact)
    model = AutoModelForCausalLM.from_pretrained(args.artifact, dtype=args.dtype).eval().to(args.device)
    texts = read_texts(args.texts_file, args.texts)
    rows = [tokenizer(text, truncation=True, max_length=args.tokens)["input_ids"] for text in texts]
    schedule = ForcedSchedule(args.prompt_tokens, 1, args.prompt_tokens)
    longest = torch.tensor([max(rows, key=len)], device=args.device)

    @torch.no_grad()
    def filled(cache):
        model(longest, **{CACHE_ARG: cache})
        return cache

    full = full_cache_bytes(filled(DynamicCache(config=model.config.get_text_config(decoder=True))))
    print(f"{'cache':<8} {'KL, nats':>10} {'top-1':>7} {'bytes':>10}  of one sequence of {longest.shape[1]} tokens")
    print(f"{'dynamic':<8} {0:>10} {1:>7} {full:>10,}")
    for name in ("damp", "loopvq", "lowbit"):
        found = compare_on_texts(
            model, rows, lambda name=name: make_cache(model, name), schedule, batch_size=len(rows), progress=False
        )
        size = filled(make_cache(model, name)).memory_report().per_request
        print(f"{name:<8} {found.kl_mean:>10.6f} {found.top1_agreement:>7.4f} {size:>10,}", flush=True)


if __name__ == "__main__":
    main()
