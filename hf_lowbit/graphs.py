"""Decode steps as CUDA graphs: captured once, then replayed without any of the model's Python.

A step may be captured if it is a *static* function of the embeddings: between two calls only the contents of tensors
change that it reads at fixed addresses (:mod:`.loopvq.decode`, :mod:`.damp.decode`). The first step of a kind runs as
usual, on the stream of the captures, so that kernels compile and libraries allocate; the second is captured; all later
ones are replayed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .errors import FallbackError


Forward = Callable[[torch.Tensor], dict[str, torch.Tensor]]

# Hooks of transformers that do nothing unless hidden states are collected, which no captured step does that way.
_HARMLESS_HOOKS = "transformers.utils.output_capturing"


class StepGraphs:
    """Runs one-token steps, through CUDA graphs where that is possible.

    Args:
        model: the decoder (layers, norms, rotary embedding) that the steps run.
        wanted: None: use graphs where possible. True: raise where not. False: never.
        obstacle: why the caller's own part of the step cannot be captured, or None.
        keep: asked at each capture for what the graph reads besides the weights and could be freed before it.

    Attributes:
        model: the decoder.
        replays: replayed steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: bool | None = None,
        obstacle: str | None = None,
        keep: Callable[[], Any] = lambda: None,
    ):
        self.wanted = wanted
        self.replays = 0
        self.model, self._obstacle, self._keep = model, obstacle, keep
        self._problem: str | None = None
        self._looked = False  # whether _problem is up to date
        self._failure: str | None = None  # of a capture
        self._weights: tuple[int, ...] = ()
        self._signature: tuple | None = None
        self._embeds: torch.Tensor | None = None
        self._pool: Any = None
        self._warm: set[Hashable] = set()
        self._captured: dict[Hashable, tuple[Callable[[], None], dict[str, torch.Tensor]]] = {}

    def __deepcopy__(self, memo):
        return type(self)(self.model, self.wanted, self._obstacle, self._keep)

    @property
    def problem(self) -> str | None:
        """Why steps cannot be captured with this model, or None."""
        if self.wanted is False:
            return "cuda_graphs=False was asked for"
        if not self._looked:
            weights = tuple(tensor.data_ptr() for tensor in self._tensors())
            if weights != self._weights:
                self.drop()  # the graphs read the old ones
            self._weights, self._looked = weights, True
            self._problem = self._failure or self._find_problem()
        return self._problem

    @property
    def nbytes(self) -> int:
        """Bytes of the static input. Activations of captured steps lie in PyTorch's memory pools and are not counted."""
        return 0 if self._embeds is None else self._embeds.nbytes

    def recheck(self) -> None:
        """Something other than a step ran: before the next one, look again whether model and hooks are the same."""
        self._looked = False

    def drop(self) -> None:
        """Forget all graphs: an address that they read is about to change."""
        if self._captured and self._embeds.is_cuda:
            torch.cuda.current_stream(self._embeds.device).synchronize()  # the last replay may still be running
        self._signature = self._embeds = self._pool = None
        self._warm, self._captured = set(), {}

    def run(self, kind: Hashable, key: Hashable, embeds: torch.Tensor, forward: Forward) -> dict[str, torch.Tensor]:
        """``forward(embeds)``, replayed if it was captured.

        Args:
            kind: steps of equal kind run the same kernels at the same addresses; few kinds, a graph for each.
            key: what ``forward`` does, as far as the model decides it. None: unknown, never captured. When it changes,
                all graphs are dropped.
            embeds: ``[B, 1, hidden]``.
            forward: must read no tensor that changes its address and nothing on the host that changes.

        Returns:
            Tensors that later steps leave alone.

        Raises:
            FallbackError: ``wanted`` is True and the step cannot be captured. Nothing was computed.
        """
        reason = self.problem_now()
        if key is None and reason is None:
            reason = "this model's forward_chunk has no graph_key (see hf_lowbit.protocols.KVAttention)"
        if reason is not None:
            self.refuse(reason)
            return forward(embeds)
        # One weight's address, at every step: model.to() moves all of them.
        signature = (key, embeds.shape, embeds.dtype, embeds.device, next(self._tensors()).data_ptr())
        if signature != self._signature:
            self.drop()
            self._signature = signature
            with torch.inference_mode(False):
                self._embeds = torch.zeros_like(embeds, requires_grad=False)
        if kind not in self._warm:
            outputs = self._warm_up(embeds, forward)
            self._warm.add(kind)
            return outputs
        if kind not in self._captured:
            try:
                self._captured[kind] = self._capture(forward)
            except Exception as error:
                # A capture only records: the cache is as it was, and the step can run as usual.
                self.drop()
                self._failure = self._problem = f"the capture failed ({type(error).__name__}: {error})"
                if self.wanted:
                    raise FallbackError(f"cuda_graphs=True, but {self._failure}.") from error
                warnings.warn(f"Decode steps run without CUDA graphs: {self._failure}.", stacklevel=2)
                return forward(embeds)
        replay, outputs = self._captured[kind]
        self._embeds.copy_(embeds)
        replay()
        self.replays += 1
        return {name: output.clone() for name, output in outputs.items()}

    def refuse(self, reason: str) -> None:
        """A step is about to run without a graph.

        Raises:
            FallbackError: ``wanted`` is True.
        """
        if self.wanted:
            raise FallbackError(f"cuda_graphs=True, and this step cannot be captured: {reason}.")

    def problem_now(self) -> str | None:
        """As `problem`, with what may change at any call."""
        if self.problem is not None:
            return self.problem
        if torch.is_grad_enabled():
            return "gradients are enabled; call the model under torch.no_grad()"
        if self.model.training:
            return "the model is in training mode; call model.eval()"
        if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return "it is being compiled or captured from outside"
        if torch.is_autocast_enabled(next(self._tensors()).device.type):
            return "autocast is on"
        return None

    # -- what a device must be able to do; tests replace these -------------------------------------------------------

    def _warm_up(self, embeds: torch.Tensor, forward: Forward) -> dict[str, torch.Tensor]:
        """Run once on the capture stream: kernels compile, and libraries get their workspaces for this stream."""
        current, side = torch.cuda.current_stream(embeds.device), _capture_stream(embeds.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            outputs = forward(embeds)
        current.wait_stream(side)
        for output in outputs.values():
            output.record_stream(current)
        return outputs

    def _capture(self, forward: Forward) -> tuple[Callable[[], None], dict[str, torch.Tensor]]:
        """A function that repeats ``forward(self._embeds)`` on the current stream, and the tensors it fills."""
        graph, device = torch.cuda.CUDAGraph(), self._embeds.device
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(device)
        collecting = gc.isenabled()
        gc.disable()  # a collection could free another graph, which is not allowed meanwhile
        try:
            with torch.cuda.stream(_capture_stream(device)):
                # thread_local: what other threads do with the GPU is none of the capture's business.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    outputs = forward(self._embeds)
                finally:
                    graph.capture_end()
        except BaseException:
            # After a capture that was broken off PyTorch believes that it goes on, and defers freeing memory for good.
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(device.index, self._pool)
            raise
        finally:
            if collecting:
                gc.enable()

        def replay(kept=self._keep()):
            graph.replay()

        return replay, outputs

    def _find_problem(self) -> str | None:
        devices = {tensor.device for tensor in self._tensors()}
        kinds = {device.type for device in devices}
        if kinds != {"cuda"}:
            return f"the model is on {', '.join(sorted(kinds))}, and graphs need CUDA"
        if len(devices) > 1:
            return f"the model is spread over {', '.join(sorted(map(str, devices)))}"
        return self._obstacle or self._hook_problem()

    # -- the model ---------------------------------------------------------------------------------------------------

    def _tensors(self):
        """All weights and buffers."""
        yield from self.model.parameters()
        yield from self.model.buffers()

    def _hook_problem(self) -> str | None:
        """A hook's Python would run at the capture and never again. Hooks of the decoder itself run outside of steps."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "there are global forward hooks"
        for name, module in self.model.named_modules():
            if name and has_hooks(module):
                return f"{name} has forward hooks"
        return None


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its ``forward``."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return hasattr(module, "_hf_hook") or any(getattr(hook, "__module__", None) != _HARMLESS_HOOKS for hook in hooks)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
