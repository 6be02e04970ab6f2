"""`vq_encode_pages` against `vq_encode` of gathered states."""

import pytest
import torch
from kernel_cases import ON_GPU

from hf_lowbit_kernels import PageCoder, group_major, half_norms, vq_decode, vq_encode_pages, vq_encode_reference


BACKENDS = ["reference", pytest.param("triton", marks=pytest.mark.triton)]
# rows, pages to encode, heads, head_dim, T_c, G, dtype
CASES = [
    (1, 1, 2, 64, 4, 16, torch.bfloat16),
    (4, 3, 1, 96, 2, 16, torch.float16),
    (3, 2, 2, 32, 4, 4, torch.float32),
    (12, 11, 1, 64, 1, 8, torch.bfloat16),
    (2, 0, 1, 32, 2, 8, torch.float32),
]
if ON_GPU:
    CASES += [(1, 1, 16, 128, 4, 16, torch.bfloat16), (200, 180, 16, 128, 4, 32, torch.bfloat16)]


def problem(case, device, metric):
    batch, count, heads, dim, steps, elements, dtype = case
    generator = torch.Generator().manual_seed(batch + 7 * count + elements)
    channels = elements // steps

    def draw(*size):
        return torch.randn(size, generator=generator)

    def coder():
        tables = draw(steps, heads, dim // channels, 256, channels).half().to(device)
        weights = (draw(steps, heads, dim).abs() + 0.1).to(device) if metric else None
        norms = half_norms(tables)
        if metric:
            parts = weights.unflatten(-1, (dim // channels, channels)).unsqueeze(-2)
            norms = 0.5 * (tables.float().square() * parts).sum(dim=(0, -1))
        return PageCoder(tables, norms, weights)

    # A slice of all loop steps, as in a cache: T_c of its 2 T_c steps.
    window = draw(2 * steps, 2, batch, heads, 21, dim).to(dtype).to(device)[steps:]
    codes = group_major(torch.full((2, batch, 6, heads, 8, dim // channels), 255, dtype=torch.uint8, device=device))
    rows = torch.randperm(batch, generator=generator)[:count].to(device)
    pages = torch.randint(0, 6, (count,), generator=generator).to(device)
    slots = ((torch.arange(8) + torch.randint(0, 21, (count, 1), generator=generator)) % 21).to(device)
    return window, codes, coder(), coder(), rows, pages, slots


@pytest.mark.parametrize("metric", [False, True], ids=["plain", "metric"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_get_the_codes_of_their_states_and_others_none(backend, case, metric, device):
    window, codes, key, value, rows, pages, slots = problem(case, device, metric)
    assert vq_encode_pages(window, codes, key, value, rows, pages, slots, backend=backend) is None
    left = torch.ones_like(codes, dtype=torch.bool)
    for i, (row, page) in enumerate(zip(rows.tolist(), pages.tolist())):
        left[:, row, page] = False
        for side, coder in enumerate((key, value)):
            states = window[:, side, row, :, slots[i]].transpose(1, 2)  # [T_c, 8, H, D]
            if metric:
                states = states.float() * coder.metric.unsqueeze(1)
            expected = vq_encode_reference(states.contiguous(), coder.tables, coder.half_norms)
            found = codes[side, row, page].transpose(0, 1)
            if backend == "triton":  # a near tie may go either way: compare what the codes are worth
                worth = [objective(states, c, coder) for c in (found, expected)]
                torch.testing.assert_close(*worth, atol=1e-4, rtol=1e-5)
                assert (found == expected).float().mean() > 0.99
            else:
                assert torch.equal(found, expected)
    assert (codes[left] == 255).all()


def objective(states, codes, coder):
    """fp32 ``[8, H, NG]``, the score that the encoder maximizes, of given codes."""
    groups, channels = coder.tables.shape[2], coder.tables.shape[4]
    scores = sum(
        (vq_decode(codes, table).float() * x.float()).unflatten(-1, (groups, channels)).sum(-1)
        for table, x in zip(coder.tables, states)
    )
    return scores - coder.half_norms.unsqueeze(0).expand(8, -1, -1, -1).gather(3, codes.long().unsqueeze(-1))[..., 0]


def test_wrong_arguments_are_refused():
    window, codes, key, value, rows, pages, slots = problem(CASES[2], torch.device("cpu"), True)
    good = dict(window=window, codes=codes, key=key, value=value, rows=rows, pages=pages, slots=slots)
    for name, wrong, message in (
        ("window", window[:, 0], "window has shape"),
        ("codes", codes[:, :, :, :, :4], "codes has shape"),
        ("value", value._replace(metric=None), "both a metric or neither"),
        ("key", key._replace(half_norms=key.half_norms[:1]), "half_norms"),
        ("rows", rows.int(), "rows has shape"),
        ("slots", slots[:, :7], "slots has shape"),
        ("slots", slots.to("meta"), "slots is on meta and window on cpu"),
        ("key", key._replace(tables=key.tables.to("meta")), "tables is on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            vq_encode_pages(**{**good, name: wrong})
