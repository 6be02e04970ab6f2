"""Table of the time that a full calibration of a looped model takes, by parts."""

from __future__ import annotations

import time

import torch

import hf_lowbit

from .. import artifact
from ..loopvq.calibration import fit
from .report import Options, Report
from .shapes import LOOPED, build_looped
from .timing import Peak


METHOD = """Random weights of the model's shape and random tokens through hf_lowbit's own calibration (the fingerprint of the weights,
Fisher weights, k-means, fine-tuning with the choice of the step size and held-out KL); parts are wall times. full: whether
sequences, their length and epochs are the defaults (16 x 2048, 4). If not, but the length is, extrapolated_s multiplies the
times of Fisher weights and fine-tuning by 16 / sequences, and that of fine-tuning also by (4 + candidates) / (epochs +
candidates), as each candidate of the step size takes an epoch. k-means works on at most kmeans_vectors tokens and is not
scaled."""
MODELS = ("ouro1.4b",)


def run(report: Report, options: Options) -> None:
    full = hf_lowbit.LoopVQConfig()
    sequences = options.choose(options.sequences, full.sequences, 2)
    epochs = options.choose(options.epochs, full.epochs, 1)
    length = options.one("tokens", full.sequence_length, 96)
    report.settings = {"sequences": sequences, "sequence_length": length, "epochs": epochs}
    model = build_looped(LOOPED[report.model], options.device, length + 16)
    ids = torch.randint(1, LOOPED[report.model].vocab, (sequences, length))
    # One bit width by default: it decides the size of the codebooks, not the passes of the model.
    for bits in options.bits[:1]:
        config = hf_lowbit.LoopVQConfig(bits=bits, sequences=sequences, sequence_length=length, epochs=epochs)
        report.measure(lambda: one(model, config, ids, options.device), bits=bits)


def one(model, config: hf_lowbit.LoopVQConfig, ids: torch.Tensor, device: str) -> dict:
    """A calibration, and its seconds in all and by part."""
    default, peak, start = hf_lowbit.LoopVQConfig(), Peak(device), time.perf_counter()
    fingerprint = artifact.weights_fingerprint(model)
    parts = {"fingerprint": time.perf_counter() - start}
    _, report = fit(model, config, ids, fingerprint=fingerprint, progress=False)
    parts |= report.seconds
    total = time.perf_counter() - start
    sizes = (config.sequences, config.sequence_length, config.epochs)
    full = sizes == (default.sequences, default.sequence_length, default.epochs)
    row = {"seconds": total, "full": full, "parts": parts, "epochs": config.epochs, "peak_bytes": peak.bytes()}
    more = extrapolated(parts, config)
    if not full and more is not None:
        row["extrapolated_s"] = more
    return row


def extrapolated(parts: dict[str, float], config: hf_lowbit.LoopVQConfig) -> float | None:
    """Seconds of a calibration with the default sequences and epochs, from one with fewer; None for other lengths."""
    default = hf_lowbit.LoopVQConfig()
    if config.sequence_length != default.sequence_length or not config.epochs:
        return None
    sequences, candidates = default.sequences / config.sequences, len(default.learning_rates)
    epochs = (default.epochs + candidates) / (config.epochs + candidates)
    factors = {"Fisher weights": sequences, "fine-tuning": sequences * epochs}
    return sum(factors.get(name, 1) * value for name, value in parts.items())
