"""``python -m hf_lowbit.cli``: the same as ``hf-lowbit``."""

from .main import main


raise SystemExit(main())
