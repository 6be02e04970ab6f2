"""Arguments and steps that several commands share."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default=None,
        help='"cpu", "cuda", "cuda:1", ... or "auto" to spread over devices; default: cuda if there',
    )
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of the weights; auto: as in the checkpoint")


def add_quiet_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def load_model(name: str, device: str | None, dtype: str) -> PreTrainedModel:
    """Load a causal language model in eval mode.

    Args:
        name: folder or Hub id.
        device: as for ``--device``.
        dtype: one of ``DTYPES``.

    Raises:
        OSError: no such model. ValueError: its codebooks do not belong to its weights, or no such device.
    """
    import torch
    from transformers import AutoModelForCausalLM

    import hf_lowbit  # noqa: F401  registers the quantizer and the looped models

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _check_device(device)
    check_model_folder(name)
    # "cpu" needs no device map, and without one no dispatch hooks are put around the modules.
    placement: dict[str, Any] = {} if device == "cpu" else {"device_map": device}
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **placement).eval()


def _check_device(name: str) -> None:
    import torch

    if name == "auto":
        return
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f'--device {name}: expected "cpu", "cuda", "cuda:N" or "auto"') from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices")


def load_tokenizer(name: str) -> Any:
    """Raises OSError if the model folder or repository has no tokenizer."""
    from transformers import AutoTokenizer

    check_model_folder(name)
    return AutoTokenizer.from_pretrained(name)


def check_model_folder(name: str) -> None:
    """Refuse what looks like a path but is none: transformers would take it for a Hub id and ask the network."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise OSError(f"{name} has no config.json; expected the folder of a model")
    elif path.is_file():
        raise NotADirectoryError(f"{name} is a file; expected the folder of a model or a Hub id")
    elif name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"no such folder: {name}")


@contextmanager
def new_folder(output: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside ``output`` that takes its name when the block ends without an error.

    On an error the temporary folder is removed and whatever was at ``output`` stays as it was. Folder and files get the
    permissions that the user's umask gives to new ones.

    Raises:
        FileExistsError: as :func:`check_output_folder`.
    """
    check_output_folder(output, overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}.", suffix=".tmp"))
    try:
        yield temporary
        _share(temporary)
        if output.exists():
            # A folder cannot be renamed onto one that is not empty: move the old one aside, and back if that fails.
            old = temporary.with_suffix(".old")
            output.rename(old)
            try:
                temporary.rename(output)
            except OSError:
                old.rename(output)
                raise
            shutil.rmtree(old)
        else:
            temporary.rename(output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_output_folder(output: Path, overwrite: bool) -> None:
    """Raise FileExistsError unless a new artifact may be put at ``output``: ``overwrite`` is for artifacts only."""
    if output.is_file() or output.is_symlink() and not output.exists():
        raise FileExistsError(f"--output {output} exists and is no folder")
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise FileExistsError(f"--output {output} is not empty; choose another folder or add --overwrite")
    if output.is_dir() and any(output.iterdir()) and not _is_artifact(output):
        raise FileExistsError(
            f"--output {output} holds something that is no hf_lowbit artifact, and --overwrite would delete it; choose "
            "another folder, or remove this one yourself"
        )
    # The artifact is built beside the output, after the model was loaded and fitted: too late to hear of this.
    above = next(folder for folder in output.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(
            f"--output {output} cannot be created: {above} is no folder that you may write to; choose another place"
        )


def _is_artifact(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return config["quantization_config"]["quant_method"] == "lowbit"
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _share(folder: Path) -> None:
    """mkdtemp and safetensors make what they write private to the user."""
    umask = os.umask(0o077)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def format_bytes(count: float) -> str:
    """Decimal units, as in the documentation: 1 MB is 10^6 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
