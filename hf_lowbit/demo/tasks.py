"""The demo model's world: notebooks of facts, then questions about them.

A notebook is one line of statements and a line for every question::

    k7=4821;the red fox sees a boat;[QFCXBK];m3=k7;w0=1937;
    w0?1937                 needle: recall the four digits
    m3>k7>4821              vars: follow the chain, then give its value after ####
    #### 4821
    sort?BCFKQX             sort: the bracketed letters in order

Every answer is an exact copy of (or an order over) a few tokens seen long before, which is what a damaged KV cache
loses first. One character is one token.
"""

from __future__ import annotations

import random

import numpy as np


TASKS = ("needle", "vars", "sort")
ANSWER_RULE = {"needle": "first_line", "vars": "after_hashes", "sort": "first_line"}
MAX_NEW_TOKENS = {"needle": 8, "vars": 40, "sort": 16}

EOS = "<|endoftext|>"
EOS_ID = 0
VOCAB_SIZE = 256
# Bytes that valid UTF-8 never contains; their places in the vocabulary are reserved.
UNUSED_BYTES = (0xC0, 0xC1, *range(0xF5, 0x100))
USED_BYTES = tuple(b for b in range(256) if b not in UNUSED_BYTES)
EOS_BYTE = 0xFF  # stands for EOS while documents are still bytes

BYTE_TO_ID = np.zeros(256, dtype=np.int64)
BYTE_TO_ID[list(USED_BYTES)] = np.arange(1, len(USED_BYTES) + 1)

MIN_AGE = 80  # asked-for facts end at least this many tokens before the question: beyond sinks and recent window
QUESTION_WEIGHT = 0.1  # loss weight of everything that is not an answer

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_KEYS = [letter + digit for letter in _LETTERS for digit in "0123456789"]
_ADJECTIVES = ("red", "old", "small", "quick", "green", "quiet")
_NOUNS = ("fox", "boat", "tree", "cat", "river", "house", "bird", "stone")
_VERBS = ("sees", "likes", "finds", "passes", "keeps")


def sentence(rng: random.Random) -> str:
    """A filler statement without any fact."""
    r = rng.random
    adjective, noun = _ADJECTIVES[int(r() * 6)], _NOUNS[int(r() * 8)]
    return f"the {adjective} {noun} {_VERBS[int(r() * 5)]} a {_NOUNS[int(r() * 8)]};"


class Notebook:
    """Draws facts whose keys are unique within one sequence, so that no question has two answers."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.keys = rng.sample(_KEYS, len(_KEYS))
        self.has_list = False

    def room(self) -> int:
        return len(self.keys)

    def pair(self) -> tuple[list[str], str, str]:
        """(statements, question, answer)"""
        key, value = self.keys.pop(), f"{int(self.rng.random() * 10000):04d}"
        return [f"{key}={value};"], f"{key}?", f"{value}\n"

    def chain(self, hops: int) -> tuple[list[str], str, str]:
        names = [self.keys.pop() for _ in range(hops + 1)]
        value = f"{int(self.rng.random() * 10000):04d}"
        statements = [f"{name}={target};" for name, target in zip(names, names[1:] + [value])]
        path = ">".join(names[1:] + [value])
        return statements, f"{names[0]}>", f"{path}\n#### {value}\n"

    def letters(self) -> tuple[list[str], str, str]:
        self.has_list = True
        chosen = self.rng.sample(_UPPER, self.rng.randint(4, 9))
        return [f"[{''.join(chosen)}];"], "sort?", "".join(sorted(chosen)) + "\n"

    def fact(self, task: str) -> tuple[list[str], str, str]:
        if task == "needle":
            return self.pair()
        return self.chain(self.rng.randint(1, 3)) if task == "vars" else self.letters()

    def other(self) -> list[str]:
        """A statement nobody will ask about, never a second list."""
        r = self.rng.random()
        if r < 0.65:
            return self.pair()[0]
        return [sentence(self.rng)] if r < 0.85 else self.chain(1)[0]


def document(notebook: Notebook, size: int) -> list[tuple[str, bool]]:
    """About `size` characters of facts and as many questions as fit, as (text, is_answer) pieces."""
    rng = notebook.rng
    statements: list[str] = []
    questions: list[tuple[str, str]] = []
    share = rng.uniform(0.4, 0.75)
    length, goal = 0, share * size
    want_list = not notebook.has_list and rng.random() < 0.8
    while length < goal and notebook.room() > 8:
        r = rng.random()
        if want_list:
            want_list = False
            new, *question = notebook.letters()
        elif r < 0.62:
            new, *question = notebook.pair()
        elif r < 0.85 and size - length > 40:
            new, *question = notebook.chain(1 + int(rng.random() * (3 if size > 150 else 1)))
        else:
            new, question = [sentence(rng)], None
        statements += new
        length += sum(map(len, new))
        if question:
            questions.append(question)
    rng.shuffle(statements)
    rng.shuffle(questions)
    pieces = [("".join(statements) + "\n", False)]
    length += 1
    for question, answer in questions:
        if length + len(question) + len(answer) > size:
            continue
        pieces += [(question, False), (answer, True)]
        length += len(question) + len(answer)
    return pieces


def sequence(rng: random.Random, length: int, smallest: int = 48) -> tuple[bytes, np.ndarray]:
    """Notebooks packed to exactly `length` tokens: bytes (EOS as 0xFF) and uint8 flags of the answer tokens."""
    notebook = Notebook(rng)
    parts: list[bytes] = []
    flags: list[np.ndarray] = []
    total = 0
    while total < length:
        left = length - total
        size = left - 1 if rng.random() < 0.5 or left < 2 * smallest else rng.randint(smallest, left)
        pieces = document(notebook, max(size, smallest))
        for text, is_answer in pieces:
            parts.append(text.encode())
            flags.append(np.full(len(text), is_answer, dtype=np.uint8))
            total += len(text)
        parts.append(bytes([EOS_BYTE]))
        flags.append(np.zeros(1, dtype=np.uint8))
        total += 1
    return b"".join(parts)[:length], np.concatenate(flags)[:length]


def batch(rng: random.Random, rows: int, length: int, smallest: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """uint8 token ids and answer flags, each [rows, length]."""
    drawn = [sequence(rng, length, smallest) for _ in range(rows)]
    raw = np.frombuffer(b"".join(data for data, _ in drawn), dtype=np.uint8).reshape(rows, length)
    return BYTE_TO_ID[raw].astype(np.uint8), np.stack([flags for _, flags in drawn])


def text_line(rng: random.Random, length: int) -> str:
    """One JSONL text of `length` tokens, documents separated by <|endoftext|>."""
    data, _ = sequence(rng, length)
    return EOS.join(part.decode() for part in data.split(bytes([EOS_BYTE])))


def item(rng: random.Random, task: str, size: int) -> dict:
    """One question over a notebook of about `size` tokens; its facts are older than MIN_AGE tokens, and not first."""
    notebook = Notebook(rng)
    facts, question, answer = notebook.fact(task)
    tail: list[str] = []
    while sum(map(len, tail)) < MIN_AGE:
        tail += notebook.other()
    middle = list(facts)
    if task != "sort" and rng.random() < 0.5:
        middle += notebook.letters()[0]
    first = notebook.pair()[0]
    while sum(map(len, first + middle + tail)) + 12 < size:
        middle += notebook.other()
    rng.shuffle(middle)
    prompt = "".join(first + middle + tail) + "\n" + question
    target = answer.split("#### ")[-1].strip() if ANSWER_RULE[task] == "after_hashes" else answer.strip()
    return {
        "task": task,
        "prompt": prompt,
        "reference": answer,
        "target": target,
        "max_new_tokens": MAX_NEW_TOKENS[task],
        "prompt_tokens": len(prompt),
        "answer": ANSWER_RULE[task],
    }


def items(seed: int, per_task: int, shortest: int = 160, longest: int = 450) -> list[dict]:
    rng = random.Random(seed)
    return [item(rng, task, rng.randint(shortest, longest)) for task in TASKS for _ in range(per_task)]


def is_right(item: dict, generated: str) -> bool:
    """The scoring rule named by item["answer"]."""
    if item["answer"] == "after_hashes":
        generated = generated.partition("####")[2]
    return generated.strip(" ").split("\n")[0].strip() == item["target"]
