"""Triton launches on the current device, so each operation must make its tensors' device that: shown without a GPU."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import ON_GPU
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_lowbit_kernels as kernels
from hf_lowbit_kernels import DampLayout, PageCoder, build_rope_tables


def tensor(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="cuda:1")


def index(*shape):
    return tensor(*shape, dtype=torch.int64)


TABLES = (2, 3, 2, 256, 4)  # T_c, H, NG, 256, c


def rope_store():
    token, table, store = tensor(2, 3, 8), tensor(2, 8), tensor(2, 3, 4, 8)
    kernels.rope_store(token, token, token, table, table, store, store, index(2), rotate_key=True)


def rope_copy():
    kernels.rope_copy(tensor(2, 3, 5, 8), tensor(1, 5, 8), tensor(1, 5, 8), tensor(2, 3, 5, 8))


def decode_pages():
    codes, table = tensor(2, 1, 3, 8, 2, dtype=torch.uint8), tensor(*TABLES[1:], dtype=torch.float16)
    out = tensor(2, 3, 8, 8)
    kernels.vq_decode_pages(codes, codes, table, table, tensor(1, 8, 8), tensor(1, 8, 8), out, out)


def encode_pages():
    coder = PageCoder(tensor(*TABLES, dtype=torch.float16), tensor(3, 2, 256), None)
    codes = tensor(2, 1, 4, 3, 8, 2, dtype=torch.uint8)
    kernels.vq_encode_pages(tensor(2, 2, 1, 3, 80, 8), codes, coder, coder, index(1), index(1), index(1, 8))


def attention():
    codes, table = tensor(2, 3, 3, 8, 2, dtype=torch.uint8), tensor(*TABLES[1:], dtype=torch.float16)
    window, counts = tensor(2, 3, 80, 8), tensor(2, dtype=torch.int32)
    rope = build_rope_tables(torch.ones(4), 100, offset=8, device="cuda:1")
    kernels.vq_decode_attention(
        tensor(2, 3, 8), codes, codes, table, table, window, window, counts, counts, rope, 1.0, max_coded=8
    )


def damp():
    layout = DampLayout(16, 40, 4)  # 40 columns: not for the CUDA kernel
    records, head, token = tensor(*layout.pool_shape(3, 2), dtype=torch.uint8), tensor(2, 2), tensor(2, 2, 16)
    plan = SimpleNamespace(heads=2, perm_k=tensor(2, 16), perm_v=tensor(2, 40))
    kernels.damp_update(records, index(2), token, token, tensor(2, 2, 40), head, head, plan, layout)


def norms():
    kernels.norm_add_norm(tensor(2, 8), tensor(8), tensor(2, 8), tensor(8), 1e-6)


# module that launches, launcher, a call
LAUNCHES = [
    ("ops", "vq_decode_attention_triton", attention),
    (
        "ops",
        "vq_encode_triton",
        lambda: kernels.vq_encode(tensor(2, 5, 3, 8), tensor(*TABLES).half(), tensor(3, 2, 256)),
    ),
    ("vq_encode_pages", "vq_encode_pages_triton", encode_pages),
    ("vq_decode_pages", "vq_decode_pages_triton", decode_pages),
    ("rope_copy", "rope_copy_triton", rope_copy),
    ("damp_ops", "damp_update_triton", damp),
    ("elementwise_ops", "rms_norm_triton", lambda: kernels.rms_norm(tensor(2, 8), tensor(8), 1e-6)),
    ("elementwise_ops", "norm_add_norm_triton", norms),
    ("elementwise_ops", "swiglu_triton", lambda: kernels.swiglu(tensor(2, 8), tensor(2, 8))),
    ("elementwise_ops", "rope_store_triton", rope_store),
    ("few_rows", "few_rows_linear_triton", lambda: kernels.few_rows_linear(tensor(1, 8), tensor(6, 8))),
    ("few_rows", "few_rows_swiglu_triton", lambda: kernels.few_rows_swiglu(tensor(1, 8), tensor(6, 8))),
]


@pytest.mark.skipif(ON_GPU, reason="a GPU answers for itself")
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize(("module", "launcher", "call"), LAUNCHES, ids=[name for _, name, _ in LAUNCHES])
def test_the_tensors_device_is_current_at_the_launch(module, launcher, call, current, monkeypatch):
    now, launches = [current], []

    class Device:
        """As torch.cuda.device."""

        def __init__(self, device):
            self.index = torch.device(device).index

        def __enter__(self):
            now.append(self.index)

        def __exit__(self, *_):
            now.pop()

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[-1])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    module = importlib.import_module(f"hf_lowbit_kernels.{module}")
    monkeypatch.setattr(module, launcher, lambda *args, **options: launches.append(now[-1]))
    with FakeTensorMode():  # tensors that have a device and no memory
        call()
    assert launches == [1] and now == [current]


def test_every_launcher_is_among_them():
    here = Path(kernels.__file__).parent
    found = {
        line.split("(")[0].removeprefix("def ")
        for path in here.glob("*_triton.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_triton")
    }
    assert found == {launcher for _, launcher, _ in LAUNCHES}
