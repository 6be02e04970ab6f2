"""One-token steps of a hybrid model's cache as CUDA graphs.

A model's decoder reads the text's length on the host: for masks, positions and the place of new keys. A step that is to
be captured gets all three ready-made, in tensors at fixed addresses (:class:`StepTensors`), and attends to more places
than there are tokens, the rest masked. Attention then costs as much as these places do, so their number grows in steps,
with one graph for each.

The models' classes are transformers' own. :func:`hook_decoder` wraps the forward of a decoder's class, once a cache is
made for such a model; calls without a :class:`StepCache` go straight through.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from ..compat import CACHE_ARG_NAMES, cache_kwargs, make_output
from ..config import check_integer, check_switch
from ..errors import FallbackError
from ..graphs import StepGraphs
from .attention import AttentionSlot
from .spec import DeltaSpec


SMALLEST = 256  # places that a captured step attends to, at least
# What a decoder's forward may be called with in a captured step, beside flags that are off.
_ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache", "return_dict")
_RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")


def places_for(length: int) -> int:
    """The next of 256, 384, 512, 768, 1024, ..."""
    places = SMALLEST
    while places < length:
        places = places * 3 // 2 if places & (places - 1) == 0 else places * 4 // 3
    return places


class StepTensors:
    """What changes from step to step, of a text that only grows.

    Attributes:
        place: int64 ``[1]``, index of the current token.
        valid: bool ``[B, capacity]``, which tokens may be attended to.
        positions: int64, in the shape that the caller gave (last dimension 1).
    """

    def __init__(self, rows: int, capacity: int, positions: torch.Size, device: torch.device):
        # Normal tensors even under inference_mode, which would not let a later call without it write to them.
        with torch.inference_mode(False):
            self.place = torch.zeros(1, dtype=torch.int64, device=device)
            self.valid = torch.zeros(rows, capacity, dtype=torch.bool, device=device)
            self.positions = torch.zeros(positions, dtype=torch.int64, device=device)

    def fits(self, rows: int, capacity: int, positions: torch.Size, device: torch.device) -> bool:
        return (
            self.valid.shape == (rows, capacity) and self.positions.shape == positions and self.place.device == device
        )

    def refresh(self, length: int, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
        """Set the numbers of the step that follows ``length`` tokens, without waiting for the device."""
        self.place.fill_(length)
        valid = self.valid[:, : length + 1]
        if mask is None:
            valid.fill_(True)
        else:
            valid.copy_(mask)
        if positions is None:
            self.positions.fill_(length)
        else:
            self.positions.copy_(positions)

    def bias(self, attended: int, dtype: torch.dtype) -> torch.Tensor:
        """The mask ``[B, 1, 1, attended]`` as every attention function takes it: added to the scores."""
        bias = torch.full(
            (self.valid.shape[0], attended), torch.finfo(dtype).min, dtype=dtype, device=self.valid.device
        )
        return bias.masked_fill_(self.valid[:, :attended], 0)[:, None, None]

    @property
    def nbytes(self) -> int:
        return self.place.nbytes + self.valid.nbytes + self.positions.nbytes


class StepCache(Cache):
    """Cache of a hybrid model (recurrent and attention layers) whose one-token steps may be replayed.

    Args:
        model: the model, or its decoder.
        slots: cache layers, in the model's order.
        cuda_graphs: None: capture steps where possible. True: raise where not. False: never.
        max_cache_len: tokens to make room for at once.
        obstacle: why the recurrent layers' part of a step cannot be captured, or None.

    Raises:
        ValueError: ``max_cache_len`` out of range.
        FallbackError: ``cuda_graphs=True`` and no way to use them.
    """

    def __init__(self, model, slots, *, cuda_graphs=None, max_cache_len=None, obstacle=None):
        check_switch("cuda_graphs", cuda_graphs, or_none="graphs where they are possible")
        if max_cache_len is not None:
            check_integer("max_cache_len", max_cache_len, 1, or_none="room that grows in steps")
        super().__init__(layers=[AttentionSlot() if type(slot) is DynamicLayer else slot for slot in slots])
        others = [s for s in self.layers if isinstance(s, CacheLayerMixin) and not isinstance(s, AttentionSlot)]
        if others:
            obstacle = f"attention layers with a {type(others[0]).__name__} have no fixed addresses"
        self._max_cache_len, self._cuda_graphs, self._obstacle = max_cache_len, cuda_graphs, obstacle
        self._longest: int | None = None  # columns that generate() will not exceed
        self._step: StepTensors | None = None
        self._attended: int | None = None  # while a step runs: the places it attends to
        self._output: type | None = None  # of the decoder
        decoder = find_decoder(model)
        self._decoder_class = (type(decoder).__module__, type(decoder).__qualname__)
        self._use(decoder)
        if cuda_graphs and self.graph_problem:
            raise FallbackError(f"cuda_graphs=True is not possible here: {self.graph_problem}.")
        self._hook()

    def _use(self, decoder: nn.Module) -> None:
        self._graphs: StepGraphs | None = StepGraphs(decoder, self._cuda_graphs, self._obstacle)
        # transformers marks the classes that experts_implementation is about by this method.
        self._experts = any(hasattr(module, "_apply_gate") for module in decoder.modules())

    def _hook(self) -> None:
        module, name = self._decoder_class
        hook_decoder(getattr(importlib.import_module(module), name))

    @property
    def graph_problem(self) -> str | None:
        """Why one-token steps are not captured, or None."""
        if self._graphs is None:
            return "the cache was just loaded, and no model has used it yet"
        return self._graphs.problem or self._model_problem(self._graphs.model)

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether one-token steps are replayed, from the third of a kind on."""
        return self.graph_problem is None

    @property
    def graph_replays(self) -> int:
        """Steps that were replayed so far."""
        return 0 if self._graphs is None else self._graphs.replays

    def expect_length(self, longest: int) -> None:
        """Announce that the cache will not exceed ``longest`` columns soon: no more room is then made."""
        self._longest = longest

    @property
    def attention_slots(self) -> list[AttentionSlot]:
        return [slot for slot in self.layers if isinstance(slot, AttentionSlot)]

    @property
    def step_bytes(self) -> int:
        """Bytes of the steps' inputs."""
        graphs = 0 if self._graphs is None else self._graphs.nbytes
        return graphs + (0 if self._step is None else self._step.nbytes)

    # -- what the model calls ------------------------------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if self._attended is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self.layers[layer_idx].write(key_states, value_states, self._step.place, self._attended)

    def run(self, decoder: nn.Module, forward, arguments: dict[str, Any]):
        """A forward pass of the decoder: replayed if it is a step that can be, else as it is.

        Args:
            forward: the decoder class's own forward.
            arguments: by name; the cache is among them.

        Raises:
            FallbackError: ``cuda_graphs=True``, and this step cannot be captured. Nothing was computed.
        """
        if self._graphs is None or self._graphs.model is not decoder:
            self._use(decoder)
        graphs = self._graphs
        if not self._is_step(arguments):
            graphs.recheck()
            return forward(decoder, **arguments)
        reason = graphs.problem_now() or self._model_problem(decoder) or self._call_problem(decoder, arguments)
        if reason is not None:
            graphs.refuse(reason)
            return forward(decoder, **arguments)

        embeds = arguments.get("inputs_embeds")
        if embeds is None:
            embeds = decoder.embed_tokens(arguments["input_ids"])
        attended = self._prepare(embeds, arguments.get("attention_mask"), arguments.get("position_ids"))
        step = self._step

        def static(embeds: torch.Tensor) -> dict[str, torch.Tensor]:
            masks = {"full_attention": step.bias(attended, embeds.dtype), "linear_attention": None}
            self._attended = attended
            try:
                out = forward(
                    decoder, inputs_embeds=embeds, attention_mask=masks, position_ids=step.positions, use_cache=True,
                    return_dict=True, **cache_kwargs(self),
                )  # fmt: skip
            finally:
                self._attended = None
            self._output = type(out)
            return {"last_hidden_state": out.last_hidden_state}

        out = graphs.run(attended, self._key(decoder), embeds, static)
        for slot in self.attention_slots:
            slot.advance()
        return make_output(self._output, self, **out)

    def _is_step(self, arguments: dict[str, Any]) -> bool:
        """One more token for every row that the cache holds."""
        ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
        tokens = ids if embeds is None else embeds
        if tokens is None or tokens.shape[1] != 1 or not self.has_previous_state():
            return False
        slots = self.attention_slots
        return bool(slots) and all(slot.is_initialized and slot.keys.shape[0] == tokens.shape[0] for slot in slots)

    def _model_problem(self, decoder: nn.Module) -> str | None:
        """Why a decoder, as it is set up, cannot be given everything ready-made, or None."""
        config = decoder.config
        if config._attn_implementation not in ("sdpa", "eager"):
            return (
                f"attn_implementation={config._attn_implementation!r} takes no ready-made mask; use 'sdpa' or 'eager'"
            )
        if self._experts and config._experts_implementation == "eager":
            return "experts_implementation='eager' reads on the host which experts are used; use 'grouped_mm'"
        if "forward" in vars(decoder):
            return "the decoder's forward was replaced"
        return None

    def _call_problem(self, decoder: nn.Module, arguments: dict[str, Any]) -> str | None:
        """What this call asks for and a captured step cannot give, or None."""
        config = decoder.config
        for name in _RECORDED:
            if arguments.get(name, getattr(config, name, None)):
                return f"{name} was asked for"
        if not arguments.get("return_dict", getattr(config, "return_dict", True)):
            return "return_dict=False was asked for"
        for name, value in arguments.items():
            if value is not None and value is not False and name not in (*_ARGUMENTS, *CACHE_ARG_NAMES):
                return f"the argument {name} is not known"
        mask, length = arguments.get("attention_mask"), self.get_seq_length()
        if mask is not None and not (
            isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] == length + 1
        ):
            return f"attention_mask is no matrix with {length + 1} columns"
        return None

    def _prepare(self, embeds: torch.Tensor, mask, positions) -> int:
        """Make room and set the step's numbers; returns the places to attend to."""
        length, slots = self.get_seq_length(), self.attention_slots
        capacity = min(slot.capacity for slot in slots)
        if capacity <= length:
            # With the next number of places, which needs a graph of its own anyway: growing captures nothing in addition.
            wanted = places_for(length + 1)
            if self._longest is not None and self._longest > length:
                wanted = min(wanted, self._longest)
            if self._max_cache_len is not None and self._max_cache_len > length:
                wanted = self._max_cache_len
            capacity = -(-wanted // 64) * 64
            for slot in slots:
                slot.reserve(capacity)
        shape = torch.Size([embeds.shape[0], 1]) if positions is None else positions.shape
        if self._step is None or not self._step.fits(embeds.shape[0], capacity, shape, embeds.device):
            self._step = StepTensors(embeds.shape[0], capacity, shape, embeds.device)
        self._step.refresh(length, mask, positions)
        return min(places_for(length + 1), capacity)

    def _key(self, decoder: nn.Module) -> tuple:
        """All addresses that a step uses beside the weights, and what else decides about its kernels."""
        config, step = decoder.config, self._step
        tensors = [step.place, step.valid, step.positions, *self.step_tensors()]
        return (
            config._attn_implementation,
            getattr(config, "_experts_implementation", None),
            step.valid.shape,
            step.positions.shape,
            *(tensor.data_ptr() for tensor in tensors),
        )

    def step_tensors(self) -> Iterator[torch.Tensor]:
        """What the layers read and write in a captured step."""
        for slot in self.layers:
            if isinstance(slot, AttentionSlot):
                yield from slot.room or ()
                continue
            for held in (*slot.conv_states.values(), *slot.recurrent_states.values()):
                if isinstance(held, torch.Tensor):
                    yield held
                else:
                    yield from held.addressed()

    # -- life ----------------------------------------------------------------------------------------------------------

    def drop_steps(self) -> None:
        """Forget graphs, their inputs, and how long the text was expected to get."""
        if self._graphs is not None:
            self._graphs.drop()
        self._step = self._longest = None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_graphs": None, "_step": None}


def find_decoder(model: nn.Module) -> nn.Module:
    """The module that runs embeddings, layers and norm of a hybrid language model.

    Raises:
        TypeError: there is none that this hf_lowbit knows.
    """
    delta = {layer.module for layer in DeltaSpec.of(model).layers}
    found = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and delta <= set(module.modules())
    ]
    if not found:
        raise TypeError(f"this {type(model).__name__} has no decoder with a list of layers; update hf_lowbit.")
    return found[-1]  # the innermost


def hook_decoder(decoder_class: type[nn.Module]) -> None:
    """Let forward passes with a :class:`StepCache` go through :meth:`StepCache.run`. Doing it again changes nothing."""
    original = decoder_class.forward
    if getattr(original, "_step_cache_hook", None) is original:
        return

    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        arguments = {**dict(zip(names, args)), **kwargs}
        cache = next((arguments[name] for name in CACHE_ARG_NAMES if arguments.get(name) is not None), None)
        if not isinstance(cache, StepCache):
            return original(self, *args, **kwargs)
        return cache.run(self, original, arguments)

    forward._step_cache_hook = forward  # functools.wraps of an outer wrapper copies the name, not the identity
    decoder_class.forward = forward


__all__ = ["StepCache", "StepTensors", "find_decoder", "hook_decoder", "places_for"]
