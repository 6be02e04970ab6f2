"""Table of the one-token update of DAMP states, one layer, against flash-linear-attention's FP32 kernels."""

from __future__ import annotations

from hf_lowbit_kernels.benchmarks import damp_update

from .report import Options, Report


METHOD = """32 value heads, states of 128 x 128, one layer. Medians of CUDA graph replays over the states of several layers,
four times as large as the L2 cache (30 layers at batch 1). fla writes the new state to new memory; fla+copy also copies it
into the cache, as transformers does. tb_s counts states read and written once (fla+copy: twice), copy_share is its share of
the rate of a device copy in the same process. Every layout is checked against the plain PyTorch reference first."""
MODELS = ()
OURS = "int8+16"


def run(report: Report, options: Options) -> None:
    device = options.device
    batches = options.choose(options.batches, damp_update.BATCHES, (1, 2))
    seconds = 0.02 if options.tiny else 0.1
    rate = None
    if device != "cpu":
        rate = damp_update.copy_rate()
        report.settings = {"copy_tb_s": rate / 1e12}
    for kind in ("gdn", "kda"):
        report.measure(lambda: damp_update.check(kind, OURS, device=device), arm="check", kind=kind)
        step = damp_update.fla_function(kind) if device != "cpu" else None
        for batch in batches:
            base: dict[str, dict] = {}
            for arm in ("fla", "fla+copy") if step is not None else ():

                def theirs() -> dict:
                    return damp_update.bench_fla(kind, batch, arm != "fla", seconds, step)

                base[arm] = report.measure(theirs, arm=arm, kind=kind, batch=batch)

            def ours() -> dict:
                row = damp_update.bench_ours(kind, batch, OURS, seconds, device=device)
                if rate is not None:
                    row["copy_share"] = row["tb_s"] * 1e12 / rate
                for arm, key in (("fla", "speedup"), ("fla+copy", "speedup_over_copy")):
                    if "us" in base.get(arm, {}):
                        row[key] = base[arm]["us"] / row["us"]
                return row

            report.measure(ours, arm="damp", kind=kind, batch=batch)
