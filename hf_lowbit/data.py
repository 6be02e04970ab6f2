"""JSONL texts and tasks, and tokenized sequences for calibration.

A text file holds one ``{"text": ...}`` a line; a ``"domain"`` beside it labels the text for calibrations that balance
domains. A task file holds one item a line:
``{"task", "prompt", "target", "max_new_tokens"}``, with an optional ``"answer"`` that says where in the generation the
answer stands (a key of ``ANSWER_RULES``: ``"first_line"``, ``"after_hashes"``); other keys are ignored. Lines in the
layout of GSM8K (``question``, ``answer``) and HumanEval (``prompt``, ``entry_point``) are understood too. Names that
end in ``.gz`` are decompressed on the fly.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


logger = logging.getLogger(__name__)

# What a calibration takes: a JSONL path, texts, or {"text", "domain"} dicts.
Texts = str | os.PathLike | Sequence[str] | Sequence[dict[str, str]]

# Where the answer of a task stands unless its item says otherwise; a task not named here has it on the first line.
ANSWER_RULE_OF_TASK = {
    "word": "after_hashes",
    "vars": "after_hashes",
    "trace": "after_hashes",
    "needle": "first_line",
    "sort": "first_line",
}


def _first_line(generation: str) -> str | None:
    return generation.split("\n", 1)[0].strip()


def _after_hashes(generation: str) -> str | None:
    _, found, rest = generation.partition("####")
    return rest.split("\n", 1)[0].strip() if found else None


def _number_after_hashes(generation: str) -> str | None:
    answer = _after_hashes(generation)
    return answer and answer.replace(",", "")  # GSM8K writes both 1,000 and 1000


ANSWER_RULES: dict[str, Callable[[str], str | None]] = {
    "first_line": _first_line,
    "after_hashes": _after_hashes,
    "number_after_hashes": _number_after_hashes,
}


@dataclass(frozen=True)
class Task:
    """One prompt with a checkable answer; ``target`` is None if the file has no text to compare with (HumanEval)."""

    task: str
    prompt: str
    target: str | None
    max_new_tokens: int
    answer: str

    def extract(self, generation: str) -> str | None:
        """The answer inside ``generation`` (the text after the prompt), or None if there is none."""
        return ANSWER_RULES[self.answer](generation)

    def is_correct(self, generation: str) -> bool | None:
        """Whether the extracted answer equals ``target``; None for items that cannot be scored."""
        return None if self.target is None else self.extract(generation) == self.target.strip()


def read_texts(path: str | Path, limit: int | None = None) -> list[str]:
    """The ``text`` of each line, of the first ``limit`` lines.

    Raises:
        OSError: no such file, or it cannot be read.
        ValueError: a line is no JSON object, lacks ``text`` or holds an empty one, or the file holds no line at all.
            The message names the line.
    """
    texts = []
    for where, record in _records(path):
        if limit is not None and len(texts) >= limit:
            break
        text = _field(record, "text", str, where)
        if not text.strip():
            raise ValueError(f"{where}: 'text' is empty")
        texts.append(text)
    if not texts:
        raise ValueError(f'{path}: no texts found; expected one {{"text": ...}} object per line')
    return texts


def calibration_texts(dataset: Texts) -> tuple[list[str], list[str] | None]:
    """The texts of a data set and, if all of them have one, their domains.

    Args:
        dataset: the path of a JSONL file, or a list of texts or of ``{"text": ..., "domain": ...}`` dicts.

    Returns:
        Texts, and one domain for each or None.

    Raises:
        OSError, ValueError: as :func:`read_texts`; also if only some lines have a domain.
    """
    if isinstance(dataset, (str, os.PathLike)):
        records = list(_records(dataset))
        texts = read_texts(dataset)
    elif not isinstance(dataset, Iterable) or isinstance(dataset, dict):
        raise ValueError(
            f"a calibration data set is a list of texts, or the path of a JSONL file of them, not {type(dataset).__name__}."
        )
    else:
        dataset = list(dataset)
        for i, x in enumerate(dataset):
            if not isinstance(x, (str, dict)):
                raise ValueError(f'text {i} must be a string or a {{"text": ...}} dict, not {type(x).__name__}.')
        records = [(f"text {i}", record) for i, record in enumerate(dataset) if isinstance(record, dict)]
        texts = [_field(x, "text", str, f"text {i}") if isinstance(x, dict) else x for i, x in enumerate(dataset)]
    domains = [_field(record, "domain", str, where) for where, record in records if "domain" in record]
    if domains and len(domains) != len(texts):
        raise ValueError(
            f"{len(domains)} of {len(texts)} calibration texts have a 'domain'; give every text one, or none."
        )
    return texts, domains or None


def write_texts(path: str | Path, texts: Sequence[str]) -> None:
    """Write texts as :func:`read_texts` reads them, through a temporary file: all of them or nothing."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(partial, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_tasks(path: str | Path, limit: int | None = None) -> list[Task]:
    """The task items of a file, at most the first ``limit`` of each task.

    Raises:
        OSError, ValueError: as :func:`read_texts`.
    """
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for where, record in _records(path):
        task = _task(record, where)
        seen[task.task] = seen.get(task.task, 0) + 1
        if limit is None or seen[task.task] <= limit:
            tasks.append(task)
    if not tasks:
        raise ValueError(
            f'{path}: no tasks found; expected one {{"task", "prompt", "target", "max_new_tokens"}} object per line'
        )
    return tasks


def calibration_sequences(
    texts: Sequence[str], tokenizer: Any, n: int | None, length: int, seed: int = 0
) -> torch.LongTensor:
    """Tokenize ``texts`` into calibration sequences.

    Texts are visited in a seeded random order. One with at least ``length`` tokens gives one sequence, cut to
    ``length``; shorter ones are joined, with the end-of-text token between them, until a sequence is full. Texts are
    tokenized only until ``n`` sequences are complete.

    Args:
        texts: the documents.
        tokenizer: a transformers tokenizer.
        n: number of sequences, or None for as many as the texts fill.
        length: tokens of each.
        seed: of the order; the same arguments give the same sequences.

    Returns:
        int64 ``[n, length]``.

    Raises:
        ValueError: fewer than ``n`` sequences can be made; the message has the tokens found and needed.
    """
    wanted, n = n, 1 if n is None else n
    if n < 1 or length < 1:
        raise ValueError(f"need at least one sequence of at least one token, got {n} of {length} tokens")
    if isinstance(texts, str):
        raise ValueError("expected a list of texts, got one string; read a JSONL file with hf_lowbit.data.read_texts")
    limit = getattr(tokenizer, "model_max_length", None)
    if limit is not None and length > limit:
        logger.warning("calibration sequences of %d tokens exceed the tokenizer's model_max_length %d", length, limit)
    separator = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    sequences: list[list[int]] = []
    pending: list[int] = []  # tokens of short texts, not yet a full sequence
    found = joined = empty = visited = 0
    for index in order:
        if len(sequences) == wanted:
            break
        visited += 1
        # Cutting inside the tokenizer avoids its warning about texts longer than the model's context.
        ids = tokenizer(texts[index], truncation=True, max_length=length)["input_ids"]
        found += len(ids)
        if not ids:
            empty += 1
        elif len(ids) >= length:
            sequences.append(ids[:length])
        else:
            pending += (separator if pending else []) + ids
            if len(pending) >= length:
                sequences.append(pending[:length])
                pending = pending[length:]
                joined += 1
    if len(sequences) < n:
        raise ValueError(
            f"too little calibration data: {len(texts)} texts hold {found} usable tokens (a text longer than {length} "
            f"tokens counts once), enough for {len(sequences)} sequences of {length}; {n} sequences need {n * length}. "
            "Give more or longer texts, or ask for fewer or shorter sequences"
        )
    if joined:
        logger.warning(
            "%d of %d calibration sequences join texts shorter than %d tokens, with the end-of-text token between them",
            joined, len(sequences), length,
        )  # fmt: skip
    if empty:
        logger.warning("%d of %d calibration texts are empty and were skipped", empty, visited)
    return torch.tensor(sequences, dtype=torch.long)


def domain_sequences(
    texts: Sequence[str], domains: Sequence[str] | None, tokenizer: Any, n: int, length: int, seed: int = 0
) -> tuple[torch.LongTensor, list[str] | None]:
    """:func:`calibration_sequences` with equal parts from every domain.

    Args:
        texts, tokenizer, n, length, seed: as there; only texts of one domain are joined.
        domains: one label per text, or None.

    Returns:
        int64 ``[n, length]`` and the label of each row, or None. If ``n`` is no multiple of the number of domains, the
        first ones (in order of appearance) give one sequence more.

    Raises:
        ValueError: more domains than sequences, or a domain with too little text; the message names it.
    """
    if domains is None:
        return calibration_sequences(texts, tokenizer, n, length, seed), None
    names = list(dict.fromkeys(domains))
    if len(names) > n:
        raise ValueError(f"{n} calibration sequences cannot cover {len(names)} domains ({', '.join(names)}).")
    parts, labels = [], []
    for i, name in enumerate(names):
        count = n // len(names) + (i < n % len(names))
        try:
            own = [text for text, domain in zip(texts, domains, strict=True) if domain == name]
            parts.append(calibration_sequences(own, tokenizer, count, length, seed))
        except ValueError as error:
            raise ValueError(f"domain {name!r}: {error}") from None
        labels += [name] * count
    return torch.cat(parts), labels


def _records(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """``(place for messages, object)`` of each line that is not blank."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a JSONL file")
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
                if not isinstance(record, dict):
                    raise ValueError(f"{where}: expected a JSON object, got {type(record).__name__}")
                yield where, record
        except UnicodeDecodeError:
            raise ValueError(f"{path}, near line {number + 1}: not UTF-8 text") from None
        except EOFError:
            raise ValueError(f"{path}: the compressed file is truncated") from None


def _field(record: dict[str, Any], key: str, kind: type, where: str) -> Any:
    if key not in record:
        raise ValueError(f"{where}: missing key '{key}' (found: {', '.join(sorted(record)) or 'none'})")
    value = record[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where}: '{key}' must be {kind.__name__}, got {type(value).__name__}")
    return value


def _task(record: dict[str, Any], where: str) -> Task:
    if "question" in record and "prompt" not in record:  # GSM8K
        target = _number_after_hashes(_field(record, "answer", str, where))
        if target is None:
            raise ValueError(f"{where}: 'answer' has no '####' line")
        prompt = f"Question: {_field(record, 'question', str, where)}\nAnswer:"
        return Task("gsm8k", prompt, target, 320, "number_after_hashes")
    prompt = _field(record, "prompt", str, where)
    if not prompt:
        raise ValueError(f"{where}: 'prompt' is empty")
    if "entry_point" in record:  # HumanEval: its check runs generated code, so only divergence is measured
        return Task("humaneval", prompt, None, 384, "first_line")
    name = _field(record, "task", str, where)
    budget = _field(record, "max_new_tokens", int, where)
    if budget < 1:
        raise ValueError(f"{where}: 'max_new_tokens' must be at least 1, got {budget}")
    rule = record.get("answer", ANSWER_RULE_OF_TASK.get(name, "first_line"))
    if rule not in ANSWER_RULES:
        raise ValueError(f"{where}: 'answer' must be one of {', '.join(ANSWER_RULES)}, got {rule!r}")
    return Task(name, prompt, _field(record, "target", str, where), budget, rule)
