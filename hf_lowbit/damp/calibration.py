"""Fit DAMP tables: capture, a column scaling per head, protected rows, and a check on held-out sequences.

Three disjoint splits of the sequences (paper, appendix A.2 and algorithm 1): *fitting* builds the scalings and ranks the
rows under each of them, *selection* compares the scalings by J(c) with the rows frozen, *validation* scores what came
out once. One capture serves any number of configurations (:func:`plans_for`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tqdm.auto import tqdm

from hf_lowbit_kernels import DampPlan

from ..config import DAMPConfig
from . import scaling
from .attach import damp_layout
from .capture import Trajectories, collect
from .report import DampReport, describe
from .selectors import NO_READOUT, check_selector, weights_of
from .spec import DeltaSpec
from .splits import split
from .tables import LayerChoice, LayerTables, choose, layer_tables


def tables(trajectories: Trajectories, config: DAMPConfig, *, progress: bool = False) -> list[LayerTables]:
    """:func:`layer_tables` of all layers; made once for configurations that differ in selector, rows or scaling only."""
    candidates = (scaling.IDENTITY,) if config.scaling == "none" else scaling.candidates()
    key = (config.seed, config.low_bits, config.zero_point, candidates)
    if key not in trajectories.memo:
        splits = split(trajectories.domains, config.seed)
        trajectories.memo[key] = [
            layer_tables(layer, trajectories, splits, config, candidates)
            for layer in tqdm(trajectories.layers, desc="scalings and rows", disable=not progress, leave=False)
        ]
    return trajectories.memo[key]


def plan(
    trajectories: Trajectories, config: DAMPConfig, *, progress: bool = False
) -> tuple[list[DampPlan], list[LayerChoice]]:
    """Plans of all layers, each on its layer's device, and what they were chosen from.

    Args:
        trajectories: a capture. What was captured (prompts, windows, anchors, horizon) is its own; ``config`` says the
            rest: format, rows, selector, scaling and seed (of the splits and of random rows).
        config: what to fit.
        progress: show a progress bar.

    Raises:
        ValueError: a selector that cannot work here ("readout" needs a capture with W^out), too few sequences, more rows than there are.
    """
    for layer in trajectories.layers:
        check_selector(config.selector, layer.kind)
        if weights_of(config.selector) not in layer.weights:
            raise ValueError(NO_READOUT)
        config.high_rows(layer.states.shape[2])
    choices = choose(tables(trajectories, config, progress=progress), config)
    plans = [choice.plan().to(layer.device) for choice, layer in zip(choices, trajectories.layers)]
    return plans, choices


def plans_for(trajectories: Trajectories, config: DAMPConfig) -> list[DampPlan]:
    """Plans for another configuration of the same capture; see :func:`plan`."""
    return plan(trajectories, config)[0]


def fit(
    model,
    config: DAMPConfig,
    sequences,
    *,
    domains: Sequence[str] | None = None,
    fingerprint: str | None = None,
    progress: bool = True,
) -> tuple[list[DampPlan], DampReport]:
    """Fit the tables of every delta-rule layer.

    Args:
        model: causal LM with gated delta-rule layers; left as it was.
        config: what to fit.
        sequences: int64 ``[N, n]``, or N one-dimensional tensors or lists of token ids: prompts of at least
            ``config.text_tokens``. At least 3 of them.
        domains: label of each sequence. Splits and means are balanced over them.
        fingerprint: of the model's weights, for the report.
        progress: show progress bars.

    Returns:
        One plan per layer, on the layer's device, and the report.

    Raises:
        TypeError: the model has no such layers.
        ValueError: too few or too short sequences, states that are not finite, a selector that cannot rank the rows of
            these layers, more rows than a state has.
    """
    spec = DeltaSpec.of(model)
    for layer in spec.layers:
        check_selector(config.selector, layer.kind)
        damp_layout(layer, config)  # says no to impossible sizes
    split(["all"] * len(sequences) if domains is None else [str(domain) for domain in domains], config.seed)
    readout = weights_of(config.selector) == "readout"
    captured = collect(model, spec, sequences, config, domains=domains, readout=readout, progress=progress)
    began = time.perf_counter()
    plans, choices = plan(captured, config, progress=progress)
    chosen = time.perf_counter()
    report = describe(captured, config, split(captured.domains, config.seed), plans, choices)
    report.fingerprint = fingerprint
    report.seconds = {
        **captured.seconds,
        "scalings and rows": chosen - began,
        "validation": time.perf_counter() - chosen,
    }
    return plans, report
