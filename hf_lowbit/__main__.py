"""``python -m hf_lowbit``: the same as ``hf-lowbit``."""

from .cli.main import main


raise SystemExit(main())
