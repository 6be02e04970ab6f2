"""`vq_encode_chunk` against `vq_encode` of gathered states."""

import pytest
import torch
from kernel_cases import ON_GPU

from hf_lowbit_kernels import PageCoder, group_major, half_norms, vq_decode, vq_encode, vq_encode_chunk
from hf_lowbit_kernels.vq_encode_cuda import chunk_cuda_problem


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HOPPER = ON_GPU and torch.version.cuda is not None and torch.cuda.get_device_capability()[0] == 9
BACKENDS = [
    "reference",
    pytest.param("triton", marks=pytest.mark.triton),
    pytest.param("cuda", marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")),
]
# rows, tokens of the chunk, of the window, first, pages, heads, head_dim, T_c, G, dtype
CASES = [
    (1, 20, 0, 0, 2, 2, 64, 4, 16, BF16),
    (2, 9, 13, 5, 2, 1, 96, 2, 16, FP16),
    (3, 24, 7, 0, 3, 2, 32, 4, 8, BF16),
    (1, 3, 14, 1, 2, 1, 64, 1, 8, BF16),  # all of them from the window but the last three
    (2, 40, 5, 11, 4, 1, 64, 4, 32, FP16),
    (1, 17, 5, 0, 1, 2, 32, 2, 32, BF16),
    (2, 8, 8, 0, 0, 1, 32, 2, 8, BF16),
]
OTHER_CASES = [
    (2, 20, 3, 1, 2, 1, 32, 4, 4, FP32),
    (1, 20, 3, 1, 2, 1, 36, 4, 16, BF16),
    (1, 9, 0, 0, 1, 1, 32, 8, 16, BF16),
]
if ON_GPU:
    CASES += [(1, 2048, 64, 0, 256, 16, 128, 4, 16, BF16), (3, 710, 21, 10, 90, 16, 128, 4, 32, BF16)]


def problem(case, device, metric):
    batch, count, lead, first, pages, heads, dim, steps, elements, dtype = case
    generator = torch.Generator().manual_seed(batch + 7 * count + elements)
    channels = elements // steps

    def draw(*size):
        return torch.randn(size, generator=generator)

    def coder():
        tables = draw(steps, heads, dim // channels, 256, channels).half().to(device)
        weights = (draw(steps, heads, dim).abs() + 0.1).half().float().to(device) if metric else None
        parts = (weights if metric else torch.ones(steps, heads, dim, device=device)).unflatten(-1, (-1, channels))
        norms = 0.5 * (tables.float().square() * parts.unsqueeze(-2)).sum(dim=(0, -1))
        return PageCoder(tables, norms if metric else half_norms(tables), weights)

    def states():  # as layers leave them
        return [draw(batch, count, heads, dim).to(dtype).to(device).transpose(1, 2) for _ in range(steps)]

    window = draw(2 * steps, 2, batch, heads, 21, dim).to(dtype).to(device)[steps:]
    slots = (torch.randperm(21, generator=generator)[:lead]).to(device)
    store = group_major(
        torch.full((2, batch, pages + 2, heads, 8, dim // channels), 255, dtype=torch.uint8, device=device)
    )
    return (states(), states(), window, slots, first), store, store[:, :, 1 : pages + 1], coder(), coder()


def gathered(given, side):
    """``[T_c, B, lead + n, H, D]``"""
    states, window, slots = given[side], given[2], given[3]
    tokens = torch.cat([window[:, side].index_select(3, slots), torch.stack(states)], dim=3)
    return tokens.transpose(2, 3)


def objective(states, codes, coder):
    """fp64 ``[N, H, NG]``, the score that the encoder maximizes, of given codes."""
    groups, channels = coder.tables.shape[2], coder.tables.shape[4]
    metric = 1 if coder.metric is None else coder.metric.double().unsqueeze(1)
    parts = (states.double() * metric).unflatten(-1, (groups, channels))
    scores = sum(
        (vq_decode(codes, t).double().unflatten(-1, (groups, channels)) * x).sum(-1)
        for t, x in zip(coder.tables, parts)
    )
    norms = coder.half_norms.double().unsqueeze(0).expand(len(codes), -1, -1, -1)
    return scores - norms.gather(3, codes.long().unsqueeze(-1))[..., 0]


@pytest.mark.parametrize("metric", [False, True], ids=["plain", "metric"])
@pytest.mark.parametrize("case", CASES + OTHER_CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_window_and_chunk_become_pages(backend, case, metric, device):
    if backend == "cuda" and case in OTHER_CASES:
        pytest.skip("not for the CUDA kernel")
    given, store, codes, key, value = problem(case, device, metric)
    first, pages = case[3:5]
    assert vq_encode_chunk(*given, codes, key, value, backend=backend) is None
    assert (store[:, :, 0] == 255).all() and (store[:, :, -1] == 255).all()
    for side, coder in enumerate((key, value)):
        states = gathered(given, side)[:, :, first : first + 8 * pages].flatten(1, 2)
        expected = vq_encode(states, *coder, backend="reference")
        found = codes[side].transpose(2, 3).flatten(0, 2)  # [B * 8 P, H, NG]
        if backend == "reference":
            assert torch.equal(found, expected)
        elif pages:  # a near tie may go either way: compare what the codes are worth
            worth, best = (objective(states, c, coder) for c in (found, expected))
            torch.testing.assert_close(worth, best, atol=1e-4, rtol=1e-5)
            assert (found == expected).double().mean() > 0.99


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("case", CASES[-2:], ids=lambda case: "-".join(map(str, case)))
def test_codes_of_a_row_depend_on_no_other_row_nor_on_the_launch(case, device):
    given, _, codes, key, value = problem(case, device, True)
    vq_encode_chunk(*given, codes, key, value, backend="cuda")
    first, pages = case[3:5]
    keys, values, window, slots, _ = given
    for row in range(case[0]):
        alone = torch.zeros_like(codes[:, row : row + 1])
        parts = [[state[row : row + 1] for state in states] for states in (keys, values)]
        vq_encode_chunk(*parts, window[:, :, row : row + 1], slots, first, alone, key, value, backend="cuda")
        assert torch.equal(alone, codes[:, row : row + 1])
        states = gathered(given, 0)[:, row, first : first + 8 * pages]
        plain = vq_encode(states, *key, backend="cuda")
        assert torch.equal(plain, codes[0, row].transpose(1, 2).flatten(0, 1))


def test_the_cuda_kernel_says_what_it_does_not_take(monkeypatch):
    monkeypatch.setattr("hf_lowbit_kernels.vq_encode_cuda.encode_cuda_problem", lambda *_: None)

    def said(case=CASES[0], change=lambda given: given, **coder):
        given, _, _, key, value = problem(case, torch.device("cpu"), True)
        keys, values, window, *_ = change(given)
        return chunk_cuda_problem(keys, values, window, key._replace(**coder), value)

    assert said() is None
    assert "at most 4 steps" in said(OTHER_CASES[2])
    assert "whole pieces" in said(OTHER_CASES[1])
    assert "lie alike" in said(change=lambda g: ([*g[0][:-1], g[0][-1].contiguous()], *g[1:]))
    shifted = torch.zeros(4 * 2 * 2 * 64 + 1, dtype=BF16)[1:].view(4, 2, 1, 2, 1, 64)
    assert "whole pieces" in said(change=lambda g: (*g[:2], shifted, *g[3:]))
    norms = torch.zeros(2 * 16 * 256 + 1)[1:].view(2, 16, 256)
    assert "multiples of 16 bytes" in said(half_norms=norms)


def test_wrong_arguments_are_refused():
    (keys, values, window, slots, first), _, codes, key, value = problem(CASES[1], torch.device("cpu"), True)
    good = dict(keys=keys, values=values, window=window, slots=slots, first=first, codes=codes, key=key, value=value)
    for name, wrong, message in (
        ("keys", keys[:1], "2 tensors"),
        ("values", [values[0], values[1][:, :, :3]], r"values\[1\] has shape"),
        ("keys", [state.float() for state in keys], r"keys\[0\] has shape"),
        ("window", window[:, :1], "window has shape"),
        ("codes", codes[..., :4], "codes has shape"),
        ("codes", codes.int(), "codes has shape"),
        ("slots", slots.int(), "slots has shape"),
        ("first", 7, "tokens 7 to 23 of a row; there are 13 from the window and 9"),
        ("first", -1, "tokens -1"),
        ("value", value._replace(metric=None), "both a metric or neither"),
        ("key", key._replace(half_norms=key.half_norms[:0]), "half_norms"),
        ("slots", slots.to("meta"), "slots is on meta and window on cpu"),
        ("values", [values[0], values[1].to("meta")], r"values\[1\] is on meta and window on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            vq_encode_chunk(**{**good, name: wrong})
    with pytest.raises(ValueError, match="not possible"):
        vq_encode_chunk(**good, backend="cuda")
