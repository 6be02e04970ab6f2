"""``hf-lowbit bench``: one module per table, random weights of real shapes, nothing downloaded.

A table module has ``METHOD`` (how its numbers come about, kept in the JSON), ``MODELS`` (shapes it runs by default; empty
for tables of kernels) and ``run(report, options)``.
"""
