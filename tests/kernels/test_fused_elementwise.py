"""`rms_norm`, `norm_add_norm`, `swiglu` and `rope_store`: models' own code, reference and kernel."""

import pytest
import torch
from kernel_cases import ON_GPU
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

import hf_lowbit_kernels
from hf_lowbit_kernels import elementwise_backend, norm_add_norm, rms_norm, rope_store, swiglu


# The interpreter's NumPy, where exp overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.triton)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Sums in another order move fp32 results by a few units in the last place, and so a rounded one to its neighbour.
NEIGHBOUR = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}
ROWS = [(1, 1, 2048), (3, 1, 64), (2, 5, 96), (7, 1000), (1, 1), (0, 8)]  # leading sizes, and the size of a row last
if ON_GPU:
    ROWS += [(512, 1, 2048), (4, 5632), (3, 16384)]
# rows, query heads, kv heads, head_dim, slots
HEADS = [(1, 16, 16, 128, 5), (3, 4, 2, 64, 9), (2, 3, 3, 96, 4), (9, 5, 5, 8, 6), (0, 2, 2, 8, 3)]
if ON_GPU:
    HEADS += [(256, 16, 16, 128, 80), (65, 8, 2, 256, 30)]


def draw(shape, dtype, device, seed=0, scale=1.0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype).to(device)


def assert_neighbours(found, expected, share=0.02, size=1e-3):
    """Equal but for the last bit of a few values, or of summands of the given size."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    neighbour = NEIGHBOUR[found.dtype]
    torch.testing.assert_close(found, expected, rtol=neighbour, atol=neighbour * size)
    if found.dtype != torch.float32 and found.numel() > 100:
        assert (found != expected).float().mean() < share


def model_norm(weight, eps, x):
    norm = LlamaRMSNorm(len(weight), eps=eps)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm(x)


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rms_norm_is_the_models_norm(backend, dtype, shape, device):
    x, weight = draw(shape, dtype, device, scale=3.0), draw(shape[-1:], dtype, device, 1)
    found = rms_norm(x, weight, 1e-5, backend=backend)
    assert found.is_contiguous()
    assert_neighbours(found, model_norm(weight, 1e-5, x))
    if backend == "reference":
        assert torch.equal(found, model_norm(weight, 1e-5, x))


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_norm_add_norm_is_two_norms_around_a_residual(backend, dtype, shape, device):
    x, residual = draw(shape, dtype, device, scale=3.0), draw(shape, dtype, device, 1, 10.0)
    weight, following = draw(shape[-1:], dtype, device, 2), draw(shape[-1:], dtype, device, 3)
    before = residual.clone()
    total, normed = norm_add_norm(x, weight, residual, following, 1e-6, 1e-3, backend=backend)
    assert torch.equal(residual, before)
    summand = model_norm(weight, 1e-6, x)
    expected = residual + summand
    assert_neighbours(total, expected, size=summand.abs().max().item() if summand.numel() else 0.0)
    assert_neighbours(normed, model_norm(following, 1e-3, total))  # of the rounded sum that it returns
    if backend == "reference":
        assert torch.equal(total, expected)
    one_eps = norm_add_norm(x, weight, residual, following, 1e-6, backend=backend)
    both = norm_add_norm(x, weight, residual, following, 1e-6, 1e-6, backend=backend)
    assert all(map(torch.equal, one_eps, both))


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_swiglu_of_two_tensors_and_of_a_merged_projection(backend, dtype, shape, device):
    merged = draw((*shape[:-1], 2 * shape[-1]), dtype, device, scale=4.0)
    if merged.numel():
        merged.view(-1)[0] = -200.0  # exp overflows in fp32
    gate, up = merged.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    found = swiglu(gate, up, backend=backend)
    assert found.is_contiguous()
    assert_neighbours(found, expected)
    if backend == "triton":  # PyTorch on CPUs computes SiLU of strided tensors in another way
        assert torch.equal(found, swiglu(gate.contiguous(), up.contiguous(), backend=backend))


@pytest.mark.parametrize("rotate_key", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("case", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rope_store_rotates_and_stores_and_touches_nothing_else(backend, dtype, case, rotate_key, device):
    batch, query_heads, heads, dim, slots = case
    merged = draw((batch, (query_heads + 2 * heads) * dim), dtype, device)
    query, key, value = (
        part.unflatten(-1, (-1, dim)) for part in merged.split([n * dim for n in (query_heads, heads, heads)], -1)
    )
    angles = draw((1 if batch == 3 else batch, dim // 2), torch.float32, device, 1, 10.0).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    # As in a LoopVQ window: keys and values of one tensor, with a batch between them and the heads.
    store = draw((2, batch, heads, slots, dim), dtype, device, 2)
    slot = torch.randint(0, slots, (batch,), generator=torch.Generator().manual_seed(3)).to(device)
    expected_query, rotated = apply_rotary_pos_emb(query[:, :, None], key[:, :, None], cos[:, None], sin[:, None])
    expected = store.clone()
    row = torch.arange(batch, device=device)
    expected[0, row, :, slot] = rotated[:, :, 0] if rotate_key else key
    expected[1, row, :, slot] = value
    found = rope_store(query, key, value, cos, sin, store[0], store[1], slot, rotate_key=rotate_key, backend=backend)
    assert torch.equal(found, expected_query[:, :, 0])  # the same roundings: bit for bit
    assert torch.equal(store, expected)


@pytest.mark.triton
def test_one_place_for_all_rows_and_far_strides(device):
    """A full-precision cache writes every row at one place, given as an expanded tensor."""
    query, key, value = (draw((3, 2, 16), torch.bfloat16, device, seed) for seed in range(3))
    cos, sin = draw((1, 16), torch.bfloat16, device, 3), draw((1, 16), torch.bfloat16, device, 4)
    slot = torch.tensor([2], device=device).expand(3)
    stores = []
    for backend in ("reference", "triton"):
        keys, values = torch.zeros((2, 2, 3, 5, 16), dtype=torch.bfloat16, device=device).transpose(1, 2)
        out = rope_store(query, key, value, cos, sin, keys, values, slot, rotate_key=True, backend=backend)
        stores.append((out, keys, values))
    assert all(map(torch.equal, *stores)) and stores[0][1][:, :, 2].any() and not stores[0][1][:, :, :2].any()


@pytest.mark.triton
def test_a_row_alone_equals_the_row_in_any_batch(device):
    x, residual = draw((33, 1, 96), torch.bfloat16, device), draw((33, 1, 96), torch.bfloat16, device, 1)
    weights = draw((96,), torch.bfloat16, device, 2), draw((96,), torch.bfloat16, device, 3)
    many = norm_add_norm(x, weights[0], residual, weights[1], 1e-6, backend="triton")
    alone = norm_add_norm(x[7:8], weights[0], residual[7:8], weights[1], 1e-6, backend="triton")
    assert all(torch.equal(a[7:8], b) for a, b in zip(many, alone))
    assert torch.equal(swiglu(x, residual, backend="triton")[7:8], swiglu(x[7:8], residual[7:8], backend="triton"))


def test_auto_takes_the_reference_where_no_kernel_can_run():
    x, weight = torch.randn(2, 8, dtype=torch.bfloat16), torch.randn(8)
    assert rms_norm(x, weight, 1e-6).dtype == torch.float32  # PyTorch's promotion
    with pytest.raises(ValueError, match="dtypes differ"):
        rms_norm(x, weight, 1e-6, backend="triton")
    grad = torch.randn(2, 8, requires_grad=True)
    swiglu(grad, grad).sum().backward()
    assert grad.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="backward"):
        swiglu(grad, grad, backend="triton")
    with pytest.raises(ValueError, match="not contiguous"):
        swiglu(torch.randn(8, 2).t(), torch.randn(8, 2).t(), backend="triton")
    assert elementwise_backend("cpu", torch.bfloat16)[0] == "reference"
    assert "cpu" in elementwise_backend("cpu", torch.bfloat16)[1]


def test_wrong_shapes_are_refused():
    x, weight = torch.randn(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match="weight has shape"):
        rms_norm(x, weight[:4], 1e-6)
    with pytest.raises(ValueError, match="residual has shape"):
        norm_add_norm(x, weight, x[:1], weight, 1e-6)
    with pytest.raises(ValueError, match="up has shape"):
        swiglu(x, x[:, :4])
    query, table, store, slot = torch.randn(2, 3, 8), torch.ones(2, 8), torch.zeros(2, 3, 4, 8), torch.zeros(2).long()
    good = dict(query=query, key=query, value=query, cos=table, sin=table, keys=store, values=store, slot=slot)
    rope_store(**good, rotate_key=False)
    for name, wrong, message in (
        ("key", query[:1], "key has shape"),
        ("cos", table[:, :4], "cos has shape"),
        ("keys", store[:, :2], "keys has shape"),
        ("values", store.half(), "float16"),
        ("slot", slot.int(), "slot has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_store(**{**good, name: wrong}, rotate_key=False)


def test_every_public_name_has_its_reference():
    for name in ("rms_norm", "norm_add_norm", "swiglu", "rope_store"):
        assert {name, f"{name}_reference"} <= set(hf_lowbit_kernels.__all__)
