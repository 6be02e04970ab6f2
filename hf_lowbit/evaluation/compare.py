"""The whole comparison: full-precision cache against quantized cache, on the same prompts."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from ..compat import CACHE_ARG
from ..config import lowbit_config
from ..data import Task
from ..generation import make_cache
from ..protocols import KVAttention
from .greedy import Generations, generate_greedily, left_pad
from .metrics import accuracy, divergence, repeats
from .storage import full_cache_bytes, recurrent_states
from .teacher_forced import compare_on_texts


# Every side of the result has these keys; a value is None when the data it needs was not given.
METRICS = (
    "kl_mean",
    "top1_agreement",
    "first_divergence",
    "accuracy",
    "accuracy_mean",
    "bits_per_element",
    "cache_bytes",
    "tokens_per_second",
)
# More of them when it is recurrent states that are quantized.
STATE_METRICS = ("state_bits_per_value", "state_bytes")


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: Sequence[str] | None = None,
    tasks: Sequence[Task] | None = None,
    *,
    cache_implementation: str = "lowbit",
    cache_config: dict[str, Any] | None = None,
    text_tokens: int = 2048,
    text_prompt_tokens: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure what a calibrated model loses and saves by its quantized cache.

    Args:
        model: a calibrated model; put into eval mode.
        tokenizer: its tokenizer.
        texts: for KL and top-1 agreement (:func:`~hf_lowbit.evaluation.teacher_forced.compare_on_texts`).
        tasks: for accuracy, first divergence and speed, by greedy generation.
        cache_implementation: the quantized cache, ``"lowbit"`` for the one that the model was calibrated for.
        cache_config: its run-time options (``recent_window``, ``strict``).
        text_tokens: texts are cut to so many tokens.
        text_prompt_tokens: tokens of a text that recurrent states get at once, before the single-token steps that are
            compared; None: 64. Not for codes, whose window decides that.
        batch_size: prompts generated at once, and texts compared at once.
        seed: torch's seed; only models that draw random states need it, the evaluation itself draws nothing.
        progress: show progress bars.

    Returns:
        ``{"full": ..., "quantized": ..., "settings": ...}``, JSON-serializable. Both sides have the keys ``METRICS``:
        kl_mean (nats) and top1_agreement against the full-precision cache; first_divergence, the mean index of the
        first generated token that differs (identical generations count with their length, so the full side holds the
        mean length); accuracy by task and its mean over tasks; bits_per_element of what is quantized (of keys and values,
        where they and states both are); cache_bytes, what
        one sequence of ``settings["cache_prompt_tokens"]`` tokens occupies (codebooks and index tables are shared by all
        sequences and listed in ``cache_detail``); tokens_per_second, new tokens over wall time. For recurrent states also
        ``STATE_METRICS``: bits per element of the states, measured from the tensors with all their scales, and the bytes
        of one sequence's states. More detail stands beside them; ``kl_by_position`` is the drift curve.

    Raises:
        ValueError: neither texts nor tasks, an uncalibrated model, or texts too short for anything quantized to be read.
    """
    if not texts and not tasks:
        raise ValueError("nothing to evaluate on: give texts, tasks or both")
    torch.manual_seed(seed)
    model.eval()
    options = dict(cache_config or {})
    # Built first: an uncalibrated model or a bad option fails before any work is done.
    probe = make_cache(model, cache_implementation, **options)
    schedule = probe.forced_schedule(text_prompt_tokens)

    full: dict[str, Any] = dict.fromkeys(METRICS)
    quantized: dict[str, Any] = dict.fromkeys(METRICS)
    if texts:
        sequences = [tokenizer(text, truncation=True, max_length=text_tokens)["input_ids"] for text in texts]
        forced = compare_on_texts(
            model,
            sequences,
            lambda: make_cache(model, cache_implementation, **options),
            schedule,
            batch_size=batch_size,
            progress=progress,
        )
        quantized |= {"kl_mean": forced.kl_mean, "top1_agreement": forced.top1_agreement}
        quantized |= {"nll_mean": forced.nll_quantized, "kl_by_position": forced.kl_by_position}
        full |= {"kl_mean": 0.0, "top1_agreement": 1.0, "nll_mean": forced.nll_full}
        counted = {"text_positions": forced.positions, "texts_used": forced.texts}
    else:
        sequences, counted = [], {"text_positions": 0, "texts_used": 0}

    if tasks:
        run = {"batch_size": batch_size, "progress": progress}
        # A short untimed generation each: kernels are compiled and memory is allocated before the clock starts.
        for name, config in (("dynamic", None), (cache_implementation, options)):
            _warm_up(model, tokenizer, tasks, name, config, batch_size)
        reference = generate_greedily(model, tokenizer, tasks, "dynamic", **run)
        other = generate_greedily(model, tokenizer, tasks, cache_implementation, cache_config=options, **run)
        full |= _task_metrics(tasks, reference, reference)
        quantized |= _task_metrics(tasks, reference, other)

    prompt = max(sequences or [tokenizer(task.prompt)["input_ids"] for task in tasks or []], key=len)
    full_storage, quantized_storage, backend = _storage(model, prompt, cache_implementation, options)
    full |= full_storage
    quantized |= quantized_storage
    return {
        "full": full,
        "quantized": quantized,
        "settings": {
            **_environment(model),
            **counted,
            "tasks": dict(Counter(task.task for task in tasks or [])),
            "texts": len(texts or []),
            "text_tokens": text_tokens,
            "batch_size": batch_size,
            "seed": seed,
            "cache": cache_implementation,
            "cache_config": options,
            "backend": backend,
            # None where there is no such thing.
            "sink_tokens": getattr(probe, "sinks", None),
            "recent_window": getattr(probe, "window", None),
            "prefill_tokens": schedule.prefill,
            "chunk_tokens": schedule.step,
            "cache_prompt_tokens": len(prompt),
            "quantization_config": lowbit_config(model).to_dict(),
        },
    }


def _task_metrics(tasks: Sequence[Task], reference: Generations, own: Generations) -> dict[str, Any]:
    by_task = accuracy(tasks, own.texts)
    apart = divergence(reference.tokens, own.tokens)
    return {
        "accuracy": by_task,
        "accuracy_mean": sum(by_task.values()) / len(by_task) if by_task else None,
        "first_divergence": apart.mean,
        "first_divergence_detail": apart.to_dict(),
        "repetition_rate": sum(map(repeats, own.tokens)) / len(tasks),
        "tokens_per_second": own.tokens_per_second,
        "generated_tokens": sum(map(len, own.tokens)),
    }


def _warm_up(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[Task],
    name: str,
    config: dict[str, Any] | None,
    batch_size: int,
) -> None:
    """Two tokens after the longest prompts: a full batch on a GPU, whose kernels are compiled by shape, else one row."""
    count = batch_size if model.device.type == "cuda" else 1
    longest = sorted(tasks, key=lambda task: len(task.prompt), reverse=True)[:count]
    short = [replace(task, max_new_tokens=2) for task in longest]
    generate_greedily(model, tokenizer, short, name, cache_config=config, batch_size=batch_size, progress=False)


@torch.no_grad()
def _storage(
    model: PreTrainedModel, prompt: Sequence[int], cache_implementation: str, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Bytes of both caches after ``prompt``, and the backend that decoded its last token (fed alone for that)."""
    ids, _ = left_pad([prompt], 0, model.device)
    text_config = model.config.get_text_config(decoder=True)
    caches = (DynamicCache(config=text_config), make_cache(model, cache_implementation, **options))
    for cache in caches:
        for piece in (ids[:, :-1], ids[:, -1:]):
            if piece.shape[1]:
                model(input_ids=piece, use_cache=True, logits_to_keep=1, **{CACHE_ARG: cache})
    stock, ours = caches
    report = ours.memory_report()
    full: dict[str, Any] = {"cache_bytes": full_cache_bytes(stock)}
    # What belongs to this one sequence; codebooks and tables are shared by all and stand in the detail.
    quantized: dict[str, Any] = {
        "cache_bytes": report.per_request,
        "bits_per_element": report.bits_per_element,
        "cache_detail": report.to_dict(),
    }
    if hasattr(report, "state_bits_per_value"):
        states = recurrent_states(stock)
        full["state_bytes"] = sum(state.nbytes for state in states)
        full["state_bits_per_value"] = 8 * full["state_bytes"] / sum(state.numel() for state in states)
        full["bits_per_element"] = full["state_bits_per_value"]
        quantized |= {"state_bytes": report.state_bytes, "state_bits_per_value": report.state_bits_per_value}
    if isinstance(ours, KVAttention):  # codes for keys and values
        keys = next(layer.keys for layer in stock.layers if hasattr(layer, "keys"))
        full["bits_per_element"] = 8.0 * keys.element_size()
    return full, quantized, str(ours.backend)


def _environment(model: PreTrainedModel) -> dict[str, Any]:
    import hf_lowbit

    device = model.device
    return {
        "versions": {
            "hf_lowbit": hf_lowbit.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "dtype": str(model.dtype).removeprefix("torch."),
    }
