"""CUDA C++ kernels compiled at first use by NVRTC, the compiler library that every CUDA build of PyTorch brings along.

No CUDA toolkit, no headers and no build step are needed; sources therefore include nothing. Compiled modules are kept
per (source, macros, device) for the life of the process.
"""

import ctypes
import functools
import glob
import os
import sys

import torch


class CudaError(RuntimeError):
    """NVRTC or the CUDA driver refused; the message holds its text."""


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """NVRTC and the driver.

    Raises:
        CudaError: one of them cannot be loaded.
    """
    major = (torch.version.cuda or "0").split(".")[0]
    # torch's wheels put NVRTC beside torch, where the loader looks only once torch has loaded it itself.
    beside = os.path.join(
        os.path.dirname(os.path.dirname(torch.__file__)), "nvidia", "*", "lib", f"libnvrtc.so.{major}*"
    )
    names = [f"libnvrtc.so.{major}", *sorted(glob.glob(beside)), "libnvrtc.so"]
    if sys.platform != "linux":
        raise CudaError("CUDA C++ kernels are loaded on Linux only")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the CUDA driver cannot be loaded: {error}") from None
    for name in names:
        try:
            return ctypes.CDLL(name), driver
        except OSError:
            continue
    raise CudaError(f"NVRTC cannot be loaded; tried {', '.join(names)}")


def cuda_problem() -> str | None:
    """Why no CUDA C++ kernel can be built here, or None."""
    if not torch.version.cuda:
        return "this PyTorch has no CUDA"
    try:
        _libraries()
    except CudaError as error:
        return str(error)
    return None


class CudaKernel:
    """A kernel on one device; calls launch it on that device's current stream."""

    def __init__(self, function: ctypes.c_void_p, shared_bytes: int, device: int):
        self._function = function
        self._shared_bytes = shared_bytes
        self._device = device

    def __call__(
        self, grid: tuple[int, int, int], threads: int, *args: ctypes._SimpleCData, overlap: bool = False
    ) -> None:
        """Launch.

        Args:
            grid: blocks.
            threads: per block.
            *args: ctypes values in the order of the kernel's parameters; pointers as ``c_void_p``.
            overlap: begin before the kernel ahead has ended; the kernel must wait for it by itself
                (:mod:`.dependent_launch`).

        Raises:
            CudaError: the launch was refused.
        """
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):  # the driver launches in the current device's context
                return self(grid, threads, *args, overlap=overlap)
        pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        config = _LaunchConfig(*grid, threads, 1, 1, self._shared_bytes, stream, _OVERLAPPING, int(overlap))
        _check_driver(_libraries()[1].cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))


_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, four bytes of padding, a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


_OVERLAPPING = ctypes.pointer(_LaunchAttribute(id=_STREAM_SERIALIZATION, value=(ctypes.c_int * 16)(1)))


@functools.cache
def load_kernel(
    source_file: str,
    name: str,
    macros: tuple[tuple[str, int], ...],
    device: int,
    shared_bytes: int,
    this_architecture_only: bool = False,
) -> CudaKernel:
    """Compile (once) and load a kernel for one device.

    Args:
        source_file: path of a CUDA C++ file without includes.
        name: of an ``extern "C"`` kernel in it.
        macros: ``-D`` definitions.
        device: CUDA device index.
        shared_bytes: dynamic shared memory of every launch.
        this_architecture_only: it uses what later architectures lack (wgmma).

    Raises:
        CudaError: the source does not compile (the message holds the compiler's log), or the driver refuses it.
    """
    nvrtc, driver = _libraries()
    with open(source_file, "rb") as file:
        source = file.read()
    major, minor = torch.cuda.get_device_capability(device)
    target = f"sm_{major}{minor}{'a' if this_architecture_only else ''}"
    options = [f"--gpu-architecture={target}", "--std=c++17", *(f"-D{key}={value}" for key, value in macros)]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    program = ctypes.c_void_p()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None))
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), array):
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"{os.path.basename(source_file)} does not compile:\n{log.value.decode(errors='replace')}")
        size = ctypes.c_size_t()
        _check_nvrtc(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc.nvrtcGetCUBIN(program, binary))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes torch's context the current one
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check_driver(driver.cuModuleLoadData(ctypes.byref(module), binary))
        _check_driver(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        max_dynamic_shared_size = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check_driver(driver.cuFuncSetAttribute(function, max_dynamic_shared_size, shared_bytes))
    return CudaKernel(function, shared_bytes, device)


def _check_nvrtc(code: int) -> None:
    if code:
        get = _libraries()[0].nvrtcGetErrorString
        get.restype = ctypes.c_char_p
        raise CudaError(f"NVRTC: {get(code).decode()}")


def _check_driver(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _libraries()[1].cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"CUDA driver: {text.value.decode() if text.value else code}")
