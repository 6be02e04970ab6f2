"""Both sides of the looped tables: a full-precision cache with every advantage, and filled LoopVQ caches.

The full-precision side keeps keys rotated once in preallocated memory, attends to exactly N tokens (a new one replaces the
oldest) by whichever backend of scaled_dot_product_attention is fastest here, runs the same fused layers, and decodes in a
CUDA graph of its own.
"""

from __future__ import annotations

import statistics

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache

import hf_lowbit
from hf_lowbit_kernels import rope_store

from ..compat import CACHE_ARG
from ..config import PAGE
from ..graphs import StepGraphs
from ..loopvq.cache import LoopVQSlot
from ..loopvq.spec import LoopSpec, rotate
from .timing import Clock, Peak, Stamp, median_of_pages


SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
SKIP = 3  # tokens of generate() that are not counted: one that warms up, one that is captured, one more


class FullPrecisionCache(Cache):
    """K and V of N tokens for every (step, layer), at fixed addresses: ``[T * L, 2, B, H, N, D]`` in model dtype.

    Args:
        model: a looped model.
        batch: B.
        tokens: N, tokens to attend to.
        backend: of scaled_dot_product_attention.
        capacity: tokens that memory is reserved for, if more than N.
        graphs: as `cuda_graphs` of LoopVQCache.
        fused: RoPE and the writes in one kernel, as LoopVQCache has them.
    """

    def __init__(
        self, model, batch, tokens, backend: SDPBackend, capacity=None, graphs: bool | None = None, fused: bool = True
    ):
        self.fused = fused
        self.spec = LoopSpec.of(model)
        weight = self.spec.layers[0].k_proj.weight
        shape = (self.spec.slots, 2, batch, self.spec.kv_heads, capacity or tokens, self.spec.head_dim)
        self.states = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        for slot in self.states:
            slot.normal_()
        self.backend = backend
        self.position = torch.zeros((1, 1), dtype=torch.int64, device=weight.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self.graphs = StepGraphs(model.base_model, graphs)
        self.set_length(tokens)
        super().__init__(layers=[LoopVQSlot(self) for _ in range(self.spec.slots)])

    def set_length(self, tokens: int) -> None:
        """Attend to so many tokens from now on."""
        self.tokens = self.seen = tokens
        self.graphs.drop()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def run(self, inputs_embeds, attention_mask, forward_chunk) -> dict:
        assert inputs_embeds.shape[1] == 1
        self.position.fill_(self.seen)
        self.place.fill_(self.seen % self.tokens)
        self.seen += 1

        def forward(embeds):
            return forward_chunk(embeds, self.position.expand(embeds.shape[0], 1))

        return self.graphs.run(0, forward_chunk.graph_key, inputs_embeds, forward)

    def attend(self, query, key, value, cos, sin, *, layer, step, module) -> torch.Tensor:
        keys, values = self.states[step * len(self.spec.layers) + layer][..., : self.tokens, :]
        if self.fused:
            token = (query[:, :, 0], key[:, :, 0], value[:, :, 0], cos[:, 0], sin[:, 0])
            query = rope_store(*token, keys, values, self.place.expand(len(query)), rotate_key=True).unsqueeze(2)
        else:
            keys.index_copy_(2, self.place, rotate(key, cos, sin))
            values.index_copy_(2, self.place, value)
            query = rotate(query, cos, sin)
        return attention(self.backend, query, keys, values).transpose(1, 2)


def attention(backend: SDPBackend, query, keys, values) -> torch.Tensor:
    gqa = query.shape[1] != keys.shape[1]
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=gqa)


def fastest_attention(model, batch: int, tokens: int) -> tuple[str, dict[str, float]]:
    """Name of the fastest SDPA backend for these sizes, and microseconds of each that runs."""
    spec = LoopSpec.of(model)
    weight = spec.layers[0].k_proj.weight
    if not weight.is_cuda:
        return "math", {}

    def random(heads, count):
        return torch.randn(batch, heads, count, spec.head_dim, dtype=weight.dtype, device=weight.device)

    # Several layers' worth, or the L2 cache would serve the smaller sizes.
    one = 2 * batch * spec.kv_heads * tokens * spec.head_dim * weight.element_size()
    query, layers = random(spec.query_heads, 1), 4 if one < 2**30 else 2
    states = [(random(spec.kv_heads, tokens), random(spec.kv_heads, tokens)) for _ in range(layers)]
    times = {}
    for name, backend in SDPA.items():
        if name == "math" and times:
            continue  # plain PyTorch, for devices without any of the others
        try:
            for keys, values in states:
                attention(backend, query, keys, values)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for keys, values in states:
                    attention(backend, query, keys, values)
            times[name] = 1e6 / layers * statistics.median(_replay_seconds(graph) for _ in range(7))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            print(f"  {name}: not available ({str(error).splitlines()[0]})")
    return min(times, key=times.get), times


def _replay_seconds(graph) -> float:
    start = Stamp("cuda")
    for _ in range(5):
        graph.replay()
    return start.until(Stamp("cuda")) / 5


def filled_loopvq_cache(model, batch: int, tokens: int, **options) -> hf_lowbit.LoopVQCache:
    """As after a prefill of ``tokens`` tokens a row, with random codes and states."""
    cache = hf_lowbit.LoopVQCache(model, **options)
    cache._reserve(cache._pages_of(tokens), PAGE)
    cache._allocate(batch, model.dtype)
    for store in cache._stores:
        store.pages.random_(0, 256)
        store.window.normal_()
    set_loopvq_length(cache, batch, tokens)
    return cache


def set_loopvq_length(cache: hf_lowbit.LoopVQCache, batch: int, tokens: int) -> None:
    """Let a cache hold ``tokens`` tokens a row, at most as many as it has room for."""
    cache._seen, cache._columns = 0, []
    cache._finish(tokens, [tokens] * batch, [PAGE * cache._pages_of(tokens)] * batch, [None] * tokens)


def bytes_per_request(cache_of_one: hf_lowbit.LoopVQCache) -> int:
    """Codes reserved for a row, and its window."""
    report = cache_of_one.memory_report()
    return report.codes_reserved + report.window


@torch.no_grad()
def capture_steps(model, cache: hf_lowbit.LoopVQCache, batch: int, tokens: int, device: str) -> None:
    """Run both kinds of steps, with and without a page to encode, twice: then both are captured."""
    token = torch.ones((batch, 1), dtype=torch.long, device=device)
    due = tokens - (tokens + 1 - cache.sinks - cache.window) % PAGE  # the next token completes a page
    for _ in range(2):
        set_loopvq_length(cache, batch, due)
        for _ in range(2):
            model(token, **{CACHE_ARG: cache})


def check_captured(cache) -> None:
    """A capture that runs out of memory leaves steps that run without graphs: such a batch does not fit.

    Raises:
        torch.OutOfMemoryError: that is what happened.
    """
    graphs = cache.graphs if isinstance(cache, FullPrecisionCache) else cache._graphs
    if "OutOfMemoryError" in (graphs.problem or ""):
        raise torch.OutOfMemoryError(graphs.problem)


def measure(model, cache, batch: int, tokens: int, pages: int, device: str) -> dict:
    """Time per output token through ``generate``, from a cache that holds ``tokens`` tokens; see :func:`generated`."""
    return generated(model, batch, tokens + 1, pages, device, **{CACHE_ARG: cache})


def generated(model, batch: int, tokens: int, pages: int, device: str, **options) -> dict:
    """Time per output token through ``generate``, after a text of ``tokens`` random tokens a row.

    Args:
        pages: of 8 tokens, to generate and time, after :data:`SKIP` more.
        options: of ``generate``.

    Returns:
        ``tpot_ms``, a median over means of 8 steps (one of 8 encodes a page), and ``tpot_ms_single_step``.
    """
    ids = torch.randint(1, model.config.vocab_size, (batch, tokens), device=device)
    clock = Clock()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=SKIP + PAGE * pages, do_sample=False, eos_token_id=None,
        pad_token_id=0, streamer=clock, **options,
    )  # fmt: skip
    gaps = clock.gaps(SKIP)
    return {"tpot_ms": 1e3 * median_of_pages(gaps), "tpot_ms_single_step": 1e3 * statistics.median(gaps)}


@torch.no_grad()
def forward_ms(model, cache, batch: int, device: str, steps: int = 4 * PAGE) -> float:
    """Milliseconds of a step of the model alone, without what ``generate`` does around it."""
    token = torch.ones((batch, 1), dtype=torch.long, device=device)
    start = Stamp(device)
    for _ in range(steps):
        model(token, **{CACHE_ARG: cache})
    return 1e3 * start.until(Stamp(device)) / steps


@torch.no_grad()
def print_kernels(model, cache, batch: int, rows: int = 16) -> None:
    """The kernels of 8 steps that take longest, per layer step."""
    token = torch.ones((batch, 1), dtype=torch.long, device="cuda")
    with torch.profiler.profile() as profile:
        for _ in range(PAGE):
            model(token, **{CACHE_ARG: cache})
        torch.cuda.synchronize()
    kernels = [k for k in profile.key_averages() if k.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda k: -k.self_device_time_total)
    per = PAGE * LoopSpec.of(model).slots
    count, total = sum(k.count for k in kernels), sum(k.self_device_time_total for k in kernels)
    print(f"  {'launches':>8} {'us each':>8} {'us':>8}   per layer step")
    for k in kernels[:rows]:
        each = k.self_device_time_total / k.count
        print(f"  {k.count / per:8.3f} {each:8.2f} {k.self_device_time_total / per:8.2f}   {k.key[:90]}")
    print(f"  {count / per:8.3f} {'':8} {total / per:8.2f}   all; {total / PAGE / 1e3:.3f} ms a token", flush=True)


def case(model, make, batch: int, tokens: int, pages: int, device: str, profile: bool = False) -> dict:
    """TPOT of the cache that ``make`` returns, its peak memory above the weights, and how its steps ran."""
    peak = Peak(device)
    cache = make()
    if isinstance(cache, hf_lowbit.LoopVQCache):
        capture_steps(model, cache, batch, tokens, device)
        set_loopvq_length(cache, batch, tokens)
    row = measure(model, cache, batch, tokens, pages, device)
    row["forward_ms"] = forward_ms(model, cache, batch, device)
    row |= graph_fields(model, cache) | {"peak_bytes": peak.bytes()}
    if profile and device != "cpu":
        print_kernels(model, cache, batch)
    return row


def graph_fields(model, cache) -> dict:
    """How the steps ran: whether replayed, by which kernels, and why not fused."""
    graphs = cache.graphs if isinstance(cache, FullPrecisionCache) else cache._graphs
    fields = {"replayed": graphs.replays}
    if isinstance(cache, hf_lowbit.LoopVQCache):
        fields["backend"] = cache.backend
    if graphs.replays == 0:
        fields["no_graphs"] = graphs.problem
    if model.model.fused_decode.problem is not None:
        fields["not_fused"] = model.model.fused_decode.problem
    return fields
