"""Errors that callers may want to tell apart."""


class FallbackError(RuntimeError):
    """``strict=True``, and the fast path cannot run here; the message says why."""
