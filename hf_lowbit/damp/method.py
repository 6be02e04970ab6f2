"""DAMP as one of the package's methods."""

from __future__ import annotations

import dataclasses
from typing import Any

from hf_lowbit_kernels import DampPlan

from ..config import DAMPConfig
from ..data import domain_sequences
from ..protocols import Calibration, CardText
from .attach import (
    NAME,
    DampTables,
    attach_damp,
    check_rows,
    damp_config,
    damp_layout,
    damp_tables,
    detach_damp,
    stored_bytes,
)
from .cache import DAMPStateCache
from .calibration import fit
from .report import DampReport
from .spec import DeltaSpec


class Damp:
    """See :class:`hf_lowbit.protocols.Method`."""

    name = NAME
    tables = "DAMP tables"
    table_class = DampTables
    cache_options = ("rounding", "seed", "prefill_chunk_size", "strict", "backend", "cuda_graphs", "max_cache_len")

    def check(self, model) -> None:
        DeltaSpec.of(model)

    def fit(
        self, model, config: DAMPConfig, calibration: Calibration
    ) -> tuple[DAMPConfig, list[DampPlan], DampReport]:
        if calibration.extra is not None:
            raise ValueError("DAMP has no fine-tuning, so extra texts (extra_dataset) have no use; leave them out.")
        if calibration.resume_dir is not None:
            raise ValueError("a DAMP calibration cannot be resumed; leave resume_dir out.")
        # The number of protected rows must not depend on a later release's default: the artifact names its own.
        sizes = {layer.dk for layer in DeltaSpec.of(model).layers}
        if config.rows is None and len(sizes) == 1:
            config = dataclasses.replace(config, rows=config.high_rows(*sizes))
        sequences, domains = domain_sequences(
            calibration.texts,
            calibration.domains,
            calibration.tokenizer,
            config.sequences,
            config.text_tokens,
            seed=config.seed,
        )
        plans, report = fit(
            model,
            config,
            list(sequences),
            domains=domains,
            fingerprint=calibration.fingerprint,
            progress=calibration.progress,
        )
        return config, plans, report

    def attach(self, model, config: DAMPConfig, tables: list[DampPlan] | None = None) -> None:
        attach_damp(model, config, tables)

    def detach(self, model) -> None:
        detach_damp(model)

    def validate(self, model) -> None:
        for layer, tables in zip(DeltaSpec.of(model).layers, damp_tables(model), strict=True):
            try:
                plan = tables.plan()
                check_rows(plan, damp_config(model).high_rows(layer.dk))
            except ValueError as error:
                raise ValueError(
                    f"the DAMP tables of layer {layer.index} are wrong ({error}); the artifact is damaged."
                ) from None

    def describe(self, model) -> dict[str, Any]:
        """Configuration, sizes and bits of each layer's states, and bytes of the tables."""
        config = damp_config(model)
        layers = []
        for layer, tables in zip(DeltaSpec.of(model).layers, damp_tables(model), strict=True):
            layout = damp_layout(layer, config)
            layers.append(
                {
                    "layer": layer.index,
                    "kind": layer.kind,
                    "key_heads": layer.key_heads,
                    "value_heads": layer.value_heads,
                    "dk": layer.dk,
                    "dv": layer.dv,
                    "rows": layout.high_rows,
                    "state_bytes": layer.value_heads * stored_bytes(layout, config.rounding),
                    "state_bits_per_value": 8 * stored_bytes(layout, config.rounding) / (layer.dk * layer.dv),
                    "table_bytes": sum(buffer.nbytes for buffer in tables.buffers()),
                    "device": str(tables.perm_k.device),
                }
            )
        return {
            "damp": config.to_dict(),
            "layers": layers,
            "table_bytes": sum(layer["table_bytes"] for layer in layers),
        }

    def make_cache(self, model, **options) -> DAMPStateCache:
        return DAMPStateCache(model, **options)

    def card(self, model, report: dict[str, Any] | None) -> CardText:
        config, layers = damp_config(model), self.describe(model)["layers"]
        bits = sum(layer["state_bits_per_value"] for layer in layers) / len(layers)
        rows = sorted({layer["rows"] for layer in layers})
        details = {
            "data": (
                f"{config.sequences} sequences x ({config.prompt_tokens} prompt tokens + {config.updates} "
                f"{'of the text' if config.continuation == 'text' else 'generated'}), seed {config.seed}"
            ),
            "protected rows chosen by": config.selector,
            "column scaling": config.scaling,
            "rounding": config.rounding,
        }
        if report:
            if len(report["domains"]) > 1:
                details["data"] += ", domains " + ", ".join(report["domains"])
            details["share of the rounding error in the protected rows, held out"] = (
                f"{report['validation']['error_share']:.0%}"
            )
            details["protected rows that both halves of the data choose"] = (
                f"{report['stability']['overlap']:.1f} of {report['stability']['rows']:g}"
            )
        return CardText(
            tags=["damp", "recurrent-state", "linear-attention"],
            title=f"{bits:.4g}-bit recurrent states",
            cache=f"{bits:.4g}-bit recurrent states",
            description=(
                f"Beside them the file holds tables for the recurrent states of {len(layers)} gated delta-rule layers, "
                f"fitted with hf_lowbit (DAMP). In each head {' or '.join(map(str, rows))} key rows are kept in FP16, "
                f"those whose rounding errors are large and live long, and the others in INT{config.low_bits} with one "
                f"scale for 32 values: {bits:.4g} bits a value instead of 32."
            ),
            rows=details,
        )
