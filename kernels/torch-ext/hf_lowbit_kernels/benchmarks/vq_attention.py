"""Time VQ decode attention against PyTorch's bf16 SDPA, one layer and one loop step, 16 heads x 128.

    python -m hf_lowbit_kernels.benchmarks.vq_attention --json vq_attention.json

Each shape is checked against the reference before it is timed. Times are medians of CUDA graph replays; a graph holds
several calls on rotating inputs that together exceed the L2 cache. GB/s counts codes, tables and window once.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import (
    attention_backend,
    build_rope_tables,
    entry_major,
    group_major,
    half_norms,
    vq_decode_attention,
    vq_decode_attention_reference,
    vq_encode,
    vq_encode_reference,
)
from .timing import guarded, median_us


SINKS, WINDOW, PAGE, LOOP_GROUP = 8, 64, 8, 4


@dataclass(frozen=True)
class Sizes:
    """Heads and their dimension, of Ouro by default, and where the tensors live."""

    heads: int = 16
    dim: int = 128
    device: str = "cuda"

    def rope(self, tokens: int):
        inv_freq = 1e6 ** (-torch.arange(0, self.dim, 2) / self.dim)
        return build_rope_tables(inv_freq, tokens + PAGE, device=self.device)


OURO = Sizes()
SHAPES = [(1, 2048), (1, 8192), (1, 32768), (4, 32768), (16, 2048), (64, 6144)]
SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CPU = ("flash", "math")  # of these, PyTorch has on a CPU
ROTATION_BYTES = 160e6  # three times the 50 MB L2 of an H200
MAX_SETS = 32
TOLERANCE = 2e-5 + 2.0**-7  # fp32 sums, one rounding to bf16 of outputs of size <= 1


def vq_inputs(sizes: Sizes, batch: int, tokens: int, channels: int, seed: int) -> dict:
    heads, dim, device = sizes.heads, sizes.dim, sizes.device
    generator, groups = torch.Generator(device).manual_seed(seed), dim // channels
    coded = PAGE * ((tokens - 1 - SINKS - WINDOW) // PAGE)

    def randn(*shape, dtype):
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def codes():
        shape = (batch, coded // PAGE, heads, PAGE, groups)
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)

    slots = SINKS + WINDOW + PAGE
    return {
        "query": randn(batch, heads, dim, dtype=torch.bfloat16),
        "k_codes": codes(),
        "v_codes": codes(),
        "k_table": randn(heads, groups, 256, channels, dtype=torch.float16),
        "v_table": randn(heads, groups, 256, channels, dtype=torch.float16),
        "k_window": randn(batch, heads, slots, dim, dtype=torch.bfloat16),
        "v_window": randn(batch, heads, slots, dim, dtype=torch.bfloat16),
        "lengths": torch.full((batch,), tokens, dtype=torch.int32, device=device),
        "n_coded": torch.full((batch,), coded, dtype=torch.int32, device=device),
        "scale": dim**-0.5,
        "max_coded": coded,
    }


def vq_bytes(inputs: dict) -> int:
    names = ("k_codes", "v_codes", "k_table", "v_table", "k_window", "v_window")
    return sum(inputs[name].numel() * inputs[name].element_size() for name in names)


def sets_for(size: float, device: str) -> int:
    """Input sets to rotate over; one where no cache is to be defeated."""
    if device == "cpu":
        return 1
    return min(MAX_SETS, max(1, math.ceil(ROTATION_BYTES / size)))


def in_layouts_of(backend: str, inputs: dict) -> dict:
    """Codes and tables as the CUDA kernel reads them, or as they are."""
    if backend != "cuda":
        return inputs
    codes = {name: group_major(inputs[name]) for name in ("k_codes", "v_codes")}
    return inputs | codes | {name: entry_major(inputs[name]) for name in ("k_table", "v_table")}


def bench_vq(sizes: Sizes, batch: int, tokens: int, channels: int, rope, options: dict, budget_s: float) -> dict:
    """Decode attention over codes, checked against the reference, then timed."""
    if "backend" in options:
        run = vq_decode_attention
    else:
        from ..vq_attention_triton import vq_decode_attention_triton as run

    backend = options.get("backend", "triton")
    first = vq_inputs(sizes, batch, tokens, channels, 0)
    size = vq_bytes(first)
    inputs = [first]
    inputs += [vq_inputs(sizes, batch, tokens, channels, seed) for seed in range(1, sets_for(size, sizes.device))]
    inputs = [in_layouts_of(backend, one) for one in inputs]
    out = run(**inputs[0], rope=rope, **options)
    rows = range(min(batch, 2))  # the reference decodes everything: two rows are enough
    few = {k: v[: len(rows)] if isinstance(v, torch.Tensor) and "table" not in k else v for k, v in first.items()}
    error = (out[: len(rows)].float() - vq_decode_attention_reference(**few, rope=rope).float()).abs().max().item()
    if not error <= TOLERANCE:  # also catches NaN
        raise AssertionError(f"kernel and reference differ by {error:.3e}, allowed {TOLERANCE:.3e}")
    calls = [lambda i=i: run(**i, rope=rope, **options) for i in inputs]
    us = median_us(calls, budget_s, device=sizes.device)
    return {"us": us, "backend": backend, "gb_s": size / us / 1e3, "bytes": size, "max_error": error}


def bench_sdpa(sizes: Sizes, batch: int, tokens: int, budget_s: float) -> dict:
    """Every SDPA backend on the bf16 cache. A decode query attends to all keys, hence no mask."""
    size = 2 * batch * sizes.heads * tokens * sizes.dim * 2
    shape = (batch, sizes.heads, tokens, sizes.dim)
    sets = []
    for _ in range(sets_for(size, sizes.device)):
        key = torch.randn(shape, device=sizes.device, dtype=torch.bfloat16)
        query = torch.randn(batch, sizes.heads, 1, sizes.dim, device=sizes.device, dtype=torch.bfloat16)
        sets.append((query, key, torch.randn_like(key)))
    times = {}
    for name, backend in SDPA.items():
        if name == "math" and times:
            continue  # plain PyTorch, for devices without any of the others
        if sizes.device == "cpu" and name not in ON_CPU:
            continue
        try:
            with sdpa_kernel(backend):
                calls = [lambda s=s: F.scaled_dot_product_attention(*s) for s in sets]
                times[name] = median_us(calls, budget_s, device=sizes.device)
        except Exception as error:
            print(f"  SDPA {name} at {batch}x{tokens}: {type(error).__name__}: {error}"[:200])
    if not times:
        raise RuntimeError("no SDPA backend ran")
    best = min(times, key=times.get)
    return {"us": times[best], "best": best, "all_us": times, "gb_s": size / times[best] / 1e3, "bytes": size}


def bench_encode(sizes: Sizes, channels: int, budget_s: float, tokens: int = 2048) -> dict:
    """Encoding of one layer's keys (or values) of one block of loop steps."""
    groups, device = sizes.dim // channels, sizes.device
    tables = torch.randn(LOOP_GROUP, sizes.heads, groups, 256, channels, device=device).half()
    norms = half_norms(tables)
    vectors = [torch.randn(LOOP_GROUP, tokens, sizes.heads, sizes.dim, device=device).bfloat16() for _ in range(5)]
    codes = vq_encode(vectors[0], tables, norms)
    agreement = (codes == vq_encode_reference(vectors[0], tables, norms)).float().mean().item()
    if agreement < 0.999:
        raise AssertionError(f"codes agree with the reference on {agreement:.4%} only")
    us = median_us([lambda v=v: vq_encode(v, tables, norms) for v in vectors], budget_s, device=device)
    flops = 2 * tokens * sizes.heads * groups * 256 * LOOP_GROUP * channels
    return {"us": us, "tflops": flops / us / 1e6, "agreement": agreement}


def options_for(sizes: Sizes, channels: int) -> dict:
    """The path that `vq_decode_attention` takes by itself, by name, so that inputs can be laid out for it."""
    return {"backend": attention_backend(sizes.device, sizes.dim, 1, torch.bfloat16, channels)[0]}


def launch_options(rows, splits, warps, stages, channels: int) -> dict:
    from ..vq_attention_triton import launch_config

    wanted = {"rows": rows, "splits": splits, "num_warps": warps, "num_stages": stages}
    config = launch_config(OURO.heads, 1, OURO.dim, channels)
    return {"config": replace(config, **{name: value for name, value in wanted.items() if value is not None})}


def sweep(rope, budget_s: float, channels: int, shape: tuple[int, int], seconds: float) -> list[dict]:
    """Try launch configurations on one shape; each compiles once (about 3 s)."""
    results, deadline = [], time.monotonic() + seconds
    for rows, warps, splits in (
        (128, 16, 8), (128, 8, 8), (64, 8, 8), (64, 8, 16), (64, 4, 16), (64, 4, 32), (32, 4, 16), (32, 4, 32),
        (32, 4, 64), (256, 16, 8), (16, 2, 64), (128, 8, 16), (128, 8, 32), (32, 8, 16),
    ):  # fmt: skip
        if time.monotonic() > deadline:
            print("  sweep stopped: out of time")
            break
        name = {"rows": rows, "num_warps": warps, "splits": splits}
        try:
            options = launch_options(rows, splits, warps, None, channels)
            result = bench_vq(OURO, *shape, channels, rope, options, budget_s)
            print(f"  sweep c={channels} {shape[0]}x{shape[1]} {name}: {result['us']:.1f} us", flush=True)
            results.append({**name, "channels": channels, "us": result["us"]})
        except Exception as error:
            print(f"  sweep {name}: {type(error).__name__}: {error}"[:300])
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--budget", type=float, default=0.4, help="seconds of timing per measurement")
    parser.add_argument("--shapes", help="for example 1x32768,64x6144; default: all")
    parser.add_argument("--channels", default="4,8", help="channels per code: 4 is 0.5 bit, 8 is 0.25 bit at T_c=4")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--splits", type=int)
    parser.add_argument("--warps", type=int)
    parser.add_argument("--stages", type=int)
    parser.add_argument("--sweep", type=float, default=0, metavar="SECONDS", help="also try launch configurations")
    parser.add_argument("--skip-sdpa", action="store_true")
    parser.add_argument(
        "--backend", choices=("auto", "cuda", "triton"), default="auto", help="launch flags are triton's"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device.")
        return 2
    name, reason = attention_backend("cuda", OURO.dim, 1, torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {name}: {reason}")
    if name == "reference":
        return 2

    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",")] if args.shapes else SHAPES
    channel_list = [int(c) for c in args.channels.split(",")]
    rope = OURO.rope(max(n for _, n in shapes))
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "heads": OURO.heads,
        "head_dim": OURO.dim,
        "attention": [],
        "encode": [],
    }

    def save():
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file, indent=1)

    header = (
        f"{'batch x N':>10} {'c':>3} {'SDPA us':>9} {'best':>9} {'VQ us':>9} {'speedup':>8} {'GB/s':>7} {'error':>9}"
    )
    print(header)
    for batch, tokens in shapes:
        label = f"{batch}x{tokens}"
        base = {"error": "skipped"}
        if not args.skip_sdpa:
            base = guarded(f"SDPA {label}", bench_sdpa, OURO, batch, tokens, args.budget)
        for channels in channel_list:
            backend = args.backend
            if backend == "auto":
                backend = attention_backend("cuda", OURO.dim, 1, torch.bfloat16, channels)[0]
            options = launch_options(args.rows, args.splits, args.warps, args.stages, channels)
            if backend == "cuda":
                options = {"backend": "cuda", "num_splits": args.splits}
            ours = guarded(
                f"VQ {label} c={channels}", bench_vq, OURO, batch, tokens, channels, rope, options, args.budget
            )
            speedup = base["us"] / ours["us"] if "us" in base and "us" in ours else None
            results["attention"].append(
                {"batch": batch, "tokens": tokens, "channels": channels, "sdpa": base, "vq": ours, "speedup": speedup}
            )
            save()
            if "us" in ours:
                print(
                    f"{label:>10} {channels:>3} {base.get('us', math.nan):>9.1f} {base.get('best', '-'):>9} "
                    f"{ours['us']:>9.1f} {speedup or math.nan:>8.2f} {ours['gb_s']:>7.0f} {ours['max_error']:>9.1e}",
                    flush=True,
                )
    for channels in channel_list:
        encode = guarded(f"encode c={channels}", bench_encode, OURO, channels, args.budget)
        results["encode"].append({"tokens": 2048, "channels": channels, **encode})
        save()
        if "us" in encode:
            print(f"encode 2048 tokens, T_c=4, c={channels}: {encode['us']:.1f} us, {encode['tflops']:.1f} TFLOP/s")
    if args.sweep:
        results["sweep"] = []
        for channels in channel_list:
            results["sweep"] += sweep(rope, args.budget, channels, (1, 32768), args.sweep / len(channel_list))
            save()
    rows = [row["vq"] for row in results["attention"]] + results["encode"]
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
