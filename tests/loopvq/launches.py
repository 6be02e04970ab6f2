"""Counts what a GPU would have to launch: every PyTorch operation that computes, and every kernel of ours as one."""

from torch.utils._python_dispatch import TorchDispatchMode

from hf_lowbit.loopvq import cache as cache_module
from hf_lowbit.loopvq import codebook as codebook_module
from hf_lowbit.loopvq import prefill_attention as prefill_module
from hf_lowbit.models.ouro import fused as fused_module
from hf_lowbit_kernels import elementwise_ops, few_rows


KERNELS = {
    elementwise_ops: ("rms_norm", "norm_add_norm", "swiglu", "rope_store"),
    few_rows: ("few_rows_linear", "few_rows_swiglu"),
}
NOT_LAUNCHED = ("empty", "detach", "alias", "lift_fresh", "_unsafe_view")


class Launches(TorchDispatchMode):
    """Names of everything launched while active, in order."""

    def __init__(self):
        super().__init__()
        self.names = []
        self._active = self._inside = False

    def __enter__(self):
        self._active = True
        return super().__enter__()

    def __exit__(self, *args):
        self._active = False
        return super().__exit__(*args)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not self._inside and not func.is_view and not name.startswith(NOT_LAUNCHED):
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def kernel(self, name, function):
        """``function`` as one launch."""

        def run(*args, **kwargs):
            if self._active:
                self.names.append(name)
            self._inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False

        return run


def count_as_on_a_gpu(monkeypatch) -> Launches:
    """From here on "auto" means the kernels, played by their references."""
    launches = Launches()
    for module, names in KERNELS.items():
        for name in names:
            reference = getattr(module, f"{name}_reference")
            monkeypatch.setattr(module, f"{name}_triton", launches.kernel(name, reference))
    for module in (elementwise_ops, fused_module):
        monkeypatch.setattr(module, "elementwise_backend", lambda *sizes: ("triton", "as on a GPU"))
    ours = {
        cache_module: ("vq_decode_attention",),
        codebook_module: ("vq_encode_chunk", "vq_encode_pages", "encode"),
        prefill_module: ("rope_copy", "vq_decode_pages"),
    }
    for module, name in ((module, name) for module, names in ours.items() for name in names):
        monkeypatch.setattr(module, name, launches.kernel(name, getattr(module, name)))
    return launches
