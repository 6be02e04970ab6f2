"""A random looped model of a few thousand weights with a byte tokenizer, for the tests of evaluation, CLI and Hub."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_lowbit import DAMPConfig, LoopVQConfig
from hf_lowbit.models.ouro import OuroConfig, OuroForCausalLM


EOS = "<|endoftext|>"

# Windows of 8 and short sequences: every page border is crossed within a hundred tokens.
LOOPVQ = LoopVQConfig(
    bits=0.5, recent_window=8, sequences=4, sequence_length=96, epochs=1, learning_rate=0.01, kmeans_iterations=5
)
DAMP = DAMPConfig(
    rows=2, sequences=3, prompt_tokens=16, decode_tokens=48, windows=(0,), window_tokens=48, anchors=(16, 32), horizon=16,
    continuation="text",
)  # fmt: skip
# LOOPVQ for ``hf-lowbit calibrate`` (k-means iterations have no flag).
FLAGS = ["--sequences=4", "--sequence-length=96", "--epochs=1", "--learning-rate=0.01", "--recent-window=8", "--quiet"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {EOS: 0, **{symbol: index for index, symbol in enumerate(alphabet, start=1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, pad_token=EOS, model_max_length=512
    )


def build_model(seed: int = 0, **changes) -> OuroForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "total_ut_steps": 4,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    model = OuroForCausalLM(OuroConfig(**(sizes | changes)))
    with torch.no_grad():  # large enough that attention and loops matter
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        model.lm_head.weight[0] = 0.0  # logit 0 is never the largest of 257: generations do not end by themselves
    return model.eval()


def texts(count: int, length: int = 120, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = [f"{rng.choice('bcdfg')}{rng.choice('aeiou')}{rng.choice('lmnrs')}" for _ in range(40)]
    return ["".join(rng.choice(words) + " " for _ in range(length))[:length] for _ in range(count)]


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_texts(path: Path, count: int, length: int = 120, seed: int = 0) -> Path:
    return write_jsonl(path, [{"text": text} for text in texts(count, length, seed)])


def write_tasks(path: Path, per_task: int = 3) -> Path:
    """Prompts of unequal lengths; a random model gets none of them right."""
    records = [
        {"task": name, "prompt": text[: 40 + 7 * i], "target": "1", "max_new_tokens": 12 + 4 * (name == "sort")}
        for name in ("word", "sort")
        for i, text in enumerate(texts(per_task, seed=len(name)))
    ]
    return write_jsonl(path, records)
