"""The two tables that examples/damp_table.py prints, from the results of its arms."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev


# Highest mean KL of DAMP's rows relative to the plain format that counts as a success (issue 3), by kind of layer.
BOUNDS = {
    "gdn": {"int8": 0.45, "int4": 0.40, "int4sym": 0.40},
    "kda": {"int8": 0.30, "int4": 0.40, "int4sym": 0.40},
}


def markdown(results: list[dict], ratios: list[dict]) -> str:
    """Both tables; KL in nats per token, with its standard error over texts."""
    lines = [
        "| arm | bits a value | KL | ± texts | seeds | top-1 | first quarter | last quarter | rows as damp | s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for group, runs in by_group(results).items():
        texts, kls = kl_by_text(runs), [run["kl_mean"] for run in runs]
        error = stdev(texts) / len(texts) ** 0.5 if len(texts) > 1 else 0.0
        seeds = f"{min(kls):.2e} to {max(kls):.2e}" if len(kls) > 1 else ""
        first, last = (mean(run["kl_by_quarter"][i] for run in runs) for i in (0, -1))
        shared = [value for run in runs if (value := shared_with_damp(run, results)) is not None]
        lines.append(
            f"| {group} | {runs[0]['state_bits_per_value']:.3f} | {mean(kls):.2e} | {error:.0e} | {seeds} "
            f"| {mean(run['top1_agreement'] for run in runs):.4f} | {first:.2e} | {last:.2e} "
            f"| {f'{mean(shared):.1f}' if shared else ''} | {mean(run['seconds'] for run in runs):.0f} |"
        )
    if ratios:
        lines += ["", "| ratio of KL | value | over seeds | lower on | wanted |", "|---|---|---|---|---|"]
    for ratio in ratios:
        low, high = ratio["over_seeds"]
        lines.append(
            f"| {ratio['numerator']} / {ratio['denominator']} | {ratio['value']:.3f} | {low:.3f} to {high:.3f} "
            f"| {ratio['texts_below']} of {ratio['texts']} texts | {_wanted(ratio)} |"
        )
    return "\n".join(lines)


def _wanted(ratio: dict) -> str:
    bound = ratio["bound"]
    if bound is None:
        return ""
    limit = "1 within the spread" if bound == "spread" else f"{bound:.2f}"
    return f"at most {limit}: {'yes' if ratio['holds'] else 'NO'}"


def shared_with_damp(result: dict, results: list[dict]) -> float | None:
    """Mean over heads of the rows that both this arm and DAMP with the same settings protect."""
    same = ("low", "rows", "scaling", "rounding", "seed")
    for other in results:
        if other["selector"] == "damp" and result["rows"] and all(other[name] == result[name] for name in same):
            heads = [
                (set(a), set(b))
                for layer, other_layer in zip(result["protected_rows"], other["protected_rows"])
                for a, b in zip(layer, other_layer)
            ]
            return mean(len(a & b) for a, b in heads)
    return None


def wanted_ratios(kind: str, rows: int) -> Iterator[tuple[str, str, float | str | None]]:
    """``(numerator, denominator, bound)`` of groups; the bound "spread": not above 1 beyond the spread over seeds."""
    for low, bound in BOUNDS[kind].items():
        damp = f"{low}+{rows} damp"
        yield damp, low, bound
        yield f"{damp} sr", low, bound
        yield f"{damp} sr", f"{low} sr", None
        for sr in ("", " sr"):
            for other in ("random", "energy", "retention"):
                yield damp + sr, f"{low}+{rows} {other}{sr}", 1.0
            yield damp + sr, f"{low}+{rows} error{sr}", "spread"
            for other in ("damp", "energy", "error"):
                yield f"{low}+{rows} readout{sr}", f"{low}+{rows} {other}{sr}", None
        yield f"{low} sr", low, None
        yield f"{damp} sr", damp, None
        yield f"{damp} sr-global", f"{damp} sr", None
        for rounding in ("stochastic", "error-feedback"):
            yield f"{low} {rounding}", low, None
            yield f"{damp} sr {rounding}", f"{damp} sr", None


def make_ratios(results: list[dict], kind: str, rows: int) -> list[dict]:
    """The wanted ratios whose arms are there: of the means over seeds, with the extremes over all pairs of seeds."""
    runs = by_group(results)
    found = []
    for numerator, denominator, bound in wanted_ratios(kind, rows):
        if numerator not in runs or denominator not in runs:
            continue
        above, below = same_seeds(runs[numerator], runs[denominator])
        value = mean(run["kl_mean"] for run in above) / mean(run["kl_mean"] for run in below)
        pairs = [a["kl_mean"] / b["kl_mean"] for a in above for b in below]
        texts = list(zip(kl_by_text(above), kl_by_text(below)))
        holds = None if bound is None else min(pairs) <= 1 if bound == "spread" else value <= bound
        found.append(
            {
                "numerator": numerator,
                "denominator": denominator,
                "value": value,
                "over_seeds": [min(pairs), max(pairs)],
                "texts_below": sum(a < b for a, b in texts),
                "texts": len(texts),
                "bound": bound,
                "holds": holds,
            }
        )
    return found


def by_group(results: list[dict]) -> dict[str, list[dict]]:
    """The runs of each group, one per seed."""
    groups: dict[str, list[dict]] = {}
    for result in results:
        groups.setdefault(result["group"], []).append(result)
    return groups


def same_seeds(a: list[dict], b: list[dict]) -> tuple[list[dict], list[dict]]:
    """Both groups' runs; where both were repeated, only of the seeds that both have."""
    if len(a) == 1 or len(b) == 1:
        common = {run["seed"] for run in a} & {run["seed"] for run in b}
        if a[0]["selector"] == b[0]["selector"]:
            return [run for run in a if run["seed"] in common], [run for run in b if run["seed"] in common]
    return a, b


def kl_by_text(runs: list[dict]) -> list[float]:
    """Mean over seeds of each text's KL."""
    return [mean(values) for values in zip(*(run["kl_by_text"] for run in runs))]
