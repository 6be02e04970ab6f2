"""Greedy generation on tasks, batched and left-padded, with a named cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..data import Task


@dataclass
class Generations:
    """What one cache generated, in the order of the tasks.

    Attributes:
        tokens: generated ids of each task, up to its token budget, the end token included if it was reached.
        texts: the same, decoded.
        seconds: wall time inside ``generate``, prompts included.
    """

    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second over all prompts; prefill time counts."""
        return sum(map(len, self.tokens)) / self.seconds if self.seconds else 0.0


@torch.no_grad()
def generate_greedily(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[Task],
    cache_implementation: str,
    *,
    cache_config: dict[str, Any] | None = None,
    batch_size: int = 16,
    progress: bool = True,
) -> Generations:
    """Continue the prompt of every task with the named cache.

    Prompts of similar length share a batch, so little is spent on padding; the batches depend on the tasks only, so
    two caches see exactly the same ones.

    Args:
        model: a causal language model in eval mode.
        tokenizer: its tokenizer.
        tasks: prompts and token budgets.
        cache_implementation: as in ``model.generate``.
        cache_config: run-time options of the cache.
        batch_size: prompts per batch.
        progress: show a progress bar.

    Raises:
        ValueError: a prompt and its budget exceed the model's context.
    """
    prompts = [tokenizer(task.prompt)["input_ids"] for task in tasks]
    _check_lengths(model, tasks, prompts)
    stop = stop_tokens(model, tokenizer)
    # Padding is masked, so its id is irrelevant; generate() also fills finished rows with it.
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stop, default=0)
    out = Generations(tokens=[[]] * len(tasks), texts=[""] * len(tasks))
    with tqdm(total=len(tasks), desc=f"{cache_implementation} cache", disable=None if progress else True) as bar:
        for batch in batches(tasks, prompts, batch_size):
            ids, mask = left_pad([prompts[i] for i in batch], pad, model.device)
            options: dict[str, Any] = {"cache_config": dict(cache_config)} if cache_config else {}
            started = _now(model.device)
            generated = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                num_beams=1,
                max_new_tokens=max(tasks[i].max_new_tokens for i in batch),
                eos_token_id=sorted(stop) or None,
                pad_token_id=pad,
                cache_implementation=cache_implementation,
                **options,
            )
            out.seconds += _now(model.device) - started
            for i, row in zip(batch, generated[:, ids.shape[1] :].tolist(), strict=True):
                out.tokens[i] = _cut(row[: tasks[i].max_new_tokens], stop)
                out.texts[i] = tokenizer.decode(out.tokens[i], skip_special_tokens=True)
            bar.update(len(batch))
    return out


def stop_tokens(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """The ids that end a generation: the generation config's, else the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return set()
    return set(configured) if isinstance(configured, (list, tuple)) else {configured}


def batches(tasks: Sequence[Task], prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Indices of tasks that are generated together: equal token budgets, similar prompt lengths, longest first.

    The largest batch comes first, so that running out of memory shows at once.
    """
    order = sorted(range(len(tasks)), key=lambda i: (-tasks[i].max_new_tokens, -len(prompts[i]), i))
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) == batch_size or tasks[i].max_new_tokens != tasks[batch[0]].max_new_tokens):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def left_pad(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """``(input_ids, attention_mask)``, both int64 ``[B, longest row]``, padded on the left."""
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _check_lengths(model: PreTrainedModel, tasks: Sequence[Task], prompts: Sequence[Sequence[int]]) -> None:
    context = getattr(model.config, "max_position_embeddings", None)
    for task, prompt in zip(tasks, prompts, strict=True):
        if not prompt:
            raise ValueError(f"a prompt of task '{task.task}' has no tokens: {task.prompt!r}")
        if context is not None and len(prompt) + task.max_new_tokens > context:
            raise ValueError(
                f"a prompt of task '{task.task}' has {len(prompt)} tokens and asks for {task.max_new_tokens} more; the "
                f"model's context holds {context}"
            )


def _cut(tokens: list[int], stop: set[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
