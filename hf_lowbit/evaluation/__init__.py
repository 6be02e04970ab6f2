"""What a quantized cache costs: KL, top-1 agreement, divergence, accuracy, bytes and speed against the full cache."""

from .compare import METRICS, STATE_METRICS, evaluate
from .report import format_table, write_json


__all__ = ["METRICS", "STATE_METRICS", "evaluate", "format_table", "write_json"]
