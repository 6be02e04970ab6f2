"""`rope_copy` and `vq_decode_pages`: what a prompt's attention reads, against a plain loop over the definition."""

import pytest
import torch
from kernel_cases import ON_GPU

from hf_lowbit_kernels import entry_major, group_major, rope_copy, vq_decode, vq_decode_pages, vq_decode_pages_cuda


BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.triton)]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def angles(rows, count, dim, dtype, device, seed=0):
    """cos and sin whose halves differ, so that a kernel that reads the wrong one shows."""
    angle = 3 * torch.randn(rows, count, dim, generator=torch.Generator().manual_seed(seed))
    return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)


def rotated(states, cos, sin):
    """As `hf_lowbit.loopvq.spec.rotate`: every operation in the dtype that PyTorch gives it."""
    half = states.shape[-1] // 2
    a, b = states[..., :half], states[..., half:]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    first = a * c[..., :half] + -b * s[..., :half]
    return torch.cat([first, b * c[..., half:] + a * s[..., half:]], dim=-1).to(states.dtype)


def draw(*size, dtype, device, seed=1):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


# rows, heads, tokens, head_dim, dtype, dtype of the angles, one angle for all rows
COPIES = [
    (1, 2, 37, 64, BF16, BF16, True),
    (3, 1, 9, 96, FP16, FP16, False),
    (2, 2, 70, 32, FP32, FP32, False),
    (2, 1, 5, 128, BF16, FP32, True),
    (1, 1, 3, 256, FP32, BF16, True),
]
if ON_GPU:
    COPIES += [(2, 16, 2048, 128, BF16, BF16, True), (1, 4, 513, 256, FP16, FP32, True)]


@pytest.mark.parametrize("gather", [False, True], ids=["all", "slots"])
@pytest.mark.parametrize("case", COPIES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_are_rotated_and_values_copied(backend, case, gather, device):
    batch, heads, count, dim, dtype, angle_dtype, shared = case
    held = count + 5 if gather else count
    # As projections give them: heads side by side in memory.
    key, value = (draw(batch, held, heads, dim, dtype=dtype, device=device, seed=i).transpose(1, 2) for i in (1, 2))
    cos, sin = angles(1 if shared else batch, count, dim, angle_dtype, device)
    slots = torch.randperm(held, generator=torch.Generator().manual_seed(3))[:count].to(device) if gather else None
    whole = torch.full((2, batch, heads, count + 7, dim), 7.0, dtype=dtype, device=device)
    keys, values = whole[:, :, :, 4 : 4 + count]
    rope_copy(key, cos, sin, keys, value, values, slots, backend=backend)
    if gather:
        key, value = key[:, :, slots], value[:, :, slots]
    assert torch.equal(keys, rotated(key, cos, sin))
    assert torch.equal(values, value)
    assert (whole[:, :, :, :4] == 7).all() and (whole[:, :, :, 4 + count :] == 7).all()
    alone = torch.empty(batch, count, heads, dim, dtype=dtype, device=device).transpose(1, 2)
    rope_copy(key, cos, sin, alone, backend=backend)
    assert torch.equal(alone, keys)


@pytest.mark.parametrize("valued", [False, True], ids=["keys", "keys and values"])
@pytest.mark.parametrize("case", COPIES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_of_the_same_tokens_are_rotated_along(backend, case, valued, device):
    batch, heads, count, dim, dtype, angle_dtype, shared = case
    key, value = (draw(batch, count, heads, dim, dtype=dtype, device=device, seed=i).transpose(1, 2) for i in (1, 2))
    query = draw(batch, count, 3 * heads, dim, dtype=dtype, device=device, seed=3).transpose(1, 2)
    cos, sin = angles(1 if shared else batch, count, dim, angle_dtype, device)
    keys, values, queries = (torch.empty_like(states) for states in (key, value, query))
    pair = (value, values) if valued else ()
    rope_copy(key, cos, sin, keys, *pair, query=query, queries=queries, backend=backend)
    assert torch.equal(queries, rotated(query, cos, sin)) and torch.equal(keys, rotated(key, cos, sin))
    assert not valued or torch.equal(values, value)


# rows, pages, heads, head_dim, channels, dtype, dtype of the angles, one angle for all rows
PAGES = [
    (1, 9, 2, 64, 4, BF16, BF16, True),
    (2, 3, 1, 128, 8, BF16, BF16, True),
    (2, 2, 2, 96, 4, FP16, FP16, False),
    (1, 5, 1, 32, 1, FP32, FP32, True),
    (1, 2, 1, 64, 16, FP32, FP32, True),
    (3, 1, 1, 96, 32, BF16, FP32, False),  # a half ends inside of an entry
    (1, 2, 1, 32, 32, FP16, FP16, True),
    (1, 2, 1, 256, 2, BF16, BF16, True),
    (2, 0, 1, 32, 2, FP32, FP32, True),
]
# Of the CUDA kernel too: a part of a warp's page, pages for several blocks and rounds of warps, no whole share.
PAGES += [
    (1, 1, 2, 128, 4, FP16, FP16, True),
    (2, 37, 1, 128, 4, BF16, BF16, False),
    (2, 35, 1, 128, 8, FP16, FP16, False),
    (2, 0, 1, 128, 8, BF16, BF16, True),
]
if ON_GPU:
    PAGES += [(1, 4096, 16, 128, 4, BF16, BF16, True), (3, 250, 16, 128, 8, BF16, BF16, True)]


def pages_problem(case, device):
    batch, pages, heads, dim, channels, dtype, angle_dtype, shared = case
    generator = torch.Generator().manual_seed(pages + dim)
    shape = (2, batch, pages + 2, heads, 8, dim // channels)
    # As in a cache: groups before tokens in memory, keys beside values, spare pages.
    codes = group_major(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device))
    tables = torch.randn(2, heads, dim // channels, 256, channels, generator=generator).half().to(device)
    cos, sin = angles(1 if shared else batch, 8 * pages, dim, angle_dtype, device)
    whole = torch.full((2, batch, heads, 8 * pages + 7, dim), 7.0, dtype=dtype, device=device)
    return codes[:, :, :pages], tables, cos, sin, whole


PAGE_RUNS = [
    *(("reference", case) for case in PAGES),
    *(pytest.param("triton", case, marks=pytest.mark.triton) for case in PAGES),
    *(pytest.param("cuda", case, marks=pytest.mark.gpu) for case in PAGES if case[3] == 128),
]


@pytest.mark.parametrize(
    ("backend", "case"), PAGE_RUNS, ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else x
)
def test_pages_become_rotated_keys_and_values(backend, case, device):
    problem = vq_decode_pages_cuda.decode_pages_cuda_problem(device, *case[3:7]) if backend == "cuda" else None
    if problem is not None:
        pytest.skip(problem)
    (k_codes, v_codes), (k_table, v_table), cos, sin, whole = pages_problem(case, device)
    count, dtype = cos.shape[1], whole.dtype
    keys, values = whole[:, :, :, :count]
    if backend == "cuda":
        k_table, v_table = entry_major(k_table), entry_major(v_table)
    vq_decode_pages(k_codes, v_codes, k_table, v_table, cos, sin, keys, values, backend=backend)

    def looked_up(codes, table):  # [B, H, 8 P, D]
        by_token = codes.permute(0, 1, 3, 2, 4).flatten(1, 2)
        heads, groups = table.shape[:2]
        h, g = torch.meshgrid(torch.arange(heads), torch.arange(groups), indexing="ij")
        entries = table[h.to(table.device), g.to(table.device), by_token.long()]  # [B, n, H, NG, c]
        return entries.flatten(-2).transpose(1, 2).to(dtype)

    assert torch.equal(keys, rotated(looked_up(k_codes, k_table), cos, sin))
    assert torch.equal(values, looked_up(v_codes, v_table))
    assert torch.equal(values, vq_decode(v_codes.transpose(2, 3).flatten(1, 2), v_table).transpose(1, 2).to(dtype))
    assert (whole[:, :, :, count:] == 7).all()


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_the_memory_order_of_tables_changes_nothing(backend, device):
    codes, tables, cos, sin, whole = pages_problem(PAGES[1], device)
    states = []
    for order in (torch.Tensor.contiguous, entry_major):
        keys, values = torch.full_like(whole[:, :, :, : cos.shape[1]], float("nan"))
        vq_decode_pages(*codes, *map(order, tables), cos, sin, keys, values, backend=backend)
        states.append(torch.stack([keys, values]))
    assert torch.equal(*states)


def test_wrong_arguments_are_refused():
    device = torch.device("cpu")
    codes, tables, cos, sin, whole = pages_problem(PAGES[0], device)
    keys, values = whole[:, :, :, :72]
    good = dict(
        k_codes=codes[0], v_codes=codes[1], k_table=tables[0], v_table=tables[1], cos=cos, sin=sin, keys=keys,
        values=values,
    )  # fmt: skip
    for name, wrong, message in (
        ("k_codes", codes[0].int(), "k_codes has shape"),
        ("v_codes", codes[1][:, :-1], "v_codes has shape"),
        ("v_table", tables[1][..., :2], r"shape of v_table, which is \(2, 16, 256, 2\)"),
        ("k_table", tables[0].float(), "must be torch.float16, contiguous or entry-major"),
        ("v_table", tables[1].flip(3).transpose(0, 2).contiguous().transpose(0, 2), "contiguous or entry-major"),
        ("cos", cos[:, 1:], "cos has shape"),
        ("sin", sin.float(), "they need one dtype"),
        ("keys", whole[0], "keys has shape"),
        ("values", values.float(), "they need one dtype"),
        ("v_table", tables[1].to("meta"), "v_table is on meta and keys on cpu; move both"),
        ("values", values.transpose(1, 3).contiguous().transpose(1, 3), "last dimension must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            vq_decode_pages(**{**good, name: wrong})
    for others, message in (
        (dict(keys=keys.int(), values=values.int()), "keys are torch.int32 .* need one dtype, bf16"),
        (dict(cos=cos.int(), sin=sin.int()), "cos is torch.int32 .* need one dtype, bf16"),
    ):
        with pytest.raises(ValueError, match=message):
            vq_decode_pages(**{**good, **others})
    good = dict(key=keys, cos=cos, sin=sin, keys=torch.empty_like(keys), value=values, values=torch.empty_like(values))
    for name, wrong, message in (
        ("key", keys[0], "key has shape"),
        ("key", keys.int(), "key has shape .* torch.int32, .* expected .* bf16"),
        ("keys", keys[:, :, 1:], "keys has shape"),
        ("values", None, "together, or neither"),
        ("value", values[:, :1], "value has shape"),
        ("values", torch.empty(values.shape), "needs the dtype of key"),
        ("sin", sin[:, :3], "sin has shape"),
        ("slots", torch.zeros(72), "slots has shape"),
        ("slots", torch.zeros(72, dtype=torch.int64, device="meta"), "slots is on meta and key on cpu; move both"),
        ("query", keys, "query and queries must be given together"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_copy(**{**good, name: wrong})
    good |= dict(query=keys, queries=torch.empty_like(keys))
    for name, wrong, message in (
        ("query", keys[:, :, 1:], "query has shape"),
        ("queries", torch.empty_like(keys)[:, :1], "queries has shape"),
        ("query", keys.float(), "query is torch.float32; it needs the dtype of key"),
        ("slots", torch.arange(72), "without slots, or neither"),
    ):
        with pytest.raises(ValueError, match=message):
            rope_copy(**{**good, name: wrong})
