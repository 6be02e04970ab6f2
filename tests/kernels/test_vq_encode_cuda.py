"""The host side of the encoder's CUDA kernel, without a GPU: when it runs, and what it hands over."""

import ctypes
import re

import pytest
import torch

from hf_lowbit_kernels import PageCoder, cuda_module, group_major, half_norms, ops, vq_encode
from hf_lowbit_kernels import vq_encode_cuda as module


SOURCE = open(module.SOURCE, encoding="utf-8").read()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def hopper(monkeypatch):
    """A machine that says it has a Hopper GPU, and kernels that only remember their launches."""
    launches = []

    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: Properties)
    monkeypatch.setattr(module, "cuda_problem", lambda: None)
    monkeypatch.setattr(module, "load_kernel", lambda *args: lambda *launch: launches.append((args, launch)))
    module._build_problem.cache_clear()
    yield launches
    module._build_problem.cache_clear()


def arguments(tokens, heads, dim, steps, channels, dtype=BF16, device="meta"):
    tables = torch.zeros(steps, heads, dim // channels, 256, channels, dtype=FP16, device=device)
    return torch.zeros(steps, tokens, heads, dim, dtype=dtype, device=device), tables, half_norms(tables)


def test_it_is_for_its_sizes_only(hopper):
    def problem(dtype=BF16, steps=4, channels=4, device="cuda"):
        return module.encode_cuda_problem(torch.device(device), dtype, steps, channels)

    assert problem() is problem(FP16) is problem(channels=8) is problem(channels=2) is problem(steps=8) is None
    assert "bfloat16" in problem(FP32) and "T_c * c" in problem(channels=1) and "Hopper" in problem(device="cpu")


def test_it_runs_by_itself_from_256_tokens_on(hopper, monkeypatch):
    ran = []
    monkeypatch.setattr(ops, "attention_backend", lambda *_: ("triton", ""))
    monkeypatch.setattr(ops, "encode_cuda_problem", lambda device, dtype, *_: None if dtype == BF16 else "it is not")
    for name in ("vq_encode_cuda", "vq_encode_triton"):
        monkeypatch.setattr(ops, name, lambda *_, name=name: ran.append(name.removeprefix("vq_encode_")))
    for tokens, dtype, backend in ((256, BF16, "auto"), (255, BF16, "auto"), (256, FP32, "auto"), (1, BF16, "cuda")):
        vq_encode(*arguments(tokens, 1, 16, 4, 4, dtype, "cpu"), backend=backend)
    assert ran == ["cuda", "triton", "triton", "cuda"]
    with pytest.raises(ValueError, match="not possible: it is not"):
        vq_encode(*arguments(1, 1, 16, 4, 4, FP32, "cpu"), backend="cuda")


def test_what_does_not_compile_does_not_run(hopper, monkeypatch):
    def fails(*args):
        raise cuda_module.CudaError("vq_encode.cu does not compile")

    monkeypatch.setattr(module, "load_kernel", fails)
    assert "does not compile" in module.encode_cuda_problem(torch.device("cuda"), BF16, 4, 4)


def parameters(name):
    """Type and name of each parameter."""
    signature = re.search(name + r"\((.*?)\)\s*\{", SOURCE, re.S)[1]
    return [part.replace("const ", "").strip().rpartition(" ")[::2] for part in signature.split(",")]


def parameter_sizes(name):
    pointers = re.search(r"struct Side \{.*?states\[(\d+)\], \*window;.*?\};", SOURCE, re.S)
    sides = 2 * 8 * (3 + int(pointers[1]) + 1)
    sizes = {"int": 4, "float": 4, "i64": 8, "__grid_constant__ Sides": sides}
    return [8 if "*" in kind else sizes[kind] for kind, _ in parameters(name)]


def named(name, args, wanted):
    values = dict(zip((parameter for _, parameter in parameters(name)), args))
    return [values[parameter].value for parameter in wanted.split()]


@pytest.mark.parametrize(
    "tokens, heads, dim, steps, channels, dtype, grid",
    [
        (2048, 16, 128, 4, 4, BF16, (128, 1, 1)),
        (2048, 16, 128, 4, 8, FP16, (128, 1, 1)),
        (2048, 4, 128, 4, 4, BF16, (32, 4, 1)),
        (8192, 16, 128, 4, 4, BF16, (128, 1, 1)),
        (1, 2, 56, 1, 8, BF16, (2, 1, 1)),
    ],
)
def test_a_launch_fits_the_source(hopper, tokens, heads, dim, steps, channels, dtype, grid):
    vectors, tables, norms = arguments(tokens, heads, dim, steps, channels, dtype, "cpu")
    codes = module.vq_encode_cuda(vectors, tables, norms, torch.ones(steps, heads, dim) if dtype == BF16 else None)
    assert codes.shape == (tokens, heads, dim // channels)
    ((_, name, macros, _, shared, *_), (launched, threads, *args)) = hopper[-1]
    macros = dict(macros)
    assert launched == grid and threads == 128 * macros["WARPGROUPS"] <= 1024
    assert macros["STEPS"] * macros["CHANNELS"] == steps * channels and macros["WEIGHTED"] == (dtype == BF16)
    assert macros["HALF_INPUT"] == (dtype == FP16)
    assert not macros["PAGED"]
    # All tokens are someone's, in whole chunks of a warpgroup.
    per_block = args[5].value
    assert (grid[1] - 1) * per_block < tokens <= grid[1] * per_block and per_block % 64 == 0
    assert [ctypes.sizeof(arg) for arg in args] == parameter_sizes(name)
    groups = dim // channels
    assert named(name, args, "nothing lead stride_cp stride_cg stride_cn") == [
        -0.0,
        0,
        8 * heads * groups,
        1,
        heads * groups,
    ]
    assert named(name, args, "stride_t stride_n stride_h stride_d") == list(vectors.stride())

    # Shared memory as the source adds it up.
    size = steps * channels
    assert "#define PRODUCTS (SIZE == 8 ? 2 : 2 * HIGHS + 1)" in SOURCE and "#define HALF_PRODUCT 4096" in SOURCE
    products = 2 if size == 8 else 2 * (2 if size == 32 else 1) + 1
    assert shared == 64 // size * products * 2 * 4096 <= 227 * 1024


@pytest.mark.parametrize("rows, pages", [(1, 256), (3, 20), (1, 2)])
def test_a_launch_of_a_chunk_fits_the_source(hopper, rows, pages):
    heads, dim, steps, channels, count = 2, 64, 4, 4, 8 * pages - 3
    _, tables, norms = arguments(1, heads, dim, steps, channels, BF16, "cpu")
    coder = PageCoder(tables, norms, None)
    states = [[torch.zeros(rows, count, heads, dim, dtype=BF16).transpose(1, 2) for _ in range(steps)] for _ in "kv"]
    window = torch.zeros(2 * steps, 2, rows, heads, 21, dim, dtype=BF16)[steps:]
    codes = group_major(torch.zeros(2, rows, pages + 1, heads, 8, dim // channels, dtype=torch.uint8))[:, :, 1:]
    slots = torch.arange(5)
    module.vq_encode_chunk_cuda(*states, window, slots, 2, codes, coder, coder)
    ((_, name, macros, *_), (grid, _, sides, to, *args)) = hopper[-1]
    args = (sides, to, *args)
    assert dict(macros)["PAGED"] == dict(macros)["VECTOR"] == 1 and grid[2] == 2
    assert [ctypes.sizeof(arg) for arg in args] == parameter_sizes(name)
    tokens, per_block, blocks, lead, first = named(
        name, args, "tokens tokens_per_block blocks_per_row lead first_token"
    )
    assert (tokens, lead, first) == (8 * pages, 5, 2) and grid[1] == rows * blocks
    assert (blocks - 1) * per_block < tokens <= blocks * per_block
    assert to.value == codes.data_ptr()
    for i, side in enumerate(sides):
        assert [side.states[step] for step in range(steps)] == [state.data_ptr() for state in states[i]]
        assert side.window == window[:, i].data_ptr() and side.tables == tables.data_ptr() and side.metric is None
    batch, token = states[0][0].stride(0), states[0][0].stride(2)
    assert named(name, args, "stride_b stride_n stride_h") == [batch, token, dim]
    assert named(name, args, "stride_wt stride_wb stride_wh stride_wn") == [window.stride(i) for i in (0, 2, 3, 4)]
    order = "stride_cs stride_cb stride_cp stride_ch stride_cn stride_cg"
    assert named(name, args, order) == list(codes.stride())


@pytest.mark.parametrize(
    "change, fits",
    [
        (lambda x: x, True),
        (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), True),
        (lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), False),
        (lambda x: torch.cat([x[..., :1], x], dim=-1)[..., 1:], False),
        (lambda x: torch.cat([x[..., :4], x], dim=-1)[..., 4:], False),
        (lambda x: torch.cat([x, x[..., :4]], dim=-1)[..., :-4], False),
    ],
)
def test_pieces_are_loaded_whole_where_they_lie_so(change, fits):
    vectors = change(torch.zeros(4, 9, 3, 32, dtype=BF16))
    assert module._in_pieces(8, 4, 4, vectors) is fits
    assert module._in_pieces(3, 4, 4, torch.zeros(4, 9, 2, 12, dtype=BF16)) is False  # a pair would run over the end
    assert module._in_pieces(8, 2, 8, torch.zeros(8, 9, 2, 16, dtype=BF16)) is False  # a piece spans two steps
