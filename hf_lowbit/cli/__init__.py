"""Command line: ``hf-lowbit COMMAND`` and, through optimum's namespace, ``optimum-cli lowbit COMMAND``.

One module per command, each with ``NAME``, ``HELP``, ``add_arguments(parser)`` and ``run(args)``. Nothing heavy is
imported before ``run``.
"""
