"""examples/train_demo_model.py on tiny settings: three steps, every file, both ways to read them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_lowbit.demo import tasks


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_demo_model.py"
TINY = "--device cpu --steps 3 --batch 2 --length 64 --hidden 32 --mlp 64 --layers 1 --heads 1 --workers 0".split()
TINY += "--warmup 1 --log-every 1 --eval-items 2 --items 2".split()


def run(*arguments):
    paths = [str(ROOT), str(ROOT / "kernels" / "torch-ext"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(reversed(paths))}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    output = run(*TINY, "--no-generate", "--output", str(folder))
    assert "step=3" in output
    return folder


@pytest.mark.compat
def test_writes_everything(trained):
    names = {path.name for path in trained.iterdir()}
    assert names >= {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "training.json"}
    lines = {name: (trained / f"{name}.jsonl").read_text().splitlines() for name in ("calibration", "text", "tasks")}
    assert (len(lines["calibration"]), len(lines["text"]), len(lines["tasks"])) == (48, 16, 6)
    assert json.loads(lines["tasks"][0]) == tasks.items(1_000_003, 2)[0]
    assert not set(lines["calibration"]) & set(lines["text"])


@pytest.mark.compat
def test_check_only_scores_a_folder(trained):
    accuracy = json.loads(run("--check-only", "--device", "cpu", "--output", str(trained)).splitlines()[-1])
    assert set(accuracy) == set(tasks.TASKS) and all(0 <= value <= 1 for value in accuracy.values())


@pytest.mark.compat
@pytest.mark.parametrize("text", ["k7=4821;\nk7?", "héllo  wörld 漢字🙂\t\x00", " a<|endoftext|>b ", "don 't ! ."])
def test_tokenizer_round_trip(trained, text):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained)
    inputs = tokenizer(text)
    assert set(inputs) == {"input_ids", "attention_mask"}
    assert tokenizer.decode(inputs["input_ids"]) == text
    assert (tokenizer.padding_side, tokenizer.pad_token_id, len(tokenizer)) == ("left", 0, tasks.VOCAB_SIZE)


@pytest.mark.compat
def test_jsonl_texts_are_a_little_over_512_tokens(trained):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(trained)
    texts = [json.loads(line)["text"] for line in (trained / "calibration.jsonl").open()]
    assert all(512 < len(tokenizer(text)["input_ids"]) < 560 for text in texts)


def test_importing_the_script_trains_nothing():
    spec = importlib.util.spec_from_file_location("train_demo_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.STAGES[-1][0] == 512
