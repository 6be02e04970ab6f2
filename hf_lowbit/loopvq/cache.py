"""`LoopVQCache`: sinks and recent tokens in model dtype, everything between as codes shared by T_c loop steps.

Life of a token (paper section 4.3): its keys (before RoPE) and values enter the window of every (layer, step). Once a
row's recent part reaches W + 8 tokens, the oldest 8 become one page of codes at the end of the forward pass. Codes are
written once. A query therefore sees position p as a code iff ``S <= p < S + n_coded``, with ``n_coded`` as it was when
the forward pass began; a long prompt goes through in chunks, so that earlier chunks are already codes.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_lowbit_kernels import (
    RopeTables,
    attention_backend,
    build_rope_tables,
    vq_decode,
    vq_decode_attention,
)

from ..config import PAGE
from ..errors import FallbackError
from ..protocols import ForcedSchedule
from .attach import loopvq_codebooks, loopvq_config
from .codebook import SIDES, LoopVQCodebook
from .memory import MemoryReport
from .spec import LoopSpec, rotate


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


@dataclass
class _Chunk:
    """One forward pass over ``count`` columns.

    Attributes:
        valid: bool ``[B, count]``, or None when every column is a real token.
        positions: int64 ``[B, count]`` among the row's real tokens (padding: any).
        start, end, coded, coded_after: per row, on the host: tokens before and after, coded tokens during and after.
        pages: (row, page) of every page that this pass encodes, the same in all layers.
        targets: per device, rows and window indices of a decode pass's tokens, the same in all slots.
    """

    count: int
    valid: torch.Tensor | None
    positions: torch.Tensor
    start: list[int]
    end: list[int]
    coded: list[int]
    coded_after: list[int]
    pages: list[tuple[int, int]] = field(init=False)
    targets: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self):
        self.pages = [
            (row, page)
            for row, (before, after) in enumerate(zip(self.coded, self.coded_after))
            for page in range(before // PAGE, after // PAGE)
        ]

    @property
    def is_decode(self) -> bool:
        return self.count == 1 and self.valid is None


class _LayerStore:
    """Tensors of one layer, on its device.

    pages: uint8 ``[nB, 2, B, P, H, NG, 8]``, the order that the CUDA kernel reads; codes: the same as ``[nB, 2, B, P, H,
    8, NG]``; window: model dtype ``[T, 2, B, H, S + R, D]``.
    """

    def __init__(self, codebook: LoopVQCodebook, batch: int, pages: int, slots: int, heads: int, dtype: torch.dtype):
        g = codebook.grouping
        device = codebook.device
        self.pages = torch.empty((g.blocks, 2, batch, pages, heads, g.groups, PAGE), dtype=torch.uint8, device=device)
        self.window = torch.zeros((g.steps, 2, batch, heads, slots, g.head_dim), dtype=dtype, device=device)
        self.pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # step -> (key, value) of the current chunk

    @property
    def codes(self) -> torch.Tensor:
        return self.pages.transpose(-1, -2)

    def grow(self, pages: int) -> None:
        shape = list(self.pages.shape)
        shape[3] = pages
        larger = torch.empty(shape, dtype=torch.uint8, device=self.pages.device)
        larger[:, :, :, : self.pages.shape[3]] = self.pages
        self.pages = larger

    def select(self, rows: torch.Tensor) -> None:
        rows = rows.to(self.pages.device)
        self.pages = self.pages.index_select(2, rows)
        self.window = self.window.index_select(2, rows)


class LoopVQCache(Cache):
    """KV cache of a calibrated looped model in 0.25 to 2 bits an element. Allocates nothing until it is used.

    Args:
        model: a calibrated model (or anything carrying its codebooks).
        recent_window: W, recent tokens kept in model dtype; None takes the artifact's. A multiple of 8.
        prefill_chunk_size: longest piece of a prompt that is processed at once; None takes the artifact's.
        strict: raise instead of falling back when decode attention cannot run on the Triton kernel.
        backend: "auto", or "cuda" / "triton" / "reference" to force a path (for tests).

    Attributes:
        backend: "cuda", "triton" or "reference", the path of decode attention. Prefill attends through PyTorch's
            scaled_dot_product_attention on every device.

    Raises:
        ValueError: the model carries no codebooks, or an option is out of range.
        FallbackError: ``strict`` and no Triton path.

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
    ):
        config = loopvq_config(model)
        self.spec = LoopSpec.of(model)
        self.codebooks = loopvq_codebooks(model)
        self.grouping = self.codebooks[0].grouping
        self.sinks = config.sink_tokens
        self.window = config.recent_window if recent_window is None else recent_window
        self.prefill_chunk_size = config.prefill_chunk_size if prefill_chunk_size is None else prefill_chunk_size
        if self.window < PAGE or self.window % PAGE:
            raise ValueError(f"recent_window={self.window} must be a multiple of {PAGE}, at least {PAGE}.")
        if self.prefill_chunk_size < PAGE:
            raise ValueError(f"prefill_chunk_size={self.prefill_chunk_size} must be at least {PAGE}.")
        if backend not in ("auto", "cuda", "triton", "reference"):
            raise ValueError(f"backend={backend!r} must be 'auto', 'cuda', 'triton' or 'reference'.")
        self.backend = self._choose_backend(backend, strict)
        self.ring = self.window + PAGE
        super().__init__(layers=[LoopVQSlot(self) for _ in range(self.spec.slots)])
        self.reset()

    # -- state -------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything, tensors included."""
        self._stores: list[_LayerStore] | None = None
        self._rope: dict[torch.device, RopeTables] = {}
        self._chunk: _Chunk | None = None
        self._seen = 0  # columns, padding included: what transformers calls the sequence length
        self._lengths: list[int] = []  # real tokens per row
        self._coded: list[int] = []  # coded tokens per row, multiples of 8
        self._columns: list[
            tuple[bool, ...] | None
        ] = []  # which rows the last columns belong to (None: all), for crop
        self._device_lengths: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def batch_size(self) -> int | None:
        """Rows, or None while the cache is empty."""
        return len(self._lengths) if self._stores is not None else None

    @property
    def coded_tokens(self) -> list[int]:
        """Coded tokens of each row."""
        return list(self._coded)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding included."""
        return self._seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._seen + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def __deepcopy__(self, memo):
        # Codebooks belong to the model: a copied cache (a shared prompt prefix, say) must not copy 200 MB of tables.
        for shared in (*self.codebooks, *self.spec.layers, self.spec.rotary):
            memo[id(shared)] = shared
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return clone

    # -- the KVAttention protocol ------------------------------------------------------------------------------------

    def run(self, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, forward_chunk) -> dict:
        """See :meth:`hf_lowbit.protocols.KVAttention.run`; prompts longer than ``prefill_chunk_size`` go in chunks."""
        batch, count, _ = inputs_embeds.shape
        valid = self._valid_columns(attention_mask, batch, count)
        size = self.prefill_chunk_size
        if count <= size:
            return self._run_chunk(inputs_embeds, valid, forward_chunk)
        back = None
        if valid is not None:
            # Pack every row to the left, so that its chunks end at the same real positions as they would without the
            # padding: which tokens are seen as codes must not depend on a row's neighbours.
            order = (~valid).to(torch.int8).argsort(dim=1, stable=True)
            back = order.argsort(dim=1)
            inputs_embeds = inputs_embeds.gather(1, order.unsqueeze(-1).expand_as(inputs_embeds))
            valid = valid.gather(1, order)
        parts = []
        for i in range(0, count, size):
            piece = None if valid is None else valid[:, i : i + size]
            if piece is not None and bool(piece.all()):
                piece = None
            parts.append(self._run_chunk(inputs_embeds[:, i : i + size], piece, forward_chunk))
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
            self._allocate(len(chunk.start), key.dtype)
        store = self._stores[layer]
        query = rotate(query, cos, sin)
        if chunk.is_decode:
            self._write_token(store, step, key, value)
            out = self._decode(store, query, layer, step, module.scaling)
        else:
            store.pending[step] = (key, value)
            out = self._prefill(store, query, key, value, cos, sin, layer, step, module.scaling)
        if (step + 1) % self.grouping.steps_per_code == 0:
            self._commit(store, layer, step // self.grouping.steps_per_code)
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

    def _run_chunk(self, inputs_embeds, valid, forward_chunk) -> dict:
        if self._chunk is not None:
            raise RuntimeError(
                "an earlier forward pass with this LoopVQCache did not finish (an exception, or out of memory), so its "
                "states are incomplete; call reset() and start again from the prompt."
            )
        batch, count, _ = inputs_embeds.shape
        device = inputs_embeds.device
        start = self._lengths if self._stores is not None else [0] * batch
        if valid is None:
            added = [count] * batch
            offsets = torch.arange(count, device=device).expand(batch, count)
        else:
            added = valid.sum(1).tolist()
            offsets = valid.long().cumsum(1).sub_(1).clamp_min_(0)
        end = [a + b for a, b in zip(start, added)]
        if count == 0:
            raise ValueError(
                f"no new tokens: the cache holds {self._seen} already, and the input adds none. Pass the whole text so far "
                "and something new after it, or reset() the cache."
            )
        if min(end, default=0) == 0:
            raise ValueError(
                f"rows {[b for b, n in enumerate(end) if n == 0]} of the batch hold no token at all (empty prompt, or "
                "attention_mask all zero); give every row at least one token."
            )
        coded = self._coded if self._stores is not None else [0] * batch
        coded_after = [max(c, PAGE * (max(0, n - self.sinks - self.window) // PAGE)) for c, n in zip(coded, end)]
        positions = offsets + torch.tensor(start, device=device).unsqueeze(1)
        self._chunk = _Chunk(count, valid, positions, list(start), end, list(coded), coded_after)
        self._reserve(max(coded_after) // PAGE)
        self._device_lengths = {}

        out = forward_chunk(inputs_embeds, positions)

        self._lengths, self._coded = end, coded_after
        self._seen += count
        columns = [None] * count if valid is None else self._columns_of(valid)
        self._columns = (self._columns + columns)[-(self.sinks + self.ring) :]
        self._chunk = None
        return out

    def _columns_of(self, valid: torch.Tensor) -> list[tuple[bool, ...] | None]:
        last = valid[:, -(self.sinks + self.ring) :].t().tolist()
        return [None if all(column) else tuple(column) for column in last]

    def _allocate(self, batch: int, dtype: torch.dtype) -> None:
        pages = max(self._chunk.coded_after) // PAGE
        slots = self.sinks + self.ring
        self._stores = [_LayerStore(c, batch, pages, slots, self.spec.kv_heads, dtype) for c in self.codebooks]

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

    def _reserve(self, pages: int) -> None:
        """Room for ``pages`` pages per row. Grows by a quarter, so that a token costs O(1) copies on average."""
        if self._stores is None:
            return
        capacity = self._stores[0].codes.shape[3]
        if pages > capacity:
            pages = max(pages, capacity + capacity // 4 + 8)
            for store in self._stores:
                store.grow(pages)

    def _lengths_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 ``[B]`` lengths (this chunk's tokens included) and coded tokens, once per forward and device."""
        if device not in self._device_lengths:
            both = torch.tensor([self._chunk.end, self._chunk.coded], dtype=torch.int32)
            if device.type == "cuda":
                both = both.pin_memory().to(device, non_blocking=True)
            self._device_lengths[device] = (both[0], both[1])
        return self._device_lengths[device]

    def _rope_tables(self, device: torch.device) -> RopeTables:
        """Angles for the decode kernel, covering this chunk's positions."""
        longest = max(self._chunk.end)
        tables = self._rope.get(device)
        if tables is None:
            scaling = float(getattr(self.spec.rotary, "attention_scaling", 1.0))
            tables = build_rope_tables(
                self.spec.inv_freq(), longest, offset=self.sinks, device=device, attention_scaling=scaling
            )
        self._rope[device] = tables.grow(longest)
        return self._rope[device]

    def _cos_sin(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own cos and sin ``[B or 1, n, D]``: a key rotated late is bit for bit the key of a stock cache."""
        return self.spec.rotary(like, position_ids=positions)

    # -- decode ------------------------------------------------------------------------------------------------------

    def _window_index(self, positions: torch.Tensor) -> torch.Tensor:
        """Where a position lives in the window: sinks first, then a ring."""
        return torch.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % self.ring)

    def _write_token(self, store: _LayerStore, step: int, key: torch.Tensor, value: torch.Tensor) -> None:
        targets = self._chunk.targets
        if key.device not in targets:
            positions = self._chunk.positions[:, 0].to(key.device)
            targets[key.device] = (torch.arange(key.shape[0], device=key.device), self._window_index(positions))
        rows, index = targets[key.device]
        store.window[step, 0, rows, :, index] = key[:, :, 0]
        store.window[step, 1, rows, :, index] = value[:, :, 0]

    def _decode(self, store: _LayerStore, query, layer: int, step: int, scale: float) -> torch.Tensor:
        block = step // self.grouping.steps_per_code
        codebook = self.codebooks[layer]
        lengths, coded = self._lengths_on(query.device)
        table = codebook.staged_table if self.backend == "cuda" else codebook.table
        out = vq_decode_attention(
            query[:, :, 0],
            store.codes[block, 0],
            store.codes[block, 1],
            table("key", step),
            table("value", step),
            store.window[step, 0],
            store.window[step, 1],
            lengths,
            coded,
            self._rope_tables(query.device),
            scale,
            sinks=self.sinks,
            max_coded=max(self._chunk.coded),
            backend=self.backend,
        )
        return out.unsqueeze(1)

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _prefill(self, store, query, key, value, cos, sin, layer: int, step: int, scale: float) -> torch.Tensor:
        """Attention of a chunk over codes, window and itself, in one softmax."""
        chunk = self._chunk
        gqa = query.shape[1] != key.shape[1]
        rotated = rotate(key, cos, sin)
        if max(chunk.start) == 0 and chunk.valid is None:
            out = F.scaled_dot_product_attention(query, rotated, value, is_causal=True, scale=scale, enable_gqa=gqa)
            return out.transpose(1, 2)
        device = query.device
        keys, values, masks = [rotated], [value], [self._chunk_mask(device)]
        if max(chunk.start) > 0:
            start = torch.tensor(chunk.start, device=device).unsqueeze(1)
            coded = torch.tensor(chunk.coded, device=device).unsqueeze(1)
            positions = self._window_positions(start, coded)  # [B, S + R]
            held = (positions >= 0) & ((positions < self.sinks) | (positions >= self.sinks + coded))
            window_cos, window_sin = self._cos_sin(positions.clamp_min(0), key)
            keys.append(rotate(store.window[step, 0], window_cos, window_sin))
            values.append(store.window[step, 1])
            masks.append(held.unsqueeze(1).expand(-1, chunk.count, -1))
            most = max(chunk.coded)
            if most:
                positions = self.sinks + torch.arange(most, device=device).unsqueeze(0)
                code_cos, code_sin = self._cos_sin(positions, key)
                keys.append(rotate(self._reconstruct(store, "key", layer, step, most, key.dtype), code_cos, code_sin))
                values.append(self._reconstruct(store, "value", layer, step, most, key.dtype))
                masks.append((positions < self.sinks + coded).unsqueeze(1).expand(-1, chunk.count, -1))
        out = F.scaled_dot_product_attention(
            query,
            torch.cat(keys, dim=2),
            torch.cat(values, dim=2),
            attn_mask=torch.cat(masks, dim=-1).unsqueeze(1),
            scale=scale,
            enable_gqa=gqa,
        )
        return out.transpose(1, 2)

    def _chunk_mask(self, device: torch.device) -> torch.Tensor:
        """Causal within the chunk, real tokens only; bool ``[B, n, n]``. Padding sees itself: an empty row is NaN."""
        chunk = self._chunk
        causal = torch.ones(chunk.count, chunk.count, dtype=torch.bool, device=device).tril()
        if chunk.valid is None:
            return causal.expand(len(chunk.start), -1, -1)
        itself = torch.eye(chunk.count, dtype=torch.bool, device=device)
        return (causal & chunk.valid.to(device).unsqueeze(1)) | itself

    def _window_positions(self, start: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
        """Position held by each window index before this chunk, -1 for none; ``[B, S + R]``."""
        sink = torch.arange(self.sinks, device=start.device).unsqueeze(0)
        sink = torch.where(sink < start, sink, -1)
        first = self.sinks + coded  # oldest recent position
        slot = torch.arange(self.ring, device=start.device).unsqueeze(0)
        recent = first + (slot - (first - self.sinks)) % self.ring
        return torch.cat([sink, torch.where(recent < start, recent, -1)], dim=1)

    def _reconstruct(self, store, side: str, layer: int, step: int, count: int, dtype) -> torch.Tensor:
        """``[B, H, count, D]`` from codes; rows with fewer coded tokens hold noise beyond theirs (masked)."""
        block = step // self.grouping.steps_per_code
        codes = store.codes[block, SIDES.index(side)][:, : count // PAGE]  # [B, pages, H, 8, NG]
        codes = codes.transpose(2, 3).flatten(1, 2)  # [B, count, H, NG]
        return vq_decode(codes, self.codebooks[layer].table(side, step)).transpose(1, 2).to(dtype)

    # -- encoding ----------------------------------------------------------------------------------------------------

    def _commit(self, store: _LayerStore, layer: int, block: int) -> None:
        """After a block's last step: encode the pages that leave the window, then put the chunk's tail in the window."""
        chunk, size = self._chunk, self.grouping.steps_per_code
        steps = range(block * size, (block + 1) * size)
        device = store.window.device
        if chunk.pages:
            where = torch.tensor(chunk.pages, device=device)
            rows, page = where[:, 0], where[:, 1]
            positions = self.sinks + PAGE * page.unsqueeze(1) + torch.arange(PAGE, device=device)  # [pages, 8]
            index = self._source_index(rows, positions)
            for i, side in enumerate(SIDES):
                states = torch.stack([self._source(store, i, step)[rows.unsqueeze(1), :, index] for step in steps])
                codebook = self.codebooks[layer]
                codes = codebook.encode(side, block, states.flatten(1, 2))  # states [T_c, pages * 8, H, D]
                codes = codes.unflatten(0, (-1, PAGE)).transpose(1, 2)  # [pages, H, 8, NG]
                store.codes[block, i, rows, page] = codes
        if not chunk.is_decode:
            row, column, index = self._tail(device)
            for step in steps:
                key, value = store.pending.pop(step)
                store.window[step, 0, row, :, index] = key[row, :, column]
                store.window[step, 1, row, :, index] = value[row, :, column]

    def _source(self, store: _LayerStore, side: int, step: int) -> torch.Tensor:
        """``[B, H, S + R (+ n), D]``: the window, followed by the chunk if there is one."""
        window = store.window[step, side]
        if step not in store.pending:
            return window
        return torch.cat([window, store.pending[step][side]], dim=2)

    def _source_index(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Index into :meth:`_source` of ``positions`` ``[pages, 8]`` of ``rows`` ``[pages]``."""
        chunk = self._chunk
        index = self._window_index(positions)
        if chunk.is_decode:
            return index
        device = rows.device
        start = torch.tensor(chunk.start, device=device)[rows].unsqueeze(1)
        column = (positions - start).clamp_min(0)
        if chunk.valid is not None:
            # The j-th real token of a row sits in the j-th real column.
            order = (~chunk.valid.to(device)).to(torch.int8).argsort(dim=1, stable=True)
            column = order[rows].gather(1, column.clamp_max(chunk.count - 1))
        return torch.where(positions < start, index, self.sinks + self.ring + column)

    def _tail(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, columns and window indices of the chunk's tokens that stay in model dtype."""
        chunk = self._chunk
        positions = chunk.positions.to(device)
        coded = torch.tensor(chunk.coded_after, device=device).unsqueeze(1)
        stays = (positions < self.sinks) | (positions >= self.sinks + coded)
        if chunk.valid is not None:
            stays &= chunk.valid.to(device)
        row, column = stays.nonzero(as_tuple=True)
        return row, column, self._window_index(positions[row, column])

    # -- operations on rows and length -------------------------------------------------------------------------------

    def _select(self, rows: list[int]) -> None:
        if self._stores is None:
            return
        index = torch.tensor(rows, dtype=torch.long)
        for store in self._stores:
            store.select(index)
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
        """
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
        lengths = sum(t.nbytes for pair in self._device_lengths.values() for t in pair)
        return MemoryReport(
            codes=used,
            codes_reserved=sum(store.codes.nbytes for store in stores),
            window=sum(store.window.nbytes for store in stores),
            codebooks=sum(codebook.nbytes() for codebook in self.codebooks),
            scratch=lengths + sum(rope.nbytes for rope in self._rope.values()),
            full_precision=tokens * elements_per_token * itemsize,
            tokens=tokens,
            coded_tokens=coded,
            bits_per_element=8 * used / (coded * elements_per_token) if coded else None,
        )

    def __repr__(self) -> str:
        g = self.grouping
        return (
            f"LoopVQCache(bits={8 / g.group_size:g}, loop_group_size={g.steps_per_code}, window={self.window}, "
            f"rows={self.batch_size}, tokens={sum(self._lengths)}, coded={sum(self._coded)}, backend={self.backend})"
        )
