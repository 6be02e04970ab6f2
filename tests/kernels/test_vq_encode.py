"""`vq_encode`, `vq_decode` and `half_norms`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import ON_GPU

import hf_lowbit_kernels
from hf_lowbit_kernels import half_norms, vq_decode, vq_encode, vq_encode_reference


HOPPER = ON_GPU and torch.version.cuda is not None and torch.cuda.get_device_capability()[0] == 9
BACKENDS = [
    "reference",
    pytest.param("triton", marks=pytest.mark.triton),
    pytest.param("cuda", marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")),
]
# Relative to the sum of all terms of a score: fp32 sums, and, in the CUDA kernel, entries in two bf16 parts (2^-18 each).
SCORE_SUM = 4e-6
# tokens, heads, head_dim, T_c, G, dtype
SHAPES = [
    (5, 2, 64, 4, 16, torch.bfloat16),
    (16, 1, 64, 4, 32, torch.float16),
    (17, 2, 96, 2, 16, torch.float32),
    (70, 1, 64, 1, 8, torch.float32),
    (8, 1, 128, 1, 32, torch.bfloat16),
    (1, 2, 32, 4, 4, torch.float32),
    (33, 2, 32, 4, 4, torch.bfloat16),
    (67, 2, 36, 4, 16, torch.bfloat16),
    (65, 1, 32, 2, 8, torch.float16),
    (35, 1, 64, 2, 32, torch.bfloat16),
    (19, 1, 32, 8, 16, torch.bfloat16),
    (3, 1, 64, 2, 32, torch.float16),
    (0, 2, 64, 4, 16, torch.float32),
]
if ON_GPU:
    SHAPES += [
        (2048, 16, 128, 4, 16, torch.bfloat16),
        (2048, 16, 128, 4, 32, torch.bfloat16),
        (1001, 5, 128, 4, 16, torch.float16),
        (777, 4, 128, 4, 32, torch.float32),
    ]


def shape_id(shape):
    return "n{}-h{}-d{}-t{}-g{}-{}".format(*shape[:5], str(shape[5]).removeprefix("torch."))


def problem(shape, device, integers=False):
    """Vectors (a strided view) and tables. Integers give exact sums and many exact ties."""
    tokens, heads, dim, steps, elements, dtype = shape
    generator = torch.Generator().manual_seed(tokens + 31 * dim + elements)
    channels = elements // steps

    def draw(*size):
        if integers:
            return torch.randint(-2, 3, size, generator=generator).float()
        return torch.randn(size, generator=generator)

    vectors = draw(tokens, steps, heads, dim).to(dtype).to(device).transpose(0, 1)
    tables = draw(steps, heads, dim // channels, 256, channels).half().to(device)
    return vectors, tables


def weights(shape, device):
    """A metric of fp16 values, 0.01 to 4, and the norms of tables under it."""
    _, heads, dim, steps, *_ = shape
    metric = torch.rand(steps, heads, dim, generator=torch.Generator().manual_seed(dim)) * 4 + 0.01
    return metric.half().float().to(device)


def weighted_norms(tables, metric):
    parts = metric.unflatten(-1, (tables.shape[2], -1)).unsqueeze(-2)
    return 0.5 * (tables.float().square() * parts).sum(dim=(0, -1))


def runs(backend, shape):
    """Skip what the CUDA kernel is not for."""
    if backend == "cuda" and (shape[5] == torch.float32 or shape[4] == 4):
        pytest.skip("the CUDA kernel is for 16-bit vectors of 8, 16 or 32 coordinates")


def oracle_scores(vectors, tables, norms, metric=None):
    """fp64 ``[N, H, NG, 256]``."""
    x, e = vectors.double(), tables.double()
    if metric is not None:
        x = x * metric.double().unsqueeze(1)
    steps, tokens, heads, _ = x.shape
    groups, _, c = e.shape[2:]
    scores = torch.empty(tokens, heads, groups, 256, dtype=torch.float64, device=x.device)
    for h in range(heads):
        for g in range(groups):
            scores[:, h, g] = sum(x[m, :, h, g * c : (g + 1) * c] @ e[m, h, g].T for m in range(steps))
    return scores - norms.double()


def assert_nearest(codes, vectors, tables, norms, metric=None):
    """No other entry scores better by more than what sums in fp32 may lose."""
    assert codes.dtype == torch.uint8 and codes.shape == (*vectors.shape[1:3], tables.shape[2])
    scores = oracle_scores(vectors, tables, norms, metric)
    terms = oracle_scores(vectors.abs(), tables.abs(), -norms, metric).amax(-1)
    chosen = scores.gather(-1, codes.long().unsqueeze(-1))[..., 0]
    assert (chosen >= scores.amax(-1) - SCORE_SUM * terms).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "metric"])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_code_is_the_nearest_entry(shape, weighted, backend, device):
    runs(backend, shape)
    vectors, tables = problem(shape, device)
    metric = weights(shape, device) if weighted else None
    norms = weighted_norms(tables, metric) if weighted else half_norms(tables)
    assert_nearest(vq_encode(vectors, tables, norms, metric, backend=backend), vectors, tables, norms, metric)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("elements", [8, 16, 32])
def test_vectors_lie_anywhere(elements, dtype, backend, device):
    """Strides of every kind, an odd first address, tables of any size: the same codes as of contiguous vectors."""
    shape = (21, 2, 32, 4, elements, dtype)
    vectors, tables = problem(shape, device)
    metric = weights(shape, device)
    for scale in (1, 2.0**-10, 2.0**6):
        scaled, norms = tables * scale, weighted_norms(tables * scale, metric)
        expected = vq_encode(vectors.contiguous(), scaled, norms, metric, backend=backend)
        assert_nearest(expected, vectors, scaled, norms, metric)
        for other in (
            vectors,
            vectors.transpose(2, 3).contiguous().transpose(2, 3),
            torch.cat([vectors[..., :1], vectors], dim=-1)[..., 1:],
            vectors.repeat_interleave(2, dim=1)[:, ::2],
        ):
            assert torch.equal(vq_encode(other, scaled, norms, metric, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "metric"])
@pytest.mark.parametrize("shape", SHAPES[:4] + SHAPES[7:9], ids=shape_id)
def test_ties_take_the_lowest_entry(shape, weighted, backend, device):
    runs(backend, shape)
    vectors, tables = problem(shape, device, integers=True)
    metric = weights(shape, device).ceil() if weighted else None
    norms = weighted_norms(tables, metric) if weighted else half_norms(tables)
    scores = oracle_scores(vectors, tables, norms, metric)
    ties = (scores == scores.amax(-1, keepdim=True)).sum(-1)
    assert (ties > 1).any(), "the case should contain ties"
    codes = vq_encode(vectors, tables, norms, metric, backend=backend)
    lowest = torch.where(scores == scores.amax(-1, keepdim=True), torch.arange(256, device=device), 256).amin(-1)
    assert torch.equal(codes.long(), lowest)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps, elements", [(1, 16), (2, 8), (4, 16), (4, 32)])
def test_an_entry_encodes_to_itself(steps, elements, backend, device):
    _, tables = problem((0, 2, 64, steps, elements, torch.float16), device)
    codes = torch.arange(256, device=device, dtype=torch.uint8)[:, None, None].expand(256, 2, tables.shape[2])
    vectors = torch.stack([vq_decode(codes, table) for table in tables])
    assert torch.equal(vq_encode(vectors, tables, half_norms(tables), backend=backend), codes)


def test_reference_does_not_depend_on_its_chunk_size(monkeypatch, device):
    vectors, tables = problem((70, 2, 64, 4, 16, torch.float32), device, integers=True)
    whole = vq_encode_reference(vectors, tables, half_norms(tables))
    module = sys.modules[vq_encode_reference.__module__]
    monkeypatch.setattr(module, "SCORE_BYTES", 4 * 2 * 16 * 256 * 9)
    assert torch.equal(vq_encode_reference(vectors, tables, half_norms(tables)), whole)


def test_decode_and_half_norms_match_their_definition(device):
    _, tables = problem((0, 2, 32, 4, 16, torch.float16), device)
    codes = torch.randint(0, 256, (3, 5, 2, 8), dtype=torch.uint8, device=device)
    out = vq_decode(codes, tables[1])
    assert out.dtype == torch.float16 and out.shape == (3, 5, 2, 32)
    assert torch.equal(out[2, 4, 1, 12:16], tables[1, 1, 3, int(codes[2, 4, 1, 3])])
    every = torch.arange(8, device=device)
    for table in (tables[1], tables[1].double(), tables[1, ..., :3]):  # entries of any size, wherever they lie
        found = vq_decode(codes.transpose(0, 1), table).unflatten(-1, (8, -1))
        assert found.dtype == table.dtype
        for head in range(2):
            assert torch.equal(found[..., head, :, :], table[head, every, codes.transpose(0, 1)[..., head, :].long()])
    joint = tables[:, 1, 3, 77].double()
    torch.testing.assert_close(half_norms(tables)[1, 3, 77].double(), 0.5 * joint.square().sum(), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="pass the table of the same layer"):
        vq_decode(codes[..., :4], tables[1])


def test_errors_say_what_is_allowed():
    vectors, tables = problem((3, 2, 64, 4, 16, torch.float32), torch.device("cpu"))
    norms = half_norms(tables)
    with pytest.raises(ValueError, match="tables have shape"):
        vq_encode(vectors[:2], tables, norms)
    with pytest.raises(ValueError, match=r"T_c \* c in \(4, 8, 16, 32\)"):
        vq_encode(vectors[:1], tables[:1, :, :, :, :2].repeat(1, 1, 2, 1, 1).contiguous(), norms)
    with pytest.raises(ValueError, match="half_norms"):
        vq_encode(vectors, tables, norms[:1])
    with pytest.raises(ValueError, match="metric has shape"):
        vq_encode(vectors, tables, norms, torch.ones(4, 2, 32))
    for metric in (torch.ones(4, 2, 64).half(), torch.ones(4, 64, 2).transpose(1, 2)):
        with pytest.raises(ValueError, match=f"metric .*{metric.dtype}, strides .*contiguous torch.float32"):
            vq_encode(vectors, tables, norms, metric)
    for wrong in ((vectors, tables.to("meta"), norms), (vectors, tables, norms, torch.ones(4, 2, 64, device="meta"))):
        with pytest.raises(ValueError, match="is on meta and vectors on cpu; move both to one device"):
            vq_encode(*wrong)
    with pytest.raises(ValueError, match="vectors has shape .* torch.int32"):
        vq_encode(vectors.int(), tables, norms)
    with pytest.raises(ValueError, match='"cuda" is not possible: it is for bfloat16 and float16'):
        vq_encode(vectors, tables, norms, backend="cuda")
    with pytest.raises(ValueError, match='"cuda" is not possible: it is for'):
        vq_encode(vectors[:1].bfloat16(), *(lambda t: (t, half_norms(t)))(tables[:1]), backend="cuda")


def test_import_without_triton_and_transformers():
    """macOS has no triton: the package imports, and only the reference is there. It needs nothing but PyTorch."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('triton', 'transformers', 'hf_lowbit'));"
        "import hf_lowbit_kernels as k, torch;"
        "assert k.attention_backend('cpu', 64, 1, torch.float32) == ('reference', 'triton is not installed')"
    )
    path = str(Path(hf_lowbit_kernels.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
