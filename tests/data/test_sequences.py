"""Calibration sequences: deterministic, never fewer or shorter than asked for."""

import logging

import pytest
import torch

from hf_lowbit.data import calibration_sequences


class Letters:
    """One token per character, ``|`` is the end of text; like a tokenizer as far as calibration looks at it."""

    eos_token_id = ord("|")
    model_max_length = 100

    def __call__(self, text, truncation, max_length):
        assert truncation
        return {"input_ids": [ord(c) for c in text[:max_length]]}


def decode(sequences):
    return ["".join(map(chr, row)) for row in sequences.tolist()]


def test_long_texts_are_cut():
    got = calibration_sequences(["abcdef", "ghijkl", "mnopqr"], Letters(), n=3, length=4)
    assert got.dtype == torch.long and got.shape == (3, 4)
    assert sorted(decode(got)) == ["abcd", "ghij", "mnop"]


def test_seed_chooses_and_repeats():
    texts = [chr(97 + i) * 5 for i in range(20)]
    one = calibration_sequences(texts, Letters(), 6, 5, seed=1)
    assert torch.equal(one, calibration_sequences(texts, Letters(), 6, 5, seed=1))
    assert not torch.equal(one, calibration_sequences(texts, Letters(), 6, 5, seed=2))
    assert len(set(decode(one))) == 6


def test_short_texts_are_joined_and_said_so(caplog):
    with caplog.at_level(logging.WARNING):
        got = calibration_sequences(["ab", "cd", "ef", "gh"], Letters(), n=2, length=5)
    joined = "".join(decode(got))
    assert joined.count("|") == 2 and all(len(row) == 5 for row in decode(got))
    assert "2 of 2 calibration sequences join texts" in caplog.text


def test_too_little_data_names_both_counts():
    with pytest.raises(ValueError, match=r"3 texts hold 8 usable tokens.*for 2 sequences of 4; 3 sequences need 12"):
        calibration_sequences(["abcdefgh", "ab", "cd"], Letters(), n=3, length=4)


def test_empty_texts_are_said(caplog):
    calibration_sequences(["", "abcd", ""], Letters(), n=1, length=4, seed=0)
    calibration_sequences(["", "abcd", ""], Letters(), n=1, length=4, seed=1)
    assert "texts are empty and were skipped" in caplog.text


def test_longer_than_the_context_is_said(caplog):
    calibration_sequences(["a" * 200], Letters(), n=1, length=150)
    assert "exceed the tokenizer's model_max_length 100" in caplog.text


@pytest.mark.parametrize("n, length", [(0, 4), (1, 0)])
def test_nothing_asked_for(n, length):
    with pytest.raises(ValueError, match="at least one sequence"):
        calibration_sequences(["abcd"], Letters(), n, length)


def test_one_string_is_no_list_of_texts():
    with pytest.raises(ValueError, match="expected a list of texts"):
        calibration_sequences("abcdefgh", Letters(), 1, 4)
