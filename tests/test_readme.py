"""The README's snippet runs as it stands."""

import re
from pathlib import Path


README = Path(__file__).parents[1] / "README.md"


def test_quick_start_runs(tmp_path, monkeypatch, capsys):
    (snippet,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(snippet.strip().splitlines()) <= 16
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})
    assert "k1?" in capsys.readouterr().out
    assert (tmp_path / "demo-loopvq" / "model.safetensors").exists()


def test_links_and_files_exist():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
