"""The host side of the CUDA kernel, without a GPU: when it is offered, and what it hands over."""

import ctypes
import re

import pytest
import torch
from kernel_cases import BASE, attention_inputs, replace

from hf_lowbit_kernels import attention_backend, cuda_module, entry_major, group_major, vq_attention_cuda


SOURCE = open(vq_attention_cuda.SOURCE, encoding="utf-8").read()


@pytest.fixture
def hopper(monkeypatch):
    """A machine that says it has a Hopper GPU, and kernels that only remember their launches."""
    launches = []

    class Properties:
        multi_processor_count = 132

    class Stream:
        cuda_stream = 7

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: Properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream)
    monkeypatch.setattr(vq_attention_cuda, "cuda_problem", lambda: None)
    monkeypatch.setattr(
        vq_attention_cuda, "load_kernel", lambda *args: lambda *launch, overlap: launches.append((args, launch))
    )
    return launches


def test_it_is_offered_for_its_sizes_only(hopper):
    def offered(head_dim=128, group=1, dtype=torch.bfloat16, channels=4, sinks=8):
        return attention_backend("cuda", head_dim, group, dtype, channels, sinks)[0]

    assert offered() == offered(channels=8) == offered(dtype=torch.float16) == "cuda"
    others = dict(head_dim=64), dict(group=2), dict(dtype=torch.float32), dict(channels=2), dict(sinks=4)
    assert [offered(**other) for other in others] == ["triton"] * len(others)
    assert offered(channels=None) == "triton"


def test_what_does_not_compile_is_not_offered(hopper, monkeypatch):
    def fails(*args):
        raise cuda_module.CudaError("vq_attention.cu does not compile")

    monkeypatch.setattr(vq_attention_cuda, "load_kernel", fails)
    assert attention_backend("cuda", 128, 1, torch.bfloat16, 4)[0] == "triton"
    problem = vq_attention_cuda.cuda_kernel_problem(torch.device("cuda"), 128, 1, 4, torch.bfloat16, 8)
    assert "does not compile" in problem


def staged_inputs(**changes):
    """As a cache lays them out for the kernel."""
    case = replace(BASE, **{**dict(head_dim=128, dtype=torch.bfloat16, lengths=(100, 90)), **changes})
    inputs = attention_inputs(case, torch.device("cpu"))
    for name in ("k_codes", "v_codes"):
        inputs[name] = group_major(inputs[name])
    for name in ("k_table", "v_table"):
        inputs[name] = entry_major(inputs[name])
    return inputs


LAYOUTS = {
    "tiles of 8, not 16": ("rope", lambda _: staged_inputs(tile=16)["rope"]),
    "v_table is not entry-major": ("v_table", torch.Tensor.contiguous),
    "k_codes and v_codes are not group-major": ("k_codes", torch.Tensor.contiguous),
    "v_codes has strides": ("v_codes", lambda x: group_major(torch.cat([x, x], 1))[:, : x.shape[1]]),
    "v_window has strides": ("v_window", lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]]),
    "query does not begin": ("query", lambda x: torch.cat([x[..., :1], x], 2)[..., 1:]),
    "the window is torch.float32 and torch.bfloat16, the query torch.bfloat16": ("k_window", torch.Tensor.float),
}


@pytest.mark.parametrize("problem", [None, *LAYOUTS])
def test_other_layouts_and_dtypes_are_refused(problem):
    """The kernel gets addresses: what lies otherwise would be read as something else."""
    inputs = staged_inputs()
    if problem is not None:
        name, change = LAYOUTS[problem]
        inputs[name] = change(inputs[name])
    names = "query", "k_codes", "v_codes", "k_table", "v_table", "k_window", "v_window", "rope"
    found = vq_attention_cuda.cuda_layout_problem(*(inputs[name] for name in names))
    assert found is None if problem is None else problem in found


@pytest.mark.parametrize("elements, heads, splits", [(16, 2, 64), (32, 40, 3), (16, 200, 1)])
def test_a_launch_fits_the_source(hopper, elements, heads, splits):
    vq_attention_cuda.vq_decode_attention_cuda(**staged_inputs(elements=elements, heads=heads))
    ((source, name, macros, _, shared), (grid, threads, *args)) = hopper[-1]
    macros = dict(macros)
    assert grid == (splits, heads, 1) and macros["CHANNELS"] == elements // 4

    # One argument for each parameter, of its size.
    signature = re.search(name + r"\((.*?)\)\s*\{", SOURCE, re.S)[1]
    parameters = [part.strip() for part in re.sub(r"//[^\n]*", "", signature).split(",")]
    sizes = {"int": 4, "float": 4, "u32": 4, "i64": 8}
    expected = [8 if "*" in text else sizes[text.split()[0]] for text in parameters]
    assert [ctypes.sizeof(arg) for arg in args] == expected

    # Shared memory as the source adds it up.
    values = dict(macros)
    for definition in re.finditer(r"^#define (\w+) (.*?)(?://.*)?$", SOURCE, re.M):
        values.setdefault(definition[1], definition[2].strip())

    def value(text):
        names = re.sub(r"[A-Z_]{2,}|\bC\b", lambda match: f"({value(str(values[match[0]]))})", text)
        return eval(names.replace("/", "//"))  # noqa: S307  our own source

    assert threads == 32 * value("WARPS")
    assert shared == value("SMEM_BYTES") <= 227 * 1024
