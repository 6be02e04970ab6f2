"""KL divergence and top-1 agreement on given texts, through the real quantized cache.

Both caches get the same tokens, so that every position compares two distributions over the same past. The quantized
cache gets them as decoding would: in steps that its :class:`~hf_lowbit.protocols.ForcedSchedule` names. Those are pages
of 8 tokens for codes, which show each query what it would see token by token (the reason stands at
``LoopVQCache.forced_schedule``), and single tokens for packed recurrent states, which are rounded at every write. The
full-precision cache has nothing to round and takes longer pieces; for recurrent states this changes logits by about
1e-6 relative, as a chunk sums in another order than single steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from ..compat import CACHE_ARG
from ..protocols import ForcedSchedule


BUCKET = 256  # positions per point of the drift curve, and tokens of a piece of the full-precision side


@dataclass(frozen=True)
class TeacherForced:
    """Means over all positions whose prediction the quantized cache can change.

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


class ForcedMetrics:
    """What two caches predict for one batch of texts, position by position, kept on the device without waiting for it.

    Args:
        rows: token ids of the texts, B of them.
        first_counted: earlier positions are left out.
        device: where the logits will be.
        dtype: of the log-probabilities. fp32 has noise of about 1e-8 nats, which hides what fp16 states cost in a model
            that computes in fp32; fp64 resolves that.

    Attributes:
        ids: int64 ``[B, longest row]``. Shorter rows go on with their last token, which is not counted.
        counted: bool, same shape: real tokens from ``first_counted`` on.
        kl, nll_full, nll_quantized: fp64, same shape, nats. agree: bool, same shape. Valid where counted; the losses not
            at a row's last token, which has no next one.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        first_counted: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ):
        width = max(map(len, rows))
        self.dtype = dtype
        self.ids = torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in rows], device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)[:, None]
        positions = torch.arange(width, device=device)
        self.counted = (positions >= first_counted) & (positions < lengths)
        self.labelled = self.counted & (positions < lengths - 1)
        self.agree = torch.zeros_like(self.counted)
        zeros = torch.zeros(3, *self.ids.shape, dtype=torch.float64, device=device)
        self.kl, self.nll_full, self.nll_quantized = zeros

    def add(self, first: int, full: torch.Tensor, quantized: torch.Tensor) -> None:
        """Take the logits ``[B, n, vocab]`` of both caches at the positions from ``first`` on."""
        count = full.shape[1]
        span = slice(first, first + count)
        log_p = F.log_softmax(full.to(self.dtype), dim=-1)
        log_q = F.log_softmax(quantized.to(self.dtype), dim=-1)
        self.kl[:, span] = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).double()
        self.agree[:, span] = log_p.argmax(-1) == log_q.argmax(-1)
        # After the last position there is no token; the stand-in's loss is never read.
        following = F.pad(self.ids[:, first + 1 : first + 1 + count], (0, 1))[:, :count, None]
        self.nll_full[:, span] = -log_p.gather(-1, following)[..., 0].double()
        self.nll_quantized[:, span] = -log_q.gather(-1, following)[..., 0].double()

    def check_finite(self, start: int, end: int) -> None:
        """Wait for the device and look at the positions from ``start`` to before ``end``.

        Raises:
            ValueError: a counted position has no finite KL.
        """
        bad = (self.counted & ~self.kl.isfinite())[:, start:end].any(0).nonzero()
        if len(bad):
            raise ValueError(
                f"the logits after position {start + int(bad[0])} are not finite; cannot compare the caches"
            )


@torch.no_grad()
def compare_on_texts(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    make_cache: Callable[[], Cache],
    schedule: ForcedSchedule,
    *,
    batch_size: int = 8,
    progress: bool = True,
) -> TeacherForced:
    """Feed each text to a full-precision and to a quantized cache and compare the next-token distributions.

    Args:
        model: a causal language model in eval mode.
        sequences: token ids of the texts. Shorter rows of a batch are padded on the right and not counted: causal
            layers and batch-invariant caches keep the padding from reaching the real tokens.
        make_cache: builds an empty quantized cache; called once per batch.
        schedule: how that cache is fed, ``cache.forced_schedule()``.
        batch_size: texts per batch.
        progress: show a progress bar.

    Raises:
        ValueError: no text is longer than ``schedule.first_counted`` tokens, so that nothing quantized would be read.
    """
    first = schedule.first_counted
    usable = sorted((list(ids) for ids in sequences if len(ids) > first), key=len, reverse=True)
    if not usable:
        longest = max((len(ids) for ids in sequences), default=0)
        raise ValueError(
            f"no text has more than {first} tokens, so that nothing quantized would ever be read (this cache is fed "
            f"{schedule.prefill} tokens at once and then {schedule.step} at a time); the longest has {longest}"
        )
    batches = []
    with tqdm(
        total=sum(map(len, usable)), desc="KL on texts", unit="token", disable=None if progress else True
    ) as bar:
        for start in range(0, len(usable), batch_size):
            rows = usable[start : start + batch_size]
            batches.append(_compare_batch(model, rows, make_cache(), schedule, bar))
    return _summarize(batches, len(usable))


def forced_logits(
    model: PreTrainedModel, ids: torch.Tensor, cache: Cache, schedule: ForcedSchedule
) -> Iterator[tuple[int, torch.Tensor]]:
    """Feed ``ids [B, width]`` to an empty cache; yields ``(first position, logits [B, n, vocab])`` of each step.

    The prefill's own logits are not computed, but for the last.
    """
    begin = min(schedule.prefill, ids.shape[1])
    _forward(model, ids[:, :begin], cache, keep=1)
    while begin < ids.shape[1]:
        piece = ids[:, begin : begin + schedule.step]
        yield begin, _forward(model, piece, cache)
        begin += piece.shape[1]


def _compare_batch(
    model: PreTrainedModel, rows: list[list[int]], quantized: Cache, schedule: ForcedSchedule, bar: tqdm
) -> ForcedMetrics:
    metrics = ForcedMetrics(rows, schedule.first_counted, model.device)
    stock = DynamicCache(config=model.config.get_text_config(decoder=True))
    # Long enough to be quick, short enough that logits of batch x 256 x vocabulary stay small; a multiple of the step.
    piece = max(BUCKET // schedule.step, 1) * schedule.step
    steps = forced_logits(model, metrics.ids, quantized, schedule)
    bar.update(schedule.prefill * len(rows))
    for start, full in forced_logits(model, metrics.ids, stock, schedule._replace(step=piece)):
        done, end = start, start + full.shape[1]
        while done < end:
            first, logits = next(steps)
            done = first + logits.shape[1]
            metrics.add(first, full[:, first - start : done - start], logits)
            bar.update(sum(min(max(len(row) - first, 0), done - first) for row in rows))
        metrics.check_finite(start, end)
    return metrics


def _summarize(batches: Sequence[ForcedMetrics], texts: int) -> TeacherForced:
    def total(values: str, where: str) -> float:
        return sum(getattr(m, values)[getattr(m, where)].double().sum().item() for m in batches)

    positions = sum(int(m.counted.sum()) for m in batches)
    labelled = max(sum(int(m.labelled.sum()) for m in batches), 1)
    return TeacherForced(
        kl_mean=total("kl", "counted") / positions,
        top1_agreement=total("agree", "counted") / positions,
        nll_full=total("nll_full", "labelled") / labelled,
        nll_quantized=total("nll_quantized", "labelled") / labelled,
        positions=positions,
        texts=texts,
        kl_by_position=drift(batches),
    )


def drift(batches: Sequence[ForcedMetrics]) -> list[list[float]]:
    """``[first position, mean KL]`` of every stretch of ``BUCKET`` positions that has counted ones."""
    curve = []
    for start in range(0, max(m.ids.shape[1] for m in batches), BUCKET):
        kl = [m.kl[:, start : start + BUCKET][m.counted[:, start : start + BUCKET]] for m in batches]
        count = sum(map(len, kl))
        if count:
            curve.append([start, sum(part.sum().item() for part in kl) / count])
    return curve


def _forward(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, keep: int = 0) -> torch.Tensor:
    """Logits ``[B, n, vocab]`` of all positions (``keep=0``) or of the last one (``keep=1``)."""
    return model(input_ids=ids, use_cache=True, logits_to_keep=keep, **{CACHE_ARG: cache}).logits
