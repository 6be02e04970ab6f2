"""Reading JSONL: every way a file can be wrong has its own message, with the line."""

import gzip
import json

import pytest

from hf_lowbit.data import Task, read_tasks, read_texts


ITEM = {"task": "word", "prompt": "Question: 1 + 1?", "target": "2", "max_new_tokens": 8}


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_texts_in_order_and_limited(tmp_path):
    path = write(tmp_path / "t.jsonl", {"text": "one"}, "\n", {"text": "two", "other": 3}, {"text": "three"})
    assert read_texts(path) == ["one", "two", "three"]
    assert read_texts(str(path), limit=2) == ["one", "two"]


def test_gzip(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    content = gzip.compress(b'{"text": "one"}\n' * 500)
    path.write_bytes(content)
    assert len(read_texts(path)) == 500
    path.write_bytes(content[:-12])
    with pytest.raises(ValueError, match="truncated"):
        read_texts(path)


@pytest.mark.parametrize(
    "lines, message",
    [
        ([], "no texts found"),
        (["\n", "  \n"], "no texts found"),
        ([{"text": "a"}, "{'text': 1}\n"], r"line 2: not JSON \(.* at column 2\)"),
        (['["text"]\n'], "line 1: expected a JSON object, got list"),
        ([{"text": "a"}, "\n", {"txt": "b"}], r"line 3: missing key 'text' \(found: txt\)"),
        ([{"text": 5}], "line 1: 'text' must be str, got int"),
        ([{"text": " \n"}], "line 1: 'text' is empty"),
    ],
)
def test_bad_texts(tmp_path, lines, message):
    path = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(ValueError, match=message) as error:
        read_texts(path)
    assert "bad.jsonl" in str(error.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file: .*absent.jsonl"):
        read_texts(tmp_path / "absent.jsonl")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        read_tasks(tmp_path)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_texts(tmp_path / "binary.jsonl")


def test_tasks_limited_per_task(tmp_path):
    items = [ITEM | {"task": name, "prompt": f"{name} {i}"} for i in range(3) for name in ("word", "needle")]
    path = write(tmp_path / "t.jsonl", *items)
    assert len(read_tasks(path)) == 6
    assert [task.prompt for task in read_tasks(path, limit=1)] == ["word 0", "needle 0"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt": None}, "'prompt' must be str"),
        ({"prompt": ""}, "'prompt' is empty"),
        ({"target": 2}, "'target' must be str"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": True}, "'max_new_tokens' must be int, got bool"),
        ({"max_new_tokens": "8"}, "'max_new_tokens' must be int"),
        ({"answer": "last_line"}, "'answer' must be one of first_line, after_hashes"),
    ],
)
def test_bad_tasks(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_tasks(write(tmp_path / "t.jsonl", ITEM | change))


@pytest.mark.parametrize("key", ["task", "prompt", "target", "max_new_tokens"])
def test_missing_task_keys(tmp_path, key):
    item = {name: value for name, value in ITEM.items() if name != key}
    with pytest.raises(ValueError, match=f"line 1: missing key '{key}'"):
        read_tasks(write(tmp_path / "t.jsonl", item))


SCORES = [
    ("word", " 2 + 5 = 7\n#### 7\n", "7", True),
    ("vars", "#### 7 and more\n", "7", False),
    ("trace", "7\n", "7", False),
    ("trace", "\nx=1 t=-8\n####  -8 \n#### 9", "-8", True),
    ("needle", " 58687\nand 1", "58687", True),
    ("needle", "\n58687", "58687", False),
    ("sort", " 1 2 3", "1 2 3", True),
    ("unknown", "yes\nno", "yes", True),
]


@pytest.mark.parametrize("name, generation, target, right", SCORES)
def test_scoring_rule_by_task(tmp_path, name, generation, target, right):
    (task,) = read_tasks(write(tmp_path / "t.jsonl", ITEM | {"task": name, "target": target}))
    assert task.is_correct(generation) is right


def test_answer_field_overrides_the_rule(tmp_path):
    (task,) = read_tasks(write(tmp_path / "t.jsonl", ITEM | {"answer": "first_line"}))
    assert task.is_correct(" 2\n#### 3") is True


def test_benchmark_layouts(tmp_path):
    gsm8k = {"question": "How many?", "answer": "It is <<1=1>>1.\n#### 1,600"}
    human = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": " pass"}
    first, second = read_tasks(write(tmp_path / "t.jsonl", gsm8k, human))
    assert first.prompt == "Question: How many?\nAnswer:" and first.is_correct("so\n#### 1600\n")
    assert first.is_correct("#### 1,600")
    assert second.task == "humaneval" and second.is_correct(" pass") is None
    assert isinstance(second, Task)
