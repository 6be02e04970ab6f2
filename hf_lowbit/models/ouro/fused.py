"""Passes of Ouro in few launches: merged projections, and one kernel for all that lies between two matrices.

A decode step reads every weight once for one token a row, so a kernel that only adds or normalizes costs its launch and
latency. Fused, a layer step is nine launches instead of about fifty: q, k, v in one matrix; RoPE with the cache's write;
attention; o_proj; norm, residual, norm; gate and up in one matrix; SwiGLU; down_proj; norm, residual, next layer's norm.
At batch 1 it is eight: SwiGLU belongs to the product before it (:attr:`FusedDecode.few_rows`).

Prompts run the same way: there the small operations read and write every state, some twenty times a layer step, which took
40 % of a bf16 prefill of 8,192 tokens. Only q, k and v stay three products, since the cache keeps keys and values of
several loop steps until they are encoded, and with them all of a tensor that holds the query as well.

Merged matrices cost no memory: the parameters become views of one storage, once, and keep names, shapes and gradients.
Moving the model undoes that, and the next pass merges again. Projections that are not plain `nn.Linear`s (LoRA,
quantized weights, hooks) are called one by one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from transformers.activations import SiLUActivation

from hf_lowbit_kernels import (
    elementwise_backend,
    few_rows_linear,
    few_rows_swiglu,
    norm_add_norm,
    overlapping_launches,
    rms_norm,
    swiglu,
)

from ...graphs import has_hooks
from ...protocols import KVAttention


class FusedDecode:
    """Whether and how the passes of a decoder run fused, with a KVAttention cache and without gradients.

    Results differ from the layers' own only by the order of sums (in norms and matrices); roundings are the same.

    Args:
        replaces: the classes of the modules whose `forward` is not called in a fused pass.

    Attributes:
        backend: "auto": fused where the kernels run (CUDA). "off": never. "triton", "reference": force that
            implementation of the small operations.
        few_rows: passes of at most so many tokens (a step: the batch) multiply by `few_rows_linear` instead of by PyTorch, and
            SwiGLU is part of its product: eight launches. 1 by default; 0: never.
        problem: why the last pass did not run fused, or None.
        packings: how often weights were moved to a common storage. CUDA graphs captured before read freed memory.
    """

    def __init__(self, replaces: tuple[type[nn.Module], ...]):
        self.backend = "auto"
        self.few_rows = 1
        self.problem: str | None = None
        self.packings = 0
        self._replaces = replaces
        self._looked: tuple | None = None

    def __repr__(self) -> str:
        return f"FusedDecode(backend={self.backend!r}, problem={self.problem!r})"

    @property
    def key(self) -> tuple:
        """What a captured step depends on."""
        return self.backend, self.few_rows, self.packings

    def prepare(self, model: nn.Module, embeds: torch.Tensor) -> None:
        """Merge projections, if the passes to come would run fused. Before a pass: weights must not move inside of one.

        Looks at all layers at prompts, and at tokens only if a glance at the first layer shows that something changed.
        """
        if torch.compiler.is_compiling() or (embeds.is_cuda and torch.cuda.is_current_stream_capturing()):
            return  # merged weights would lie in the memory of somebody's graph
        if embeds.shape[1] == 1 and self._glance(model) == self._looked:
            return
        if self._find_problem(model, embeds) is None:
            for layer in model.layers:
                for linears in (_qkv(layer), _gate_up(layer)):
                    if all(map(_is_plain, linears)) and merged_weight(linears) is None:
                        self.packings += pack(linears)
        self._looked = self._glance(model)

    def _glance(self, model: nn.Module) -> tuple:
        # Places within a storage too: after model.cpu().cuda() weights may lie where they lay before, but never merged.
        weights = (getattr(linear, "weight", None) for linear in _qkv(model.layers[0]))
        places = [(w.data_ptr(), w.storage_offset()) if isinstance(w, torch.Tensor) else None for w in weights]
        return self.backend, torch.is_grad_enabled(), model.training, *places

    def weights(self, model: nn.Module, embeds: torch.Tensor) -> dict[nn.Module, _Weights] | None:
        """What :meth:`loop` multiplies by, of each layer, or None if this pass does not run fused; sets `problem`.

        Found once for all loop steps, and not kept: it would hold on to the memory of a model that moved.
        """
        self.problem = self._find_problem(model, embeds)
        if self.problem is not None:
            return None
        return {layer: _Weights.of(layer, merge_qkv=embeds.shape[1] == 1) for layer in model.layers}

    def loop(
        self,
        weights: dict[nn.Module, _Weights],
        layers: Sequence[nn.Module],
        last_norm: nn.Module,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step: int,
        cache: KVAttention,
        layer_states: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """One loop step over `[B, n, hidden]`: all layers, then `last_norm`.

        Args:
            weights: of :meth:`weights`, of this pass.
            layer_states: if a list, every layer's output is appended to it.
        """
        # Steps are many small kernels: each one's launch and first loads hide behind the end of the one before.
        with overlapping_launches() if hidden_states.shape[1] == 1 else contextlib.nullcontext():
            return self._loop(
                weights, layers, last_norm, hidden_states, position_embeddings, step, cache, layer_states
            )

    def _loop(self, weights, layers, last_norm, hidden_states, position_embeddings, step, cache, layer_states):
        backend = self.backend
        tokens = hidden_states.shape[0] * hidden_states.shape[1]
        multiply = _few_rows(backend) if tokens <= self.few_rows else _many_rows(backend)
        norms = [layer.input_layernorm for layer in layers[1:]] + [last_norm]
        first = layers[0].input_layernorm
        normed = rms_norm(hidden_states, first.weight, first.variance_epsilon, backend=backend)
        for layer, following in zip(layers, norms):
            attended = _attention(layer.self_attn, weights[layer], normed, position_embeddings, step, cache, multiply)
            hidden_states, normed = _norm_add_norm(
                attended, layer.input_layernorm_2, hidden_states, layer.post_attention_layernorm, backend
            )
            out = _mlp(layer.mlp, weights[layer], normed, multiply)
            hidden_states, normed = _norm_add_norm(
                out, layer.post_attention_layernorm_2, hidden_states, following, backend
            )
            if layer_states is not None:
                layer_states.append(hidden_states)
        return normed

    def _find_problem(self, model: nn.Module, embeds: torch.Tensor) -> str | None:
        if self.backend == "off":
            return "fused_decode.backend is 'off'"
        if torch.compiler.is_compiling():
            return "it is being compiled"
        if self.backend == "auto":
            head_dim = model.layers[0].self_attn.head_dim
            available, reason = elementwise_backend(embeds.device, embeds.dtype, embeds.shape[-1], head_dim)
            if available == "reference":
                return reason
        if torch.is_grad_enabled():
            return "gradients are enabled; call the model under torch.no_grad()"
        if model.training:
            return "the model is in training mode; call model.eval()"
        if torch.is_autocast_enabled(embeds.device.type):
            return "autocast is on"
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "there are global forward hooks"
        for name, module in _replaced(model):
            if type(module) not in self._replaces:
                return f"{name} is a {type(module).__name__}"
            if _is_hooked(module):
                return f"{name} has forward hooks or a forward of its own"
            for parameter in module.parameters(recurse=False):
                if (parameter.dtype, parameter.device) != (embeds.dtype, embeds.device):
                    return f"{name} is {parameter.dtype} on {parameter.device}, the states are not"
        for activation in (layer.mlp.act_fn for layer in model.layers):
            if not isinstance(activation, (nn.SiLU, SiLUActivation)) or _is_hooked(activation):
                return f"the activation is {type(activation).__name__}, not a plain SiLU"
        return None


def merged_weight(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    """`[sum of out_features, in_features]`, the weights as one matrix, or None if they do not lie one after another."""
    first = linears[0].weight
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for linear in linears:
        weight = linear.weight
        follows = weight.untyped_storage().data_ptr() == storage and weight.storage_offset() == end
        if not follows or weight.dtype != first.dtype or not weight.is_contiguous():
            return None
        end += weight.numel()
    columns = first.shape[1]
    rows = (end - first.storage_offset()) // columns
    return first.detach().as_strided((rows, columns), (columns, 1))


@torch.no_grad()
def pack(linears: Sequence[nn.Linear]) -> bool:
    """Move the weights to one storage, in which they follow each other; False if they are not of one kind."""
    weights = [linear.weight for linear in linears]
    if len({(weight.dtype, weight.device, weight.shape[1]) for weight in weights}) > 1:
        return False
    with torch.inference_mode(False):  # parameters that training can go on with
        packed = torch.cat([weight.detach() for weight in weights])
        for weight, part in zip(weights, packed.split([len(weight) for weight in weights])):
            weight.data = part
    return True


class _Products(NamedTuple):
    """How to multiply, and SwiGLU: of two products, and of one with a merged matrix."""

    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    swiglu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    merged_swiglu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _many_rows(backend: str) -> _Products:
    pair = functools.partial(swiglu, backend=backend)
    return _Products(F.linear, pair, lambda x, weight: pair(*F.linear(x, weight).chunk(2, dim=-1)))


def _few_rows(backend: str) -> _Products:
    return _Products(*(functools.partial(op, backend=backend) for op in (few_rows_linear, swiglu, few_rows_swiglu)))


class _Weights(NamedTuple):
    """Of one layer: a matrix where a projection, or several merged, is nothing but a product with it; else the module."""

    qkv: torch.Tensor | tuple[torch.Tensor | nn.Module, ...]
    o: torch.Tensor | nn.Module
    gate_up: torch.Tensor | None
    down: torch.Tensor | nn.Module

    @classmethod
    def of(cls, layer: nn.Module, merge_qkv: bool) -> _Weights:
        qkv = _merged(_qkv(layer)) if merge_qkv else None
        if qkv is None:
            qkv = tuple(map(_plain_weight, _qkv(layer)))
        o, down = _plain_weight(layer.self_attn.o_proj), _plain_weight(layer.mlp.down_proj)
        return cls(qkv, o, _merged(_gate_up(layer)), down)


def _attention(
    attention, weights: _Weights, normed, position_embeddings, step: int, cache: KVAttention, multiply: _Products
):
    """`[B, n, hidden]` after `o_proj`; as OuroAttention with a KVAttention."""
    shape = (*normed.shape[:-1], -1, attention.head_dim)
    if isinstance(weights.qkv, tuple):
        parts = [_product(normed, weight, multiply) for weight in weights.qkv]
    else:
        sizes = [linear.out_features for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
        parts = multiply.linear(normed, weights.qkv).split(sizes, dim=-1)
    query, key, value = (part.view(shape).transpose(1, 2) for part in parts)
    out = cache.attend(query, key, value, *position_embeddings, layer=attention.layer_idx, step=step, module=attention)
    return _product(out.reshape(*normed.shape[:-1], -1), weights.o, multiply)


def _mlp(mlp, weights: _Weights, normed, multiply: _Products) -> torch.Tensor:
    """As OuroMLP."""
    if weights.gate_up is None:
        hidden = multiply.swiglu(mlp.gate_proj(normed), mlp.up_proj(normed))
    else:
        hidden = multiply.merged_swiglu(normed, weights.gate_up)
    return _product(hidden, weights.down, multiply)


def _product(x: torch.Tensor, weight: torch.Tensor | nn.Module, multiply: _Products) -> torch.Tensor:
    return multiply.linear(x, weight) if isinstance(weight, torch.Tensor) else weight(x)


def _plain_weight(linear: nn.Module) -> torch.Tensor | nn.Module:
    return linear.weight if _is_plain(linear) else linear


def _merged(linears: Sequence[nn.Module]) -> torch.Tensor | None:
    return merged_weight(linears) if all(map(_is_plain, linears)) else None


def _norm_add_norm(x, norm, residual, following, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    return norm_add_norm(
        x, norm.weight, residual, following.weight, norm.variance_epsilon, following.variance_epsilon, backend=backend
    )


def _qkv(layer) -> tuple[nn.Module, ...]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj


def _gate_up(layer) -> tuple[nn.Module, ...]:
    return layer.mlp.gate_proj, layer.mlp.up_proj


def _replaced(model):
    """Name and module of everything whose `forward` a fused pass does not call."""
    yield "norm", model.norm
    for i, layer in enumerate(model.layers):
        yield f"layers.{i}", layer
        for name, module in layer.named_children():
            yield f"layers.{i}.{name}", module


def _is_plain(linear: nn.Module) -> bool:
    """Whether `linear(x)` is `x @ linear.weight.T` and nothing else."""
    if type(linear) is not nn.Linear or linear.bias is not None or _is_hooked(linear):
        return False
    weight = linear.weight
    return type(weight) is nn.Parameter and type(weight.data) is torch.Tensor and not weight.is_inference()


def _is_hooked(module: nn.Module) -> bool:
    return has_hooks(module) or "forward" in module.__dict__
