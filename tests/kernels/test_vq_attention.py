"""`vq_decode_attention`: reference against an fp64 oracle, Triton against the reference."""

import pytest
import torch
from kernel_cases import (
    BASE,
    CASES,
    LARGE,
    ON_GPU,
    SMALL,
    assert_close,
    attention_inputs,
    attention_oracle,
    one_row,
    replace,
)  # fmt: skip

from hf_lowbit_kernels import attention_backend, build_rope_tables, vq_decode_attention


BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.triton)]
by_id = {"ids": lambda case: case.id}


@pytest.mark.parametrize("case", SMALL, **by_id)
def test_reference_matches_oracle(case, device):
    inputs = attention_inputs(case, device)
    out = vq_decode_attention(**inputs, backend="reference")
    assert out.dtype == case.dtype and out.shape == inputs["query"].shape
    assert_close("reference", out, attention_oracle(inputs), case.dtype)


@pytest.mark.triton
@pytest.mark.parametrize("case", CASES, **by_id)
def test_triton_matches_reference(case, device):
    inputs = attention_inputs(case, device)
    expected = vq_decode_attention(**inputs, backend="reference")
    out = vq_decode_attention(**inputs, backend="triton")
    assert out.dtype == case.dtype and out.shape == inputs["query"].shape
    assert_close("triton", out, expected, case.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE[-3:], **by_id)
def test_large_reference_matches_fp64_reference(case, device):
    inputs = attention_inputs(case, device)
    exact = vq_decode_attention(**dict(inputs, query=inputs["query"].double()), backend="reference")
    assert_close("fp32 reference", vq_decode_attention(**inputs, backend="reference"), exact, case.dtype)


def test_fp64_query_gives_an_oracle(device):
    inputs = attention_inputs(replace(BASE, lengths=(100,), heads=1), device)
    out = vq_decode_attention(**dict(inputs, query=inputs["query"].double()), backend="reference")
    torch.testing.assert_close(out.cpu(), torch.as_tensor(attention_oracle(inputs)), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_alone_equals_row_in_batch_bit_for_bit(backend, dtype, device):
    lengths = (4000, 300, 1000, 81, 3) if ON_GPU else (300, 100, 3)
    inputs = attention_inputs(replace(BASE, lengths=lengths, dtype=dtype), device)
    together = vq_decode_attention(**inputs, backend=backend)
    for row in range(len(lengths)):
        alone = vq_decode_attention(**one_row(inputs, row), backend=backend)
        assert torch.equal(together[row], alone[0]), f"row {row} of length {lengths[row]}"


@pytest.mark.triton
def test_max_coded_is_only_a_bound(device):
    inputs = attention_inputs(replace(BASE, lengths=(100,)), device)
    assert inputs["max_coded"] < 8 * inputs["k_codes"].shape[1]
    tight = vq_decode_attention(**inputs, backend="triton")
    loose = vq_decode_attention(**dict(inputs, max_coded=8 * inputs["k_codes"].shape[1]), backend="triton")
    assert torch.equal(tight, loose)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_pages_at_all(backend, device):
    inputs = attention_inputs(replace(BASE, lengths=(9, 80)), device)
    for name in ("k_codes", "v_codes"):
        inputs[name] = inputs[name][:, :0]
    out = vq_decode_attention(**dict(inputs, max_coded=0), backend=backend)
    assert_close(backend, out, attention_oracle(inputs), torch.float32)


@pytest.mark.gpu
def test_cuda_graph_replay_follows_new_lengths(device):
    inputs = attention_inputs(replace(BASE, lengths=(300, 100), dtype=torch.bfloat16), device)
    vq_decode_attention(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = vq_decode_attention(**inputs)
    inputs["n_coded"].copy_(torch.tensor([64, 24], dtype=torch.int32))
    inputs["lengths"].copy_(torch.tensor([72 + 40, 32 + 33], dtype=torch.int32))
    inputs["k_window"].nan_to_num_()
    inputs["v_window"].nan_to_num_()
    graph.replay()
    assert torch.equal(out, vq_decode_attention(**inputs))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"max_coded": 10**6}, "allocate more pages"),
        ({"sinks": 4}, "build it with offset=4"),
        ({"num_splits": 0}, "num_splits must be at least 1"),
        ({"backend": "cuda"}, "backend must be"),
        ({"lengths": torch.tensor([1])}, "lengths must be contiguous int32"),
        ({"k_codes": torch.zeros(2, 1, 2, 8, 4, dtype=torch.uint8)}, r"k_codes has .* expected \[2, P, 2, 8, 16\]"),
        ({"k_table": torch.zeros(2, 16, 256, 4)}, "k_table must be contiguous torch.float16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_say_what_to_do(change, message):
    inputs = attention_inputs(BASE, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        vq_decode_attention(**{"backend": "reference", **inputs, **change})


def test_attention_backend_gives_a_reason(device):
    name, reason = attention_backend("cpu", 128, 1, torch.bfloat16)
    assert name == "reference" and reason
    name, reason = attention_backend(device, 128, 1, torch.float64)
    assert name == "reference" and reason


@pytest.mark.parametrize("tile", [8, 32, 128])
@pytest.mark.parametrize("offset", [0, 4, 8])
def test_rope_tables_compose_to_the_exact_angle(tile, offset):
    inv_freq = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    rope = build_rope_tables(inv_freq, 100_000, tile, offset, attention_scaling=1.5)
    positions = torch.tensor([0, 1, offset, offset + 1, offset + tile - 1, offset + tile, 99_999])
    assert (offset + rope.shift) % tile == 0 and rope.max_position >= 100_000
    base, step = (positions + rope.shift) // tile, (positions + rope.shift) % tile
    bases = torch.complex(rope.base_cos, rope.base_sin)
    composed = bases[base] * torch.complex(rope.offset_cos, rope.offset_sin)[step]
    cos, sin = rope.cos_sin(positions, torch.float64)
    exact_angle = positions.double()[:, None] * inv_freq.double()
    torch.testing.assert_close(cos, 1.5 * exact_angle.cos(), rtol=0, atol=1e-12)
    torch.testing.assert_close(composed.real.double(), cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(composed.imag.double(), sin, rtol=0, atol=1e-6)


def test_rope_tables_grow_without_recomputing():
    inv_freq = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    short = build_rope_tables(inv_freq, 100)
    assert short.grow(50) is short
    grown = short.grow(short.max_position + 1)
    assert grown.max_position >= 2 * short.max_position
    whole = build_rope_tables(inv_freq, grown.max_position)
    assert torch.equal(grown.base_cos, whole.base_cos) and torch.equal(grown.base_sin, whole.base_sin)
