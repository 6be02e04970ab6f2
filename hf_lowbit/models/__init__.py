"""Native looped models. Importing this package registers them with the Auto classes (no remote code needed)."""

from .looped_cache import extend_cache
from .ouro import OuroConfig, OuroForCausalLM, OuroModel, OuroPreTrainedModel


__all__ = ["OuroConfig", "OuroForCausalLM", "OuroModel", "OuroPreTrainedModel", "extend_cache"]
