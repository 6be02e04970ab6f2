"""The tables that examples/damp_table.py prints, from the results of its arms: arms, spread over seeds, ratios, claims."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, stdev, variance


# Highest mean KL of DAMP's rows relative to the plain format that counts as a success (issue 3), by kind of layer.
BOUNDS = {
    "gdn": {"int8": 0.45, "int4": 0.40, "int4sym": 0.40},
    "kda": {"int8": 0.30, "int4": 0.40, "int4sym": 0.40},
}


def markdown(results: list[dict], ratios: list[dict]) -> str:
    """All tables; KL in nats per token, with its standard error over texts."""
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
    return "\n".join(lines + _spread_table(results) + _ratio_table(ratios) + _claim_table(results, ratios))


def _spread_table(results: list[dict]) -> list[str]:
    lines = [
        "",
        "Spread over calibration seeds, each fitted on other sequences:",
        "",
        "| arm | seeds | mean KL | sd | min | max | mean / error's | by seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups = by_group(results)
    repeated = [group for group, runs in groups.items() if len(runs) > 1]
    for group in repeated:
        kls = [run["kl_mean"] for run in groups[group]]
        error = groups.get(group.replace(groups[group][0]["selector"], "error"))
        ratio, pairs = "", ""
        if error:
            ratio = f"{mean(kls) / mean(run['kl_mean'] for run in error):.3f}"
            of_seed = {run["seed"]: run["kl_mean"] for run in error}
            pairs = " ".join(
                f"{run['kl_mean'] / of_seed[run['seed']]:.3f}" for run in groups[group] if run["seed"] in of_seed
            )
        lines.append(
            f"| {group} | {len(kls)} | {mean(kls):.3e} | {stdev(kls):.1e} | {min(kls):.3e} | {max(kls):.3e} "
            f"| {ratio} | {pairs} |"
        )
    return lines if repeated else []


def _ratio_table(ratios: list[dict]) -> list[str]:
    if not ratios:
        return []
    lines = ["", "| ratio of KL | value | over seeds | lower on |", "|---|---|---|---|"]
    for ratio in ratios:
        low, high = ratio["over_seeds"]
        lines.append(
            f"| {ratio['numerator']} / {ratio['denominator']} | {ratio['value']:.3f} | {low:.3f} to {high:.3f} "
            f"| {ratio['texts_below']} of {ratio['texts']} texts |"
        )
    return lines


def _claim_table(results: list[dict], ratios: list[dict]) -> list[str]:
    lines = ["", "| claim (issue 3) | number | target | |", "|---|---|---|---|"]
    for claim in claims(results, ratios):
        lines.append(f"| {claim['claim']} | {claim['number']} | {claim['target']} | {claim['verdict']} |")
    return lines if len(lines) > 3 else []


def claims(results: list[dict], ratios: list[dict]) -> list[dict]:
    """What issue 3 asks of the table, as far as its arms are there: the claim, its number, the target, met or missed."""
    found = []
    for result in results[:1]:
        steps, texts = result["settings"]["steps"], result["settings"]["texts"]
        found.append(_claim(f"teacher-forced steps, {texts} texts", f"{steps}", "at least 1000", steps >= 1000))
    for result in results:
        if (result["low"], result["selector"], result["rounding"]) == ("int8", "damp", "nearest") and result[
            "rows"
        ] == 16:
            bits = result["state_bits_per_value"]
            found.append(_claim("bits a value of INT8 + 16 rows, from tensors", f"{bits:.4f}", "9.875", bits == 9.875))
            break
    for ratio in ratios:
        if ratio["bound"] is None:
            continue
        claim, number = f"{ratio['numerator']} / {ratio['denominator']}", f"{ratio['value']:.3f}"
        if ratio["bound"] == "spread":
            number += f" ± {ratio['spread']:.3f}" if ratio["spread"] is not None else " (one seed: no spread)"
            target = "at most 1 + the spread over seeds"
        else:
            target = f"{'below' if ratio['bound'] == 1 else 'at most'} {ratio['bound']:.2f}"
        found.append(_claim(claim, number, target, ratio["holds"]))
    return found


def _claim(claim: str, number: str, target: str, met: bool) -> dict:
    return {"claim": claim, "number": number, "target": target, "verdict": "met" if met else "MISSED"}


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
    """``(numerator, denominator, bound)`` of groups; the bound "spread": not above 1 beyond the spread over seeds.

    Bound 1 means below 1; other numbers mean at most that.
    """
    for low, bound in BOUNDS[kind].items():
        damp = f"{low}+{rows} damp"
        yield damp, low, bound
        yield f"{damp} sr", low, bound
        yield f"{damp} sr", f"{low} sr", None
        for sr in ("", " sr"):
            for other in ("random", "energy", "retention"):
                yield damp + sr, f"{low}+{rows} {other}{sr}", 1.0
            yield damp + sr, f"{low}+{rows} error{sr}", "spread"
            yield f"{low}+{rows} readout{sr}", low, None
            for other in ("damp", "energy", "error"):
                yield f"{low}+{rows} readout{sr}", f"{low}+{rows} {other}{sr}", None
        yield f"{low} sr", low, None
        yield f"{damp} sr", damp, None
        yield f"{damp} sr-global", f"{damp} sr", None
        for rounding in ("stochastic", "error-feedback"):
            yield f"{low} {rounding}", low, None
            yield f"{damp} sr {rounding}", f"{damp} sr", None


def make_ratios(results: list[dict], kind: str, rows: int) -> list[dict]:
    """The wanted ratios whose arms are there: of the means over seeds, with the extremes over all pairs of seeds.

    ``spread`` is the standard deviation over seeds of the difference between one run of each, relative to the
    denominator's mean; None where one of them has a single seed.
    """
    runs = by_group(results)
    found = []
    for numerator, denominator, bound in wanted_ratios(kind, rows):
        if numerator not in runs or denominator not in runs:
            continue
        above, below = same_seeds(runs[numerator], runs[denominator])
        value = mean(run["kl_mean"] for run in above) / mean(run["kl_mean"] for run in below)
        pairs = [a["kl_mean"] / b["kl_mean"] for a in above for b in below]
        texts = list(zip(kl_by_text(above), kl_by_text(below)))
        spread = _spread(above, below)
        holds = None if bound is None else value <= 1 + (spread or 0) if bound == "spread" else value <= bound
        found.append(
            {
                "numerator": numerator,
                "denominator": denominator,
                "value": value,
                "over_seeds": [min(pairs), max(pairs)],
                "spread": spread,
                "texts_below": sum(a < b for a, b in texts),
                "texts": len(texts),
                "bound": bound,
                "holds": holds,
            }
        )
    return found


def _spread(above: list[dict], below: list[dict]) -> float | None:
    if len(above) < 2 or len(below) < 2:
        return None
    kls = [[run["kl_mean"] for run in runs] for runs in (above, below)]
    return (variance(kls[0]) + variance(kls[1])) ** 0.5 / mean(kls[1])


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
