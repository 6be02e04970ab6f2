"""KL divergence and top-1 agreement on given texts, through the real quantized cache.

Why chunks of 8 tokens measure what decoding sees. A query at position q reads key p from the codes exactly when
``S <= p < S + n_q`` with ``n_q = 8 * floor(max(0, q - S - W) / 8)`` (S sinks, W recent window).
With chunk borders at S + W + 8 j, ``n_q`` is the same for all queries of a chunk: feeding a page at a time shows each
query the codes it would see in token-by-token decoding, in an eighth of the calls. Larger chunks would let late
queries of a chunk read tokens in full precision that decoding has already encoded, and flatter the result. The first
chunk may hold S + W tokens, since no code is visible before position S + W + 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from ..compat import CACHE_ARG
from ..config import PAGE


BUCKET = 256  # positions per point of the drift curve


@dataclass(frozen=True)
class TeacherForced:
    """Means over all positions where at least one page of codes is visible.

    Attributes:
        kl_mean: KL(full || quantized) of the next-token distribution, nats, computed in fp32.
        top1_agreement: share of positions where both caches prefer the same token.
        nll_full, nll_quantized: loss of the actual next token, nats, over the positions that have one.
        positions: how many positions the means are over.
        texts: how many texts they come from.
        kl_by_position: ``[first position, mean KL]`` of every stretch of 256 positions: the drift curve.
    """

    kl_mean: float
    top1_agreement: float
    nll_full: float
    nll_quantized: float
    positions: int
    texts: int
    kl_by_position: list[list[float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Sums:
    """Running sums in fp64 over the counted positions."""

    def __init__(self) -> None:
        self.kl = self.agree = self.nll_full = self.nll_quantized = 0.0
        self.positions = self.labelled = 0
        self.buckets: dict[int, tuple[float, int]] = {}

    def add(
        self, full: torch.Tensor, quantized: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor, first: int
    ) -> None:
        """Add one chunk.

        Args:
            full, quantized: logits ``[B, n, vocab]``.
            labels: next tokens ``[B, n]``, -100 where there is none.
            counted: bool ``[B, n]``, False for padding and for positions that see no codes.
            first: position of the chunk's first token.
        """
        count = int(counted.sum())
        if not count:
            return
        log_p = F.log_softmax(full[counted].float(), dim=-1)
        log_q = F.log_softmax(quantized[counted].float(), dim=-1)
        kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).double().sum().item()
        if not math.isfinite(kl):
            raise ValueError(f"the logits after position {first} are not finite; cannot compare the caches")
        labels = labels[counted]
        known = (labels >= 0).nonzero().squeeze(-1)
        self.kl += kl
        self.agree += (log_p.argmax(-1) == log_q.argmax(-1)).sum().item()
        self.positions += count
        self.nll_full -= log_p[known, labels[known]].double().sum().item()
        self.nll_quantized -= log_q[known, labels[known]].double().sum().item()
        self.labelled += len(known)
        key = first // BUCKET * BUCKET  # chunks start at multiples of 8 and never reach into the next bucket
        total, before = self.buckets.get(key, (0.0, 0))
        self.buckets[key] = (total + kl, before + count)


@torch.no_grad()
def compare_on_texts(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    make_cache: Callable[[], Cache],
    *,
    sink_tokens: int,
    recent_window: int,
    batch_size: int = 8,
    progress: bool = True,
) -> TeacherForced:
    """Feed each text to a full-precision and to a quantized cache and compare the next-token distributions.

    Args:
        model: a causal language model in eval mode.
        sequences: token ids of the texts. Shorter rows of a batch are padded on the right and not counted: causal
            attention and batch-invariant caches keep the padding from reaching the real tokens.
        make_cache: builds an empty quantized cache; called once per batch.
        sink_tokens, recent_window: the cache's S and W, which place the chunk borders.
        batch_size: texts per batch.
        progress: show a progress bar.

    Raises:
        ValueError: no text is longer than S + W + 8 tokens, so that no query would see a code.
    """
    first_coded = sink_tokens + recent_window + PAGE
    usable = sorted((list(ids) for ids in sequences if len(ids) > first_coded), key=len, reverse=True)
    if not usable:
        longest = max((len(ids) for ids in sequences), default=0)
        raise ValueError(
            f"no text has more than {first_coded} tokens ({sink_tokens} sinks, a window of {recent_window} and a page "
            f"of {PAGE}), so that no code would ever be read; the longest has {longest}"
        )
    sums = _Sums()
    total = sum(len(ids) for ids in usable)
    with tqdm(total=total, desc="KL on texts", unit="token", disable=None if progress else True) as bar:
        for start in range(0, len(usable), batch_size):
            _compare_batch(model, usable[start : start + batch_size], make_cache(), first_coded, sums, bar)
    return TeacherForced(
        kl_mean=sums.kl / sums.positions,
        top1_agreement=sums.agree / sums.positions,
        nll_full=sums.nll_full / max(sums.labelled, 1),
        nll_quantized=sums.nll_quantized / max(sums.labelled, 1),
        positions=sums.positions,
        texts=len(usable),
        kl_by_position=[[key, value / count] for key, (value, count) in sorted(sums.buckets.items())],
    )


def _compare_batch(
    model: PreTrainedModel, rows: list[list[int]], quantized: Cache, first_coded: int, sums: _Sums, bar: tqdm
) -> None:
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    width = int(lengths.max())
    ids = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows], device=model.device)
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    positions = torch.arange(width, device=model.device)
    labels[positions >= lengths[:, None] - 1] = -100

    full = DynamicCache(config=model.config)
    # The first piece ends at S + W; later ones are the reference's: long enough to be quick, short enough that
    # their logits (batch x 256 x vocabulary) stay small. All borders lie at S + W + 8 j.
    start = first_coded - PAGE
    _forward(model, ids[:, :start], full, keep=1)
    _forward(model, ids[:, :start], quantized, keep=1)
    bar.update(start * len(rows))
    while start < width:
        end = min(start + BUCKET, width)
        reference = _forward(model, ids[:, start:end], full)
        for begin in range(start, end, PAGE):
            stop = min(begin + PAGE, end)
            logits = _forward(model, ids[:, begin:stop], quantized)
            counted = (positions[begin:stop] >= first_coded) & (positions[begin:stop] < lengths[:, None])
            sums.add(reference[:, begin - start : stop - start], logits, labels[:, begin:stop], counted, begin)
            bar.update(int((positions[begin:stop] < lengths[:, None]).sum()))
        start = end


def _forward(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, keep: int = 0) -> torch.Tensor:
    """Logits ``[B, n, vocab]`` of all positions (``keep=0``) or of the last one (``keep=1``)."""
    return model(input_ids=ids, use_cache=True, logits_to_keep=keep, **{CACHE_ARG: cache}).logits
