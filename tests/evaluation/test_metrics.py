"""Divergence, repetition and accuracy on hand-made token lists."""

import pytest

from hf_lowbit.data import Task
from hf_lowbit.evaluation.metrics import accuracy, divergence, first_divergence, repeats


@pytest.mark.parametrize(
    "a, b, index",
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([4], [5], 0), ([], [], 0)],
)
def test_first_divergence(a, b, index):
    assert first_divergence(a, b) == first_divergence(b, a) == index


def test_divergence_counts_identical_ones_with_their_length():
    apart = divergence([[1, 2, 3], [1, 2, 3, 4]], [[1, 9, 3], [1, 2, 3, 4]])
    assert (apart.mean, apart.identical, apart.p10, apart.p90) == (2.5, 0.5, 1.0, 4.0)
    with pytest.raises(ValueError, match="equally many"):
        divergence([[1]], [])


@pytest.mark.parametrize(
    "tokens, found",
    [
        ([7] * 16, True),
        ([7] * 15, False),
        (list(range(100)) + [1, 2, 3] * 6, True),
        (list(range(100)) + [1, 2, 3] * 5, False),  # 15 tokens: too short to be sure
        ([1, 2, 3] * 6 + list(range(100)), True),  # also when it recovers
        (list(range(32)) * 4, True),
        (list(range(32)) * 3, False),
        (list(range(33)) * 8, False),  # longer periods are not looked for
        ([], False),
    ],
)
def test_repeats(tokens, found):
    assert repeats(tokens) is found


def test_accuracy_by_task_leaves_out_what_cannot_be_scored():
    tasks = [
        Task("a", "", "1", 1, "first_line"),
        Task("b", "", "1", 1, "first_line"),
        Task("c", "", None, 1, "first_line"),
    ]
    assert accuracy(tasks, ["1", "2", "x"]) == {"a": 1.0, "b": 0.0}
