"""Time per output token of a looped model: LoopVQ caches against a full-precision cache, all under CUDA graphs.

Random weights and random cache contents of the given shapes: speed does not depend on them, so that nothing has to be
downloaded, calibrated or prefilled. Both sides are the native Ouro classes and go through ``model.generate``.

    python examples/decode_speed.py --tokens 32768 --out decode_speed.json

The full-precision side gets every advantage: keys rotated once, memory preallocated, exactly N tokens attended to (a new
one replaces the oldest) by whichever backend of scaled_dot_product_attention is fastest here, a CUDA graph of its own.
"bf16" also runs the fused layers (hf_lowbit/models/ouro/fused.py), "bf16 stock" the layers as they are; --compile adds
what a user of transformers has, ``generate(cache_implementation="static")``, which compiles the forward pass.
"""

import argparse
import gc
import json
import statistics
import time

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

import hf_lowbit
from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.config import PAGE
from hf_lowbit.graphs import StepGraphs
from hf_lowbit.loopvq.attach import attach_loopvq, detach_loopvq
from hf_lowbit.loopvq.cache import LoopVQSlot
from hf_lowbit.loopvq.codebook import SIDES, LoopVQCodebook
from hf_lowbit.loopvq.grouping import Grouping
from hf_lowbit.loopvq.spec import LoopSpec, rotate
from hf_lowbit.models.ouro import OuroConfig, OuroForCausalLM
from hf_lowbit_kernels import rope_store


SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class FullPrecisionCache(Cache):
    """K and V of N tokens for every (step, layer), at fixed addresses: ``[T * L, 2, B, H, N, D]`` in model dtype."""

    def __init__(
        self, model, batch: int, tokens: int, backend: SDPBackend, graphs: bool | None = None, fused: bool = True
    ):
        self.fused = fused  # whether RoPE and the writes are one kernel too
        self.spec = LoopSpec.of(model)
        weight = self.spec.layers[0].k_proj.weight
        shape = (self.spec.slots, 2, batch, self.spec.kv_heads, tokens, self.spec.head_dim)
        self.states = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        for slot in self.states:
            slot.normal_()
        self.backend, self.tokens, self.seen = backend, tokens, tokens
        self.position = torch.zeros((1, 1), dtype=torch.int64, device=weight.device)
        self.place = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self.graphs = StepGraphs(model.base_model, graphs)
        super().__init__(layers=[LoopVQSlot(self) for _ in range(self.spec.slots)])

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
        keys, values = self.states[step * len(self.spec.layers) + layer]
        if self.fused:
            token = (query[:, :, 0], key[:, :, 0], value[:, :, 0], cos[:, 0], sin[:, 0])
            place = self.place.expand(len(query))
            query = rope_store(*token, keys, values, place, rotate_key=True).unsqueeze(2)
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
    query, layers = random(spec.query_heads, 1), 4
    states = [(random(spec.kv_heads, tokens), random(spec.kv_heads, tokens)) for _ in range(layers)]
    times = {}
    for name, backend in SDPA.items():
        try:
            for keys, values in states:
                attention(backend, query, keys, values)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for keys, values in states:
                    attention(backend, query, keys, values)
            times[name] = 1e6 / layers * statistics.median(seconds(graph.replay) for _ in range(7))
        except RuntimeError as error:
            print(f"  {name}: not available ({str(error).splitlines()[0]})")
    return min(times, key=times.get), times


def seconds(function) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(5):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 5e3


class Clock(BaseStreamer):
    """When each token reached the host."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def build(args) -> OuroForCausalLM:
    config = OuroConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=args.intermediate,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=args.heads,
        head_dim=args.head_dim, total_ut_steps=args.loops, rope_theta=1e6,
        max_position_embeddings=args.tokens + args.steps + 4096,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(args.device):
        return OuroForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def attach_random_codebooks(model, bits: float) -> None:
    config = hf_lowbit.LoopVQConfig(bits=bits)
    spec = LoopSpec.of(model)
    grouping = Grouping.of(config, spec.steps, spec.head_dim)
    shape = (grouping.blocks, spec.kv_heads, grouping.groups, 256, grouping.group_size)
    device = spec.layers[0].k_proj.weight.device
    codebooks = []
    for _ in spec.layers:
        codebook = LoopVQCodebook(grouping, spec.kv_heads, metric=True, device=device)
        for side in SIDES:
            metric = torch.rand((spec.steps, spec.kv_heads, spec.head_dim), device=device) + 0.1
            codebook.store(side, torch.randn(shape, device=device), metric)
        codebooks.append(codebook)
    detach_loopvq(model)
    attach_loopvq(model, config, codebooks)
    model.config.quantization_config = hf_lowbit.LowBitConfig(loopvq=config, fingerprint="random weights")


def filled_loopvq_cache(model, batch: int, tokens: int, **options) -> hf_lowbit.LoopVQCache:
    """As after a prefill of ``tokens`` tokens a row, with random codes and states."""
    cache = hf_lowbit.LoopVQCache(model, **options)
    pages = cache._pages_of(tokens)
    cache._reserve(pages, PAGE)
    cache._allocate(batch, model.dtype)
    for store in cache._stores:
        store.pages.random_(0, 256)
        store.window.normal_()
    cache._finish(tokens, [tokens] * batch, [PAGE * pages] * batch, [None] * tokens)
    return cache


def generated(model, args, batch: int, tokens: int, **options) -> dict:
    """Milliseconds per token through generate, after a text of ``tokens`` tokens a row."""
    ids = torch.randint(1, args.vocab, (batch, tokens), device=args.device)
    clock = Clock()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.steps, do_sample=False, eos_token_id=None,
        streamer=clock, **options,
    )  # fmt: skip
    skip = min(32, args.steps // 2)  # until every kind of step is captured
    gaps = [b - a for a, b in zip(clock.times[skip:], clock.times[skip + 1 :])]
    pages = [sum(gaps[i : i + PAGE]) / PAGE for i in range(0, len(gaps) - PAGE + 1, PAGE)]  # one of 8 steps encodes
    return {"tpot_ms": 1e3 * statistics.median(pages), "tpot_ms_single_step": 1e3 * statistics.median(gaps)}


def measure(model, cache, args, batch: int, tokens: int) -> dict:
    """Milliseconds per token, through generate and of the model's forward alone."""
    result = generated(model, args, batch, tokens + 1, **{CACHE_ARG: cache})
    token = torch.randint(1, args.vocab, (batch, 1), device=args.device)
    with torch.no_grad():
        synchronize(args.device)
        start = time.perf_counter()
        for _ in range(32):
            model(token, **{CACHE_ARG: cache})
        synchronize(args.device)
        result["forward_ms"] = 1e3 * (time.perf_counter() - start) / 32
        if args.profile and args.device == "cuda":
            with torch.profiler.profile() as profile:
                for _ in range(PAGE):
                    model(token, **{CACHE_ARG: cache})
                synchronize(args.device)
            print_kernels(profile, tokens=PAGE, layer_steps=PAGE * args.layers * args.loops)
    return result


def print_kernels(profile, tokens: int, layer_steps: int, rows: int = 16) -> None:
    """The kernels that take longest, per layer step: the share of launches and of time that each has."""
    kernels = [k for k in profile.key_averages() if k.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda k: -k.self_device_time_total)
    count, total = sum(k.count for k in kernels), sum(k.self_device_time_total for k in kernels)
    print(f"  {'launches':>8} {'us each':>8} {'us':>8}   per layer step")
    for k in kernels[:rows]:
        each, time_ = k.self_device_time_total / k.count, k.self_device_time_total / layer_steps
        print(f"  {k.count / layer_steps:8.3f} {each:8.2f} {time_:8.2f}   {k.key[:90]}")
    print(
        f"  {count / layer_steps:8.3f} {'':8} {total / layer_steps:8.2f}   all; {total / tokens / 1e3:.3f} ms a token"
    )


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768], help="tokens in the cache")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=128, help="tokens to generate")
    parser.add_argument("--bits", type=float, nargs="*", default=[0.5, 0.25])
    parser.add_argument("--eager", action="store_true", help="LoopVQ without graphs too")
    parser.add_argument("--stock", action="store_true", help="both sides also with the layers' own small kernels")
    parser.add_argument("--few-rows", type=int, default=0, help="batches up to this multiply by few_rows_linear")
    parser.add_argument("--compile", action="store_true", help="also transformers' own compiled static cache")
    parser.add_argument("--no-baseline", action="store_true", help="leave out the full-precision cache")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each case")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args()
    lengths, args.tokens = args.tokens, max(args.tokens)

    model = build(args)
    model.model.fused_decode.few_rows = args.few_rows
    rows = []

    def case(name: str, tokens: int, make, fused: bool = True, **extra) -> None:
        gc.collect()  # the cache before, which its slots refer to
        synchronize(args.device)
        model.model.fused_decode.backend = "auto" if fused else "off"
        before = torch.cuda.memory_allocated() if args.device == "cuda" else 0
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        cache = make()
        row = {"cache": name, "tokens": tokens, "batch": args.batch}
        row |= measure(model, cache, args, args.batch, tokens) | extra
        graphs = cache.graphs if isinstance(cache, FullPrecisionCache) else cache._graphs
        row |= {"replayed": graphs.replays, "peak_bytes": peak(args.device) - before}
        row["not_fused"] = model.model.fused_decode.problem
        if graphs.replays == 0:
            row["no_graphs"] = graphs.problem
        rows.append(row)
        print(
            f"{name:<16} {tokens:>7} tokens x {args.batch}: {row['tpot_ms']:.3f} ms per token "
            f"(forward {row['forward_ms']:.3f}), {row['replayed']} replays, {row['peak_bytes'] / 2**30:.2f} GiB"
        )

    def compiled_case(tokens: int) -> None:
        """What transformers offers by itself; may not run (memory, a compiler) and must not stop the rest."""
        row = {"cache": "bf16 compiled", "tokens": tokens, "batch": args.batch}
        gc.collect()
        try:
            row |= generated(model, args, args.batch, tokens, cache_implementation="static")
            row["compiled"] = getattr(model, "_compiled_call", None) is not None
            print(f"{row['cache']:<16} {tokens:>7} tokens x {args.batch}: {row['tpot_ms']:.3f} ms per token")
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"
            print(f"{row['cache']:<16} {tokens:>7} tokens: did not run ({row['failed'][:300]})")
        rows.append(row)

    both = [True, False] if args.stock else [True]
    for tokens in lengths:
        if not args.no_baseline:
            best, times = fastest_attention(model, args.batch, tokens)
            print("  SDPA:", ", ".join(f"{name} {value:.1f} us" for name, value in times.items()), "->", best)
            for fused in both:

                def full_precision():
                    return FullPrecisionCache(model, args.batch, tokens, SDPA[best], fused=fused)

                case("bf16" if fused else "bf16 stock", tokens, full_precision, fused, sdpa=best, sdpa_us=times)
            if args.compile:
                compiled_case(tokens)
    for bits in args.bits:
        attach_random_codebooks(model, bits)
        for tokens in lengths:
            for fused, graphs in [(fused, None) for fused in both] + ([(True, False)] if args.eager else []):
                name = f"loopvq {bits:g}" + ("" if fused else " stock") + ("" if graphs is None else " eager")
                case(name, tokens, lambda: filled_loopvq_cache(model, args.batch, tokens, cuda_graphs=graphs), fused)
                rows[-1]["backend"] = hf_lowbit.LoopVQCache(model).backend

    for baseline in ("bf16", "bf16 stock", "bf16 compiled"):
        full = {row["tokens"]: row.get("tpot_ms") for row in rows if row["cache"] == baseline}
        for row in rows:
            if full.get(row["tokens"]) and "tpot_ms" in row and row["cache"] != baseline:
                ratio = row["tpot_ms"] / full[row["tokens"]]
                row.setdefault("tpot_ratio", {})[baseline] = ratio
                print(f"{row['cache']:<20} {row['tokens']:>7} tokens: {ratio:.3f} of {baseline}")
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    report = {
        "device": device,
        "torch": torch.__version__,
        "arguments": vars(args) | {"tokens": lengths},
        "rows": rows,
    }
    if args.out:
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)
    else:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
