"""The matrix of the kernel tests, inputs for a case, and an fp64 oracle that shares no code with the package."""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from hf_lowbit_kernels import build_rope_tables


SINKS, WINDOW, PAGE = 8, 64, 8
ON_GPU = torch.cuda.is_available()

# fp32 sums of at most a few thousand terms of size one, in another order than fp64's; measured below 2e-6.
FP32_SUM = 2e-5
# Rounding the output once to the model's dtype: half a unit in the last place, doubled for two roundings to compare.
ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True)
class Case:
    """One attention problem. G = T_c * c elements share a code; attention itself sees only c."""

    lengths: tuple[int, ...] = (8 + 64 + 9, 300)
    group: int = 1
    head_dim: int = 64
    loop_group: int = 4
    elements: int = 16
    dtype: torch.dtype = torch.float32
    frequency: float = 1.0  # multiplies inv_freq; 500 turns position 200 into an angle of 1e5
    scaling: float = 1.0
    tile: int = 8
    splits: int | None = None
    heads: int = 2

    @property
    def channels(self) -> int:
        return self.elements // self.loop_group

    @property
    def id(self) -> str:
        parts = [
            "n" + "_".join(map(str, self.lengths)),
            f"r{self.group}",
            f"d{self.head_dim}",
            f"t{self.loop_group}",
            f"g{self.elements}",
            str(self.dtype).removeprefix("torch."),
        ]
        default = Case()
        for name in ("frequency", "scaling", "tile", "splits", "heads"):
            if getattr(self, name) != getattr(default, name):
                parts.append(f"{name}{getattr(self, name):g}")
        return "-".join(parts)


# Around every border: no token coded, first page coded (81), one more token, the ring's second turn.
BORDERS = (1, 7, 8, 9, 8 + 64, 8 + 64 + 7, 8 + 64 + 8, 8 + 64 + 9)
BASE = Case()
SMALL = [
    replace(BASE, lengths=BORDERS),
    replace(BASE, lengths=(0, 81, 5)),
    replace(BASE, lengths=(82, 88, 89, 97), heads=1),
    replace(BASE, lengths=(8 + 72, 8 + 72 + 1, 8 + 2 * 72 + 1, 8 + 3 * 72 + 5)),
    replace(BASE, lengths=(513,), splits=1, heads=1),
    replace(BASE, lengths=(513, 2), splits=3, heads=1),
    replace(BASE, frequency=500.0),
    replace(BASE, scaling=1.25, tile=32),
    replace(BASE, group=2, dtype=torch.bfloat16),
    replace(BASE, group=4, head_dim=128, dtype=torch.float16, elements=32),
    replace(BASE, group=3, lengths=(100,), tile=16),
    replace(BASE, group=9, lengths=(100,), heads=1, elements=32),
    replace(BASE, head_dim=128, dtype=torch.bfloat16),
    replace(BASE, head_dim=96, dtype=torch.float16),
    replace(BASE, head_dim=96, loop_group=1, elements=32),  # entries straddle the two RoPE halves
    replace(BASE, loop_group=1, elements=8),
    replace(BASE, loop_group=1, elements=32),  # one entry is a whole RoPE half
    replace(BASE, head_dim=16, loop_group=1, elements=16),  # one entry holds whole RoPE pairs
    replace(BASE, loop_group=2, elements=32),
    replace(BASE, loop_group=2, elements=4, lengths=(100,)),
    replace(BASE, loop_group=4, elements=4, lengths=(100,)),
    replace(BASE, loop_group=4, elements=8, lengths=(100,)),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Every second combination, dtypes in turn: each costs a compilation of seconds on the GPU.
LARGE = [
    Case((*BORDERS, 4099, 700), group, head_dim, loop_group, elements, DTYPES[i % 3])
    for i, (group, head_dim, (loop_group, elements)) in enumerate(
        itertools.product(
            [1, 2, 4],
            [64, 96, 128],
            [(1, 8), (1, 16), (1, 32), (2, 8), (2, 16), (2, 32), (4, 4), (4, 16), (4, 32)],
        )
    )
    if i % 2 == 0
]
LARGE += [
    replace(BASE, lengths=(32768, 17, 5000), head_dim=128, heads=16, dtype=torch.bfloat16),
    replace(BASE, lengths=(32768,), head_dim=128, heads=4, group=8, elements=32),
    replace(BASE, lengths=(4096,), frequency=25.0, head_dim=256),
]
CASES = SMALL + LARGE if ON_GPU else SMALL


def coded_tokens(length: int) -> int:
    """The serving rule: whole pages that are older than the recent window."""
    return PAGE * (max(0, length - 1 - SINKS - WINDOW) // PAGE)


def attention_inputs(case: Case, device: torch.device) -> dict:
    """Keyword arguments of `vq_decode_attention`. Everything the contract does not read is NaN or a random code."""
    generator = torch.Generator().manual_seed(len(case.id) * 7919 + sum(case.lengths))

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    batch, heads, dim, c = len(case.lengths), case.heads, case.head_dim, case.channels
    groups = dim // c
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    n_coded = torch.tensor([coded_tokens(n) for n in case.lengths], dtype=torch.int32)
    pages = int(n_coded.max()) // PAGE + 2
    # Views of larger pools: batch and page strides are not those of a contiguous tensor.
    codes = torch.randint(0, 256, (2, batch, pages, 3, heads, PAGE, groups), dtype=torch.uint8, generator=generator)
    ring = WINDOW + PAGE
    window = randn(2, batch, heads, SINKS + ring, dim)
    for row, length in enumerate(case.lengths):
        live = [window_slot(p, ring) for p in range(length) if in_window(p, int(n_coded[row]))]
        dead = torch.ones(SINKS + ring, dtype=torch.bool)
        dead[live] = False
        window[:, row, :, dead] = float("nan")
    inv_freq = case.frequency * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    max_coded = int(n_coded.max())
    return {
        "query": randn(batch, heads * case.group, dim).to(case.dtype).to(device),
        "k_codes": codes[0, :, :, 1].to(device),
        "v_codes": codes[1, :, :, 2].to(device),
        "k_table": randn(heads, groups, 256, c).half().to(device),
        "v_table": randn(heads, groups, 256, c).half().to(device),
        "k_window": window[0].to(case.dtype).to(device),
        "v_window": window[1].to(case.dtype).to(device),
        "lengths": lengths.to(device),
        "n_coded": n_coded.to(device),
        "rope": build_rope_tables(inv_freq, max(case.lengths) + 1, case.tile, SINKS, device, case.scaling),
        "scale": dim**-0.5,
        "sinks": SINKS,
        "max_coded": max_coded,
        "num_splits": case.splits,
    }


def one_row(inputs: dict, row: int) -> dict:
    """The same problem with one row of the batch, and only the pages that the row needs."""
    max_coded = int(inputs["n_coded"][row])
    alone = dict(inputs, max_coded=max_coded)
    for name in ("query", "k_codes", "v_codes", "k_window", "v_window", "lengths", "n_coded"):
        alone[name] = inputs[name][row : row + 1].clone()
    for name in ("k_codes", "v_codes"):
        alone[name] = alone[name][:, : max_coded // PAGE].contiguous()
    return alone


def in_window(position: int, coded: int) -> bool:
    return position < SINKS or position >= SINKS + coded


def window_slot(position: int, ring: int) -> int:
    return position if position < SINKS else SINKS + (position - SINKS) % ring


def attention_oracle(inputs: dict) -> np.ndarray:
    """The definition in fp64, one row, head and position at a time. Returns ``[B, Hq, D]``."""
    array = {
        name: value.detach().cpu().to(torch.float64 if value.is_floating_point() else torch.int64).numpy()
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    }
    batch, query_heads, dim = array["query"].shape
    heads, slots = array["k_window"].shape[1:3]
    channels = array["k_table"].shape[3]
    frequencies = inputs["rope"].inv_freq.numpy()
    scaling = inputs["rope"].attention_scaling
    out = np.zeros((batch, query_heads, dim))
    for row, h in itertools.product(range(batch), range(heads)):
        length, coded = array["lengths"][row], array["n_coded"][row]
        keys, values = [], []
        for p in range(length):
            if in_window(p, coded):
                slot = window_slot(p, slots - SINKS)
                k, v = array["k_window"][row, h, slot], array["v_window"][row, h, slot]
            else:
                page, slot = divmod(p - SINKS, PAGE)
                k, v = (
                    np.concatenate(
                        [
                            array[f"{kind}_table"][h, g, array[f"{kind}_codes"][row, page, h, slot, g]]
                            for g in range(dim // channels)
                        ]
                    )
                    for kind in "kv"
                )
            # Channels i and i + D/2 as one complex number, turned by the position's angle.
            turned = (k[: dim // 2] + 1j * k[dim // 2 :]) * np.exp(1j * p * frequencies) * scaling
            keys.append(np.concatenate([turned.real, turned.imag]))
            values.append(v)
        group = query_heads // heads
        for query_head in range(h * group, (h + 1) * group) if length else ():
            scores = [math.fsum(array["query"][row, query_head] * key) * inputs["scale"] for key in keys]
            weights = np.exp(np.array(scores) - max(scores))
            out[row, query_head] = weights @ np.array(values) / weights.sum()
    return out


def assert_close(name: str, actual: torch.Tensor, expected, dtype: torch.dtype) -> None:
    """Within `FP32_SUM` plus the output's rounding; NaN never passes."""
    actual = actual.double().cpu()
    expected = torch.as_tensor(expected).double().cpu()
    error = (actual - expected).abs()
    allowed = FP32_SUM + ROUNDING[dtype] * expected.abs()
    bad = ~(error <= allowed)
    assert not bad.any(), f"{name}: {int(bad.sum())} of {bad.numel()} values off, largest error {error.max():.3e}"
