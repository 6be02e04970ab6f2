"""What the wheel holds. Built from a copy, so that no build folder of the checkout leaks in or out."""

import ast
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"hf_lowbit": ROOT / "hf_lowbit", "hf_lowbit_kernels": ROOT / "kernels/torch-ext/hf_lowbit_kernels"}
DATA = ("config.json", "tokenizer.json", "calibration.jsonl", "text.jsonl", "tasks.jsonl", "model.safetensors")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("hf_lowbit", "kernels"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_in_the_wheel(wheel_names, package):
    folder = PACKAGES[package]
    modules = {f"{package}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.py")}
    modules = {name for name in modules if "/optimum_register/" not in name}
    assert modules and modules <= wheel_names, sorted(modules - wheel_names)


@pytest.mark.parametrize("name", DATA)
def test_demo_data_is_in_the_wheel(wheel_names, name):
    if not (PACKAGES["hf_lowbit"] / "demo" / "model" / name).exists():
        pytest.fail(f"demo/model/{name} is missing: run examples/train_demo_model.py")
    assert f"hf_lowbit/demo/model/{name}" in wheel_names


def test_cuda_sources_are_in_the_wheel(wheel_names):
    sources = {f"hf_lowbit_kernels/{path.name}" for path in PACKAGES["hf_lowbit_kernels"].rglob("*.cu")}
    assert len(sources) == 4 and sources <= wheel_names


def test_every_import_is_declared():
    """The standard library, ourselves, the dependencies; in functions also what an extra brings, or fla."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    declared = {name.replace("-", "_") for name in re.findall(r'"([\w-]+)', listed)}
    known = declared | PACKAGES.keys() | sys.stdlib_module_names
    for path in (path for folder in PACKAGES.values() for path in folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        late = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for node in ast.walk(f)}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in (name.partition(".")[0] for name in names):
                assert name in known or name in ("matplotlib", "fla") and id(node) in late, f"{path}: {name}"


def test_optimum_command_is_in_the_wheel(wheel_names):
    assert "optimum/commands/register/register_lowbit.py" in wheel_names


def test_wheel_adds_nothing_else(wheel_names):
    tops = {name.split("/")[0] for name in wheel_names if ".dist-info/" not in name}
    assert tops == {"hf_lowbit", "hf_lowbit_kernels", "optimum"}
    assert {name for name in wheel_names if name.startswith("optimum/")} == {
        "optimum/commands/register/register_lowbit.py"
    }


@pytest.mark.parametrize("folder", ["kernels", "kernels/torch-ext", "hf_lowbit/cli/optimum_register"])
def test_folders_that_must_not_be_packages(folder):
    """kernels/ would hide the `kernels` library; optimum-cli refuses a register folder with __init__.py."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_import_kernels_is_not_ours():
    spec = importlib.util.find_spec("kernels")  # None, the library, or the checkout's folder as an empty namespace
    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT / "kernels")


def _installed() -> bool:
    try:
        importlib.metadata.distribution("hf-lowbit")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(not _installed(), reason="hf-lowbit is not installed here")
def test_optimum_cli_finds_the_command():
    from optimum.commands.optimum_cli import load_optimum_namespace_cli_commands

    modules = {getattr(command, "__module__", "") for command, _ in load_optimum_namespace_cli_commands()}
    spec = importlib.util.find_spec("optimum.commands.register.register_lowbit")
    assert spec is not None and Path(spec.origin).name == "register_lowbit.py"
    assert any(module.endswith(".register_lowbit") or module.startswith("hf_lowbit") for module in modules), modules
