"""Ouro (looped transformer, ByteDance), model_type "ouro", as native transformers classes.

Importing this package registers the classes with AutoConfig, AutoModel and AutoModelForCausalLM, so the public
checkpoints load without `trust_remote_code`. All Auto classes named in the checkpoints' `auto_map` are registered:
an unregistered one would ask for remote code. `exist_ok=True` makes a second import (or a reload) harmless.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_ouro import OuroConfig
from .modeling_ouro import OuroForCausalLM, OuroModel, OuroModelOutputWithPast, OuroPreTrainedModel


AutoConfig.register("ouro", OuroConfig, exist_ok=True)
AutoModel.register(OuroConfig, OuroModel, exist_ok=True)
AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM, exist_ok=True)

__all__ = ["OuroConfig", "OuroForCausalLM", "OuroModel", "OuroModelOutputWithPast", "OuroPreTrainedModel"]
