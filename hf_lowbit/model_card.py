"""The README of an artifact on the Hub. It begins with the import, without which the codebooks would go unused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData

from .config import lowbit_config
from .loopvq.attach import loopvq_codebooks


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

The weights are those of {base}, unchanged. Beside them the file holds codebooks for the KV cache, fitted
with hf_lowbit. All but the first {sinks} and the {window} most recent tokens are stored as 8-bit codes, one for {group} elements of keys or
values ({coupling}): {bits:g} bit per element. `cache_implementation="dynamic"` in `generate` turns that off.

| calibration | |
|---|---|
{rows}

What the cache costs is measured by `hf-lowbit eval {name} --text texts.jsonl --tasks tasks.jsonl`.
"""


def model_card(
    model: PreTrainedModel,
    report: dict[str, Any] | None = None,
    base_model: str | None = None,
    repo_id: str | None = None,
) -> ModelCard:
    """Build the card of a calibrated model; ``card.save(path)`` or ``card.push_to_hub(repo_id)`` stores it.

    ``model.push_to_hub`` writes transformers' generic card; push this one after it.

    Args:
        model: a calibrated model.
        report: ``CalibrationReport.to_dict()``, for the held-out KL.
        base_model: folder or Hub id of the uncalibrated model; only an id becomes metadata.
        repo_id: the name in the usage snippet.

    Raises:
        ValueError: the model is not calibrated.
    """
    codebooks = loopvq_codebooks(model)
    config = lowbit_config(model).to_dict()
    loopvq = config["loopvq"]
    hub_id = base_model if base_model and _is_hub_id(base_model) else None
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=hub_id,
        base_model_relation="quantized" if hub_id else None,
        tags=["hf-lowbit", "loopvq", "kv-cache", "looped-transformer"],
    )
    rows = {
        "data": f"{loopvq['sequences']} sequences x {loopvq['sequence_length']} tokens, seed {loopvq['seed']}",
        "fine-tuning": f"{loopvq['epochs']} epochs",
        "fingerprint of the weights": f"`{config['fingerprint']}`",
    }
    if report:
        rows["held-out KL after k-means"] = f"{report['held_out'][0]:.4g} nats per token"
        rows["held-out KL of the codebooks kept"] = f"{report['held_out'][report['best_epoch']]:.4g} nats per token"
    group, steps = round(8 / loopvq["bits"]), codebooks[0].grouping.steps_per_code
    body = _BODY.format(
        name=repo_id or "PATH_OR_REPO_ID",
        title=f"{(hub_id or type(model).__name__).rsplit('/', 1)[-1]}, {loopvq['bits']:g}-bit KV cache",
        base=f"[{hub_id}](https://huggingface.co/{hub_id})" if hub_id else "the model it was calibrated from",
        sinks=loopvq["sink_tokens"],
        window=loopvq["recent_window"],
        group=group,
        coupling=f"{group // steps} channels of {steps} loop step{'s' if steps > 1 else ''}",
        bits=loopvq["bits"],
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{body}")


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()
