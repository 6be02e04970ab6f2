"""A capture without a GPU: records the operations of a step, and repeats them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hf_lowbit.graphs import StepGraphs


class Tape(TorchDispatchMode):
    """Records operations on tensors, and repeats them on the same tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            raise RuntimeError(f"{function} in a capture")
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        aliases = [value.alias_info for value in function._schema.returns]
        if all(alias is not None and not alias.is_write for alias in aliases):
            return out  # a view, which is one of the same memory at every replay
        self.calls.append((function, args, kwargs, None if aliases[0] is not None else out))
        return out

    def play(self):
        for function, args, kwargs, out in self.calls:
            new = function(*args, **kwargs)
            if out is not None:  # None: changed in place
                for old, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                    old.copy_(value)


class TapeGraphs(StepGraphs):
    """Captures and replays on the host: a replay repeats the recorded operations, and nothing of the model's Python."""

    captures = 0
    cache = None
    tape = None  # while something is captured

    def held(self):
        """Tensors that a step changes."""
        raise NotImplementedError

    def addresses(self):
        """Of all that a step reads or changes."""
        return [tensor.data_ptr() for tensor in self.held()]

    def _find_problem(self):
        return self._hook_problem()

    def _warm_up(self, embeds, forward):
        return forward(embeds)

    def _capture(self, forward):
        self.captures += 1
        held = list(self.held())
        before = [tensor.clone() for tensor in held]
        TapeGraphs.tape = tape = Tape()
        try:
            with tape:
                outputs = forward(self._embeds)
        finally:
            TapeGraphs.tape = None
            for tensor, value in zip(held, before, strict=True):  # a capture computes nothing
                tensor.copy_(value)
        addresses = self.addresses()

        def replay():
            assert self.addresses() == addresses
            tape.play()

        return replay, outputs


def record_as_one(monkeypatch, module, name):
    """The reference of a kernel reads numbers on the host; the kernel, which captured steps run, does not: one operation."""
    function = getattr(module, name)

    def recorded(*args, **kwargs):
        with _disable_current_modes():
            out = function(*args, **kwargs)
        if TapeGraphs.tape is not None:
            TapeGraphs.tape.calls.append((function, args, kwargs, out))
        return out

    monkeypatch.setattr(module, name, recorded)
