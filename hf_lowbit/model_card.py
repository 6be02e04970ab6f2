"""The README of an artifact on the Hub. It begins with the import, without which the codebooks would go unused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPORT_NAME = "calibration_report.json"  # written beside the card by ``hf-lowbit calibrate``

_BODY = """\
```python
import hf_lowbit  # first: without it the model loads, but with an ordinary full-precision cache
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{name}"
model = AutoModelForCausalLM.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)
hf_lowbit.assert_quantized(model)  # raises if the codebooks were not picked up

inputs = tokenizer("Once upon a time", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=64)  # uses the {bits:g}-bit cache
print(tokenizer.decode(output[0], skip_special_tokens=True))
```

# {title}

The weights are those of {base}, unchanged. Beside them the file holds codebooks for the KV cache, fitted by
[hf_lowbit](https://pypi.org/project/hf-lowbit/) (`pip install hf-lowbit`): outside a window of {sinks} first and {window}
recent tokens, the keys and values of {steps} are stored as one 8-bit code per {group} elements, {bits:g} bit
per element. Use `cache_implementation="dynamic"` in `generate` to turn that off.

| calibration | |
|---|---|
{rows}

How the numbers of an evaluation are made: `hf-lowbit eval {name} --text texts.jsonl --tasks tasks.jsonl`.
"""


def model_card(
    model: PreTrainedModel, report: dict[str, Any] | None = None, base_model: str | None = None, repo_id: str | None = None
) -> ModelCard:
    """Build the card of a calibrated model; ``card.save(path)`` or ``card.push_to_hub(repo_id)`` stores it.

    ``model.push_to_hub`` writes transformers' generic card; push this one after it.

    Args:
        model: a calibrated model.
        report: ``CalibrationReport.to_dict()``; its numbers (not its lists) are shown.
        base_model: folder or Hub id of the uncalibrated model; only an id becomes metadata.
        repo_id: the name in the usage snippet.

    Raises:
        ValueError: the model is not calibrated.
    """
    config = getattr(model.config, "quantization_config", None)
    config = config if config is None or isinstance(config, dict) else config.to_dict()
    if config is None or "loopvq" not in config:
        raise ValueError(f"this {type(model).__name__} is not calibrated, so there is no card to write")
    loopvq = config["loopvq"]
    hub_id = base_model if base_model and _is_hub_id(base_model) else None
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=hub_id,
        base_model_relation="quantized" if hub_id else None,
        tags=["hf-lowbit", "loopvq", "kv-cache", "looped-transformer"],
    )
    steps = loopvq["loop_group_size"]
    settings = {
        "bits per element": f"{loopvq['bits']:g}",
        "loop steps per code": steps or "automatic",
        "sequences": f"{loopvq['sequences']} x {loopvq['sequence_length']} tokens",
        "fine-tuning epochs": loopvq["epochs"],
        "seed": loopvq["seed"],
        "fingerprint of the weights": f"`{config['fingerprint']}`",
    }
    numbers = {key.replace("_", " "): f"{value:.6g}" for key, value in (report or {}).items() if type(value) is float}
    body = _BODY.format(
        name=repo_id or "PATH_OR_REPO_ID",
        title=f"{(hub_id or type(model).__name__).rsplit('/', 1)[-1]}, {loopvq['bits']:g}-bit KV cache",
        base=f"[{hub_id}](https://huggingface.co/{hub_id})" if hub_id else "the model it was calibrated from",
        sinks=loopvq["sink_tokens"],
        window=loopvq["recent_window"],
        steps=f"{steps} loop steps" if steps and steps > 1 else "every loop step" if steps == 1 else "all coupled loop steps",
        group=int(8 / loopvq["bits"]),
        bits=loopvq["bits"],
        rows="\n".join(f"| {key} | {value} |" for key, value in {**settings, **numbers}.items()),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{body}")


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()
