"""Changing what an object of one of transformers' own classes does, by a subclass with the same name and module.

The object stays what it was for ``isinstance``, for ``save_pretrained``, for pickles and copies, and for whoever looks
its class up by name.
"""

from __future__ import annotations

import functools
from typing import Any


def mix_in(instance: Any, mixin: type) -> None:
    """Put ``mixin`` before the class of ``instance``; nothing if it is there already."""
    if not isinstance(instance, mixin):
        _turn(instance, _mixed(type(instance), mixin))


def take_out(instance: Any, mixin: type) -> None:
    """Undo :func:`mix_in`; nothing if ``mixin`` is not what it put there."""
    if getattr(type(instance), "_lowbit_mixin", None) is mixin:
        _turn(instance, type(instance)._class_without_lowbit)


def _turn(instance: Any, cls: type) -> None:
    instance.__class__ = cls
    if "_old_forward" in vars(instance):  # accelerate's hooks (device maps) go on to the forward that they found
        instance._old_forward = cls.forward.__get__(instance)


@functools.cache
def _mixed(stock: type, mixin: type) -> type:
    body = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": _reduce_mixed,
        "_class_without_lowbit": stock,
        "_lowbit_mixin": mixin,
    }
    return type(stock.__name__, (mixin, stock), body)


def _reduce_mixed(self, protocol):
    # Pickle would look the class up by its name and find transformers' own.
    stock, mixin = self._class_without_lowbit, self._lowbit_mixin
    state = super(_mixed(stock, mixin), self).__reduce_ex__(max(2, protocol))
    return (_new_mixed, (stock, mixin), *state[2:])


def _new_mixed(stock: type, mixin: type):
    cls = _mixed(stock, mixin)
    return cls.__new__(cls)
