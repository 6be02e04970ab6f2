"""``hf-lowbit demo --quick`` on the embedded model."""

import pytest

from hf_lowbit.demo import demo_model_path


pytestmark = pytest.mark.skipif(not demo_model_path().is_dir(), reason="the embedded model is not built")


def test_quick_demo(run, tmp_path):
    status, out, err = run("demo", "--quick", "--quiet", "--output", tmp_path / "artifact")
    assert status == 0, err
    for part in ("held-out KL", "accuracy needle", "KL, nats per token", "bits per quantized element", "cache bytes"):
        assert part in out
    assert (tmp_path / "artifact" / "README.md").exists()
    status, out, _ = run("inspect", tmp_path / "artifact")
    assert status == 0 and "0.5 per element" in out


def test_output_that_is_taken(run, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    status, out, err = run("demo", "--quick", "--output", tmp_path)
    assert status == 2 and "is not empty" in err and out == ""
