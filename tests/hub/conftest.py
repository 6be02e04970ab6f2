"""A local Hub per test, and clients in subprocesses: huggingface_hub reads its settings when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # local_hub.py, whatever pytest's import mode

from local_hub import LocalHub  # noqa: E402


@pytest.fixture
def hub():
    with LocalHub() as server:
        yield server


@pytest.fixture
def run_client(hub, tmp_path):
    """``run_client(code, *arguments)``: run Python code against the local Hub; returns its stdout and stderr.

    ``home`` names the client's cache folder: another name is another machine.
    """

    def call(code, *arguments, home="home"):
        environment = os.environ | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_TOKEN": hub.token,
            "HF_HOME": str(tmp_path / home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1,localhost",
            "PYTHONPATH": os.pathsep.join(
                [*(str(HERE.parent / folder) for folder in ("evaluation", "damp")), *filter(None, sys.path)]
            ),
        }
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            capture_output=True,
            text=True,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return call
