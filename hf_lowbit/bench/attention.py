"""Table of the decode attention kernel, one layer and loop step of Ouro, against PyTorch's attention in bf16."""

from __future__ import annotations

from hf_lowbit_kernels.benchmarks.vq_attention import (
    LOOP_GROUP,
    SHAPES,
    Sizes,
    bench_encode,
    bench_sdpa,
    bench_vq,
    options_for,
)

from .report import Options, Report


METHOD = """16 heads x 128, T_c = 4, one layer and loop step. Medians of CUDA graph replays; a graph holds several calls on
rotating inputs that together exceed the L2 cache. Every shape is checked against the plain PyTorch reference first.
speedup is over the fastest SDPA backend of PyTorch on a bf16 cache in the same process; gb_s counts codes, tables and
window (SDPA: keys and values) once."""
MODELS = ()


def run(report: Report, options: Options) -> None:
    sizes = Sizes(2, 32, options.device) if options.tiny else Sizes()
    shapes = [(1, 128), (2, 160)] if options.tiny else SHAPES
    seconds = 0.02 if options.tiny else 0.25
    rope = sizes.rope(max(tokens for _, tokens in shapes))
    report.settings = {"heads": sizes.heads, "head_dim": sizes.dim, "loop_group_size": LOOP_GROUP}
    for batch, tokens in shapes:
        base = report.measure(
            lambda: bench_sdpa(sizes, batch, tokens, seconds), arm="bf16", batch=batch, tokens=tokens
        )
        for bits in options.bits:

            def ours() -> dict:
                channels = round(8 / bits) // LOOP_GROUP
                row = bench_vq(sizes, batch, tokens, channels, rope, options_for(sizes, channels), seconds)
                return row | ({"speedup": base["us"] / row["us"]} if "us" in base else {})

            report.measure(ours, arm="loopvq", batch=batch, tokens=tokens, bits=bits)
    tokens = 64 if options.tiny else 2048
    for bits in options.bits:
        channels = round(8 / bits) // LOOP_GROUP
        report.measure(lambda: bench_encode(sizes, channels, seconds, tokens), arm="encode", tokens=tokens, bits=bits)
