"""What the tables are made of: both sides' caches, the JSON file, the search for the largest batch, figures, pictures."""

import json

import pytest
import torch
from transformers import DynamicCache

import hf_lowbit
from hf_lowbit.bench import looped, shapes
from hf_lowbit.bench.calibrate import extrapolated
from hf_lowbit.bench.encode import spans
from hf_lowbit.bench.plot import plot
from hf_lowbit.bench.report import Options, Report
from hf_lowbit.bench.summary import summarize, write_summary
from hf_lowbit.bench.throughput import candidates, first_that_fits, integral
from hf_lowbit.bench.timing import median_of_pages
from hf_lowbit.compat import CACHE_ARG
from hf_lowbit.loopvq.codebook import LoopVQCodebook


@pytest.fixture(scope="module")
def model():
    built = shapes.build_looped(shapes.LOOPED["tiny"], "cpu", 4096).float()
    shapes.attach_random_codebooks(built, 0.5)
    return built


# -- the two sides -----------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False])
def test_full_precision_cache_attends_to_the_newest_tokens(model, fused):
    count = 40
    ids = torch.randint(1, 97, (2, count), generator=torch.Generator().manual_seed(0))
    stock = DynamicCache()
    model(ids, use_cache=True, **{CACHE_ARG: stock})
    ours = looped.FullPrecisionCache(model, 2, count, looped.SDPA["math"], capacity=count + 8, fused=fused)
    for slot, layer in enumerate(stock.layers):
        ours.states[slot, 0, :, :, :count], ours.states[slot, 1, :, :, :count] = layer.keys, layer.values
    for step in range(3):
        token = ids[:, step : step + 1]
        # The oldest places are overwritten one by one: a stock cache with as many tokens masked sees the same.
        mask = torch.ones(2, count + step + 1, dtype=torch.long)
        mask[:, : step + 1] = 0
        position = torch.full((2, 1), count + step)
        expected = model(token, attention_mask=mask, position_ids=position, **{CACHE_ARG: stock}).logits
        found = model(token, **{CACHE_ARG: ours}).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_filled_cache_is_like_one_after_a_prefill(model):
    ids = torch.ones((2, 200), dtype=torch.long)
    real = hf_lowbit.LoopVQCache(model)
    model(ids, **{CACHE_ARG: real})
    filled = looped.filled_loopvq_cache(model, 2, 200)
    assert filled.coded_tokens == real.coded_tokens and filled.get_seq_length() == real.get_seq_length()
    assert filled.memory_report() == real.memory_report()
    looped.set_loopvq_length(filled, 2, 120)
    assert filled.get_seq_length() == 120 and filled.coded_tokens == [48, 48]
    token = ids[:, :1]
    for _ in range(10):
        model(token, **{CACHE_ARG: filled})
    assert filled.get_seq_length() == 130 and filled.coded_tokens == [56, 56]


def test_both_kinds_of_steps_run_twice_before_they_are_timed(model):
    cache = looped.filled_loopvq_cache(model, 1, 300)
    pages, run = [], cache._run_step
    cache._run_step = lambda *args: (run(*args), pages.append(cache._step.pages))[0]
    for tokens in (128, 135):
        looped.capture_steps(model, cache, 1, tokens, "cpu")
    assert pages == [1, 0, 1, 0] * 2


def test_a_capture_without_memory_means_that_the_batch_does_not_fit(model):
    cache = looped.filled_loopvq_cache(model, 1, 100)
    looped.check_captured(cache)
    cache._graphs._failure = cache._graphs._problem = "the capture failed (OutOfMemoryError: CUDA out of memory)"
    with pytest.raises(torch.OutOfMemoryError, match="the capture failed"):
        looped.check_captured(cache)


def test_random_models_have_the_published_sizes():
    for name, parameters in (("ouro1.4b", 1.43e9), ("ouro2.6b", 2.67e9)):
        built = shapes.build_looped(shapes.LOOPED[name], "meta", 64)
        assert sum(p.numel() for p in built.parameters()) == pytest.approx(parameters, rel=0.01)
    assert shapes.LOOPED["ouro1.4b"].token_bytes() == 786432
    kimi = shapes.HYBRID["kimi-linear-scaled"][1]["layer_types"]
    assert kimi.count("linear_attention") == 20 and len(kimi) == 27


@torch.no_grad()
def test_spans_time_every_call_and_leave_nothing_behind(model):
    original = LoopVQCodebook.encode_chunk
    with spans(LoopVQCodebook, "encode_chunk", "cpu") as found:
        model(torch.ones((1, 200), dtype=torch.long), **{CACHE_ARG: hf_lowbit.LoopVQCache(model)})
    assert len(found) == 2  # layers; keys and values of one block of steps together
    assert all(start.until(end) > 0 for start, end in found)
    assert LoopVQCodebook.encode_chunk is original


# -- the numbers -------------------------------------------------------------------------------------------------------


def test_median_of_pages_counts_the_step_that_encodes():
    page = [1.0] * 7 + [9.0]
    assert median_of_pages(page * 3 + [5.0]) == 2.0


def test_integral_is_exact_for_lines():
    points = (2048, 4096, 6144)
    assert integral(points, [2 * n + 1 for n in points]) == pytest.approx(4096 * (2 * 4096 + 1))


def test_largest_batch_goes_down_until_it_fits():
    tried = []

    def attempt(batch):
        tried.append(batch)
        if batch > 23:
            raise torch.OutOfMemoryError("full")
        return {"batch": batch}

    assert first_that_fits(candidates(26), attempt, "cpu") == (23, {"batch": 23}) and tried == [26, 25, 24, 23]
    assert list(candidates(3)) == [3, 2, 1] and list(candidates(0)) == [1]
    assert next(b for b in candidates(1000) if b < 1000) == 980
    with pytest.raises(torch.OutOfMemoryError, match="not even one"):
        first_that_fits(candidates(2), lambda batch: attempt(99), "cpu")


def test_extrapolation_of_a_calibration():
    parts = {"fingerprint": 1.0, "Fisher weights": 10.0, "k-means": 5.0, "fine-tuning": 20.0}
    config = hf_lowbit.LoopVQConfig(sequences=8, epochs=1)
    assert extrapolated(parts, config) == 1 + 2 * 10 + 5 + 2 * (7 / 4) * 20
    assert extrapolated(parts, hf_lowbit.LoopVQConfig()) == sum(parts.values())
    assert extrapolated(parts, hf_lowbit.LoopVQConfig(sequence_length=1024)) is None


# -- files -------------------------------------------------------------------------------------------------------------


def report(folder, **changes):
    values = dict(
        path=folder / "t.json", table="decode", model="m", command="c", method="how", options=Options("cpu"), budget=60
    )
    return Report(**{**values, **changes})


def test_every_row_is_on_disk_at_once(tmp_path):
    table = report(tmp_path)

    def fail():
        raise ValueError("broken")

    def full():
        raise torch.OutOfMemoryError("full")

    for i, (function, key) in enumerate(((lambda: {"us": 1.5}, "us"), (fail, "error"), (full, "out_of_memory")), 1):
        table.measure(function, tokens=i)
        rows = json.loads(table.path.read_text())["rows"]
        assert len(rows) == i and key in rows[-1] and rows[-1]["tokens"] == i
    assert table.errors == ["ValueError: broken"]
    assert table.to_dict()["machine"]["torch"] == torch.__version__


def test_no_row_begins_after_the_budget(tmp_path):
    table = report(tmp_path, budget=0)
    assert table.measure(lambda: pytest.fail("measured"), tokens=7, bits=0.5) == {}
    written = json.loads(table.path.read_text())
    assert written["rows"] == [] and written["skipped"] == ["tokens=7 bits=0.5"]


def tables():
    """Tables as a GPU would leave them, with round numbers."""
    machine = {"device": "card"}

    def table(name, rows, model=None):
        return {"table": name, "model": model, "command": f"run {name}", "machine": machine, "rows": rows}

    throughput = [
        {"arm": "bf16", "prefill_s_per_row": 0.1},
        {"arm": "bf16", "batch": 24, "tokens_per_s": 600.0},
        {"arm": "bf16", "batch": 16, "tokens_per_s": 500.0},
        {"arm": "loopvq", "bits": 0.5, "batch": 600, "tokens_per_s": 2500.0},
        {"arm": "loopvq", "bits": 0.5, "batch": 192, "tokens_per_s": 2700.0},
        {"arm": "loopvq", "bits": 0.25, "batch": 900, "out_of_memory": True},
    ]
    decode = [
        {"arm": "bf16", "batch": 1, "tokens": 32768, "tpot_ms": 20.0, "peak_bytes": 2000},
        {
            "arm": "loopvq", "bits": 0.5, "batch": 1, "tokens": 32768, "tpot_ms": 8.0, "tpot_ratio": 0.4, "peak_bytes": 80,
        },
    ]  # fmt: skip
    damp = [
        {"arm": "fla", "kind": "gdn", "batch": 256, "us": 366.0},
        {"arm": "damp", "kind": "gdn", "batch": 256, "us": 91.5, "speedup": 4.0, "copy_share": 0.9},
    ]
    hybrid = [
        {"arm": "fp32 eager", "batch": 256, "tpot_ms": 40.0},
        {"arm": "damp eager", "batch": 256, "tpot_ms": 36.0, "change": -0.1},
        {"arm": "damp graph", "batch": 256, "tpot_ms": 24.0, "change": -0.2},
    ]
    calibrate = [{"bits": 0.5, "full": True, "seconds": 140.0}, {"bits": 0.25, "full": False, "extrapolated_s": 160.0}]
    return {
        "throughput_ouro1.4b.json": table("throughput", throughput, "ouro1.4b"),
        "decode_ouro1.4b.json": table("decode", decode, "ouro1.4b"),
        "damp.json": table("damp", damp),
        "hybrid_qwen3.5-4b.json": table("hybrid", hybrid, "qwen3.5-4b"),
        "calibrate_ouro1.4b.json": table("calibrate", calibrate, "ouro1.4b"),
    }


def test_figures_have_the_names_of_the_readme():
    found = summarize(tables())
    assert found["tpot_ratio"] == {"ouro1.4b_b1_32k_0.5bit": 0.4}
    assert found["peak_memory_ratio_32k"] == {"ouro1.4b_decode_0.5bit": 0.04}
    assert found["throughput_ratio"] == {"ouro1.4b_0.5bit": 4.5}
    assert found["throughput_peak_batch"] == {"ouro1.4b_bf16": 24, "ouro1.4b_0.5bit": 192}
    assert found["damp_update_speedup"] == {"gdn_b256": 4.0} and found["damp_copy_rate_share"] == {"gdn_b256": 0.9}
    assert found["qwen35_tpot_b256_change"] == -0.2  # of the arms under graphs
    assert found["calibration_seconds"] == {"ouro1.4b_0.5bit": 140.0, "ouro1.4b_0.25bit_extrapolated": 160.0}
    for name in found.keys() - {"sources"}:
        (source,) = found["sources"][name]
        assert source["machine"] == {"device": "card"} and source["command"].startswith("run ")


def test_summary_and_plot_read_a_folder(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="holds no table"):
        write_summary(tmp_path)
    (tmp_path / "other.json").write_text("[1, 2]")
    old = tables()["decode_ouro1.4b.json"]
    old["rows"][1]["tpot_ratio"] = 0.9
    (tmp_path / "decode_ouro1.4b_old.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="holds no table"):
        write_summary(tmp_path)
    for name, table in tables().items():
        (tmp_path / name).write_text(json.dumps(table))
    written = json.loads(write_summary(tmp_path).read_text())
    assert written == json.loads(json.dumps(summarize(tables())))
    assert json.loads(write_summary(tmp_path).read_text()) == written  # its own output is no table
    picture = plot(tmp_path).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000


def test_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    table = tables()["calibrate_ouro1.4b.json"]
    (tmp_path / "calibrate_ouro1.4b.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match="no table in .* has a row to draw"):
        plot(tmp_path)
