"""The tables of ``hf-lowbit bench`` on a GPU, tiny: both sides replay their steps, and memory is counted."""

import json

import pytest
import torch

from hf_lowbit.cli.bench import TABLES
from hf_lowbit.cli.main import main


pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path = tmp_path_factory.mktemp("bench")
    failed = {}
    for name in TABLES:
        status = main(["bench", name, "--tiny", "--bits", "0.5", "--json", str(path), "--debug"])
        if status:
            failed[name] = status
    assert not failed
    return path


def rows(folder, name):
    return json.loads((folder / f"{name}.json").read_text())["rows"]


@pytest.mark.parametrize("name", ["decode_tiny", "throughput_tiny", "encode_tiny"])
def test_steps_are_replayed(folder, name):
    timed = [row for row in rows(folder, name) if "replayed" in row]
    assert timed and all(row["replayed"] > 8 and "no_graphs" not in row for row in timed)
    assert all("not_fused" not in row for row in timed)


def test_hybrid_graphs_are_compared_with_graphs(folder):
    found = {row["arm"]: row for row in rows(folder, "hybrid_tiny")}
    assert found["fp32 graph"]["replayed"] > 4 and found["damp graph"]["replayed"] > 4
    assert "change" in found["damp graph"] and "change" in found["damp eager"]


def test_memory_is_counted(folder):
    for name in ("decode_tiny", "prefill_tiny", "throughput_tiny", "calibrate_tiny"):
        assert all(row["peak_bytes"] > 0 for row in rows(folder, name) if "peak_bytes" in row)


def test_kernels_ran(folder):
    backends = {row["backend"] for row in rows(folder, "attention") if "backend" in row}
    assert backends <= {"cuda", "triton"} and backends
    ours = [row for row in rows(folder, "damp") if row["arm"] == "damp"]
    assert ours and all("copy_share" in row and row["backend"] in ("cuda", "triton") for row in ours)
