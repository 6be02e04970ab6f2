"""Time one decoding step on packed DAMP states against flash-linear-attention's FP32 kernels, per layer.

    python -m hf_lowbit_kernels.benchmarks.damp_update --json damp_update.json

Gated DeltaNet with 16 key and 32 value heads, KDA with 32 heads, states of 128 x 128. Every layout is checked against the
reference before it is timed. Times are medians of CUDA graph replays; a graph steps through the states of several layers,
the same number for all arms of a batch size, so that even the smallest format is four times as large as the L2 cache (but
at batch 1: 30 layers). fla writes the new state to new memory ("fla", every layer to its own); transformers then copies it
into the cache ("fla+copy").

Bytes per second count the states, read and written once ("fla+copy": twice); % is the share of a device copy's rate, x the
speed-up over "fla".
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from .. import DampLayout, DampPlan, damp_backend, damp_pack, damp_unpack, damp_update, damp_update_reference
from .timing import guarded, median_us


KEY_DIM = VALUE_DIM = 128
HEADS = 32
KEY_HEADS = {"gdn": 16, "kda": 32}
BATCHES = (1, 16, 64, 128, 256)
LAYOUTS = {
    "fp32": DampLayout(KEY_DIM, VALUE_DIM, 0, 32),
    "fp16": DampLayout(KEY_DIM, VALUE_DIM, KEY_DIM),
    "int8+16": DampLayout(KEY_DIM, VALUE_DIM, 16),
    "int4z+16": DampLayout(KEY_DIM, VALUE_DIM, 16, 4, zero_point=True),
}
IN_GRAPH = 24  # calls: a millisecond or more, against the graph's own launch
MEASURED = "int8+16"  # the paper's layout: the one that --sweep tunes
ROTATION_BYTES = 4 * 60e6  # four times the L2 that an H200 reports
# Relative norms of the outputs (fp32 sums, rounded to bf16) and of the state where codes agree (single fp16 values may round the other way),
# and the share of values whose codes do not agree: next to a rounding border.
TOLERANCES = {"out": 1e-3, "state": 1e-4, "other_codes": 2e-3}
# (rows, warps per record, registers per thread, streaming)
SWEEP = [
    (8, 1, None, False),
    (8, 1, 200, False),
    (8, 1, 184, False),
    (8, 1, 184, True),
    (8, 1, 168, False),
    (8, 1, 168, True),
    (8, 1, 128, False),
    (16, 1, None, False),
    (16, 1, 168, False),
    (16, 2, None, False),
    (16, 2, 96, False),
    (32, 4, None, False),
]


def layers_for(batch: int) -> int:
    """30 at batch 1, where four times the L2 would take 500 layers; at least 8, so that a graph is long."""
    smallest = min(layout.state_bytes for layout in LAYOUTS.values()) * HEADS * batch
    return 30 if batch == 1 else max(8, math.ceil(ROTATION_BYTES / smallest))


def make_launch(rows, num_warps, max_registers, streaming):
    from ..damp_triton import DampLaunch

    return DampLaunch(rows, num_warps, max_registers, streaming)


def default_launch(layout: DampLayout):
    from ..damp_triton import damp_launch

    return damp_launch(layout)


def make_plan(device="cuda") -> DampPlan:
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([torch.randperm(KEY_DIM, generator=generator)[:16] for _ in range(HEADS)])
    perm_v = torch.stack([torch.randperm(VALUE_DIM, generator=generator) for _ in range(HEADS)])
    scale = torch.exp2(0.5 * torch.randn(HEADS, VALUE_DIM, generator=generator))
    return DampPlan.from_rows(rows, KEY_DIM, VALUE_DIM, perm_v=perm_v, column_scale=scale).to(device)


def make_inputs(kind: str, batch: int, seed: int, device="cuda") -> tuple[torch.Tensor, ...]:
    """query, key, value, g, beta as a model makes them: bf16, g fp32."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device=device)

    shape = (batch, HEADS) if kind == "gdn" else (batch, HEADS, KEY_DIM)
    qk = randn(2, batch, KEY_HEADS[kind], KEY_DIM).bfloat16()
    g = -0.1 * randn(*shape).exp()
    return qk[0], qk[1], randn(batch, HEADS, VALUE_DIM).bfloat16(), g, randn(batch, HEADS).sigmoid().bfloat16()


def update(records, indices, inputs, plan, layout, launch=None):
    """What users get, or the Triton kernel with a launch configuration."""
    if launch is None:
        return damp_update(records, indices, *inputs, plan, layout)
    from ..damp_triton import damp_update_triton

    return damp_update_triton(records, indices, *inputs, plan, layout, scale=KEY_DIM**-0.5, launch=launch)


def fla_function(kind: str):
    """fla's one-token function on (inputs, FP32 state [B, HV, dk, dv]) -> (out, new state), or None without fla."""
    try:
        if kind == "gdn":
            from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as function
        else:
            from fla.ops.kda import fused_recurrent_kda as function
    except ImportError as error:
        print(f"no fla: {error}")
        return None

    def step(inputs, state):
        q, k, v, g, beta = (x[:, None] for x in inputs)
        return function(
            q=q, k=k, v=v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )  # fmt: skip

    return step


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check(kind: str, name: str, launch=None, device="cuda") -> dict:
    """Kernel against reference on random states and inputs."""
    layout, plan, batch = LAYOUTS[name], make_plan(device), 3
    generator = torch.Generator(device).manual_seed(7)
    size = torch.exp2(2 * torch.randn(1, HEADS, KEY_DIM, 1, generator=generator, device=device))
    state = size * torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM, generator=generator, device=device)
    records = damp_pack(state, plan, layout)
    inputs = make_inputs(kind, batch, 8, device)
    indices = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    expected_records = records.clone()
    expected = damp_update_reference(expected_records, indices, *inputs, plan, layout, scale=KEY_DIM**-0.5)
    out = update(records, indices, inputs, plan, layout, launch)
    new, expected_new = (damp_unpack(x, plan, layout) for x in (records, expected_records))
    # An INT8 step is 1/127 of a group's largest value, fp32 errors are far smaller.
    near = (new - expected_new).abs() <= 1e-3 * expected_new.abs().amax(-1, keepdim=True)
    errors = {
        "out": relative(out, expected),
        "state": relative(new[near], expected_new[near]),
        "other_codes": 1 - near.float().mean().item(),
    }
    if not all(errors[key] <= TOLERANCES[key] for key in TOLERANCES):  # also catches NaN
        raise AssertionError(f"{kind} {name}: kernel and reference differ: {errors}, allowed {TOLERANCES}")
    return errors


def check_fla(kind: str, step) -> float:
    """fla against our unquantized reference: that both compute the same."""
    layout, plan = LAYOUTS["fp32"], DampPlan.identity(HEADS, KEY_DIM, VALUE_DIM, "cuda")
    state = torch.randn(2, HEADS, KEY_DIM, VALUE_DIM, device="cuda")
    records, inputs = damp_pack(state, plan, layout), make_inputs(kind, 2, 9)
    out, new = step(inputs, state)
    indices = torch.arange(2, device="cuda", dtype=torch.int32)
    damp_update_reference(records, indices, *inputs, plan, layout, scale=KEY_DIM**-0.5)
    error = relative(new, damp_unpack(records, plan, layout))
    if not error <= 1e-3:
        raise AssertionError(f"fla's {kind} differs from the reference by {error:.1e}")
    return error


def copy_rate() -> float:
    """Bytes read and written per second by a device copy of 4 GB, outside a graph: one launch takes 2 ms."""
    source = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.bitwise_not(source, out=target)  # a kernel of its own: copy_ may go to a copy engine
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * 2**32 / statistics.median(times[2:])


def bench_ours(kind: str, batch: int, name: str, budget_s: float, launch=None, device="cuda") -> dict:
    """One of our layouts, over the states of several layers."""
    layout, plan = LAYOUTS[name], make_plan(device)
    indices = torch.arange(batch, dtype=torch.int32, device=device)
    calls = []
    state = torch.randn(1, HEADS, KEY_DIM, VALUE_DIM, device=device)
    packed = damp_pack(state, plan, layout)
    for layer in range(layers_for(batch) if device != "cpu" else 2):
        records = packed.repeat(batch, 1, 1, 1)
        inputs = make_inputs(kind, batch, layer, device)
        calls.append(lambda r=records, i=inputs: update(r, indices, i, plan, layout, launch))
    us = median_us(calls, budget_s, device=device, in_graph=IN_GRAPH)
    moved = 2 * batch * HEADS * layout.state_bytes
    backend = "triton" if launch is not None else damp_backend(device, torch.bfloat16, layout)[0]
    return {"us": us, "backend": backend, "bytes": moved, "tb_s": moved / us / 1e6, "bits": layout.bits_per_value}


def bench_fla(kind: str, batch: int, copy: bool, budget_s: float, step) -> dict:
    def call(state, inputs):
        out, new = step(inputs, state)
        if not copy:
            return out, new
        state.copy_(new)
        return out

    calls = []
    for layer in range(layers_for(batch)):
        state = torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM, device="cuda")
        calls.append(lambda s=state, i=make_inputs(kind, batch, layer): call(s, i))
    us = median_us(calls, budget_s, in_graph=IN_GRAPH)
    moved = (4 if copy else 2) * batch * HEADS * KEY_DIM * VALUE_DIM * 4
    return {"us": us, "bytes": moved, "tb_s": moved / us / 1e6, "bits": 32.0}


def compile_one(job: tuple) -> None:
    """In a process of its own: one launch puts the kernel into Triton's cache on disk."""
    kind, name, launch = job
    layout = LAYOUTS[name]
    indices = torch.zeros(1, dtype=torch.int32, device="cuda")
    launch = launch and make_launch(*launch)
    update(layout.zeros(1, HEADS, "cuda"), indices, make_inputs(kind, 1, 0), make_plan(), layout, launch)
    torch.cuda.synchronize()


def compile_all(jobs: list[tuple]) -> None:
    """Compile side by side; what fails here is compiled, or reported, where it is used."""
    start = time.monotonic()
    with ProcessPoolExecutor(min(8, len(jobs)), mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(compile_one, job): job for job in jobs}
        for future, job in futures.items():
            if future.exception() is not None:
                print(f"compiling {job}: {str(future.exception())[:300]}", flush=True)
    print(f"compiled {len(jobs)} kernels in {time.monotonic() - start:.0f} s", flush=True)


def sweep(budget_s: float, rate: float) -> list[dict]:
    """Every launch of SWEEP on the paper's layout, GDN, batches 16 and 256; the best one last."""
    results = []
    for config in SWEEP:
        launch = make_launch(*config)
        row = {"config": config, **guarded(f"check {config}", check, "gdn", MEASURED, launch)}
        if "error" not in row:
            for batch in (16, 256):
                row[str(batch)] = guarded(str(config), bench_ours, "gdn", batch, MEASURED, budget_s, launch)
        results.append(row)
        times = [row.get(batch, {}).get("us", math.nan) for batch in ("16", "256")]
        share = 2 * 256 * HEADS * LAYOUTS[MEASURED].state_bytes / times[1] * 1e6 / rate
        print(f"  sweep {str(launch):>80}: {times[0]:6.2f} {times[1]:7.2f} us, {share:4.0%} of copy", flush=True)
    timed = [row for row in results if all("us" in row.get(batch, {}) for batch in ("16", "256"))]
    if timed:
        # Relative to the fastest of each batch size, so that both count alike.
        least = {batch: min(row[batch]["us"] for row in timed) for batch in ("16", "256")}
        timed.sort(key=lambda row: -sum(row[batch]["us"] / least[batch] for batch in least))
        print(f"  best: {make_launch(*timed[-1]['config'])}", flush=True)
        results.remove(timed[-1])
        results.append(timed[-1])
    return results


def table(rows: list[dict]) -> str:
    """One line per kind and batch."""
    cells = {(row["kind"], row["batch"], row["arm"]): row for row in rows}
    lines = [f"{'us per layer':>12} {'fla':>8} {'fla+copy':>9}" + "".join(f"{name:>21}" for name in LAYOUTS)]
    for kind, batch in dict.fromkeys((row["kind"], row["batch"]) for row in rows):
        get = lambda arm: cells.get((kind, batch, arm), {})  # noqa: B023, E731
        line = f"{kind:>5} {batch:>6} {get('fla').get('us', math.nan):8.1f} {get('fla+copy').get('us', math.nan):9.1f}"
        for name in LAYOUTS:
            us, ratio, share = (get(name).get(key) or math.nan for key in ("us", "speedup", "copy_share"))
            line += f"{us:9.1f} {ratio:5.2f}x {share:4.0%}"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--budget", type=float, default=0.12, help="seconds of timing per measurement")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--kinds", default="gdn,kda")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="try launch configurations of the Triton kernel first; the table uses the best",
    )
    parser.add_argument(
        "--launch", help="our arms but fp32 on the Triton kernel: rows,num_warps,max_registers,streaming, as 8,1,168,0"
    )
    parser.add_argument("--skip-fla", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device.")
        return 2
    start = time.monotonic()
    name, reason = damp_backend("cuda", torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {name}: {reason}")
    if name != "triton":
        return 2
    batches, kinds = [int(b) for b in args.batches.split(",")], args.kinds.split(",")
    config = None
    if args.launch:
        rows, warps, registers, streaming = (int(x) for x in args.launch.split(","))
        config = (rows, warps, registers or None, bool(streaming))

    rate = copy_rate()
    torch.cuda.empty_cache()
    print(f"device copy: {rate / 1e12:.2f} TB/s read and written")
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_tb_s": rate / 1e12,
        "rows": [],
    }
    results["checks"], results["layers"] = [], {batch: layers_for(batch) for batch in batches}

    def save():
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file, indent=1)

    if args.sweep:
        compile_all([("gdn", MEASURED, launch) for launch in SWEEP])
        results["sweep"] = sweep(args.budget, rate)
        save()
        config = config or results["sweep"][-1]["config"]
    # The fp32 state takes more registers and keeps its own configuration.
    configs = {name: None if name == "fp32" else config for name in LAYOUTS}
    launches = {name: chosen and make_launch(*chosen) for name, chosen in configs.items()}
    backend = "triton" if launches[MEASURED] else damp_backend("cuda", torch.bfloat16, LAYOUTS[MEASURED])[0]
    results["backend"] = backend
    if backend == "triton":
        results["launch"] = str(launches[MEASURED] or default_launch(LAYOUTS[MEASURED]))
    compile_all([(kind, name, configs[name]) for kind in kinds for name in LAYOUTS])

    for kind in kinds:
        step = None if args.skip_fla else fla_function(kind)
        if step is not None:
            error = guarded(f"fla {kind}", lambda k=kind, s=step: {"fla": check_fla(k, s)})
            results["checks"].append({"kind": kind, **error})
        for name in LAYOUTS:
            results["checks"].append(
                {"kind": kind, "arm": name, **guarded(f"check {kind} {name}", check, kind, name, launches[name])}
            )
        for batch in batches:
            arms = {}
            for arm in ("fla", "fla+copy") if step is not None else ():
                arms[arm] = guarded(f"{arm} {kind} {batch}", bench_fla, kind, batch, arm != "fla", args.budget, step)
            for name in LAYOUTS:
                arms[name] = guarded(
                    f"{name} {kind} {batch}", bench_ours, kind, batch, name, args.budget, launches[name]
                )
            for arm, row in arms.items():
                if "us" in row:
                    row["copy_share"] = row["tb_s"] * 1e12 / rate
                    for base, key in (("fla", "speedup"), ("fla+copy", "speedup_over_copy")):
                        row[key] = arms[base]["us"] / row["us"] if "us" in arms.get(base, {}) else None
                results["rows"].append({"kind": kind, "batch": batch, "arm": arm, **row})
            save()
    results["seconds"] = time.monotonic() - start
    save()
    print(
        f"{results['seconds']:.0f} s; check errors at most "
        + str(
            {key: max((c[key] for c in results["checks"] if key in c), default=None) for key in ("fla", *TOLERANCES)}
        )
    )
    print(table(results["rows"]))
    return 1 if any("error" in row for row in results["rows"] + results["checks"]) else 0


if __name__ == "__main__":
    sys.exit(main())
