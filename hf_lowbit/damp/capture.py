"""States and decays of the FP32 reference trajectory, sampled at anchors (paper, section 5.1 and appendix A.2).

A stock cache keeps recurrent states in FP32. Sequences are replayed teacher-forced in segments that end where a state
is sampled; the many-token recurrence gives the same states as one-token steps up to the order of sums (4e-6 on trained
models). Nothing is kept but the anchors, on the CPU.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache

from hf_lowbit_kernels import DampLayout

from ..compat import cache_kwargs
from ..config import DAMPConfig
from .attach import layout_of
from .readout import extend_readout, with_responses
from .risk import extend_retention
from .spec import FUNCTIONS, DeltaSpec


# Tokens of a sequence per forward pass: the plain PyTorch KDA recurrence takes 64 * dk floats per token and head.
SEGMENT = 256
# Tokens per chunk of the plain PyTorch KDA recurrence on a CPU. Its own 64 would take 2.6 times as long.
CPU_CHUNK = {"chunk_kimi_delta_attention": 16}
# State values brought to a layer's device at once.
CHUNK = 2**22


@dataclass(frozen=True)
class LayerTrajectory:
    """One layer's anchors, on the CPU. A = sequences * anchors of a sequence, in this order.

    Attributes:
        index: ``layer_idx`` of the layer.
        kind: "gdn" or "kda".
        device: of the layer, where its states are worked on.
        states: fp32 ``[A, HV, dk, dv]``, in model coordinates.
        retention: W over the horizon after each anchor, fp32 ``[A, HV]`` (GDN) or ``[A, HV, dk]`` (KDA).
        log_decay: mean of g over the updates of all windows, fp32 ``[N, HV]`` or ``[N, HV, dk]``; its exponential is
            the effective decay (paper, section 4.2).
        readout: W^out over the same horizon, fp32 ``[A, HV, dk]`` (:mod:`readout`); None where it was not asked for.
    """

    index: int
    kind: str
    device: torch.device
    states: torch.Tensor
    retention: torch.Tensor
    log_decay: torch.Tensor
    readout: torch.Tensor | None = None

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What errors can be weighted with, by name: "retention", and "readout" where it was captured."""
        both = {"retention": self.retention, "readout": self.readout}
        return {name: values for name, values in both.items() if values is not None}

    def layout(self, config: DAMPConfig, high_rows: int) -> DampLayout:
        """The configured format with ``high_rows`` protected rows."""
        return replace(layout_of(*self.states.shape[2:], config), high_rows=high_rows)

    def chunks(self, anchors: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, dict[str, torch.Tensor]]]:
        """``(slice of anchors, states, weights)`` on the layer's device, a few anchors at a time."""
        size = max(1, CHUNK // self.states[0].numel())
        for start in range(0, len(anchors), size):
            part = slice(start, start + size)
            at = anchors[part]
            weights = {name: values[at].to(self.device) for name, values in self.weights.items()}
            yield part, self.states[at].to(self.device), weights


@dataclass
class Trajectories:
    """One capture; it serves every selector, scaling and format.

    Attributes:
        config: what was captured (its horizon, windows and anchors).
        domains: label of each of the N sequences.
        layers: one entry per delta-rule layer.
        seconds: wall time by stage.
        memo: results of :mod:`calibration` that several configurations share.
    """

    config: DAMPConfig
    domains: list[str]
    layers: list[LayerTrajectory]
    seconds: dict[str, float]
    memo: dict = field(default_factory=dict, repr=False)

    @property
    def per_sequence(self) -> int:
        """Anchors of each sequence."""
        return len(self.config.windows) * len(self.config.anchors)

    def anchors(self, sequences: Sequence[int]) -> torch.Tensor:
        """Rows of ``states`` that belong to the given sequences, int64."""
        first = torch.tensor(sequences, dtype=torch.long)[:, None] * self.per_sequence
        return (first + torch.arange(self.per_sequence)).flatten()


def cut(sequences, config: DAMPConfig) -> torch.Tensor:
    """Sequences cut to what a capture needs: the prompt, and with ``continuation="text"`` the updates of the windows.

    Args:
        sequences: int64 ``[N, n]``, or N one-dimensional tensors or lists of token ids.
        config: its ``prompt_tokens``, windows and ``continuation``.

    Returns:
        int64 ``[N, config.text_tokens]``, on the CPU.

    Raises:
        ValueError: no sequences, or one that is too short.
    """
    length = config.text_tokens
    rows = [torch.as_tensor(sequence, dtype=torch.long, device="cpu").flatten() for sequence in sequences]
    if not rows:
        raise ValueError("calibration needs token sequences; got none.")
    for i, row in enumerate(rows):
        if len(row) < length:
            need = f"prompt_tokens={config.prompt_tokens}"
            if config.continuation == "text":
                need += f' + {config.updates} up to the end of the last window (continuation="text")'
            raise ValueError(
                f"calibration sequence {i} has {len(row)} tokens and needs {length}: {need}. Give longer sequences or "
                "make these counts smaller."
            )
    return torch.stack([row[:length] for row in rows])


@torch.no_grad()
def collect(
    model,
    spec: DeltaSpec,
    sequences,
    config: DAMPConfig,
    *,
    domains: Sequence[str] | None = None,
    batch_size: int = 12,
    readout: bool = False,
    progress: bool = True,
) -> Trajectories:
    """Run the model over the sequences and keep states, W and mean decays.

    Args:
        model: causal LM; left as it was.
        spec: its delta-rule layers.
        sequences: as for :func:`cut`.
        config: counts, horizon, continuation and seed.
        domains: label of each sequence; default: all alike.
        batch_size: sequences run at once.
        readout: also keep W^out, which the "readout" selector needs. Takes ``4 * dk^2`` bytes more for each sequence of
            a batch, layer, value head and anchor whose horizon has begun and not ended, and about a tenth more time.
        progress: show progress bars.

    Raises:
        ValueError: sequences too short, a label missing, states or decays that are not finite.
        RuntimeError: a layer did not call its modeling file's recurrence (replaced by ``use_kernels=True``, say).
    """
    tokens = cut(sequences, config)
    domains = ["all"] * len(tokens) if domains is None else [str(domain) for domain in domains]
    if len(domains) != len(tokens):
        raise ValueError(f"{len(domains)} domain labels for {len(tokens)} sequences; give one for each.")
    batches = tokens.split(batch_size)
    updates = config.updates
    seconds: dict[str, float] = {}

    def bar(total, desc):
        return tqdm(total=total, desc=desc, disable=not progress, leave=False)

    with _evaluation(model):
        if config.continuation == "generate":
            began = time.perf_counter()
            with bar(len(tokens), "generating") as shown:
                batches = _continue(model, batches, updates, config.seed, shown)
            seconds["generating"] = time.perf_counter() - began
        began = time.perf_counter()
        store = _Store(spec, config, len(tokens), readout)
        length = config.prompt_tokens + updates
        with _Recorder(spec) as recorder, bar(len(tokens) * length, "reference states") as shown:
            start = 0
            for batch in batches:
                _replay(model, batch[:, :length], config, recorder, store, slice(start, start + len(batch)), shown)
                start += len(batch)
        seconds["reference states"] = time.perf_counter() - began
    return Trajectories(config, domains, store.layers(), seconds)


@contextmanager
def _evaluation(model):
    training = {name: module.training for name, module in model.named_modules()}
    model.eval()
    try:
        yield
    finally:
        for name, module in model.named_modules():
            module.training = training[name]


def _stock_cache(model):
    """The model's own cache: recurrent states in FP32, whatever the model's dtype."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _run(model, ids: torch.Tensor, cache) -> None:
    """One forward pass without padding; logits are not needed."""
    device = model.get_input_embeddings().weight.device
    model(ids.to(device), use_cache=True, logits_to_keep=1, **cache_kwargs(cache))


def _continue(model, batches, count: int, seed: int, bar) -> list[torch.Tensor]:
    """Each batch ``[B, prompt]`` with ``count`` sampled tokens after it.

    Sampled with the temperature and cut-offs of the model's own generation config (inferred: the paper does not say),
    as small models repeat themselves when they take the likeliest token. Never the end token.
    """
    device = model.get_input_embeddings().weight.device
    done = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for ids in batches:
            cache = _stock_cache(model)
            # generate() would take the prompt at once; all but its last token goes in here, in segments.
            for piece in ids[:, :-1].split(SEGMENT, 1) if ids.shape[1] > 1 else ():
                _run(model, piece, cache)
            ids = ids.to(device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                min_new_tokens=count,
                max_new_tokens=count,
                **cache_kwargs(cache),
            )
            done.append(out.cpu())
            bar.update(len(ids))
    return done


class _Recorder:
    """While entered, keeps what each layer's recurrence got and gave in the last forward pass.

    While ``readout`` is set, that includes how outputs and state depend on the state before. The recurrences are globals
    of a modeling file, called by all its layers; a hook tells which layer is running.
    """

    def __init__(self, spec: DeltaSpec):
        self.spec = spec
        self.current: int | None = None
        self.readout = False
        self.seen: dict[int, tuple] = {}

    def __enter__(self):
        self._handles = [
            layer.module.register_forward_pre_hook(functools.partial(self._enter_layer, position))
            for position, layer in enumerate(self.spec.layers)
        ]
        self._originals = []
        for modeling, kind in self.spec.modelings:
            for name in FUNCTIONS[kind]:
                original = getattr(modeling, name)
                self._originals.append((modeling, name, original))
                setattr(modeling, name, self._recording(original, CPU_CHUNK.get(name)))
        return self

    def __exit__(self, *exception):
        for handle in self._handles:
            handle.remove()
        for modeling, name, original in self._originals:
            setattr(modeling, name, original)

    def _enter_layer(self, position, module, args):
        self.current = position

    def _recording(self, original, cpu_chunk: int | None):
        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            if cpu_chunk is not None and args[0].device.type == "cpu":
                kwargs["chunk_size"] = cpu_chunk
            if self.readout:
                out, state, *response = with_responses(original, *args, **kwargs)
            else:
                (out, state), response = original(*args, **kwargs), None
            self.seen[self.current] = state, kwargs["g"] if "g" in kwargs else args[3], response
            return out, state

        return wrapper

    def take(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, list[torch.Tensor] | None]]:
        """``(layer, state [B, HV, dk, dv], g [B, T, HV(, dk)], responses and transition)`` of the pass that ended.

        The last are None unless ``readout`` is set.
        """
        seen, self.seen = self.seen, {}
        for position, layer in enumerate(self.spec.layers):
            if position not in seen:
                raise RuntimeError(
                    f"layer {layer.index} did not call {' or '.join(FUNCTIONS[layer.kind])} of "
                    f"{layer.modeling.__name__}, so its states cannot be recorded. Load the model without "
                    "use_kernels=True and without a replaced forward."
                )
            yield position, *seen.pop(position)


class _Store:
    """Anchors of all layers, filled batch by batch."""

    def __init__(self, spec: DeltaSpec, config: DAMPConfig, count: int, readout: bool):
        self.spec, self.count = spec, count
        self.per_sequence = len(config.windows) * len(config.anchors)
        self.states = [
            torch.empty(count, self.per_sequence, layer.value_heads, layer.dk, layer.dv) for layer in spec.layers
        ]
        rows = [(layer.value_heads, layer.dk)[: 2 if layer.kind == "kda" else 1] for layer in spec.layers]
        self.retention = [torch.empty(count, self.per_sequence, *shape) for shape in rows]
        self.log_decay = [torch.empty(count, *shape) for shape in rows]
        self.readout = None
        if readout:
            self.readout = [
                torch.empty(count, self.per_sequence, layer.value_heads, layer.dk) for layer in spec.layers
            ]

    def layers(self) -> list[LayerTrajectory]:
        return [
            LayerTrajectory(
                layer.index,
                layer.kind,
                next(layer.module.parameters()).device,
                self.states[i].flatten(0, 1),
                self.retention[i].flatten(0, 1),
                self.log_decay[i],
                None if self.readout is None else self.readout[i].flatten(0, 1),
            )
            for i, layer in enumerate(self.spec.layers)
        ]


def segments(config: DAMPConfig) -> Iterator[tuple[int, int]]:
    """``(first, last + 1)`` token of each forward pass: cut where windows, anchors and horizons begin or end."""
    cuts = {0, config.prompt_tokens}
    for window in config.windows:
        begin = config.prompt_tokens + window
        cuts |= {begin, begin + config.window_tokens}
        cuts |= {begin + x for anchor in config.anchors for x in (anchor, anchor + config.horizon)}
    edges = sorted(cuts)
    for begin, end in zip(edges, edges[1:]):
        for start in range(begin, end, SEGMENT):
            yield start, min(start + SEGMENT, end)


def _replay(model, ids, config: DAMPConfig, recorder: _Recorder, store: _Store, rows: slice, bar) -> None:
    """Run one batch ``[B, prompt + updates]`` and fill its rows of the store."""
    begins = [config.prompt_tokens + window for window in config.windows]
    anchors = [begin + anchor for begin in begins for anchor in config.anchors]
    updates = len(begins) * config.window_tokens
    running: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # (layer, anchor) -> log_kept, weight
    reading: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}  # -> effect, weight
    decay: dict[int, torch.Tensor] = {}
    cache = _stock_cache(model)
    for start, end in segments(config):
        counts = any(anchor <= start and end <= anchor + config.horizon for anchor in anchors)
        recorder.readout = counts and store.readout is not None
        _run(model, ids[:, start:end], cache)
        covering = sum(begin <= start and end <= begin + config.window_tokens for begin in begins)
        for layer, state, g, response in recorder.take():
            if covering:
                decay[layer] = decay.get(layer, 0) + covering * g.float().sum(1)
            for j, anchor in enumerate(anchors):
                if anchor <= start and end <= anchor + config.horizon:
                    running[layer, j] = extend_retention(*running[layer, j], g)
                    if response is not None:
                        reading[layer, j] = extend_readout(*reading[layer, j], *response)
                    if end == anchor + config.horizon:
                        store.retention[layer][rows, j] = running.pop((layer, j))[1].cpu()
                        if response is not None:
                            store.readout[layer][rows, j] = reading.pop((layer, j))[1].cpu()
                if end == anchor:
                    store.states[layer][rows, j] = state.float().cpu()
                    zeros = torch.zeros_like(g[:, 0], dtype=torch.float32)
                    running[layer, j] = zeros, torch.ones_like(zeros)
                    if store.readout is not None:
                        reading[layer, j] = None, torch.zeros(state.shape[:3], device=state.device)
        bar.update(len(ids) * (end - start))
    for layer, total in decay.items():
        store.log_decay[layer][rows] = (total / updates).cpu()
        kept = {"state": store.states, "decay": store.retention, "readout weight": store.readout}
        for name, values in ((name, values[layer][rows]) for name, values in kept.items() if values is not None):
            finite = values.flatten(1).isfinite().all(1)
            if not bool(finite.all()):
                sequence = rows.start + int((~finite).nonzero()[0])
                raise ValueError(
                    f"the {name} of layer {recorder.spec.layers[layer].index} is not finite on calibration sequence "
                    f"{sequence}: the model's own recurrence overflows there. Use another dtype or other sequences."
                )
