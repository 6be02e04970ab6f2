"""Table of the time per output token of hybrid models: FP32 recurrent states against packed ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

import hf_lowbit

from ..compat import CACHE_ARG
from ..damp.decode import StepCache
from ..damp.full_precision import FullStateCache
from .report import Options, Report
from .shapes import HYBRID, build_hybrid
from .timing import Clock, Peak


METHOD = """Random weights of the model's shape, a prompt of random tokens, then model.generate; tpot_ms is the median time between
tokens. fp32: the model's own one-token function (flash-linear-attention's kernel where it is installed) on FP32 states,
eager in transformers' own cache, graph in the same cache with steps that are CUDA graphs. damp: DAMPStateCache with random
tables of the default layout (INT8, 16 rows in FP16), in the same two ways. change is damp over fp32 - 1, of the arms that
run alike; where steps cannot be captured (no_graphs says why), the graph arms run eagerly and have none."""
MODELS = ("qwen3.5-4b", "kimi-linear-scaled")


def run(report: Report, options: Options) -> None:
    prompt = options.one("tokens", 64, 8)
    batches = options.choose(options.batches, (256, 64, 1), (2,))
    steps, skip = (16, 8) if options.tiny else (40, 12)
    report.settings = {"prompt_tokens": prompt, "steps": steps, "configuration": HYBRID[report.model][1]}
    model = build_hybrid(report.model, options.device)
    for batch in batches:
        base: dict[str, float] = {}
        for arm, make in arms(model).items():
            kind, how = arm.split()

            def one() -> dict:
                row = tpot(model, make(), batch, prompt, steps, skip, options.device)
                if kind == "damp" and how in base and ran_so(how, row):
                    row["change"] = row["tpot_ms"] / base[how] - 1
                return row

            row = report.measure(one, arm=arm, batch=batch, tokens=prompt)
            if kind == "fp32" and "tpot_ms" in row and ran_so(how, row):
                base[how] = row["tpot_ms"]


def ran_so(how: str, row: dict) -> bool:
    """Whether an arm ran as its name says."""
    return how == "eager" or "no_graphs" not in row


def arms(model) -> dict[str, Callable[[], Cache]]:
    """What makes the cache of each arm."""
    return {
        "fp32 graph": lambda: FullStateCache(model),
        "damp graph": lambda: hf_lowbit.DAMPStateCache(model),
        "fp32 eager": lambda: DynamicCache(config=model.config.get_text_config(decoder=True)),
        "damp eager": lambda: hf_lowbit.DAMPStateCache(model, cuda_graphs=False),
    }


def tpot(model, cache, batch: int, prompt: int, steps: int, skip: int, device: str) -> dict:
    """Milliseconds per token through ``generate`` and the bytes of the states."""
    ids = torch.randint(1, model.config.get_text_config(decoder=True).vocab_size, (batch, prompt), device=device)
    clock, peak = Clock(), Peak(device)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False, eos_token_id=None,
        pad_token_id=0, streamer=clock, **{CACHE_ARG: cache},
    )  # fmt: skip
    row = {"tpot_ms": 1e3 * statistics.median(clock.gaps(skip)), "peak_bytes": peak.bytes()}
    if isinstance(cache, hf_lowbit.DAMPStateCache):
        found = cache.memory_report()
        row |= {"backend": cache.backend, "state_bytes": found.state_bytes, "bits": found.state_bits_per_value}
    else:
        states = [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]
        row |= {"state_bytes": sum(s.nbytes for s in states), "state_dtype": str(states[0].dtype)}
    if isinstance(cache, StepCache):
        row["replayed"] = cache.graph_replays
        if cache.graph_replays == 0:
            row["no_graphs"] = cache.graph_problem or "these steps cannot be captured"
    return row
