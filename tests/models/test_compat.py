"""hf_lowbit.compat on the installed release."""

import inspect

import pytest
import torch
from packaging.version import Version
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_lowbit import compat


pytestmark = pytest.mark.compat


def test_names_agree_with_the_release():
    expected = "cache" if compat.TRANSFORMERS_VERSION >= Version("5.24.0") else "past_key_values"
    assert compat.CACHE_ARG == expected
    assert expected in inspect.signature(LlamaForCausalLM.forward).parameters


def test_old_releases_are_refused():
    with pytest.raises(ImportError, match="needs transformers >= 5.17.0, but 4.57.1 is installed.*pip install"):
        compat.check_transformers_version(Version("4.57.1"))
    for accepted in ("5.17.0", "5.24.0", "5.25.0.dev0", "5.17.0rc1"):
        compat.check_transformers_version(Version(accepted))


def test_cache_from_kwargs():
    cache = DynamicCache()
    for names in (("cache",), ("past_key_values",), ("cache", "past_key_values")):
        kwargs = dict.fromkeys(names, cache) | {"other": 1}
        assert compat.cache_from_kwargs(kwargs) is cache
        assert kwargs == {"other": 1}
    assert compat.cache_from_kwargs({"past_key_values": None}) is None
    with pytest.raises(TypeError, match="two different caches"):
        compat.cache_from_kwargs({"cache": cache, "past_key_values": DynamicCache()})


def test_outputs_and_stock_models():
    cache = DynamicCache()
    output = compat.make_output(BaseModelOutputWithPast, cache=cache, last_hidden_state=torch.zeros(1))
    assert compat.get_cache(output) is cache and compat.CACHE_ARG in output

    config = LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with torch.no_grad():
        out = LlamaForCausalLM(config)(torch.ones(1, 3, dtype=torch.long), **compat.cache_kwargs(cache))
    assert compat.get_cache(out) is cache and cache.get_seq_length() == 3


@pytest.mark.parametrize("keep, positions", [(0, [0, 1, 2, 3]), (1, [3]), (torch.tensor([2, 0]), [2, 0])])
def test_slice_logits_to_keep(keep, positions):
    hidden = torch.randn(2, 4, 3)
    assert torch.equal(compat.slice_logits_to_keep(hidden, keep), hidden[:, positions])
