"""LoopVQ: vector quantization of a looped model's KV cache with codes shared by loop steps."""
