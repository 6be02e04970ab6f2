"""A capture without a GPU: records the operations of a step, and repeats them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
