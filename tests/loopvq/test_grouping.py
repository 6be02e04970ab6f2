"""Which element lands in which coordinate, and that nothing gets lost on the way."""

import pytest
import torch

from hf_lowbit import LoopVQConfig
from hf_lowbit.loopvq.grouping import Grouping


SHAPES = [
    (4, 4, 16, 128),
    (4, 4, 32, 128),
    (4, 2, 16, 64),
    (4, 1, 16, 96),
    (1, 1, 8, 64),
    (6, 2, 8, 64),
    (32, 4, 32, 96),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_coordinates_follow_the_paper(shape):
    g = Grouping(*shape)
    states = torch.arange(g.steps_per_code * 3 * g.head_dim).view(g.steps_per_code, 3, g.head_dim)
    coupled = g.couple(states)
    assert coupled.shape == (3, g.groups, g.group_size)
    for group in range(g.groups):
        for i in range(g.channels):
            for m in range(g.steps_per_code):
                expected = states[m, :, group * g.channels + i]
                assert torch.equal(coupled[:, group, i * g.steps_per_code + m], expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_round_trips_are_bit_exact(shape):
    g = Grouping(*shape)
    states = torch.randn(g.steps_per_code, 2, 5, g.head_dim, generator=torch.Generator().manual_seed(0))
    assert torch.equal(g.separate(g.couple(states)), states)
    entries = torch.randn(2, g.groups, 256, g.group_size)
    tables = g.step_tables(entries)
    assert tables.shape == (g.steps_per_code, 2, g.groups, 256, g.channels)
    assert torch.equal(g.join_tables(tables), entries)


def test_a_table_slice_reconstructs_the_steps_of_its_entry():
    g = Grouping(4, 4, 16, 32)
    states = torch.randn(4, 1, 32)
    tables = g.step_tables(g.couple(states)[0].unsqueeze(-2))  # [T_c, NG, 1, c]: one entry per group
    for m in range(4):
        assert torch.equal(tables[m].flatten(), states[m, 0])


@pytest.mark.parametrize(
    ("bits", "size", "steps", "dim", "message"),
    [
        (0.5, 3, 4, 128, "divides G"),
        (0.5, 8, 4, 128, "does not divide the model's 4 loop steps"),
        (0.5, 2, 3, 128, "does not divide the model's 3 loop steps"),
        (0.25, 1, 4, 80, "do not divide head_dim=80"),
        (0.3, None, 4, 128, "bits=0.3"),
    ],
)
def test_impossible_groupings_say_why(bits, size, steps, dim, message):
    with pytest.raises(ValueError, match=message):
        Grouping.of(LoopVQConfig(bits=bits, loop_group_size=size), steps, dim)


def test_default_group_size_is_the_largest_that_fits():
    for steps, expected in ((4, 4), (1, 1), (6, 2), (3, 1), (32, 4)):
        assert Grouping.of(LoopVQConfig(bits=0.5), steps, 128).steps_per_code == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(recent_window=0), "recent_window"),
        (dict(recent_window=60), "multiple of the page"),
        (dict(sink_tokens=4), "sink_tokens"),
        (dict(sequences=1), "sequences"),
        (dict(epochs=-1), "epochs"),
        (dict(learning_rate="fast"), "learning_rate"),
        (dict(learning_rate=3.0), "learning_rate"),
        (dict(schedule="linear"), "schedule"),
        (dict(seed=True), "seed"),
    ],
)
def test_config_refuses_bad_values(values, message):
    with pytest.raises(ValueError, match=message):
        LoopVQConfig(**values)


def test_config_dict_round_trip_and_unknown_keys():
    config = LoopVQConfig(bits=0.25, recent_window=256, learning_rate=0.01)
    assert LoopVQConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="does not know"):
        LoopVQConfig.from_dict({"bits": 0.5, "rotation": 3})
