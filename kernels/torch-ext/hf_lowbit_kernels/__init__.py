"""Decode attention and encoding for vector-quantized KV caches that share one code across loop steps.

Plain PyTorch references on every device; on CUDA Triton kernels where triton is installed, and CUDA C++ on Hopper GPUs.
"""

from .damp_layout import DampLayout, DampPlan, ErrorFeedback, StochasticRounding
from .damp_ops import damp_backend, damp_pack, damp_unpack, damp_update
from .damp_reference import damp_update_reference
from .dependent_launch import overlapping_launches
from .elementwise_ops import elementwise_backend, norm_add_norm, rms_norm, rope_store, swiglu
from .elementwise_reference import (
    norm_add_norm_reference,
    rms_norm_reference,
    rope_store_reference,
    swiglu_reference,
)
from .few_rows import (
    few_rows_linear,
    few_rows_linear_reference,
    few_rows_swiglu,
    few_rows_swiglu_reference,
)
from .ops import attention_backend, group_major, vq_decode_attention, vq_encode
from .rope_copy import rope_copy, rope_copy_reference
from .rope_tables import RopeTables, build_rope_tables
from .vq_attention_cuda import entry_major
from .vq_attention_reference import vq_decode_attention_reference
from .vq_codes import half_norms, vq_decode
from .vq_decode_pages import vq_decode_pages, vq_decode_pages_reference
from .vq_encode_chunk import vq_encode_chunk, vq_encode_chunk_reference
from .vq_encode_pages import PageCoder, vq_encode_pages, vq_encode_pages_reference
from .vq_encode_reference import vq_encode_reference


__all__ = [
    "DampLayout",
    "DampPlan",
    "ErrorFeedback",
    "PageCoder",
    "RopeTables",
    "StochasticRounding",
    "attention_backend",
    "build_rope_tables",
    "damp_backend",
    "damp_pack",
    "damp_unpack",
    "damp_update",
    "damp_update_reference",
    "elementwise_backend",
    "entry_major",
    "few_rows_linear",
    "few_rows_linear_reference",
    "few_rows_swiglu",
    "few_rows_swiglu_reference",
    "group_major",
    "half_norms",
    "norm_add_norm",
    "norm_add_norm_reference",
    "overlapping_launches",
    "rms_norm",
    "rms_norm_reference",
    "rope_copy",
    "rope_copy_reference",
    "rope_store",
    "rope_store_reference",
    "swiglu",
    "swiglu_reference",
    "vq_decode",
    "vq_decode_attention",
    "vq_decode_attention_reference",
    "vq_decode_pages",
    "vq_decode_pages_reference",
    "vq_encode",
    "vq_encode_chunk",
    "vq_encode_chunk_reference",
    "vq_encode_pages",
    "vq_encode_pages_reference",
    "vq_encode_reference",
]
