"""`vq_decode_attention`: reference against an fp64 oracle, Triton against the reference."""

import pytest
import torch
from kernel_cases import (
    BASE,
    BORDERS,
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

from hf_lowbit_kernels import attention_backend, build_rope_tables, entry_major, group_major, vq_decode_attention


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


def in_cuda_layouts(inputs):
    """Codes and tables as the CUDA kernel reads them."""
    codes = {name: group_major(inputs[name]) for name in ("k_codes", "v_codes")}
    return dict(inputs, **codes, **{name: entry_major(inputs[name]) for name in ("k_table", "v_table")})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head_dim, elements", [(128, 16), (96, 32)])
def test_group_major_codes_give_the_same_bits(backend, head_dim, elements, device):
    inputs = attention_inputs(replace(BASE, head_dim=head_dim, elements=elements), device)
    grouped = dict(inputs, **{name: group_major(inputs[name]) for name in ("k_codes", "v_codes")})
    assert grouped["k_codes"].stride() != inputs["k_codes"].stride()
    expected = vq_decode_attention(**inputs, backend=backend)
    assert torch.equal(vq_decode_attention(**grouped, backend=backend), expected)
    assert (
        torch.equal(vq_decode_attention(**in_cuda_layouts(inputs), backend="reference"), expected)
        or backend != "reference"
    )


def test_cuda_kernel_is_refused_where_it_cannot_run(device):
    inputs = attention_inputs(BASE, device)  # head_dim 64
    with pytest.raises(ValueError, match='backend="cuda" is not possible'):
        vq_decode_attention(**in_cuda_layouts(inputs), backend="cuda")


CUDA_BASE = replace(BASE, head_dim=128, dtype=torch.bfloat16)
CUDA_CASES = [
    replace(CUDA_BASE, dtype=dtype, elements=elements, **changes)
    for elements in (16, 32)
    for dtype in (torch.bfloat16, torch.float16)
    for changes in (
        {"lengths": BORDERS},
        {"lengths": (0, 81, 5, 4099)},
        {"lengths": (8 + 72, 8 + 72 + 1, 8 + 2 * 72 + 1, 8 + 3 * 72 + 5, 32768), "heads": 16},
        {"lengths": tuple(range(60, 1200, 31)), "heads": 5},
        {"lengths": (5000, 700), "splits": 1},
        {"lengths": (5000, 700), "splits": 3, "frequency": 500.0, "scaling": 1.25},
    )
]


def needs_cuda_kernel(inputs):
    query, table = inputs["query"], inputs["k_table"]
    name, reason = attention_backend(query.device, query.shape[-1], 1, query.dtype, table.shape[-1])
    if name != "cuda":
        pytest.skip(f"the CUDA kernel does not run here: {reason}")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUDA_CASES, **by_id)
def test_cuda_matches_reference(case, device):
    inputs = attention_inputs(case, device)
    needs_cuda_kernel(inputs)
    exact = vq_decode_attention(**dict(inputs, query=inputs["query"].double()), backend="reference")
    out = vq_decode_attention(**in_cuda_layouts(inputs), backend="cuda").double()
    assert torch.isfinite(out).all()
    # The kernel's packed fp16 arithmetic is good to 2^-11 a step, bf16 attention to 2^-9: the sum of squares of 128
    # channels keeps it below bf16's own rounding.
    assert (out - exact).norm() < 3e-3 * exact.norm()
    for row in range(len(case.lengths)):
        assert (out[row] - exact[row]).abs().max() <= 2.0**-7 * max(1.0, float(exact[row].abs().max()))


TURNS = {  # how rows come to the twelve warps of a block
    "a warp or a few for each": (4000, 300, 1000, 81, 3, 2000, 77),
    "most of them one": (3300, 4000, 8000, 3200, 7000, 5000, 3150, 7500, 90),
    "two for each": (6144,) * 6,
    "three for each, as many parts as there is room for": (9000,) * 4,
    "no room: all for each in turn": (9000,) * 5,
    "nearly all for one": (20000, 100),
    "in turn, and all for a long one": (30000, *range(500, 900, 30)),
    "in turn, then two for each": (3000,) * 17,
    "in turn, then nothing to do": (2500,) * 13 + (5,),
}


@pytest.mark.gpu
@pytest.mark.parametrize("elements", [16, 32])
@pytest.mark.parametrize("lengths", TURNS.values(), ids=TURNS.keys())
def test_cuda_row_alone_equals_row_in_batch_bit_for_bit(lengths, elements, device):
    # A row alone is shared by all warps of a block; in a batch by as many as there are for it, or by none.
    case = replace(CUDA_BASE, lengths=lengths, elements=elements, heads=16)
    inputs = attention_inputs(case, device)
    needs_cuda_kernel(inputs)
    together = vq_decode_attention(**in_cuda_layouts(inputs), backend="cuda")
    for row in range(len(case.lengths)):
        alone = vq_decode_attention(**in_cuda_layouts(one_row(inputs, row)), backend="cuda")
        assert torch.equal(together[row], alone[0]), f"row {row} of length {case.lengths[row]}"


@pytest.mark.gpu
def test_cuda_kernel_in_a_cuda_graph_and_as_the_default(device):
    inputs = in_cuda_layouts(attention_inputs(replace(CUDA_BASE, lengths=(3000, 500)), device))
    needs_cuda_kernel(inputs)
    expected = vq_decode_attention(**inputs, backend="cuda")
    assert torch.equal(vq_decode_attention(**inputs), expected)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = vq_decode_attention(**inputs, backend="cuda")
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


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
        ({"backend": "cublas"}, "backend must be"),
        ({"lengths": torch.tensor([1])}, "lengths must be contiguous int32"),
        ({"k_codes": torch.zeros(2, 1, 2, 8, 4, dtype=torch.uint8)}, r"k_codes has .* expected \[2, P, 2, 8, 16\]"),
        ({"k_table": torch.zeros(2, 16, 256, 4)}, "k_table must be torch.float16, contiguous or entry-major"),
        ({"v_table": torch.zeros(2, 8, 256, 8)}, r"the shape of v_table, which is \(2, 8, 256, 8\)"),
        ({"n_coded": torch.ones(2, dtype=torch.int32, device="meta")}, "n_coded is on meta and query on cpu"),
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
