"""examples/damp_table.py: its arms, its ratios, and a small run that goes on where another stopped."""

import json
import sys
from pathlib import Path

import pytest
import tiny_model


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # also for the worker processes

import damp_models  # noqa: E402
import damp_table  # noqa: E402
import damp_table_report  # noqa: E402


def test_arms():
    gdn, kda = (damp_table.all_arms(kind, 16, 3) for kind in ("gdn", "kda"))
    names = [arm.name for arm in kda]
    assert len(set(names)) == len(names)
    assert {arm.group for arm in kda} - {arm.group for arm in gdn} == {
        f"{low}+16 retention{sr}" for low in ("int8", "int4") for sr in ("", " sr")
    }
    # Names under which docs/benchmarks has results; every selector with every seed.
    assert {"int8+16 energy", "int4+16 retention sr", "int8+16 damp #0", "int8 sr"} <= set(names)
    assert {"int8+16 energy #2", "int4+16 damp sr #2", "int4+16 readout #1"} <= set(names)
    bits = {arm.group: arm.layout(128, 128).bits_per_value for arm in kda}
    assert (bits["fp32 stepwise"], bits["fp16"], bits["int8"], bits["int4"], bits["int4sym"]) == (32, 16, 9, 6, 5)
    # All selectors at equal bits: the paper's figures.
    assert {bits[g] for g in bits if g.startswith("int8+16")} == {9.875}
    assert {bits[g] for g in bits if g.startswith("int4+16")} == {7.25}
    assert (bits["int8+8 damp sr"], bits["int8+32 damp sr"], bits["int4sym+16 damp"]) == (9.4375, 10.75, 6.375)
    # Every ratio is between arms that exist; retention on KDA only.
    for kind, arms in (("gdn", gdn), ("kda", kda)):
        groups = {arm.group for arm in arms}
        missing = {
            name
            for pair in damp_table_report.wanted_ratios(kind, 16)
            for name in pair[:2]
            if name not in groups and "int4sym" not in name
        }
        assert all("retention" in name for name in missing) and bool(missing) == (kind == "gdn")


def result(group, selector, seed, *texts):
    return {"group": group, "selector": selector, "seed": seed, "kl_mean": sum(texts) / 2, "kl_by_text": texts}


def test_ratios():
    results = [
        result("int8", "", 0, 8.0, 4.0),
        *(result("int8+16 damp", "damp", seed, 1.0 + seed, 5.0) for seed in (0, 1)),
        *(result("int8+16 error", "error", seed, 1.5 + seed, 5.0) for seed in (0, 1)),
        *(result("int8+16 damp sr", "damp", seed, 2.0 + seed, 2.0) for seed in (0, 1)),
        result("int8+16 damp sr-global", "damp", 1, 3.0, 3.0),
    ]
    found = {(r["numerator"], r["denominator"]): r for r in damp_table_report.make_ratios(results, "gdn", 16)}
    plain = found["int8+16 damp", "int8"]
    assert plain["value"] == pytest.approx(3.25 / 6) and plain["over_seeds"] == [0.5, pytest.approx(3.5 / 6)]
    assert (plain["texts_below"], plain["bound"], plain["holds"]) == (1, 0.45, False)
    error = found["int8+16 damp", "int8+16 error"]
    assert error["value"] < 1 and error["over_seeds"] == [3 / 3.75, 3.5 / 3.25]
    assert error["spread"] == pytest.approx((0.125 + 0.125) ** 0.5 / 3.5)
    assert (error["bound"], error["holds"]) == ("spread", True)
    # A group with one seed is compared with that seed of the other.
    assert found["int8+16 damp sr-global", "int8+16 damp sr"]["value"] == 3 / 2.5


@pytest.mark.parametrize("worse, holds", [(0.1, True), (0.4, False)])
def test_not_above_error_beyond_the_spread(worse, holds):
    """sd 0.1 in each group: a mean that is 0.1 higher is within sqrt(2) * 0.1, one that is 0.4 higher is not."""
    results = [
        *(result("int8+16 error", "error", i, kl, kl) for i, kl in enumerate((0.9, 1.0, 1.1))),
        *(result("int8+16 damp", "damp", i, kl + worse, kl + worse) for i, kl in enumerate((0.9, 1.0, 1.1))),
    ]
    (ratio,) = damp_table_report.make_ratios(results, "kda", 16)
    assert ratio["value"] == pytest.approx(1 + worse) and ratio["spread"] == pytest.approx(2**0.5 / 10)
    assert ratio["holds"] is holds
    # Without seeds to compare there is no spread to hide in.
    (ratio,) = damp_table_report.make_ratios([results[0], results[3]], "kda", 16)
    assert ratio["spread"] is None and ratio["holds"] is False


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    tokenizer = tiny_model.build_tokenizer()
    damp_models.build_model("kimi_linear", vocab_size=len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    tiny_model.write_texts(folder / "calibration.jsonl", 4)
    tiny_model.write_texts(folder / "text.jsonl", 3, length=50, seed=7)
    return folder


SMALL = [
    "--device=cpu", "--prompt=10", "--steps=16", "--rows=4", "--sequences=3", "--prompt-tokens=16", "--windows=0",
    "--window-tokens=48", "--anchors=16,32", "--horizon=16", "--seeds=2",
]  # fmt: skip


def test_a_run_and_its_continuation(folders, capsys):
    out = folders / "out"

    def run(arms, *more):
        status = damp_table.main(
            [str(folders / "model"), str(folders), str(out), *SMALL, "--texts=2", "--arms", arms, *more]
        )
        return status, capsys.readouterr().out

    status, printed = run("^fp|^int8$|^int8.4 (damp|random|retention|readout)|stochastic|feedback")
    assert status == 0
    assert (out / "table.md").read_text().strip() in printed and "| int8+4 damp / int8+4 retention |" in printed
    assert "| int8+4 readout sr / int8+4 damp sr |" in printed and "| int8+4 damp sr | 2 | " in printed
    assert "| int8+4 damp / int8 |" in printed.split("| claim (issue 3)")[1]
    content = json.loads((out / "table.json").read_text())
    arms = {arm["name"]: arm for arm in content["arms"]}
    assert {"int8+4 damp sr stochastic #0", "int8+4 damp sr error-feedback #0", "int8+4 random #1"} <= arms.keys()
    assert sorted(json.loads(p.read_text())["name"] for p in (out / "arms").iterdir()) == sorted(arms)
    # The floor is far below everything; the bits are those of the tensors.
    kl = {name: arm["kl_mean"] for name, arm in arms.items()}
    assert 0 < kl["fp32 stepwise"] < 1e-10 < kl["fp16"] < kl["int8+4 damp #0"] < 1
    assert arms["int8"]["state_bits_per_value"] == 9 and arms["int8+4 damp #0"]["state_bits_per_value"] == 9.875
    assert arms["int8+4 damp sr error-feedback #0"]["state_bits_per_value"] > 16  # the residual counts
    for arm in arms.values():
        assert len(arm["kl_by_text"]) == 2 and len(arm["kl_by_quarter"]) == 4
        assert arm["kl_mean"] == pytest.approx(sum(arm["kl_by_quarter"]) / 4) and arm["seconds"] > 0
    assert all(len(set(rows)) == 4 for layer in arms["int8+4 damp #0"]["protected_rows"] for rows in layer)

    # Again with one more arm, in two processes: what is done is not done again.
    before = (out / "arms" / "int8.json").stat().st_mtime_ns
    status, printed = run("^int8$|^int8.4 (damp|energy)$|^int4sym$|damp #0", "--jobs=2", "--together=1")
    assert status == 0 and "2 of them done" in printed and "int4sym: KL" in printed
    # An arm alone in its batch and one beside others store the same states.
    alone = out / "alone"
    assert (
        damp_table.main([str(folders / "model"), str(folders), str(alone), *SMALL, "--texts=2", "--arms=^int8$"]) == 0
    )
    kl = json.loads((alone / "arms" / "int8.json").read_text())["kl_by_text"]
    assert kl == pytest.approx(arms["int8"]["kl_by_text"], rel=0.05)
    capsys.readouterr()
    assert (out / "arms" / "int8.json").stat().st_mtime_ns == before


def test_refusals(folders, capsys):
    command = [str(folders / "model"), str(folders), str(folders / "none"), *SMALL]
    assert damp_table.main([*command, "--arms", "nothing"]) == 2 and "no arm matches" in capsys.readouterr().out
    assert damp_table.main([*command, "--arms", "^fp16$", "--texts=9"]) == 1
    assert "has 3 texts of 26 tokens, and --texts 9" in capsys.readouterr().err
