"""Fused decode steps with their kernels and as CUDA graphs, against the layers' own operations."""

import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "loopvq"))

from loopvq_models import build_model, random_codebooks  # noqa: E402

from hf_lowbit import LoopVQCache, LoopVQConfig  # noqa: E402
from hf_lowbit.compat import CACHE_ARG  # noqa: E402
from hf_lowbit_kernels import dependent_launch  # noqa: E402


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
# Norm of the difference of logits over their norm. bf16 logits of this model are 0.03 away from those in fp32: a last
# bit that goes the other way early moves them by about as much.
APART = {torch.float32: 1e-3, torch.bfloat16: 6e-2}


def coded_model(dtype=torch.bfloat16, **sizes):
    sizes = {"head_dim": 128, **sizes}
    return random_codebooks(build_model(**sizes), LoopVQConfig(bits=0.5)).to("cuda", dtype)


def steps(model, backend, rows=1, count=24, **options):
    """Logits of single tokens after a prompt, and the cache."""
    model.model.fused_decode.backend = backend
    cache = LoopVQCache(model, **options)
    ids = torch.randint(1, 89, (rows, 90), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        model(ids, **{CACHE_ARG: cache})
        tokens = [torch.full((rows, 1), i + 1, device="cuda") for i in range(count)]
        return torch.stack([model(token, **{CACHE_ARG: cache}).logits for token in tokens]).float(), cache


@pytest.mark.parametrize(("rows", "few_rows"), [(1, 0), (1, 4), (3, 4), (40, 4)])
@pytest.mark.parametrize("dtype", APART, ids=str)
def test_fused_steps_equal_the_layers(dtype, rows, few_rows):
    model = coded_model(dtype, num_key_value_heads=1 if rows == 3 else 2)
    model.model.fused_decode.few_rows = few_rows
    count = 5 if dtype == torch.bfloat16 else 24  # 5: before a code could flip and be seen
    expected, _ = steps(model, "off", rows, count, cuda_graphs=False)
    found, _ = steps(model, "auto", rows, count, cuda_graphs=False)
    assert model.model.fused_decode.problem is None and model.model.fused_decode.packings == 4
    assert (found - expected).norm() < APART[dtype] * expected.norm()


def test_replayed_steps_equal_eager_ones():
    model = coded_model()
    expected, _ = steps(model, "auto", cuda_graphs=False)
    found, cache = steps(model, "auto", cuda_graphs=True)
    assert cache.graph_replays >= 24 - 4 and model.model.fused_decode.problem is None
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    again, other = steps(model, "auto", cuda_graphs=True)
    assert torch.equal(again, found) and model.model.fused_decode.packings == 4


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_overlapping_launches_change_no_bit(cuda_graphs, monkeypatch):
    model = coded_model()
    overlapped, _ = steps(model, "auto", cuda_graphs=cuda_graphs)
    monkeypatch.setattr(dependent_launch, "_possible", lambda device: False)
    one_by_one, _ = steps(model, "auto", cuda_graphs=cuda_graphs)
    assert torch.equal(overlapped, one_by_one)


def test_a_moved_model_is_merged_and_captured_again():
    model = coded_model()
    expected, _ = steps(model, "auto", cuda_graphs=True)
    cache = LoopVQCache(model, cuda_graphs=True)
    ids = torch.randint(1, 89, (1, 90), generator=torch.Generator().manual_seed(0)).cuda()
    logits = []
    with torch.no_grad():
        model(ids, **{CACHE_ARG: cache})
        for i in range(24):
            if i == 12:
                model.cpu().cuda()
                torch.empty(2**24, device="cuda").fill_(float("nan"))  # over memory that was freed
            logits.append(model(torch.full((1, 1), i + 1, device="cuda"), **{CACHE_ARG: cache}).logits)
    torch.testing.assert_close(torch.stack(logits).float(), expected, atol=1e-3, rtol=1e-3)
    assert model.model.fused_decode.packings == 8


def kernels_of_a_step(model, backend):
    model.model.fused_decode.backend = backend
    _, cache = steps(model, backend, cuda_graphs=True)
    token = torch.full((1, 1), 7, device="cuda")
    with torch.no_grad(), torch.profiler.profile() as profile:
        model(token, **{CACHE_ARG: cache})
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sum(kernel.count for kernel in profile.key_averages() if kernel.device_type == cuda)


def test_a_layer_step_is_a_dozen_kernels():
    """Nine launches; a matrix product of one row may be two kernels where cuBLAS splits its sum."""
    counts = {}
    for backend in ("off", "auto"):
        one, two = (kernels_of_a_step(coded_model(num_hidden_layers=depth), backend) for depth in (1, 2))
        counts[backend] = (two - one) / 4
    assert 7 <= counts["auto"] <= 13 and counts["off"] > 25, counts


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_where_their_tensors_are():
    from hf_lowbit_kernels import rms_norm

    x, weight = torch.randn(3, 2048, device="cuda:1"), torch.ones(2048, device="cuda:1")
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6, backend="reference"))
