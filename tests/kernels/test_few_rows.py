"""`few_rows_linear` and `few_rows_swiglu` against fp64."""

import pytest
import torch
from kernel_cases import ON_GPU

from hf_lowbit_kernels import few_rows_linear, few_rows_swiglu


# The interpreter's NumPy, where exp overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.triton)]
STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}
# leading sizes of x, K, N
SHAPES = [((1, 1), 64, 24), ((3,), 96, 10), ((2, 1), 1536, 7), ((1,), 700, 4), ((0,), 8, 3), ((1,), 1, 1)]
if ON_GPU:
    SHAPES += [((1, 1), 2048, 6144), ((4, 1), 2048, 2048), ((1, 1), 5632, 2048)]


def problem(shape, dtype, device, factor=1):
    rows, size, columns = shape
    generator = torch.Generator().manual_seed(size)
    x = torch.randn((*rows, size + 3), generator=generator).to(dtype).to(device)[..., :size]  # rows apart
    weight = (torch.randn((factor * columns, size), generator=generator) * size**-0.5).to(dtype).to(device)
    return x, weight


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_is_the_rounded_product(backend, dtype, shape, device):
    x, weight = problem(shape, dtype, device)
    found = few_rows_linear(x, weight, backend=backend)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=STEP[dtype], atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_swiglu_follows_the_products(backend, dtype, shape, device):
    x, weight = problem(shape, dtype, device, 2)
    found = few_rows_swiglu(x, weight, backend=backend)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    # gate, up, SiLU and the product round once each
    torch.testing.assert_close(
        found.double(), torch.nn.functional.silu(gate) * up, rtol=5 * STEP[dtype], atol=5 * STEP[dtype]
    )


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="weight has shape"):
        few_rows_linear(torch.ones(1, 8), torch.ones(4, 7))
    with pytest.raises(ValueError, match="weight has shape"):
        few_rows_swiglu(torch.ones(1, 8), torch.ones(5, 8))
