"""Timing of the kernels against what PyTorch and flash-linear-attention offer: modules to import and to run (``-m``)."""
