"""The host side of `vq_decode_pages`' CUDA kernel, without a GPU: when it is taken, and what it hands over."""

import ctypes
import re
import sys

import pytest
import torch

import hf_lowbit_kernels
from hf_lowbit_kernels import cuda_module, entry_major, group_major, vq_decode_pages, vq_decode_pages_cuda


PUBLIC = sys.modules[f"{hf_lowbit_kernels.__name__}.vq_decode_pages"]  # the package's attribute is the function
SOURCE = open(vq_decode_pages_cuda.SOURCE, encoding="utf-8").read()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def arguments(channels=4, batch=2, pages=40, heads=2, dtype=BF16):
    """As in a cache: spare pages, keys beside values, a longer buffer of keys."""
    codes = torch.zeros(2, batch, pages + 2, heads, 8, 128 // channels, dtype=torch.uint8)
    k_codes, v_codes = group_major(codes)[:, :, :pages]
    k_table, v_table = (entry_major(table) for table in torch.zeros(2, heads, 128 // channels, 256, channels).half())
    cos, sin = torch.zeros(2, 1, 8 * pages, 128, dtype=dtype)
    keys, values = torch.zeros(2, batch, heads, 8 * pages + 7, 128, dtype=dtype)[:, :, :, : 8 * pages]
    return dict(
        k_codes=k_codes, v_codes=v_codes, k_table=k_table, v_table=v_table, cos=cos, sin=sin, keys=keys, values=values
    )  # fmt: skip


@pytest.fixture
def taken(monkeypatch):
    """The kernels that ran, on a machine that has all of them."""
    names = []
    monkeypatch.setattr(PUBLIC, "decode_pages_cuda_problem", lambda *sizes: None)
    monkeypatch.setattr(PUBLIC, "copy_backend", lambda *sizes: "triton")
    for name in ("cuda", "triton"):
        monkeypatch.setattr(
            PUBLIC, f"vq_decode_pages_{name}", lambda *tensors, name=name: names.append((name, tensors))
        )
    return names


@pytest.mark.parametrize("channels", [4, 8])
def test_auto_takes_it_where_all_fits(taken, channels):
    vq_decode_pages(**arguments(channels))
    assert taken[-1][0] == "cuda"


OTHERS = {
    "k_codes": lambda t: t["k_codes"].contiguous(),
    "v_codes": lambda t: group_major(t["v_codes"]),
    "v_table": lambda t: t["v_table"].contiguous(),
    "sin": lambda t: torch.zeros(1, 320, 136, dtype=BF16)[:, :, :128],
    "values": lambda t: t["values"].contiguous(),
    "keys": lambda t: torch.zeros(t["keys"].numel() + 4, dtype=BF16)[4:].view(t["keys"].shape),  # 8 bytes too far
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_are_tritons(taken, name):
    tensors = arguments()
    tensors[name] = OTHERS[name](tensors)
    if name == "keys":
        tensors["values"] = tensors["values"].contiguous()  # strides alike: the address alone is wrong
    vq_decode_pages(**tensors)
    ran, (_, _, k_table, v_table, *_) = taken[-1]
    assert ran == "triton" and k_table.is_contiguous() and v_table.is_contiguous()
    with pytest.raises(ValueError, match='backend="cuda" is not possible: .* must'):
        vq_decode_pages(**tensors, backend="cuda")


def test_other_sizes_and_dtypes_are_refused():
    def problem(head_dim=128, channels=4, dtype=BF16, angles=BF16):
        return vq_decode_pages_cuda.decode_pages_cuda_problem(torch.device("cpu"), head_dim, channels, dtype, angles)

    assert "head_dim 128" in problem(head_dim=64) and "4 or 8 channels" in problem(channels=2)
    assert "same dtype" in problem(angles=FP32) and "bfloat16 or float16" in problem(dtype=FP32, angles=FP32)
    assert "Hopper" in problem()
    with pytest.raises(ValueError, match='backend="cuda" is not possible: it is for Hopper'):
        vq_decode_pages(**arguments(), backend="cuda")


def test_why_there_is_no_kernel_is_said(monkeypatch):
    def fails(*args):
        raise cuda_module.CudaError("vq_decode_pages.cu does not compile")

    monkeypatch.setattr(vq_decode_pages_cuda, "cuda_problem", lambda: None)
    monkeypatch.setattr(vq_decode_pages_cuda, "load_kernel", fails)
    kernel = vq_decode_pages_cuda._kernel.__wrapped__  # without what it keeps
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "Hopper" in kernel(4, BF16, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert "does not compile" in kernel(4, BF16, 0)


@pytest.mark.parametrize(
    ("sizes", "grid"),
    [
        (dict(channels=4, batch=1, pages=255, heads=16), (8, 32, 1)),
        (dict(channels=8, batch=3, pages=17, heads=2, dtype=FP16), (1, 4, 3)),
        (dict(batch=1, pages=1, heads=1), (1, 2, 1)),
        (dict(batch=1, pages=100, heads=1), (6, 2, 1)),
        (dict(batch=2, pages=16, heads=80), (1, 160, 2)),
    ],
)
def test_a_launch_fits_the_source(sizes, grid, monkeypatch):
    made, launches = [], []

    def load(*args):
        made.append(args)
        return lambda *launch: launches.append(launch)

    monkeypatch.setattr(vq_decode_pages_cuda, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(vq_decode_pages_cuda, "cuda_problem", lambda: None)
    monkeypatch.setattr(vq_decode_pages_cuda, "load_kernel", load)
    monkeypatch.setattr(vq_decode_pages_cuda, "_kernel", vq_decode_pages_cuda._kernel.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    tensors = arguments(**sizes)
    assert vq_decode_pages_cuda.layout_problem(**tensors) is None
    vq_decode_pages_cuda.vq_decode_pages_cuda(**tensors)
    ((source, name, macros, _, shared), (launched, threads, *args)) = made[-1], launches[-1]
    macros, pages = dict(macros), sizes["pages"]
    assert source.endswith("vq_decode_pages.cu") and launched == grid
    assert macros == {"CHANNELS": sizes.get("channels", 4), "HALF_STATES": int(sizes.get("dtype") == FP16)}

    constants = dict(re.findall(r"^#define (\w+) (\d+)", SOURCE, re.M))
    assert threads == 32 * int(constants["WARPS"]) and shared == int(constants["TABLE"]) + 16

    # One argument for each parameter, of its size; shares cover the pages, and no block is without any.
    signature = re.search(name + r"\((.*?)\)\s*\{", re.sub(r"//[^\n]*", "", SOURCE), re.S)[1]
    parameters = [part.strip() for part in signature.split(",")]
    expected = [8 if "*" in text else {"int": 4, "i64": 8}[text.split()[0]] for text in parameters]
    assert [ctypes.sizeof(arg) for arg in args] == expected
    values = dict(zip((text.split()[-1] for text in parameters), args))
    assert (
        values["pages"].value == pages
        and (grid[0] - 1) * values["share"].value < pages <= grid[0] * values["share"].value
    )
