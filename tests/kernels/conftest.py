"""Kernel tests run on the GPU if there is one, else in Triton's interpreter on the CPU."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch


ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
HAS_TRITON = importlib.util.find_spec("triton") is not None

if importlib.util.find_spec("hf_lowbit_kernels") is None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "kernels" / "torch-ext"))


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "triton: needs triton (interpreted on the CPU without a CUDA device)")


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in (item for item in items if here in item.path.parents):
        if not ON_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if not HAS_TRITON and item.get_closest_marker("triton"):
            item.add_marker(pytest.mark.skip(reason="triton is not installed"))


def _let_interpreter_loop_over_loaded_bounds():
    """Triton 3.6's interpreter calls int() on one-element arrays, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _round_fma_once_in_the_interpreter():
    """Triton's interpreter rounds the product of an fp32 fma; hardware does not, and quotients in kernels rely on it."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fma(self, x, y, z):
        with np.errstate(all="ignore"):  # also on values that a tl.where discards
            exact = x.data.astype(np.float64) * y.data + z.data
            return TensorHandle(exact.astype(x.data.dtype), z.dtype.scalar)

    InterpreterBuilder.create_fma = create_fma


def _round_to_bf16_in_the_interpreter():
    """Triton's interpreter cuts fp32 off where it becomes bf16; hardware rounds to nearest, ties to even."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.cast_impl

    def cast_impl(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return original(self, src, dst_type)
        rounded = torch.tensor(src.data).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
        return TensorHandle(rounded, dst_type.scalar)

    InterpreterBuilder.cast_impl = cast_impl


if HAS_TRITON and not ON_GPU:
    _round_to_bf16_in_the_interpreter()
    _let_interpreter_loop_over_loaded_bounds()
    _round_fma_once_in_the_interpreter()


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fill torch.empty with NaN (0xFF bytes for integers), so that a read of unwritten memory shows at once."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(tensor):
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))


@pytest.fixture(autouse=True)
def no_remembered_capability():
    """Some tests replace what PyTorch says of a device."""
    from hf_lowbit_kernels import on_device

    on_device.capability.cache_clear()
    yield
    on_device.capability.cache_clear()
