"""hf_lowbit: caches in very few bits for Hugging Face transformers.

Importing the package registers the native looped models (Ouro) and the ``lowbit`` quantization method, so that
``AutoModelForCausalLM.from_pretrained`` loads calibrated checkpoints.
"""

from . import models as _models  # noqa: F401  registers the native models
from .artifact import assert_quantized
from .config import DAMPConfig, LoopVQConfig, LowBitConfig
from .damp.cache import DAMPStateCache
from .hybrid import HybridCache
from .loopvq.cache import LoopVQCache
from .quantizer import LowBitQuantizer, calibrate


__version__ = "0.1.0"

__all__ = [
    "DAMPConfig",
    "DAMPStateCache",
    "HybridCache",
    "LoopVQCache",
    "LoopVQConfig",
    "LowBitConfig",
    "LowBitQuantizer",
    "assert_quantized",
    "calibrate",
]
