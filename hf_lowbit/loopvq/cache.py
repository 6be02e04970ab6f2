"""`LoopVQCache`: sinks and recent tokens in model dtype, everything between as codes shared by T_c loop steps.

Life of a token (paper section 4.3): its keys (before RoPE) and values enter the window of every (layer, step). Once a
row's recent part reaches W + 8 tokens, the oldest 8 become one page of codes at the end of the forward pass. Codes are
written once. A query therefore sees position p as a code iff ``S <= p < S + n_coded``, with ``n_coded`` as it was when
the forward pass began; a long prompt goes through in chunks, so that earlier chunks are already codes.

Forward passes are of two kinds: chunks (:class:`~.prefill.EvenChunk`, :class:`~.prefill_ragged.RaggedChunk`) know their
lengths on the host; steps of one token per row (:class:`~.decode.DecodeStep`) have them on the device only, and run as CUDA
graphs where they can (:mod:`hf_lowbit.graphs`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from hf_lowbit_kernels import (
    RopeTables,
    attention_backend,
    build_rope_tables,
    vq_decode_attention,
)

from ..config import PAGE, check_integer, check_model, check_switch
from ..errors import NO_CROP, FallbackError
from ..graphs import StepGraphs
from ..protocols import ForcedSchedule
from .attach import loopvq_codebooks, loopvq_config
from .decode import DecodeStep
from .memory import MemoryReport
from .prefill import EvenChunk
from .prefill_attention import Layout
from .prefill_ragged import RaggedChunk, due_pages, real_columns
from .spec import LoopSpec
from .store import LayerStore


# Spare pages that a decode step asks for when codes have to grow: 512 tokens between two captures of its graphs.
STEP_PAGES = 64


class LoopVQSlot(CacheLayerMixin):
    """One (step, layer) slot as transformers sees it; the tensors live in the cache, as steps share codes."""

    is_croppable = True

    def __init__(self, cache: LoopVQCache):
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        raise TypeError(
            "LoopVQCache codes keys before RoPE and cannot take rotated ones through update(). Use it with a model that "
            "has the KVAttention hook: import hf_lowbit, then load Ouro through AutoModelForCausalLM without "
            "trust_remote_code's own classes."
        )

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, max_length: int) -> None:
        """Each slot's crop is a part of the cache's own; see :meth:`LoopVQCache.crop`."""
        raise TypeError("crop the LoopVQCache itself: all slots share their codes and lengths.")


class LoopVQCache(Cache):
    """KV cache of a calibrated looped or hybrid model in 0.25 to 2 bits an element. Allocates nothing until it is used.

    The other layers of a hybrid model keep their states in a cache of their own, :attr:`states`, whose slots stand among
    the slots of this one.

    Args:
        model: a calibrated model (or anything carrying its codebooks).
        recent_window: W, recent tokens kept in model dtype; None takes the artifact's. A multiple of 8.
        prefill_chunk_size: longest piece of a prompt that is processed at once; None takes the artifact's.
        strict: raise instead of falling back when decode attention cannot run on a kernel.
        backend: "auto", or "cuda" / "triton" / "reference" to force a path (for tests).
        cuda_graphs: None: run decode steps as CUDA graphs where possible, which changes nothing but their speed. False:
            never. True: raise where it is not possible.
        max_cache_len: tokens per row to reserve codes for at once. Without it room grows in steps (``generate`` says how
            far it may go); each of them captures the graphs again. A longer text still grows it.
        states: hybrid models: makes an empty cache for the recurrent layers; None: transformers' own, in full precision.

    Attributes:
        backend: "cuda", "triton" or "reference", the path of decode attention. Prefill attends through PyTorch's
            scaled_dot_product_attention on every device.
        states: hybrid models: the cache of the recurrent layers; None for a looped model.

    Raises:
        ValueError: the model carries no codebooks, or an option is out of range.
        FallbackError: ``strict`` and no kernel, or ``cuda_graphs=True`` and no way to use them.

    Example:
        >>> cache = LoopVQCache(model)                                          # doctest: +SKIP
        >>> model.generate(**inputs, cache=cache, max_new_tokens=100)           # doctest: +SKIP
        >>> print(cache.memory_report())                                        # doctest: +SKIP
    """

    def __init__(
        self,
        model,
        *,
        recent_window: int | None = None,
        prefill_chunk_size: int | None = None,
        strict: bool = False,
        backend: str = "auto",
        cuda_graphs: bool | None = None,
        max_cache_len: int | None = None,
        states: Callable[[], Cache] | None = None,
    ):
        check_model(model)
        check_switch("strict", strict)
        check_switch("cuda_graphs", cuda_graphs, or_none="graphs where they are possible")
        config = loopvq_config(model)
        self.spec = LoopSpec.of(model)
        self.codebooks = loopvq_codebooks(model)
        self.grouping = self.codebooks[0].grouping
        self.sinks = config.sink_tokens
        self.window = config.recent_window if recent_window is None else recent_window
        self.prefill_chunk_size = config.prefill_chunk_size if prefill_chunk_size is None else prefill_chunk_size
        check_integer("recent_window", self.window, PAGE)
        if self.window % PAGE:
            raise ValueError(f"recent_window={self.window} must be a multiple of {PAGE}, at least {PAGE}.")
        check_integer("prefill_chunk_size", self.prefill_chunk_size, PAGE)
        if backend not in ("auto", "cuda", "triton", "reference"):
            raise ValueError(f"backend={backend!r} must be 'auto', 'cuda', 'triton' or 'reference'.")
        if max_cache_len is not None:
            check_integer("max_cache_len", max_cache_len, 1, or_none="room that grows in steps")
        self._max_cache_len = max_cache_len
        self.backend = self._choose_backend(backend, strict)
        self.ring = self.window + PAGE
        self._layout = Layout(self.sinks, self.ring, self.spec.rotary, self.grouping, self.backend == "cuda")
        self._make_states = None
        if self.spec.cache_slots is not None:
            text_config = model.config.get_text_config(decoder=True)
            self._make_states = states or (lambda: DynamicCache(config=text_config))
        elif states is not None:
            raise ValueError("states= is for hybrid models; this one has no recurrent layers.")
        super().__init__(layers=[LoopVQSlot(self) for _ in range(self.spec.slots)])
        self._forget()
        self._graphs = StepGraphs(
            getattr(model, "base_model", model),
            cuda_graphs,
            self._graph_obstacle(),
            lambda: [codebook.derived() for codebook in self.codebooks],
        )
        if cuda_graphs and self._graphs.problem:
            raise FallbackError(f"cuda_graphs=True is not possible here: {self._graphs.problem}.")

    # -- state -------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything, tensors included."""
        self._graphs.drop()
        self._forget()

    def _forget(self) -> None:
        self._stores: list[LayerStore] | None = None
        self._capacity = 0  # pages per row
        self._longest: int | None = None  # columns that generate() will not exceed
        self._rope: dict[torch.device, RopeTables] = {}
        self._chunk: EvenChunk | RaggedChunk | DecodeStep | None = None  # the forward pass that is running
        self._step: DecodeStep | None = None  # kept between steps
        self._seen = 0  # columns, padding included: what transformers calls the sequence length
        self._lengths: list[int] = []  # real tokens per row
        self._coded: list[int] = []  # coded tokens per row, multiples of 8
        self._columns: list[
            tuple[bool, ...] | None
        ] = []  # which rows the last columns belong to (None: all), for crop
        self.states = None
        if self._make_states is not None:
            # Made anew: transformers' own layers keep tensors, or their length, when they are reset.
            self.states = self._make_states()
            self.layers = list(self.states.layers)
            for slot in self.spec.cache_slots:
                self.layers[slot] = LoopVQSlot(self)

    @property
    def batch_size(self) -> int | None:
        """Rows, or None while the cache is empty."""
        return len(self._lengths) if self._stores is not None else None

    @property
    def coded_tokens(self) -> list[int]:
        """Coded tokens of each row."""
        return list(self._coded)

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens that one verifying pass of assisted generation may add and :meth:`crop` can still remove."""
        return self.window

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether steps of one token are replayed, from the third on at the latest."""
        return self._graphs.problem is None

    @property
    def graph_replays(self) -> int:
        """Steps that were replayed so far."""
        return self._graphs.replays

    def expect_length(self, longest: int) -> None:
        """Announce that the cache will not exceed ``longest`` columns soon: codes then grow to that, and no further."""
        self._longest = longest

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding included."""
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._seen + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def update_recurrent_state(self, recurrent_states, layer_idx: int, state_idx: int = 0, **kwargs):
        """Of a hybrid model's other layers."""
        return self.states.update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def __deepcopy__(self, memo):
        # Codebooks belong to the model: a copied cache (a shared prompt prefix, say) must not copy 200 MB of tables.
        for shared in (*self.codebooks, *self.spec.layers, self.spec.rotary):
            memo[id(shared)] = shared
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return clone

    def __getstate__(self):
        raise TypeError(
            "a LoopVQCache cannot be pickled: it shares codebooks and modules with its model. copy.deepcopy works within a "
            "process; elsewhere, fill a new cache from the text."
        )

    # -- the KVAttention protocol ------------------------------------------------------------------------------------

    def run(self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, forward_chunk) -> dict:
        """See :meth:`hf_lowbit.protocols.KVAttention.run`; prompts longer than ``prefill_chunk_size`` go in chunks."""
        batch, count, _ = inputs_embeds.shape
        if batch == 0:
            raise ValueError("the batch has no rows; pass at least one.")
        valid = self._valid_columns(attention_mask, batch, count)
        if self._chunk is not None:
            raise RuntimeError(
                "an earlier forward pass with this LoopVQCache did not finish (an exception, or out of memory), so its "
                "states are incomplete; call reset() and start again from the prompt."
            )
        if valid is not None:
            empty = [b for b, n in enumerate(valid.sum(1).tolist()) if n + (self._lengths or [0] * batch)[b] == 0]
            if empty:
                raise ValueError(
                    f"rows {empty} of the batch hold no token at all (empty prompt, or attention_mask all zero); give "
                    "every row at least one token."
                )
        if count > 1:
            self._reserve(self._pages_of(self._seen + count), PAGE)
        size = self.prefill_chunk_size
        if count <= size:
            return self._run_piece(inputs_embeds, valid, forward_chunk)
        back = None
        if valid is not None and self.states is None:
            # Pack every row to the left, so that its chunks end at the same real positions as they would without the
            # padding: which tokens are seen as codes must not depend on a row's neighbours.
            order = (~valid).to(torch.int8).argsort(dim=1, stable=True)
            back = order.argsort(dim=1)
            inputs_embeds = inputs_embeds.gather(1, order.unsqueeze(-1).expand_as(inputs_embeds))
            valid = valid.gather(1, order)
        # Recurrent layers need the columns in their order, padding on the left. Counted from the end, chunks end at the
        # same real positions as without the padding all the same: then the first one is the short one.
        short = count % size if self.states is not None else 0
        borders = [0, *range(short or size, count, size), count]
        parts = []
        for begin, end in zip(borders, borders[1:]):
            piece = None if valid is None else valid[:, begin:end]
            if piece is not None and bool(piece.all()):
                piece = None
            parts.append(self._run_piece(inputs_embeds[:, begin:end], piece, forward_chunk))
        merged = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
        if back is not None:
            self._columns = self._columns_of(valid.gather(1, back))
            for name, value in merged.items():
                index = back.view(batch, count, *[1] * (value.ndim - 2)).expand_as(value)
                merged[name] = value.gather(1, index.to(value.device))
        return merged

    def attend(self, query, key, value, cos, sin, *, layer, step, module) -> torch.Tensor:
        """See :meth:`hf_lowbit.protocols.KVAttention.attend`."""
        chunk = self._chunk
        if chunk is None:
            raise RuntimeError("LoopVQCache.attend was called outside of run(); call the model, not its layers.")
        if module is not self.spec.layers[layer]:
            self._chunk = None
            raise ValueError(
                "this LoopVQCache was made for another model: its codebooks fit that model's weights only. Make one with "
                "LoopVQCache(model) for the model that uses it."
            )
        key, value = key.detach(), value.detach()
        if self._stores is None:
            self._allocate(key.shape[0], key.dtype)
        store = self._stores[layer]
        size = self.grouping.steps_per_code
        block, place = divmod(step, size)
        if isinstance(chunk, DecodeStep):
            query = chunk.rotate_and_write(query, key, value, cos, sin, store.window[step])
            out = self._decode(store, query, layer, step, module.scaling)
            if place == size - 1:
                window = store.window[block * size : step + 1]
                chunk.encode(window, store.codes[block], self.codebooks[layer], block)
        else:
            codebook = self.codebooks[layer]
            out = chunk.attend(
                store, codebook, query, key, value, cos, sin, layer=layer, step=step, scale=module.scaling
            )
            if place == size - 1:
                chunk.commit(store, codebook, layer=layer, block=block)
        return out

    # -- forward passes ----------------------------------------------------------------------------------------------

    def _valid_columns(self, mask: torch.Tensor | None, batch: int, count: int) -> torch.Tensor | None:
        if self._stores is not None and batch != len(self._lengths):
            raise ValueError(f"the cache holds {len(self._lengths)} rows and got {batch}; use one cache per batch.")
        # A single token after the prompt is real in every row (generate() never pads there): not looking at the mask
        # saves a synchronization with the GPU per token.
        if mask is None or (count == 1 and self._seen > 0):
            return None
        if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] != self._seen + count:
            raise ValueError(
                f"LoopVQCache needs the 2-D attention mask [{batch}, {self._seen + count}] (past and new tokens), got "
                f"{tuple(mask.shape)}."
            )
        valid = mask[:, self._seen :] != 0
        return None if bool(valid.all()) else valid

    def _graph_obstacle(self) -> str | None:
        """Why the cache's own part of a step cannot be captured, or None."""
        if self.backend == "reference":
            return "decode attention on the reference path reads lengths on the host"
        return None

    def _state_tensors(self) -> Iterable[torch.Tensor]:
        """What one-token steps read and change of a hybrid model's states: a graph needs them where they were."""
        kept = (getattr(slot, name, {}) for slot in self.layers for name in ("recurrent_states", "conv_states"))
        return (state for states in kept for state in states.values() if isinstance(state, torch.Tensor))

    def _run_piece(self, inputs_embeds, valid, forward_chunk) -> dict:
        if inputs_embeds.shape[1] == 1 and valid is None:
            return self._run_step(inputs_embeds, forward_chunk)
        return self._run_chunk(inputs_embeds, valid, forward_chunk)

    def _run_step(self, inputs_embeds, forward_chunk) -> dict:
        """One real token in every row."""
        batch, device = inputs_embeds.shape[0], inputs_embeds.device
        start, coded = self._rows(batch)
        end = [length + 1 for length in start]
        coded_after = self._coded_at(end, coded)
        # One page ahead, so that the first step after a prompt grows the codes, and not the first that encodes: it is
        # the one before the graphs are captured.
        self._reserve(max(coded_after) // PAGE + 1, STEP_PAGES)
        if self._step is None or not self._step.fits(batch, device):
            self._graphs.drop()
            devices = {device, *(codebook.device for codebook in self.codebooks)}
            self._step = DecodeStep(batch, devices, self.sinks, self.ring)
        self._step.refresh(end, coded, due_pages(coded, coded_after), spare=self._capacity)
        for on in self._step.devices:
            self._cover_positions(on)
        self._chunk = step = self._step

        def forward(embeds: torch.Tensor) -> dict[str, torch.Tensor]:
            step.derive()
            return forward_chunk(embeds, step.on(embeds.device).position)

        if self._stores is None:
            out = forward(inputs_embeds)
        else:
            key = getattr(forward_chunk, "graph_key", None)
            if key is not None and self.states is not None:
                key = (key, *(tensor.data_ptr() for tensor in self._state_tensors()))
            try:
                out = self._graphs.run(step.pages, key, inputs_embeds, forward)
            except FallbackError:
                self._chunk = None
                raise
        self._finish(1, end, coded_after, [None])
        return out

    def _run_chunk(self, inputs_embeds, valid, forward_chunk) -> dict:
        batch, count, _ = inputs_embeds.shape
        device = inputs_embeds.device
        start, coded = self._rows(batch)
        if count == 0 and self._seen == 0:
            raise ValueError("the prompt has no tokens; give at least one.")
        if count == 0:
            raise ValueError(
                f"no new tokens: the cache holds {self._seen} already, and the input adds none. Pass the whole text so far "
                "and something new after it, or reset() the cache."
            )
        added, columns = ([count] * batch, [slice(0, count)] * batch) if valid is None else real_columns(valid)
        end = [a + b for a, b in zip(start, added)]
        coded_after = self._coded_at(end, coded)
        if valid is None and len(set(zip(start, coded))) == 1:
            chunk = EvenChunk(self._layout, batch, count, start[0], coded[0], coded_after[0], device)
        else:
            offsets = torch.arange(count, device=device) if valid is None else valid.long().cumsum(1) - 1
            positions = offsets.clamp_min(0) + torch.tensor(start, device=device).unsqueeze(1)
            chunk = RaggedChunk(self._layout, count, valid, positions, list(start), list(coded), coded_after, columns)
        self._chunk = chunk
        self._reserve(max(coded_after) // PAGE, PAGE)
        self._graphs.recheck()

        out = forward_chunk(inputs_embeds, chunk.positions)

        self._finish(count, end, coded_after, [None] * count if valid is None else self._columns_of(valid))
        return out

    def _rows(self, batch: int) -> tuple[list[int], list[int]]:
        """Tokens and coded tokens of each row before this pass."""
        return (self._lengths, self._coded) if self._stores is not None else ([0] * batch, [0] * batch)

    def _coded_at(self, lengths: list[int], coded: list[int]) -> list[int]:
        """Coded tokens of each row once it holds ``lengths`` tokens."""
        return [max(c, PAGE * self._pages_of(n)) for c, n in zip(coded, lengths)]

    def _pages_of(self, length: int) -> int:
        """Pages of codes that a row of ``length`` tokens has."""
        return max(0, length - self.sinks - self.window) // PAGE

    def _finish(
        self, count: int, lengths: list[int], coded: list[int], columns: list[tuple[bool, ...] | None]
    ) -> None:
        """The pass over ``count`` columns is complete: take over what it changed."""
        self._lengths, self._coded = lengths, coded
        self._seen += count
        self._columns = (self._columns + columns)[-(self.sinks + self.ring) :]
        self._chunk = None

    def _columns_of(self, valid: torch.Tensor) -> list[tuple[bool, ...] | None]:
        last = valid[:, -(self.sinks + self.ring) :].t().tolist()
        return [None if all(column) else tuple(column) for column in last]

    def _allocate(self, batch: int, dtype: torch.dtype) -> None:
        slots, heads = self.sinks + self.ring, self.spec.kv_heads
        self._stores = [LayerStore(c, batch, self._capacity, slots, heads, dtype) for c in self.codebooks]

    def _choose_backend(self, asked: str, strict: bool) -> str:
        spec, device = self.spec, self.codebooks[0].device
        dtype = spec.layers[0].k_proj.weight.dtype
        name, reason = attention_backend(
            device,
            spec.head_dim,
            spec.query_heads // spec.kv_heads,
            dtype,
            self.grouping.channels,
            self.sinks,
        )
        if asked != "auto":
            name, reason = asked, f"backend={asked!r} was asked for"
        if name == "reference":
            if strict:
                raise FallbackError(f"strict=True, and decode attention would run on the reference path: {reason}.")
            if device.type == "cuda":
                warnings.warn(f"LoopVQ decode attention runs on the slow reference path: {reason}.", stacklevel=3)
        return name

    def _reserve(self, pages: int, step: int) -> None:
        """Room for ``pages`` pages per row. Grows by a quarter, at least ``step``: a token costs O(1) copies on average."""
        if pages <= self._capacity:
            return
        if self._max_cache_len is not None:
            pages = max(pages, self._pages_of(self._max_cache_len) + 1)
        if self._stores is not None:
            ahead = max(pages, self._capacity + max(self._capacity // 4, step))
            limit = ahead if self._longest is None else self._pages_of(self._longest) + 1
            pages = max(pages, min(ahead, limit)) if limit >= pages else ahead  # an outdated limit means nothing
            self._graphs.drop()
            for store in self._stores:
                store.grow(pages)
        self._capacity = pages

    def _cover_positions(self, device: torch.device) -> None:
        """Angles for the decode kernel, of every position that the reserved pages and the window can hold."""
        longest = self.sinks + PAGE * self._capacity + self.ring
        tables = self._rope.get(device)
        if tables is None:
            scaling = float(getattr(self.spec.rotary, "attention_scaling", 1.0))
            with torch.inference_mode(False):
                tables = build_rope_tables(
                    self.spec.inv_freq(), longest, offset=self.sinks, device=device, attention_scaling=scaling
                )
        elif longest > tables.max_position:
            self._graphs.drop()
            tables = tables.grow(longest)
        self._rope[device] = tables

    # -- decode ------------------------------------------------------------------------------------------------------

    def _decode(self, store: LayerStore, query, layer: int, step: int, scale: float) -> torch.Tensor:
        block = step // self.grouping.steps_per_code
        codebook, at = self.codebooks[layer], self._chunk.on(query.device)
        table = codebook.staged_table if self.backend == "cuda" else codebook.table
        out = vq_decode_attention(
            query,
            store.codes[block, 0],
            store.codes[block, 1],
            table("key", step),
            table("value", step),
            store.window[step, 0],
            store.window[step, 1],
            at.length,
            at.coded,
            self._rope[query.device],
            scale,
            sinks=self.sinks,
            max_coded=PAGE * self._capacity,
            backend=self.backend,
        )
        return out.unsqueeze(1)

    # -- operations on rows and length -------------------------------------------------------------------------------

    def _select(self, rows: list[int]) -> None:
        if self._stores is None or rows == list(range(len(self._lengths))):
            return
        if len(rows) != len(self._lengths):
            self._graphs.drop()
        index, pages = torch.tensor(rows, dtype=torch.long), max(self._coded) // PAGE
        if self.states is not None:
            self.states.reorder_cache(index)
        for store in self._stores:
            store.select(index, pages)
        self._lengths = [self._lengths[r] for r in rows]
        self._coded = [self._coded[r] for r in rows]
        self._columns = [None if c is None else tuple(c[r] for r in rows) for c in self._columns]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, copies side by side."""
        self._select([row for row in range(len(self._lengths)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows (indices, or a boolean mask)."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select(indices.tolist())

    def crop(self, max_length: int) -> None:
        """Remove tokens from the end: ``-n`` removes n columns, 0 removes none, ``n > 0`` keeps n columns.

        Raises:
            ValueError: a removed token is coded already. Codes are written once and are not decoded back, so the cut
                must lie within the recent window.
            RuntimeError: the model has recurrent layers, whose earlier states are not kept.
        """
        if self.states is not None:
            raise RuntimeError(NO_CROP)
        remove = -max_length if max_length <= 0 else self._seen - max_length
        if remove <= 0:
            return
        removed = self._columns[-remove:] if remove <= len(self._columns) else None
        lost = [sum(c is None or c[row] for c in removed) for row in range(len(self._lengths))] if removed else None
        if lost is None or any(n - k < self.sinks + c and c > 0 for n, k, c in zip(self._lengths, lost, self._coded)):
            room = [n - self.sinks - c if c else n for n, c in zip(self._lengths, self._coded)]
            raise ValueError(
                f"crop would remove {remove} tokens, but at most {min(room, default=0)} of the newest are still in full "
                "precision; the others are codes, which are written once. Crop less, use a larger recent_window, or "
                "reset() and prefill again."
            )
        self._lengths = [n - k for n, k in zip(self._lengths, lost)]
        self._seen -= remove
        self._columns = self._columns[:-remove]

    def activate_past_recording(self) -> None:
        """It prepares :meth:`crop`, which needs nothing here.

        Raises:
            RuntimeError: the model has recurrent layers, see :meth:`crop`.
        """
        if self.states is not None:
            raise RuntimeError(NO_CROP)

    # -- what the evaluation asks ------------------------------------------------------------------------------------

    def forced_schedule(self, prompt_tokens: int | None = None) -> ForcedSchedule:
        """Pages, with borders at S + W + 8 j, see what single tokens would see.

        A query at position q reads key p from the codes exactly when ``S <= p < S + n_q`` with
        ``n_q = 8 * floor(max(0, q - S - W) / 8)``: the same for all queries of a page. Larger steps would let late
        queries read tokens in full precision that decoding has already encoded, and flatter the result. The first chunk
        may hold S + W tokens, since no code is visible before position S + W + 8.

        Raises:
            ValueError: ``prompt_tokens`` is given; the window decides here.
        """
        if prompt_tokens is not None:
            raise ValueError(
                f"prompt_tokens={prompt_tokens} is for caches of recurrent states. A LoopVQCache reads codes from position "
                f"{self.sinks + self.window + PAGE} on whatever the prompt; set recent_window to change that."
            )
        first = self.sinks + self.window
        return ForcedSchedule(prefill=first, step=PAGE, first_counted=first + PAGE)

    # -- bytes -------------------------------------------------------------------------------------------------------

    def memory_report(self) -> MemoryReport:
        """Bytes of everything this cache holds, read from the tensors."""
        stores = self._stores or []
        used = 0
        for store in stores:
            for row, coded in enumerate(self._coded):
                used += store.codes[:, :, row, : coded // PAGE].numel() * store.codes.element_size()
        elements_per_token = 2 * self.spec.slots * self.spec.kv_heads * self.spec.head_dim
        itemsize = stores[0].window.element_size() if stores else 0
        coded, tokens = sum(self._coded), sum(self._lengths)
        step = self._step.nbytes if self._step is not None else 0
        return MemoryReport(
            codes=used,
            codes_reserved=sum(store.codes.nbytes for store in stores),
            window=sum(store.window.nbytes for store in stores),
            codebooks=sum(codebook.nbytes() for codebook in self.codebooks),
            scratch=step + self._graphs.nbytes + sum(rope.nbytes for rope in self._rope.values()),
            full_precision=tokens * elements_per_token * itemsize,
            tokens=tokens,
            coded_tokens=coded,
            states=self._state_bytes(),
            bits_per_element=8 * used / (coded * elements_per_token) if coded else None,
        )

    def _state_bytes(self) -> int:
        """Bytes of the recurrent and convolution states of a hybrid model's other layers, kept by transformers."""
        return sum(state.nbytes for state in self._state_tensors())

    def __repr__(self) -> str:
        g = self.grouping
        return (
            f"LoopVQCache(bits={8 / g.group_size:g}, loop_group_size={g.steps_per_code}, window={self.window}, "
            f"rows={self.batch_size}, tokens={sum(self._lengths)}, coded={sum(self._coded)}, backend={self.backend}, "
            f"cuda_graphs={self.uses_cuda_graphs})"
        )
