"""Errors that callers may want to tell apart."""


class FallbackError(RuntimeError):
    """``strict=True``, and the fast path cannot run here; the message says why."""


# Why caches of recurrent layers refuse to crop, whatever their states are stored as.
NO_CROP = (
    "a cache with recurrent states cannot drop tokens: a state holds the whole past in one matrix, and earlier states are not "
    "kept. Assisted generation and prompt look-up need that and do not work with recurrent models; for anything else, "
    "deepcopy the cache before the tokens in question, or reset() it and prefill again."
)
