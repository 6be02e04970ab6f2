"""The CUDA kernel of `damp_update`: its host side without a GPU, and on a Hopper GPU the matrix of the other kernels."""

import ctypes
import math
import re

import pytest
import test_damp_update as matrix
import torch
from damp_cases import BASE, make_inputs
from kernel_cases import replace

from hf_lowbit_kernels import DampLayout, DampPlan, cuda_module, damp_backend, damp_pack, damp_unpack, damp_update
from hf_lowbit_kernels import damp_update_cuda as module


SOURCE = open(module.SOURCE, encoding="utf-8").read()


@pytest.fixture
def hopper(monkeypatch):
    """A machine that says it has a Hopper GPU, and kernels that only remember their launches."""
    launches = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "cuda_problem", lambda: None)
    monkeypatch.setattr(module, "load_kernel", lambda *args: lambda *launch: launches.append((args, launch)))
    module._build_problem.cache_clear()
    yield launches
    module._build_problem.cache_clear()


def test_it_is_offered_for_its_layouts_only(hopper):
    def offered(layout, nearest=True):
        return damp_backend("cuda", torch.bfloat16, layout, nearest=nearest)[0]

    for layout in (DampLayout(128, 128), DampLayout(96, 192, 12), DampLayout(128, 128, 16, 4, zero_point=True)):
        assert offered(layout) == "cuda" and offered(layout, nearest=False) == "triton"
    for layout in (DampLayout(128, 40), DampLayout(128, 288), DampLayout(128, 128, 16, 32)):
        assert offered(layout) == "triton"
    assert damp_backend("cuda", torch.bfloat16)[0] == "triton"
    assert damp_backend("cpu", torch.bfloat16, DampLayout(128, 128))[0] == "reference"


def test_what_does_not_compile_is_not_offered(hopper, monkeypatch):
    def fails(*args):
        raise cuda_module.CudaError("damp_update.cu does not compile")

    monkeypatch.setattr(module, "load_kernel", fails)
    assert damp_backend("cuda", torch.bfloat16, DampLayout(128, 128))[0] == "triton"
    assert "does not compile" in module.damp_cuda_problem(torch.device("cuda"), DampLayout(128, 128))


@pytest.mark.parametrize(
    "layout",
    [
        DampLayout(128, 128),
        DampLayout(128, 32, 0),
        DampLayout(60, 64, 60),
        DampLayout(256, 256, 5),
        DampLayout(128, 128, 1, 4, zero_point=True),
        DampLayout(17, 32, 3, 4),
    ],
    ids=str,
)
def test_a_launch_fits_the_source(hopper, layout):
    case = replace(BASE, dk=layout.dk, dv=layout.dv, high_rows=layout.high_rows, low_bits=layout.low_bits)
    case = replace(case, zero_point=layout.zero_point, dtype=torch.bfloat16, heads=4, ratio=2)
    records, arguments, plan = make_inputs(case, torch.device("cpu"))
    module.damp_update_cuda(records, *arguments, plan, layout, scale=0.1)
    ((source, name, macros, _, shared), (grid, threads, *args)) = hopper[-1]
    macros = dict(macros)
    assert grid == (8, 1, 1) and threads == layout.dv

    # One argument for each parameter, of its size.
    signature = re.search(name + r"\((.*?)\)\s*\{", SOURCE, re.S)[1]
    parameters = [part.strip() for part in re.sub(r"//[^\n]*", "", signature).split(",")]
    sizes = {"int": 4, "float": 4, "i64": 8}
    assert [ctypes.sizeof(arg) for arg in args] == [
        8 if "*" in text else sizes[text.split()[0]] for text in parameters
    ]

    # Shared memory as the source adds it up.
    values = dict(macros)
    for definition in re.finditer(r"^#define (\w+) (.*?)(?://.*)?$", SOURCE, re.M):
        values.setdefault(definition[1], definition[2].strip())

    def value(name):
        text = re.sub(r"\b(?!LARGER)[A-Z_]{2,}\b", lambda match: str(value(match[0])), str(values[name]))
        return eval(text.replace("/", "//"), {"LARGER": max})  # noqa: S307  our own source

    assert shared == value("SPACE") <= 227 * 1024


# dv in whole tiles, else as the matrix of the other kernels.
CASES = [
    BASE,
    replace(BASE, channel_decay=True),
    replace(BASE, dk=128, dv=128, heads=2, ratio=2, slots=(4, 1)),
    replace(BASE, dk=128, dv=128, heads=1, channel_decay=True, dtype=torch.bfloat16, slots=(2,)),
    replace(BASE, dk=96, dv=192, high_rows=12, heads=4, ratio=2, dtype=torch.float16),
    replace(BASE, dk=60, dv=32, high_rows=1, channel_decay=True, index_dtype=torch.int64, slots=(2, 4, 1)),
    replace(BASE, dk=60, dv=64, high_rows=0, heads=3, ratio=3),
    replace(BASE, dk=96, dv=64, high_rows=96, channel_decay=True),
    replace(BASE, dk=60, dv=32, high_rows=60, heads=2, ratio=2),
    replace(BASE, dk=256, dv=256, high_rows=37, heads=1, slots=(1,)),
    replace(BASE, dk=1, dv=32, high_rows=0, slots=(1, 3, 0)),
    replace(BASE, normalize=False, dtype=torch.bfloat16, slots=(1, -1, 4)),
    replace(BASE, low_bits=4),
    replace(BASE, dk=60, dv=32, high_rows=1, low_bits=4, channel_decay=True, heads=4, ratio=2),
    replace(BASE, dk=128, dv=64, high_rows=0, low_bits=4, slots=(1,)),
    replace(BASE, low_bits=4, zero_point=True, channel_decay=True),
    replace(BASE, dk=128, dv=128, low_bits=4, zero_point=True, heads=2, dtype=torch.bfloat16, slots=(2, 0)),
    replace(BASE, dk=60, dv=64, high_rows=7, low_bits=4, zero_point=True, normalize=False, slots=(1,)),
]


@pytest.fixture
def cuda(device):
    problem = module.damp_cuda_problem(device, DampLayout(128, 128))
    if problem is not None:
        pytest.skip(problem)
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_step(case, cuda):
    matrix.test_step_is_the_fp64_recurrence(case, "cuda", cuda)
    matrix.assert_kernel_matches_the_reference(case, "nearest", cuda, backend="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        replace(BASE, dk=60, dv=32, high_rows=5, heads=2, ratio=2),
        replace(BASE, dk=96, dv=64, channel_decay=True, slots=(4, 2, 0)),
        replace(BASE, dk=60, dv=32, high_rows=3, low_bits=4),
        replace(BASE, dk=60, dv=96, high_rows=3, low_bits=4, zero_point=True),
        replace(BASE, dk=32, dv=32, high_rows=32),
    ],
    ids=lambda case: case.id,
)
def test_bytes_are_equal_where_sums_are_exact(case, cuda):
    records, arguments, plan = matrix.exact_problem(case, cuda)
    other, before = records.clone(), records.clone()
    options = dict(scale=0.25, normalize=False)
    out = damp_update(records, *arguments, plan, case.layout, **options, backend="cuda")
    expected = damp_update(other, *arguments, plan, case.layout, **options, backend="reference")
    assert torch.equal(out, expected)
    assert torch.equal(records, other) and not torch.equal(records, before)


@pytest.mark.gpu
@pytest.mark.parametrize("low_bits", [8, 4])
def test_a_row_alone_equals_the_row_in_any_batch(low_bits, cuda):
    case = replace(BASE, dk=128, dv=128, low_bits=low_bits, slots=(4, 0, 3, 1), heads=8, ratio=2, dtype=torch.bfloat16)
    records, arguments, plan = make_inputs(case, cuda)
    together = records.clone()
    out = damp_update(together, *arguments, plan, case.layout, backend="cuda")
    for part in ([2, 0, 3, 1], [1], [3, 0]):
        pool = records.clone()
        some = damp_update(pool, *(x[part] for x in arguments), plan, case.layout, backend="cuda")
        slots = [case.slots[i] for i in part]
        assert torch.equal(some, out[part]) and torch.equal(pool[slots], together[slots])


@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_values_stay_in_their_row_and_head(value, cuda):
    matrix.test_non_finite_states_stay_in_their_row_and_head(value, "cuda", cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["query", "key", "g", "beta", "scale", "high"])
def test_non_finite_inputs_and_states_reach_the_whole_state(name, cuda):
    case = replace(BASE, high_rows=4, slots=(2, 1))
    records, arguments, plan = make_inputs(case, cuda)
    arguments = list(arguments)
    clean = records.clone()
    expected = damp_update(clean, *arguments, plan, case.layout, backend="cuda")
    if name == "scale":
        records[1, 0, :, case.layout.scale_offset : case.layout.scale_offset + 4] = 255
    elif name == "high":
        records[1, 0, :, :64] = 255
    else:
        at = {"query": 1, "key": 2, "g": 4, "beta": 5}[name]
        arguments[at] = arguments[at].clone()
        arguments[at][1, 0] = math.nan
    out = damp_update(records, *arguments, plan, case.layout, backend="cuda")
    assert torch.equal(out[0], expected[0]) and torch.equal(records[2], clean[2])
    assert torch.equal(out[1, 1], expected[1, 1]) and torch.equal(records[1, 1], clean[1, 1])
    assert out[1, 0].isnan().all()
    state = damp_unpack(records[1:2], plan, case.layout)[0, 0]
    assert not state.isfinite().any() if name != "query" else state.isfinite().all()


@pytest.mark.gpu
def test_high_rows_saturate_and_tiny_groups_are_zero(cuda):
    layout = DampLayout(4, 64, 2)
    plan = DampPlan.identity(1, 4, 64, cuda)
    state = torch.full((1, 1, 4, 64), 3.0, device=cuda)
    state[:, :, :2] = 6e4
    records = damp_pack(state, plan, layout)
    inputs = [torch.zeros(1, 1, n, device=cuda) for n in (4, 4, 64)]
    index, beta = torch.zeros(1, dtype=torch.int32, device=cuda), torch.zeros(1, 1, device=cuda)
    g = torch.tensor([[[1.0, 0, -71.5, 0]]], device=cuda)  # 3 exp(-71.5) = 2.7e-31
    damp_update(records, index, *inputs, g, beta, plan, layout, backend="cuda")
    new = damp_unpack(records, plan, layout)[0, 0]
    assert (new[0] == 65504).all() and (new[1] == 6e4).all() and not new[2].any() and (new[3] == 3).all()


@pytest.mark.gpu
def test_sizes_of_any_magnitude(cuda):
    """Fixed-point coefficients are relative to the state's own size."""
    case = replace(BASE, dk=128, dv=128, heads=1, slots=(1,))
    records, arguments, plan = make_inputs(case, cuda)
    state = damp_unpack(records[1:2], plan, case.layout)
    for factor in (1e-12, 1e-3, 1e4):
        pool = case.layout.zeros(2, 1, cuda)
        pool[1:] = damp_pack(state * factor, plan, case.layout)
        other = pool.clone()
        inputs = list(arguments)
        inputs[3] = arguments[3] * factor
        out = damp_update(pool, *inputs, plan, case.layout, backend="cuda")
        expected = damp_update(other, *inputs, plan, case.layout, backend="reference")
        assert (out - expected).norm() <= 2e-6 * expected.norm()
        a, b = (damp_unpack(x[1:], plan, case.layout) for x in (pool, other))
        assert (a - b).abs().max() <= 1.01 / 127 * b.abs().max()


@pytest.mark.gpu
def test_indices_outside_the_pool(cuda):
    case = replace(BASE, dk=32, dv=32, slots=(1, -7, 3, 99))
    records, arguments, plan = make_inputs(case, cuda)
    before = records.clone()
    out = damp_update(records, *arguments, plan, case.layout, backend="cuda")
    assert out[[0, 2]].isfinite().all() and not out[1].any() and out[3].isnan().all()
    others = [0, 2, 4]
    assert torch.equal(records[others], before[others])


@pytest.mark.gpu
def test_cuda_graph_replays_are_steps(cuda):
    case = replace(BASE, dk=128, dv=128, heads=4, dtype=torch.bfloat16)
    records, arguments, plan = make_inputs(case, cuda)
    expected = records.clone()
    for _ in range(3):
        out = damp_update(expected, *arguments, plan, case.layout, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = damp_update(records, *arguments, plan, case.layout, backend="cuda")
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(records, expected) and torch.equal(result, out)
