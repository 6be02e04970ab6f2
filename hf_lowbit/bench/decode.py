"""Table of the time per output token of a looped model at batch 1, and of the memory that decoding takes."""

from __future__ import annotations

from .looped import SDPA, FullPrecisionCache, case, fastest_attention, filled_loopvq_cache, generated
from .report import Options, Report
from .shapes import LOOPED, attach_random_codebooks, build_looped
from .timing import Peak


METHOD = """Random weights of the model's shape, caches filled with random states or codes, model.generate. tpot_ms is the median
over means of 8 tokens (one step of 8 encodes a page), after all CUDA graphs are captured. bf16: the same model with the same
fused layers and overlapping launches, keys rotated once at fixed addresses, exactly N tokens attended to by the fastest SDPA
backend here, in a CUDA graph too. bf16 stock: the same with the layers' own small kernels. bf16 compiled: what transformers
offers by itself, generate(cache_implementation="static"), which prefills the text and compiles the step. tpot_ratio is over
bf16. peak_bytes is torch.cuda.max_memory_allocated above the weights (and above the codebooks, which belong to the model)."""
MODELS = ("ouro1.4b",)
ROOM = 128  # tokens that the measurement adds: a cache that grew in between would be captured again


def run(report: Report, options: Options) -> None:
    device, pages = options.device, 1 if options.tiny else 6
    lengths = options.choose(options.tokens, (32768, 2048, 8192, 65536, 4096, 16384), (128,))
    batches = options.choose(options.batches, (1,), (1,))
    model = build_looped(LOOPED[report.model], device, max(lengths) + 4096)
    for tokens in lengths:
        for batch in batches:
            fields = {"batch": batch, "tokens": tokens}
            full = {}
            for arm in ("bf16", *(f"bf16 {name}" for name in options.baselines)):
                full[arm] = report.measure(
                    lambda: full_precision(model, arm, batch, tokens, pages, options), arm=arm, **fields
                )
            for bits in options.bits:
                attach_random_codebooks(model, bits)

                def coded() -> dict:
                    make = lambda: filled_loopvq_cache(model, batch, tokens, max_cache_len=tokens + ROOM)  # noqa: E731
                    row = case(model, make, batch, tokens, pages, device, options.profile)
                    for arm, other in full.items():
                        if "tpot_ms" in other:
                            name = "tpot_ratio" + "".join(f"_over_{word}" for word in arm.split()[1:])
                            row[name] = row["tpot_ms"] / other["tpot_ms"]
                    return row

                report.measure(coded, arm="loopvq", **fields, bits=bits)


def full_precision(model, arm: str, batch: int, tokens: int, pages: int, options: Options) -> dict:
    """A full-precision side of one row."""
    device = options.device
    if arm == "bf16 compiled":
        peak = Peak(device)
        row = generated(model, batch, tokens, pages, device, cache_implementation="static")
        return row | {"compiled": getattr(model, "_compiled_call", None) is not None, "peak_bytes": peak.bytes()}
    fused = arm == "bf16"
    best, times = fastest_attention(model, batch, tokens)
    model.model.fused_decode.backend = "auto" if fused else "off"
    try:
        make = lambda: FullPrecisionCache(model, batch, tokens, SDPA[best], fused=fused)  # noqa: E731
        row = case(model, make, batch, tokens, pages, device, options.profile)
    finally:
        model.model.fused_decode.backend = "auto"
    return row | {"sdpa": best, "sdpa_us": times}
