"""The quality table of DAMP: every way to store recurrent states, at equal bits, on one small model.

    python examples/damp_table.py MODEL DATA OUT                       # all arms, on a GPU if there is one
    python examples/damp_table.py MODEL DATA OUT --jobs 8 --device cuda
    python examples/damp_table.py MODEL DATA OUT --device cpu --texts 2 --steps 200 --sequences 6 --arms '^int8'

DATA holds calibration.jsonl and text.jsonl ({"text"} a line). One capture of the full-precision states serves all arms;
each arm is a set of index tables, a byte layout and a rounding, and decodes the same texts token by token in one batch
next to logits of the full-precision cache. Everything is computed in fp32 with TF32 off and compared in fp64: what
remains is the cost of the stored states. `fp32 stepwise` stores them unrounded and shows the floor, as the full-precision
side runs in pieces of 256 tokens.

OUT gets arms/NAME.json as arms end, table.json and table.md. Run it again with the same settings to go on where it
stopped. Steps are bound by kernel launches: all texts are one batch, --together arms share it, and a GPU takes a few
--jobs. Selectors are run with --seeds calibrations, each from other sequences of the capture.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import torch
import transformers
from damp_table_arms import Arm, all_arms, side_by_side
from damp_table_report import claims, make_ratios, markdown
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_lowbit.config import DAMPConfig
from hf_lowbit.damp.cache import DAMPStateCache
from hf_lowbit.damp.spec import DeltaSpec
from hf_lowbit.data import calibration_sequences, read_texts
from hf_lowbit.evaluation.report import write_json
from hf_lowbit.evaluation.teacher_forced import ForcedMetrics, drift, forced_logits
from hf_lowbit_kernels import DampPlan


PIECE = 32  # steps whose logits are compared at once


# -- one process ---------------------------------------------------------------------------------------------------------


class Bench:
    """The model, the texts and the full-precision logits: made once per process, then any number of arms."""

    def __init__(self, args: argparse.Namespace):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        if args.jobs > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.jobs))
        self.args = args
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
        self.spec = DeltaSpec.of(self.model)
        self.reference: torch.Tensor | None = None

    @torch.no_grad()
    def prepare(self) -> None:
        """Read the texts and compute logits ``[texts, steps, vocab]`` with the stock cache."""
        args, tokenizer = self.args, AutoTokenizer.from_pretrained(self.args.model)
        width = args.prompt + args.steps
        rows = [tokenizer(text)["input_ids"][:width] for text in read_texts(args.data / "text.jsonl")]
        self.rows = [row for row in rows if len(row) == width][: args.texts]
        if len(self.rows) < args.texts:
            raise ValueError(
                f"text.jsonl has {len(self.rows)} texts of {width} tokens, and --texts {args.texts} with --prompt "
                f"{args.prompt} --steps {args.steps} needs more; the longest has {max(map(len, rows))} tokens"
            )
        ids = torch.tensor(self.rows, device=self.model.device)
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        schedule = self._cache(Arm("fp32"), None).forced_schedule(args.prompt)._replace(step=256)
        self.reference = torch.cat([logits for _, logits in forced_logits(self.model, ids, cache, schedule)], dim=1)

    def _cache(self, arm: Arm, plans: list[DampPlan] | None) -> DAMPStateCache:
        if plans is None:
            plans = [DampPlan.identity(layer.value_heads, layer.dk, layer.dv) for layer in self.spec.layers]
        plans = [plan.to(self.model.device) for plan in plans]
        layouts = [arm.layout(layer.dk, layer.dv) for layer in self.spec.layers]
        return DAMPStateCache(
            self.model, plans=plans, layouts=layouts, rounding=arm.rounding, backend=self.args.backend
        )

    @torch.no_grad()
    def run(self, arms: list[tuple[Arm, list[DampPlan] | None]]) -> list[dict]:
        """Decode the texts with the arms' caches side by side and compare.

        Returns:
            One result per arm; ``{"error": ...}`` where an arm's logits are not finite.
        """
        if self.reference is None:
            self.prepare()
        started = time.perf_counter()
        caches = [self._cache(arm, plans) for arm, plans in arms]
        schedule = caches[0].forced_schedule(self.args.prompt)
        metrics = [ForcedMetrics(self.rows, schedule.first_counted, self.model.device, torch.float64) for _ in caches]
        ids = metrics[0].ids.repeat(len(caches), 1)
        held: list[torch.Tensor] = []
        for first, logits in forced_logits(self.model, ids, side_by_side(caches), schedule):
            held.append(logits)
            if len(held) == PIECE or first + 1 == ids.shape[1]:
                begin = first + 1 - len(held)
                full = self.reference[:, begin - schedule.prefill : first + 1 - schedule.prefill]
                for one, mine in zip(metrics, torch.cat(held, dim=1).chunk(len(caches)), strict=True):
                    one.add(begin, full, mine)
                held.clear()
        float(metrics[0].kl.sum())  # waits for the device
        seconds = (time.perf_counter() - started) / len(caches)
        return [self._result(*parts, seconds) for parts in zip(arms, caches, metrics, strict=True)]

    def _result(self, run: tuple, cache: DAMPStateCache, metrics: ForcedMetrics, seconds: float) -> dict:
        (arm, plans), first = run, self.args.prompt
        try:
            metrics.check_finite(0, metrics.ids.shape[1])
        except ValueError as error:
            return {"error": str(error)}
        report = cache.memory_report()
        kl = metrics.kl[:, first:]
        by_text = kl.mean(1).tolist()
        return {
            **asdict(arm),
            "name": arm.name,
            "group": arm.group,
            "kl_mean": mean(by_text),
            "kl_by_text": by_text,
            "kl_by_position": drift([metrics]),
            "kl_by_quarter": [part.mean().item() for part in kl.chunk(4, dim=1)],
            "top1_agreement": metrics.agree[metrics.counted].double().mean().item(),
            "nll_full": metrics.nll_full[metrics.labelled].mean().item(),
            "nll_quantized": metrics.nll_quantized[metrics.labelled].mean().item(),
            "state_bits_per_value": report.state_bits_per_value,
            "state_bytes": report.state_bytes,
            "full_state_bytes": report.full_state_bytes,
            "protected_rows": None if plans is None or not arm.rows else _protected(plans, arm.rows),
            "backend": cache.backend,
            "seconds": seconds,  # of the batch, divided by its arms
        }


def _protected(plans: list[DampPlan], rows: int) -> list[list[list[int]]]:
    """Key channels ``[layer][head][rows]`` in FP16."""
    return [plan.perm_k[:, :rows].long().cpu().sort(1).values.tolist() for plan in plans]


_bench: Bench | None = None  # of a worker process


def _start_worker(args: argparse.Namespace) -> None:
    global _bench
    transformers.logging.set_verbosity_error()
    _bench = Bench(args)


def _run_in_worker(batch: list[tuple[Arm, list[tuple] | None]]) -> list[dict]:
    return _run_and_keep(_bench, batch)


def _run_and_keep(bench: Bench, batch: list[tuple[Arm, list[tuple] | None]]) -> list[dict]:
    # Tables travel as numpy arrays: torch would pass tensors between processes through file descriptors.
    results = bench.run(
        [(arm, tables and [DampPlan(*map(torch.from_numpy, table)) for table in tables]) for arm, tables in batch]
    )
    for (arm, _), result in zip(batch, results, strict=True):
        if "error" not in result:
            result["settings"] = settings(bench.args)
            write_json(arm_file(bench.args, arm), result)
    return results


# -- calibration ---------------------------------------------------------------------------------------------------------


class Tables:
    """Index tables of the arms, all from one capture of the full-precision states."""

    def __init__(self, bench: Bench, readout: bool):
        self.bench, self.readout, self.made = bench, readout, {}
        self.captured = None
        self.seconds: dict[str, float] = {}

    def of(self, arm: Arm) -> list[tuple] | None:
        """Per layer perm_k, perm_v and column_scale as numpy arrays; None for arms that need no calibration."""
        if not arm.calibrated:
            return None
        from hf_lowbit.damp import calibration

        if self.captured is None:
            self.captured = self._capture()
        config = arm.config(self.bench.args.base)
        key = json.dumps({**config.to_dict(), "rounding": None}, sort_keys=True)
        if key not in self.made:
            started = time.perf_counter()
            plans = calibration.plans_for(self.captured, config)
            self.seconds[arm.name] = time.perf_counter() - started
            self.made[key] = [
                tuple(table.cpu().numpy() for table in (plan.perm_k, plan.perm_v, plan.column_scale)) for plan in plans
            ]
        return self.made[key]

    def _capture(self):
        from hf_lowbit.damp import capture

        args, base = self.bench.args, self.bench.args.base
        started = time.perf_counter()
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        texts = read_texts(args.data / "calibration.jsonl")
        length = base.prompt_tokens + base.decode_tokens
        sequences = calibration_sequences(texts, tokenizer, base.sequences, length, seed=0)
        captured = capture.collect(self.bench.model, self.bench.spec, list(sequences), base, readout=self.readout)
        self.seconds["capture"] = time.perf_counter() - started
        print(f"captured {base.sequences} sequences in {self.seconds['capture']:.1f} s", flush=True)
        return captured


# -- files ----------------------------------------------------------------------------------------------------


def settings(args: argparse.Namespace) -> dict:
    """What a result depends on besides its arm; arms made with other settings are made again."""
    return {
        "model": str(args.model),
        "data": str(args.data),
        "texts": args.texts,
        "prompt": args.prompt,
        "steps": args.steps,
        "backend": args.backend,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device,
        "calibration": {name: value for name, value in args.base.to_dict().items() if name in CALIBRATION},
    }


CALIBRATION = ("horizon", "sequences", "prompt_tokens", "decode_tokens", "windows", "window_tokens", "anchors")


def arm_file(args: argparse.Namespace, arm: Arm) -> Path:
    return args.out / "arms" / f"{re.sub('[^A-Za-z0-9+-]+', '_', arm.name)}.json"


def finished(args: argparse.Namespace, arm: Arm) -> dict | None:
    """The arm's result of an earlier run with the same settings."""
    path = arm_file(args, arm)
    if not path.is_file():
        return None
    result = json.loads(path.read_text())
    return result if result["settings"] == settings(args) else None


# -- the run -------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    transformers.logging.set_verbosity_error()  # a warning per process and missing package
    bench = Bench(args)
    first = bench.spec.layers[0]
    rows = DAMPConfig().high_rows(first.dk) if args.rows is None else args.rows
    arms = [arm for arm in all_arms(first.kind, rows, args.seeds) if re.search(args.arms, arm.name)]
    if args.list or not arms:
        print("\n".join(arm.name for arm in arms) or f"no arm matches --arms {args.arms!r}")
        return 0 if arms else 2
    if importlib.util.find_spec("fla"):
        print("warning: fla is installed; its kernels may compute in TF32 and raise the floor", file=sys.stderr)
    (args.out / "arms").mkdir(parents=True, exist_ok=True)

    results = {arm.name: result for arm in arms if (result := finished(args, arm))}
    todo = [arm for arm in arms if arm.name not in results]
    print(f"{len(arms)} arms on {args.texts} texts x {args.steps} steps, {len(results)} of them done", flush=True)
    tables = Tables(bench, readout=any(arm.selector == "readout" for arm in todo))
    failed, started = [], time.perf_counter()

    def fail(batch: list[Arm], error: object) -> None:  # the other arms are worth having
        failed.extend(arm.name for arm in batch)
        print(f"{', '.join(arm.name for arm in batch)}: {error}", file=sys.stderr, flush=True)

    def keep(batch: list[Arm], run) -> None:
        try:
            found = run()
        except Exception as error:
            return fail(batch, f"{type(error).__name__}: {error}")
        for arm, result in zip(batch, found, strict=True):
            if "error" in result:
                fail([arm], result["error"])
                continue
            results[arm.name] = result
            print(f"{arm.name}: KL {result['kl_mean']:.3e} in {result['seconds']:.1f} s", flush=True)
        write_tables(args, arms, results, tables.seconds, first.kind, rows)

    if args.jobs == 1:
        for batch in batches(todo, args.together):
            keep(batch, lambda batch=batch: _run_and_keep(bench, [(arm, tables.of(arm)) for arm in batch]))
    else:
        spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        with ProcessPoolExecutor(args.jobs, spawn, initializer=_start_worker, initargs=(args,)) as pool:
            running: dict[Future, list[Arm]] = {}
            for batch in batches(todo, args.together):  # workers run while the tables of the next arms are made
                try:
                    running[pool.submit(_run_in_worker, [(arm, tables.of(arm)) for arm in batch])] = batch
                except Exception as error:
                    fail(batch, f"{type(error).__name__}: {error}")
                for future in [future for future in running if future.done()]:
                    keep(running.pop(future), future.result)
            for future in as_completed(running):
                keep(running[future], future.result)

    print(f"\n{write_tables(args, arms, results, tables.seconds, first.kind, rows)}\n")
    print(f"{time.perf_counter() - started:.0f} s; {args.out / 'table.json'}")
    return 1 if failed else 0


def batches(arms: list[Arm], size: int) -> list[list[Arm]]:
    """Arms that run side by side: at most ``size``, stage by stage, so that a run that is stopped has the main ones."""
    stages = [[arm for arm in arms if arm.stage == stage] for stage in sorted({arm.stage for arm in arms})]
    return [stage[i : i + size] for stage in stages for i in range(0, len(stage), size)]


def write_tables(args, arms: list[Arm], results: dict, seconds: dict, kind: str, rows: int) -> str:
    """Write table.json and table.md; returns the latter."""
    ordered = [results[arm.name] for arm in arms if arm.name in results]
    ratios = make_ratios(ordered, kind, rows)
    text = markdown(ordered, ratios)
    content = {"settings": settings(args), "command": sys.argv, "ratios": ratios, "calibration_seconds": seconds}
    content["claims"] = claims(ordered, ratios)
    write_json(args.out / "table.json", content | {"arms": ordered})
    (args.out / "table.md").write_text(text + "\n")
    return text


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model with gated delta-rule layers")
    parser.add_argument("data", type=Path, help="folder with calibration.jsonl and text.jsonl")
    parser.add_argument("out", type=Path, help="folder for the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto", help="of the cache: auto, triton, reference or model")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes side by side")
    parser.add_argument("--together", type=int, default=12, metavar="N", help="arms of one batch (default 12)")
    parser.add_argument("--arms", default="", metavar="REGEX", help="only arms whose name matches somewhere")
    parser.add_argument("--list", action="store_true", help="print the names of the arms and stop")
    parser.add_argument("--texts", type=int, default=16, metavar="N", help="texts, all in one batch (default 16)")
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="tokens processed at once (default 64)")
    parser.add_argument("--steps", type=int, default=1500, metavar="N", help="single-token steps (default 1500)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="calibrations of each selector (default 3)")
    parser.add_argument("--rows", type=int, metavar="N", help="protected rows (default an eighth)")
    parser.add_argument("--sequences", type=int, default=48, metavar="N", help="calibration sequences (default 48)")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="of a calibration sequence")
    parser.add_argument("--windows", type=_integers, default=(0, 768), metavar="A,B", help="default 0,768")
    parser.add_argument("--window-tokens", type=int, default=1024, metavar="N", help="default 1024")
    parser.add_argument(
        "--anchors", type=_integers, default=(256, 512, 768), metavar="A,B", help="default 256,512,768"
    )
    parser.add_argument("--horizon", type=int, default=256, metavar="N", help="default 256")
    args = parser.parse_args(argv)
    args.base = DAMPConfig(
        sequences=args.sequences,
        prompt_tokens=args.prompt_tokens,
        decode_tokens=max(args.windows) + args.window_tokens,
        windows=args.windows,
        window_tokens=args.window_tokens,
        anchors=args.anchors,
        horizon=args.horizon,
        continuation="text",  # small models ramble; their texts go on by themselves
    )
    return args


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
