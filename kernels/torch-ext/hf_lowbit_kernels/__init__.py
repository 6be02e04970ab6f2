"""Decode attention and encoding for vector-quantized KV caches that share one code across loop steps.

Plain PyTorch references on every device; Triton kernels on CUDA when triton is installed.
"""

from .ops import attention_backend, vq_decode_attention, vq_encode
from .rope_tables import RopeTables, build_rope_tables
from .vq_attention_reference import vq_decode_attention_reference
from .vq_codes import half_norms, vq_decode
from .vq_encode_reference import vq_encode_reference


__all__ = [
    "RopeTables",
    "attention_backend",
    "build_rope_tables",
    "half_norms",
    "vq_decode",
    "vq_decode_attention",
    "vq_decode_attention_reference",
    "vq_encode",
    "vq_encode_reference",
]
