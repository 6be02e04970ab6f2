"""The README of an artifact on the Hub. It begins with the import, without which the tables would go unused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard, ModelCardData

from .artifact import stored_fingerprint
from .methods import METHODS, methods_on


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
hf_lowbit.assert_quantized(model)  # raises if the {tables} were not picked up

inputs = tokenizer("Once upon a time", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=64)  # uses {cache}
print(tokenizer.decode(output[0], skip_special_tokens=True))
```

# {title}

The weights are those of {base}, unchanged. {description}
`cache_implementation="dynamic"` in `generate` turns that off.

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
        report: ``to_dict()`` of what ``calibrate`` returned, for the figures of the calibration. For a model with tables
            of both methods a dict of both reports, by method; one may be missing.
        base_model: folder or Hub id of the uncalibrated model; only an id becomes metadata.
        repo_id: the name in the usage snippet.

    Raises:
        ValueError: the model is not calibrated.
    """
    found = methods_on(model)
    if not found:
        raise ValueError(
            f"this {type(model).__name__} carries none of {', '.join(m.tables for m in METHODS.values())}; a card is for "
            "a calibrated model."
        )
    if len(found) == 1:
        parts = [method.card(model, report) for method in found]
        rows = dict(parts[0].rows)
    else:
        parts = [method.card(model, (report or {}).get(method.name)) for method in found]
        rows = {
            f"{method.name}: {name}": value for method, part in zip(found, parts) for name, value in part.rows.items()
        }
    rows["fingerprint of the weights"] = f"`{stored_fingerprint(model)}`"
    hub_id = base_model if base_model and _is_hub_id(base_model) else None
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=hub_id,
        base_model_relation="quantized" if hub_id else None,
        tags=["hf-lowbit", *dict.fromkeys(tag for part in parts for tag in part.tags)],
    )
    body = _BODY.format(
        name=repo_id or "PATH_OR_REPO_ID",
        title=", ".join([(hub_id or type(model).__name__).rsplit("/", 1)[-1], *(part.title for part in parts)]),
        base=f"[{hub_id}](https://huggingface.co/{hub_id})" if hub_id else "the model it was calibrated from",
        tables=" and ".join(method.tables for method in found),
        cache=" and ".join(part.cache for part in parts),
        description="\n".join(part.description for part in parts),
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{body}")


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()
