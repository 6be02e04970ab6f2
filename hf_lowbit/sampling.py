"""Texts written by the model itself, as more data for fine-tuning codebooks.

Codebooks have millions of entries, and a handful of calibration texts teaches them those texts: training KL goes on
falling while held-out KL stops (numbers in README). A language model is its own source of more text of
the kind it was trained on.
"""

from __future__ import annotations

import torch
from tqdm.auto import tqdm


@torch.no_grad()
def sample_texts(
    model,
    tokenizer,
    prompts: list[str],
    count: int,
    length: int,
    *,
    prompt_tokens: int = 16,
    batch_size: int = 32,
    seed: int = 0,
    progress: bool = True,
) -> list[str]:
    """Sample ``count`` texts of about ``length`` tokens at temperature 1, each from the first tokens of a prompt.

    The end-of-text token does not stop a sample: models trained on packed documents go on with the next one. A text is
    a little longer than ``length`` tokens, as tokenizing it again may join some.

    Args:
        model: causal LM; a calibrated one samples from its full-precision cache.
        tokenizer: its tokenizer.
        prompts: calibration texts, used in turn.
        count, length: how many texts, of how many tokens.
        prompt_tokens: tokens taken from each prompt; a later round over the prompts starts further into them.
        batch_size: texts sampled at once; each needs a full-precision cache of ``length`` tokens.
        seed: same seed, same texts (on the same device and batch size).
        progress: show a progress bar.

    Raises:
        ValueError: no prompts, or sizes below 1.
    """
    if not prompts or count < 1 or length <= prompt_tokens or prompt_tokens < 1:
        raise ValueError(
            f"sampling needs prompts, count >= 1 and length > prompt_tokens >= 1; got {len(prompts)} prompts, "
            f"count={count}, length={length}, prompt_tokens={prompt_tokens}."
        )
    device = model.get_input_embeddings().weight.device
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    starts = []
    for i in range(count):
        ids, turn = encoded[i % len(encoded)], i // len(encoded)
        begin = min(turn * 97, max(0, len(ids) - prompt_tokens))
        starts.append(ids[begin : begin + prompt_tokens])
    if min(len(ids) for ids in starts) < prompt_tokens:
        raise ValueError(f"every prompt needs at least prompt_tokens={prompt_tokens} tokens.")
    extra = max(16, length // 64)
    texts: list[str] = []
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for i in tqdm(range(0, count, batch_size), desc="sampling", disable=not progress, leave=False):
            ids = torch.tensor(starts[i : i + batch_size], device=device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=None,
                max_new_tokens=length + extra - prompt_tokens,
                cache_implementation="dynamic",
            )
            texts += tokenizer.batch_decode(out, skip_special_tokens=False)
    return texts
