"""LoopVQ as one of the package's methods."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..config import LoopVQConfig, lowbit_config
from ..data import calibration_sequences
from ..protocols import Calibration, CardText
from .attach import NAME, attach_loopvq, detach_loopvq, loopvq_codebooks
from .cache import LoopVQCache
from .calibration import CalibrationReport, fit
from .codebook import SIDES, LoopVQCodebook
from .spec import LoopSpec
from .stock import handing_over_keys


class LoopVQ:
    """See :class:`hf_lowbit.protocols.Method`."""

    name = NAME
    tables = "codebooks"
    table_class = LoopVQCodebook
    cache_options = (
        "recent_window",
        "prefill_chunk_size",
        "strict",
        "backend",
        "cuda_graphs",
        "max_cache_len",
    )

    def check(self, model) -> None:
        LoopSpec.of(model)

    def fit(
        self, model, config: LoopVQConfig, calibration: Calibration
    ) -> tuple[LoopVQConfig, list[LoopVQCodebook], CalibrationReport]:
        def sequences(texts, count):
            return calibration_sequences(texts, calibration.tokenizer, count, config.sequence_length, seed=config.seed)

        main = sequences(calibration.texts, config.sequences)
        with handing_over_keys(model):
            codebooks, report = fit(
                model,
                config,
                main,
                fingerprint=calibration.fingerprint,
                extra=None if calibration.extra is None else sequences(calibration.extra, None),
                resume_dir=calibration.resume_dir,
                progress=calibration.progress,
            )
        # "The largest T_c that fits" must not mean something else to a later release: the artifact names its own.
        return dataclasses.replace(config, loop_group_size=codebooks[0].grouping.steps_per_code), codebooks, report

    def attach(self, model, config: LoopVQConfig, tables: list[LoopVQCodebook] | None = None) -> None:
        attach_loopvq(model, config, tables)

    def detach(self, model) -> None:
        detach_loopvq(model)

    def validate(self, model) -> None:
        for layer, codebook in enumerate(loopvq_codebooks(model)):
            for side in SIDES:
                table = getattr(codebook, f"{side}_table").view(torch.float16)
                if codebook.has_metric:
                    weights = getattr(codebook, f"{side}_metric").view(torch.float16)
                    if not torch.isfinite(weights).all() or not (weights > 0).all():
                        raise ValueError(
                            f"the {side} metric of layer {layer} is not positive; the artifact is damaged."
                        )
                if not torch.isfinite(table).all():
                    raise ValueError(
                        f"the {side} codebook of layer {layer} holds NaN or Inf; the artifact is damaged."
                    )
                if bool((table == table.flatten()[0]).all()):
                    raise ValueError(f"the {side} codebook of layer {layer} is constant; the artifact is damaged.")

    def describe(self, model) -> dict[str, Any]:
        """Configuration, grouping, and shape of each layer's tables and bytes of its buffers."""
        codebooks = loopvq_codebooks(model)
        layers = [
            {
                "layer": layer,
                "shape": list(codebook.key_table.shape),
                **{
                    f"{side}_bytes": sum(b.nbytes for name, b in codebook.named_buffers() if name.startswith(side))
                    for side in SIDES
                },
                "device": str(codebook.device),
            }
            for layer, codebook in enumerate(codebooks)
        ]
        grouping = codebooks[0].grouping
        return {
            "loopvq": lowbit_config(model).loopvq.to_dict(),
            "grouping": {
                "steps": grouping.steps,
                "steps_per_code": grouping.steps_per_code,
                "group_size": grouping.group_size,
                "channels": grouping.channels,
            },
            "layers": layers,
            "codebook_bytes": sum(layer["key_bytes"] + layer["value_bytes"] for layer in layers),
        }

    def make_cache(self, model, **options) -> LoopVQCache:
        return LoopVQCache(model, **options)

    def card(self, model, report: dict[str, Any] | None) -> CardText:
        config, grouping = lowbit_config(model).loopvq, loopvq_codebooks(model)[0].grouping
        spec = LoopSpec.of(model)
        group, steps = grouping.group_size, grouping.steps_per_code
        rows = {
            "data": f"{config.sequences} sequences x {config.sequence_length} tokens, seed {config.seed}",
            "fine-tuning": f"{config.epochs} epochs",
        }
        if report:
            best = report["held_out"][report["best_epoch"]]
            rows["held-out KL after k-means"] = f"{report['held_out'][0]:.4g} nats per token"
            rows["held-out KL of the codebooks kept"] = f"{best:.4g} nats per token"
        return CardText(
            tags=["loopvq", "kv-cache", "linear-attention" if spec.cache_slots else "looped-transformer"],
            title=f"{config.bits:g}-bit KV cache",
            cache=f"the {config.bits:g}-bit cache",
            description=(
                f"Beside them the file holds codebooks for the KV cache{' of the attention layers' if spec.cache_slots else ''}, "
                "fitted with hf_lowbit. All but the first "
                f"{config.sink_tokens} and the {config.recent_window} most recent tokens are stored as 8-bit codes, one "
                f"for {group} elements of keys or values ({group // steps} channels of {steps} loop "
                f"step{'s' if steps > 1 else ''}): {config.bits:g} bit per element."
            ),
            rows=rows,
        )
