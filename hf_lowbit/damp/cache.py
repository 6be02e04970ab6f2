"""`DAMPStateCache`: recurrent states as packed bytes, everything else of a hybrid model's cache as transformers has it.

Inside a forward pass over several tokens the recurrence is in FP32; its final state is packed when the pass ends
(paper, appendix A.4). A pass over one token updates the packed state in place, as a CUDA graph where that is possible
(:mod:`.decode`).
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import warnings
from collections.abc import Sequence

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from hf_lowbit_kernels import DampLayout, DampPlan, damp_backend

from ..config import check_integer, check_model, check_switch
from ..errors import NO_CROP, FallbackError
from ..protocols import ForcedSchedule
from .attach import damp_config, damp_layout, damp_tables, has_damp
from .decode import StepCache
from .functions import patch_delta_rules
from .memory import DampMemoryReport
from .spec import DeltaLayer, DeltaSpec
from .state import ROUNDINGS, PackedState, select_rows


FAST_BACKENDS = ("cuda", "triton")
BACKENDS = ("auto", *FAST_BACKENDS, "reference", "model")


class DampStateLayer(LinearAttentionLayer):
    """Cache slot of one gated delta-rule layer: packed states, and the convolution's state in model dtype.

    Args:
        state: the (still empty) packed state.
        strict: raise instead of warning when the model's recurrence bypasses the packed update.

    Attributes:
        recurrent_states: ``{0: state}``.
        conv_states: ``{0: [B, channels, kernel]}``, changed in place by one-token steps.
        finite: 0-dim bool on the layer's device, whether the last packed prefill state was finite; None if not looked at.
    """

    # A patched Python function inside a compiled graph is untested, and states are not rolled back.
    is_compileable = False
    is_croppable = False

    def __init__(self, state: PackedState, strict: bool = False):
        super().__init__()
        self.recurrent_states[0] = state
        self.strict = strict
        self.finite: torch.Tensor | None = None
        self._in_prefill = False

    @property
    def state(self) -> PackedState:
        return self.recurrent_states[0]

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """Take the inputs ``[B, channels, T]`` of the convolution; called in every pass but one-token steps."""
        held = self.conv_states[0]
        if held is not None and held.shape[0] != conv_states.shape[0]:
            raise ValueError(
                f"the cache holds {held.shape[0]} rows and got {conv_states.shape[0]}; use one cache per batch, or reset() it."
            )
        self._in_prefill = True
        return super().update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states, state_idx: int = 0, **kwargs):
        """Pack the FP32 states ``[B, HV, dk, dv]`` of a prefill; a packed state was updated in place already."""
        if recurrent_states is self.state:
            return recurrent_states
        if not self._in_prefill:
            message = (
                "the model handed an FP32 state to a DAMPStateCache after a one-token step: its recurrence does not run "
                "on the packed state. The state is packed here, which is correct and slow."
            )
            if self.strict:
                raise FallbackError(message)
            warnings.warn(message, stacklevel=2)
        self._in_prefill = False
        states = recurrent_states.detach()
        self.finite = states.isfinite().all()
        self.state.encode(states)
        self.is_recurrent_states_initialized[0] = True
        return self.state

    def reset(self) -> None:
        """Forget everything, tensors included: the next prompt may have another number of rows."""
        self.state.clear()
        self.conv_states[0] = None
        self.finite, self._in_prefill = None, False
        for flags in (self.is_conv_states_initialized, self.is_recurrent_states_initialized, self.has_previous_state):
            flags[0] = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was, bit for bit."""
        self.state.select(beam_idx)
        if self.conv_states[0] is not None:
            self.conv_states[0] = select_rows(self.conv_states[0], beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, copies side by side."""
        self.reorder_cache(torch.arange(self.state.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows (indices, or a boolean mask)."""
        self.reorder_cache(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def offload(self) -> None:
        """Move the states to the CPU; :meth:`prefetch` before the next forward pass."""
        self._move("cpu")

    def prefetch(self) -> None:
        """Move the states back to the layer's device."""
        if self.device is not None:
            self._move(self.device)

    def _move(self, device) -> None:
        self.state.move(device)
        if self.conv_states[0] is not None:
            self.conv_states[0] = self.conv_states[0].to(device)

    def crop(self, *args, **kwargs) -> None:
        raise RuntimeError(NO_CROP)

    def activate_past_recording(self) -> None:
        raise RuntimeError(NO_CROP)


class DAMPStateCache(StepCache):
    """Cache of a hybrid model whose gated delta-rule states are packed (9.875 bits a value instead of 32, by default).

    Attention layers keep their keys and values as they are. Making a cache patches the recurrence functions of the model's
    modeling file (:func:`~hf_lowbit.damp.functions.patch_delta_rules`) and its decoder's forward
    (:func:`~hf_lowbit.damp.decode.hook_decoder`); stock caches go on working there.

    Args:
        model: a model with gated delta-rule layers; calibrated, unless ``plans`` and ``layouts`` are given.
        plans: one plan per delta-rule layer; None takes the model's tables.
        layouts: one layout per delta-rule layer, or one for all; None takes what the model was calibrated for.
        rounding: of the low rows at every write: "nearest", "stochastic" or "error_feedback"; None takes the
            calibration's (without one: nearest).
        seed: of stochastic rounding; None takes the calibration's (without one: 0).
        backend: "cuda", "triton" or "reference" force a path of the packed update, "model" decodes the state, calls the
            model's own one-token function in FP32 and packs again; "auto" is the first of them that runs.
        strict: raise instead of falling back when the update runs on neither kernel, CUDA or Triton, or is bypassed.
        prefill_chunk_size: longest piece of a prompt in one forward pass, for whoever feeds the model: a cache sees only
            the pieces it is given. None: whole prompts.
        cuda_graphs: None: run one-token steps as CUDA graphs where possible. Attention then sums over masked places too,
            which may round differently; nothing else changes but the speed. False: never. True: raise where a step
            cannot be one.
        max_cache_len: tokens that attention layers make room for at once, when the first step is captured. None: the room
            grows by a half or a third whenever it is used up. A longer text still makes it grow.

    Attributes:
        backend: "cuda", "triton", "reference" or "model".

    Raises:
        TypeError: the model has no gated delta-rule layers.
        ValueError: no tables and no plans, plans or layouts for other sizes, a key dimension above 256, an option out of
            range, or ``backend="cuda"`` where that kernel does not run.
        FallbackError: ``strict`` and no kernel, or ``cuda_graphs=True`` and no way to use them.

    Example:
        >>> cache = DAMPStateCache(model)                                       # doctest: +SKIP
        >>> model.generate(**inputs, cache=cache, max_new_tokens=100)           # doctest: +SKIP
        >>> print(cache.memory_report())                                        # doctest: +SKIP
    """

    def __init__(
        self,
        model,
        *,
        plans: Sequence[DampPlan] | None = None,
        layouts: Sequence[DampLayout] | DampLayout | None = None,
        rounding: str | None = None,
        seed: int | None = None,
        backend: str = "auto",
        strict: bool = False,
        prefill_chunk_size: int | None = None,
        cuda_graphs: bool | None = None,
        max_cache_len: int | None = None,
    ):
        check_model(model)
        check_switch("strict", strict)
        spec = DeltaSpec.of(model)
        if getattr(model, "use_kernels", False):
            raise ValueError(
                "this model was loaded with use_kernels=True, which replaces the recurrence that packed states go through; "
                "load it without (DAMPStateCache brings its own kernel)."
            )
        calibrated = damp_config(model) if has_damp(model) else None
        rounding = rounding or (calibrated.rounding if calibrated else "nearest")
        if rounding not in ROUNDINGS:
            raise ValueError(f"rounding={rounding!r} is not supported; choose one of {list(ROUNDINGS)}.")
        if seed is None:
            seed = calibrated.seed if calibrated else 0
        check_integer("seed", seed, 0)
        if seed >= 2**63:
            raise ValueError(f"seed={seed} must be below 2^63.")
        if prefill_chunk_size is not None:
            check_integer("prefill_chunk_size", prefill_chunk_size, 1, or_none="whole prompts")
        self.rounding, self.prefill_chunk_size = rounding, prefill_chunk_size
        plans, layouts = _plans_and_layouts(model, spec, plans, layouts, calibrated)
        self.backend = _choose_backend(spec, layouts, rounding, backend, strict)

        # The model's own text configuration: transformers' table of layer types decides about the attention slots.
        slots = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
        for layer, plan, layout in zip(spec.layers, plans, layouts, strict=True):
            state = PackedState(plan, layout, rounding=rounding, seed=seed, layer=layer.index, backend=self.backend)
            slots[layer.index] = DampStateLayer(state, strict)
        slow = self.backend not in FAST_BACKENDS
        obstacle = f"packed states are updated on the slow {self.backend} path" if slow else None
        super().__init__(model, slots, cuda_graphs=cuda_graphs, max_cache_len=max_cache_len, obstacle=obstacle)
        self._delta = [layer.index for layer in spec.layers]
        # Untouched copies: DynamicLayer.reset() of transformers 5.17 keeps the length, so reset() starts from these.
        self._empty = {i: copy.copy(slot) for i, slot in enumerate(self.layers) if i not in self._delta}
        self._modelings = tuple((modeling.__name__, kind) for modeling, kind in spec.modelings)
        self._patch()

    def _patch(self) -> None:
        for name, kind in self._modelings:
            patch_delta_rules(importlib.import_module(name), kind)

    @property
    def delta_layers(self) -> list[DampStateLayer]:
        """The slots with packed states, in layer order."""
        return [self.layers[i] for i in self._delta]

    # -- what the model calls ------------------------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Asked before the first layer of a forward pass.

        Raises:
            ValueError: the pass has no tokens; layers would fail in a reshape.
        """
        if query_length == 0:
            held = self.get_seq_length()
            raise ValueError(
                f"no new tokens: the cache holds {held} already, and the input adds none. Give every row at least one token"
                + (", after the whole text so far." if held else ".")
            )
        return super().get_mask_sizes(query_length, layer_idx)

    def update_recurrent_state(self, recurrent_states, layer_idx: int, state_idx: int = 0, **kwargs):
        """Pack a prefill's final state; after the last layer, check that the states of all layers are finite.

        Raises:
            ValueError: a state holds NaN or infinities.
        """
        out = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        if layer_idx == self._delta[-1] and not isinstance(recurrent_states, PackedState):
            self._check_finite()
        return out

    @torch.compiler.disable  # reads on the host; without it a compiled model says so at length
    def _check_finite(self) -> None:
        """One synchronization per prefill chunk, none per decode step."""
        flags = [layer.finite for layer in self.delta_layers]
        for layer in self.delta_layers:
            layer.finite = None
        known = [flag for flag in flags if flag is not None]
        if bool(torch.stack([flag.to(known[0].device) for flag in known]).all()):
            return
        bad = [i for i, flag in zip(self._delta, flags, strict=True) if flag is not None and not flag]
        raise ValueError(
            f"the recurrent states of layers {bad} hold NaN or infinite values after this prompt: the model's recurrence "
            "overflowed (check its dtype and inputs). reset() the cache before it is used again."
        )

    # -- rows and length -----------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Rows, or -1 while the cache is empty."""
        return self.layers[self._delta[0]].state.rows or -1

    def reset(self) -> None:
        """Forget everything, tensors included."""
        self.drop_steps()
        for i, empty in self._empty.items():
            self.layers[i] = copy.copy(empty)
        for layer in self.delta_layers:
            layer.reset()

    def crop(self, *args, **kwargs) -> None:
        """Refused before any layer is changed.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(NO_CROP)

    def activate_past_recording(self) -> None:
        """Refused: it prepares :meth:`crop`.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(NO_CROP)

    # -- copies and files ----------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Hex digest of tables and layouts: what the bytes of the states mean."""
        return _fingerprint([layer.state.plan for layer in self.delta_layers], self._layouts())

    def verify(self, model) -> None:
        """Check that a cache, e.g. one loaded from a file, was made with the tables that ``model`` carries.

        Raises:
            ValueError: it was not.
        """
        plans = [table.plan() for table in damp_tables(model)]
        layouts = [damp_layout(layer, damp_config(model)) for layer in DeltaSpec.of(model).layers]
        if _fingerprint(plans, layouts) != self.fingerprint():
            raise ValueError(
                "this DAMPStateCache was made with other tables than the model carries (another calibration, or another "
                "model), so its states do not continue here. Make a new one: DAMPStateCache(model)."
            )

    def _use(self, decoder) -> None:
        known = getattr(
            self, "_graphs", None
        )  # of the model that used the cache before; None after loading from a file
        if known is not None and not self._has_tables_of(decoder):
            raise ValueError(
                f"this DAMPStateCache was made for another model: its tables and states do not belong to this "
                f"{type(decoder).__name__}. Make one with DAMPStateCache(model)."
            )
        super()._use(decoder)

    def _has_tables_of(self, decoder) -> bool:
        """Whether another model, e.g. a copy, carries the tables that this cache was made with."""
        if not has_damp(decoder):
            return False
        own = [layer.state.plan for layer in self.delta_layers]
        theirs = [table.plan() for table in damp_tables(decoder)]
        return len(own) == len(theirs) and all(
            torch.equal(getattr(a, name).cpu(), getattr(b, name).cpu())
            for a, b in zip(own, theirs, strict=True)
            for name in ("perm_k", "perm_v", "column_scale")
        )

    def _layouts(self) -> list[DampLayout]:
        return [layer.state.layout for layer in self.delta_layers]

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_fingerprint": self.fingerprint()}

    def __setstate__(self, values: dict) -> None:
        expected = values.pop("_fingerprint")
        self.__dict__.update(values)
        if self.fingerprint() != expected:
            raise ValueError(
                "this pickled DAMPStateCache is damaged: its tables do not have the recorded fingerprint."
            )
        self._hook()
        self._patch()

    def __deepcopy__(self, memo) -> DAMPStateCache:
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return clone

    # -- bytes and evaluation ------------------------------------------------------------------------------------------

    def memory_report(self) -> DampMemoryReport:
        """Bytes of everything this cache holds, read from the tensors."""
        layers = self.delta_layers
        states = [layer.state for layer in layers]
        values = sum(s.rows * s.plan.heads * s.layout.dk * s.layout.dv for s in states)
        packed = sum(t.nbytes for s in states for name, t in s.tensors.items() if name in ("records", "residual"))
        counters = sum(t.nbytes for s in states for name, t in s.tensors.items() if name in ("steps", "streams"))
        slots = sum(s.slot_bytes for s in states)
        tables = (table for s in states for table in (s.plan.perm_k, s.plan.perm_v, s.plan.column_scale))
        return DampMemoryReport(
            rows=max(self.batch_size, 0),
            state_bytes=packed,
            full_state_bytes=4 * values,
            conv_bytes=sum(layer.conv_states[0].nbytes for layer in layers if layer.conv_states[0] is not None),
            attention_bytes=sum(slot.nbytes for slot in self.attention_slots),
            scratch=counters + slots + self.step_bytes,
            table_bytes=sum(table.nbytes for table in tables),
            state_bits_per_value=8 * packed / values if values else None,
        )

    def forced_schedule(self, prompt_tokens: int | None = None) -> ForcedSchedule:
        """How teacher-forced evaluation feeds a text: a prompt, then single tokens, as every step rounds the states.

        Args:
            prompt_tokens: tokens of the prompt; None takes 64.
        """
        prompt = 64 if prompt_tokens is None else prompt_tokens
        return ForcedSchedule(prefill=prompt, step=1, first_counted=prompt)

    def __repr__(self) -> str:
        layout = self._layouts()[0]
        return (
            f"DAMPStateCache(low_bits={layout.low_bits}, high_rows={layout.high_rows}, rounding={self.rounding!r}, "
            f"rows={max(self.batch_size, 0)}, backend={self.backend}, cuda_graphs={self.uses_cuda_graphs})"
        )


def _plans_and_layouts(model, spec: DeltaSpec, plans, layouts, calibrated) -> tuple[list[DampPlan], list[DampLayout]]:
    """One plan (on the layer's device) and one layout per delta-rule layer."""
    if calibrated is None and (plans is None or layouts is None):
        damp_tables(model)  # says what to do
    if plans is None:
        plans = [table.plan() for table in damp_tables(model)]
    if layouts is None:
        layouts = [damp_layout(layer, calibrated) for layer in spec.layers]
    elif isinstance(layouts, DampLayout):
        layouts = [layouts] * len(spec.layers)
    for name, given in (("plans", plans), ("layouts", layouts)):
        if len(given) != len(spec.layers):
            raise ValueError(f"{len(given)} {name} for {len(spec.layers)} delta-rule layers; give one for each.")
    placed = []
    for layer, plan, layout in zip(spec.layers, plans, layouts, strict=True):
        _check_sizes(layer, plan, layout)
        device = next(layer.module.parameters()).device
        placed.append(plan if plan.perm_k.device == device else plan.to(device))
    return placed, list(layouts)


def _check_sizes(layer: DeltaLayer, plan: DampPlan, layout: DampLayout) -> None:
    expected = (layer.value_heads, layer.dk, layer.dv)
    if (plan.heads, plan.perm_k.shape[1], plan.perm_v.shape[1]) != expected:
        raise ValueError(
            f"layer {layer.index} has {expected[0]} value heads with states of {expected[1]} x {expected[2]}, but its plan is "
            f"for {plan.heads} heads of {plan.perm_k.shape[1]} x {plan.perm_v.shape[1]}; use the plans of this model."
        )
    if (layout.dk, layout.dv) != expected[1:]:
        raise ValueError(
            f"layer {layer.index} has states of {layer.dk} x {layer.dv}, but its layout is for {layout.dk} x {layout.dv}."
        )


def _choose_backend(spec: DeltaSpec, layouts: Sequence[DampLayout], rounding: str, asked: str, strict: bool) -> str:
    if asked not in BACKENDS:
        raise ValueError(f"backend={asked!r} must be one of {list(BACKENDS)}.")
    # The largest parameter is a projection; some small ones stay in FP32 in a bf16 model.
    weights = [max(layer.module.parameters(), key=torch.Tensor.numel) for layer in spec.layers]
    places = [(weight.device, weight.dtype, layout) for weight, layout in zip(weights, layouts, strict=True)]
    found = [damp_backend(*place, nearest=rounding == "nearest") for place in dict.fromkeys(places)]
    name, reason = max(found, key=lambda choice: BACKENDS.index(choice[0]))  # what all layers have
    if asked == "cuda" and name != "cuda":
        raise ValueError(f"backend='cuda' is not possible here ({reason}); use 'auto', which takes {name!r}.")
    if asked != "auto":
        name, reason = asked, f"backend={asked!r} was asked for"
    if name not in FAST_BACKENDS:
        if strict:
            raise FallbackError(f"strict=True, and the update of packed states would run on the slow path: {reason}.")
        if any(device.type == "cuda" for device, *_ in places):
            warnings.warn(f"DAMP's update of packed states runs on the slow {name} path: {reason}.", stacklevel=3)
    return name


def _fingerprint(plans: Sequence[DampPlan], layouts: Sequence[DampLayout]) -> str:
    digest = hashlib.sha256()
    for plan, layout in zip(plans, layouts, strict=True):
        digest.update(repr(layout).encode())
        for table in (plan.perm_k, plan.perm_v, plan.column_scale):
            digest.update(table.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
