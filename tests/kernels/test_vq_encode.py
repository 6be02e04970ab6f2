"""`vq_encode`, `vq_decode` and `half_norms`."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import ON_GPU

import hf_lowbit_kernels
from hf_lowbit_kernels import half_norms, vq_decode, vq_encode, vq_encode_reference


BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.triton)]
# Scores of up to 32 products of size one, summed in fp32; a near tie closer than this may go either way.
SCORE_SUM = 1e-4
# tokens, heads, head_dim, T_c, G, dtype
SHAPES = [
    (5, 2, 64, 4, 16, torch.bfloat16),
    (16, 1, 64, 4, 32, torch.float16),
    (17, 2, 96, 2, 16, torch.float32),
    (70, 1, 64, 1, 8, torch.float32),
    (8, 1, 128, 1, 32, torch.bfloat16),
    (1, 2, 32, 4, 4, torch.float32),
    (3, 1, 64, 2, 32, torch.float16),
    (0, 2, 64, 4, 16, torch.float32),
]
if ON_GPU:
    SHAPES += [(2048, 16, 128, 4, 16, torch.bfloat16), (777, 4, 128, 4, 32, torch.float32)]


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


def oracle_scores(vectors, tables, norms):
    """fp64 ``[N, H, NG, 256]``."""
    x, e = vectors.double().cpu().numpy(), tables.double().cpu().numpy()
    steps, tokens, heads, _ = x.shape
    groups, _, c = e.shape[2:]
    scores = np.empty((tokens, heads, groups, 256))
    for h in range(heads):
        for g in range(groups):
            scores[:, h, g] = sum(x[m, :, h, g * c : (g + 1) * c] @ e[m, h, g].T for m in range(steps))
    return scores - norms.double().cpu().numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_code_is_the_nearest_entry(shape, backend, device):
    vectors, tables = problem(shape, device)
    norms = half_norms(tables)
    codes = vq_encode(vectors, tables, norms, backend=backend)
    assert codes.dtype == torch.uint8 and codes.shape == (shape[0], shape[1], tables.shape[2])
    scores = oracle_scores(vectors, tables, norms)
    chosen = np.take_along_axis(scores, codes.cpu().numpy()[..., None].astype(np.int64), -1)[..., 0]
    assert (chosen >= scores.max(-1, initial=-np.inf) - SCORE_SUM).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=shape_id)
def test_ties_take_the_lowest_entry(shape, backend, device):
    vectors, tables = problem(shape, device, integers=True)
    norms = half_norms(tables)
    scores = oracle_scores(vectors, tables, norms)
    ties = (scores == scores.max(-1, keepdims=True)).sum(-1)
    assert (ties > 1).any(), "the case should contain ties"
    codes = vq_encode(vectors, tables, norms, backend=backend)
    assert np.array_equal(codes.cpu().numpy(), scores.argmax(-1))


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


def test_import_without_triton_and_transformers():
    """macOS has no triton: the package imports, and only the reference is there. It needs nothing but PyTorch."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('triton', 'transformers', 'hf_lowbit'));"
        "import hf_lowbit_kernels as k, torch;"
        "assert k.attention_backend('cpu', 64, 1, torch.float32) == ('reference', 'triton is not installed')"
    )
    path = str(Path(hf_lowbit_kernels.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
