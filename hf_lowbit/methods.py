"""The quantization methods, behind one interface: what quantizer, artifact, generation, cards and commands loop over."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .damp.method import Damp
from .loopvq.method import LoopVQ
from .protocols import Method


METHODS: dict[str, Method] = {method.name: method for method in (LoopVQ(), Damp())}


def check(model, method: Method) -> None:
    """Refuse a model that the method cannot serve, and name the method that can.

    Raises:
        TypeError, ValueError: what the method raised.
    """
    try:
        method.check(model)
    except TypeError as error:
        for other in METHODS.values():
            try:
                other.check(model)
            except (TypeError, ValueError):
                continue
            raise TypeError(f"{error} Method {other.name!r} works on this model.") from None
        raise


def methods_on(model) -> list[Method]:
    """The methods whose tables the model carries."""
    found = {type(module) for module in model.modules()}
    return [method for method in METHODS.values() if method.table_class in found]


def named_tables(model, method: Method) -> Iterator[tuple[str, nn.Module]]:
    """A method's table modules with their names in the model."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, method.table_class))


def detach(model) -> None:
    """Remove the tables of every method."""
    for method in METHODS.values():
        method.detach(model)
