"""Overlapping launches: who asks for them, and what the driver is told."""

import contextlib
import ctypes

import pytest
import torch
from kernel_cases import ON_GPU

from hf_lowbit_kernels import cuda_module, overlapping_launches
from hf_lowbit_kernels.dependent_launch import overlap_options, overlaps


def triton_knows_them():
    try:
        from triton.language.extra.cuda import gdc_wait  # noqa: F401
    except ImportError:
        return False
    return torch.version.hip is None


def test_only_inside_and_only_where_devices_know_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 0 else (8, 0))
    hopper, ampere = torch.device("cuda", 0), torch.device("cuda", 1)
    from hf_lowbit_kernels import dependent_launch

    dependent_launch._possible.cache_clear()
    try:
        assert not overlaps(hopper)
        with overlapping_launches():
            possible = overlaps(hopper)
            assert possible == triton_knows_them()
            with overlapping_launches():
                pass
            assert overlaps(hopper) == possible  # leaving the inner one does not end the outer one
            assert not overlaps(ampere) and not overlaps(torch.device("cpu"))
            assert overlap_options(ampere) == {"OVERLAP": False}
            if possible:
                assert overlap_options(hopper) == {"OVERLAP": True, "launch_pdl": True}
        assert not overlaps(hopper)
        with pytest.raises(RuntimeError), overlapping_launches():
            raise RuntimeError
        assert not overlaps(hopper)
    finally:
        dependent_launch._possible.cache_clear()


def test_launch_structures_are_those_of_cuda_h():
    assert ctypes.sizeof(cuda_module._LaunchConfig) == 56 and cuda_module._LaunchConfig.stream.offset == 32
    assert ctypes.sizeof(cuda_module._LaunchAttribute) == 72 and cuda_module._LaunchAttribute.value.offset == 8


class Driver:
    """Notes what it is asked to launch."""

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        config = config._obj
        self.attributes = [(config.attributes[i].id, config.attributes[i].value[0]) for i in range(config.count)]
        self.grid = (config.grid_x, config.grid_y, config.grid_z)
        self.rest = (config.block_x, config.block_y, config.block_z, config.shared, config.stream)
        self.argument = ctypes.cast(pointers[0], ctypes.POINTER(ctypes.c_int))[0]
        return 0


@pytest.mark.skipif(ON_GPU, reason="replaces parts of torch.cuda")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_launch_says_what_it_was_told(overlap, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(cuda_module, "_libraries", lambda: (None, driver))
    current = [1]

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda index: type("Stream", (), {"cuda_stream": 77 if current == [index] else 0})(),
    )
    kernel = cuda_module.CudaKernel(ctypes.c_void_p(1), 1000, 0)
    kernel((3, 2, 1), 96, ctypes.c_int(42), overlap=overlap)
    assert driver.grid == (3, 2, 1) and driver.rest == (96, 1, 1, 1000, 77) and driver.argument == 42
    assert driver.attributes == ([(6, 1)] if overlap else [])
    assert current == [1]
