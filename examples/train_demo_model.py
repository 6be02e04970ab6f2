"""Train the embedded demo model (hf_lowbit/demo/model) from scratch: under five minutes on one H200.

    python examples/train_demo_model.py --minutes 4.5 --output hf_lowbit/demo/model

writes config, bf16 weights, tokenizer, calibration.jsonl, text.jsonl, tasks.jsonl and training.json. Sequences are
notebooks of facts and questions (hf_lowbit/demo/tasks.py), drawn on the fly. Recall forms fastest over few facts, so
they start at 64 tokens and grow to 512 as soon as the answers are right (STAGES). The loss sees the last loop's logits
only.
`--check-only` scores a finished folder by real greedy generation instead.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hf_lowbit.demo import tasks
from hf_lowbit.models.ouro import OuroConfig, OuroForCausalLM


CALIBRATION_SEED, TEXT_SEED, TASKS_SEED, EVAL_SEED = 1_000_001, 1_000_002, 1_000_003, 1_000_004
# (sequence length, smallest document, share of training after which the stage ends however bad the answers are)
STAGES = ((64, 32, 0.15), (128, 32, 0.30), (256, 48, 0.45), (512, 48, 1.0))
CAUSAL = {"full_attention": None}  # a finished mask: building one would wait for the device
STAGE_LOSS = 0.1  # mean loss of the answer tokens (nats) that ends a stage early
STAGE_STEPS = 50  # looked at this often: reading the loss waits for the device


def build_tokenizer(path: Path | None = None):
    """One token for every byte of UTF-8: 1 character = 1 token in ASCII, and any text survives the round trip."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = _byte_symbols()
    vocabulary = {tasks.EOS: tasks.EOS_ID}
    vocabulary |= {symbols[byte]: int(tasks.BYTE_TO_ID[byte]) for byte in tasks.USED_BYTES}
    for index in range(len(vocabulary), tasks.VOCAB_SIZE):
        vocabulary[f"<|reserved_{index}|>"] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tasks.EOS,
        eos_token=tasks.EOS,
        pad_token=tasks.EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        model_input_names=["input_ids", "attention_mask"],
    )
    if path is not None:
        fast.save_pretrained(path)
    return fast


def _byte_symbols() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, which the ByteLevel pre-tokenizer uses."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in symbols:
            symbols[byte] = chr(256 + len(symbols) - len(printable))
    return symbols


def build_model(args: argparse.Namespace) -> OuroForCausalLM:
    config = OuroConfig(
        vocab_size=tasks.VOCAB_SIZE,
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        max_window_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        total_ut_steps=4,
        bos_token_id=tasks.EOS_ID,
        eos_token_id=tasks.EOS_ID,
        pad_token_id=tasks.EOS_ID,
        tie_word_embeddings=False,
    )
    model = OuroForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "early_exit_gate" in name:  # never trained: all mass stays on the last loop
                parameter.fill_(-20.0 if name.endswith("bias") else 0.0)
            elif "embed_tokens" in name:
                parameter.normal_(0.0, 0.7)
            elif name.endswith("layernorm_2.weight"):  # small residual steps, so that the token stays visible
                parameter.fill_(0.3)
            elif parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    return model


class Notebooks(IterableDataset):
    """(ids uint8 [rows, length], answer flags uint8 [rows, length]); rows x length is constant."""

    def __init__(self, seed: int, tokens: int, longest: int, stage):
        self.seed, self.tokens, self.longest, self.stage = seed, tokens, longest, stage

    def __iter__(self):
        worker = get_worker_info()
        index, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        while True:
            length, smallest, _ = STAGES[self.stage.value]
            length, smallest = min(length, self.longest), min(smallest, self.longest // 2)
            rng = random.Random(self.seed * 1_000_003 + index)
            yield tasks.batch(rng, max(1, self.tokens // length), length, smallest)
            index += stride


def loss_of(model: OuroForCausalLM, ids: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted loss, plain loss of the answer tokens)"""
    logits = model(input_ids=ids, attention_mask=CAUSAL, use_cache=False).logits[:, :-1].float()
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    answer = flags[:, 1:].flatten().float()
    weight = tasks.QUESTION_WEIGHT + (1 - tasks.QUESTION_WEIGHT) * answer
    return (each * weight).sum() / weight.sum(), (each.detach() * answer).sum() / answer.sum().clamp(min=1)


class Trainer:
    """One optimizer step, as a CUDA graph for each batch shape if asked."""

    def __init__(self, model: OuroForCausalLM, args: argparse.Namespace, device: torch.device):
        self.model, self.device = model, device
        self.graphs: dict[tuple[int, int], tuple] = {}
        self.use_graphs = args.cuda_graphs and device.type == "cuda"
        self.parameters = [p for n, p in model.named_parameters() if "early_exit_gate" not in n]
        embedding = model.get_input_embeddings().weight  # row 0 is the padding row: never trained, so never decayed
        decayed = [p for p in self.parameters if p.dim() == 2 and p is not embedding]
        rest = [p for p in self.parameters if p.dim() != 2 or p is embedding]
        rate = torch.tensor(0.0, device=device) if self.use_graphs else 0.0
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}],
            lr=rate,
            betas=(0.9, 0.98),
            eps=1e-9,
            capturable=self.use_graphs,
        )

    def autocast(self):
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def _step(self, ids: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss, answer_loss = loss_of(self.model, ids, flags)
        loss.backward()
        # clip by hand: no host synchronization
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([p.grad for p in self.parameters])))
        torch._foreach_mul_([p.grad for p in self.parameters], (1.0 / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        return loss.detach(), answer_loss

    def step(self, ids: np.ndarray, flags: np.ndarray, rate: float) -> tuple[Tensor, Tensor]:
        ids, flags = (torch.from_numpy(a).to(self.device, torch.long) for a in (ids, flags))
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if not self.use_graphs:
            return self._step(ids, flags)
        if ids.shape not in self.graphs:
            return self._capture(ids, flags)
        graph, static_ids, static_flags, out = self.graphs[ids.shape]
        static_ids.copy_(ids)
        static_flags.copy_(flags)
        graph.replay()
        return out

    def _capture(self, ids: Tensor, flags: Tensor):
        """Three eager steps on a side stream, then the capture; falls back to eager steps for good if it fails."""
        ids, flags = ids.clone(), flags.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                out = self._step(ids, flags)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        try:
            graph = torch.cuda.CUDAGraph()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                captured = self._step(ids, flags)
            self.graphs[ids.shape] = (graph, ids, flags, captured)
        except Exception as error:  # a graph is a speed-up, not a requirement
            print(f"no CUDA graph for {tuple(ids.shape)}, eager steps instead: {error}", flush=True)
            self.use_graphs = False
            torch.cuda.synchronize()
        return out


def rate_at(progress: float, step: int, args: argparse.Namespace) -> float:
    """Warm-up, constant while the stages grow, then a half cosine to 1%."""
    left = 1 - max(0.0, min(1.0, progress) - 0.5) / 0.5
    return args.lr * min(1.0, (step + 1) / args.warmup) * (0.01 + 0.99 * 0.5 * (1 - math.cos(math.pi * left)))


@torch.no_grad()
def teacher_forced_accuracy(model, items: list[dict], device: torch.device, context=nullcontext) -> dict[str, float]:
    """Share of items whose every answer token is the arg max given the right tokens before it: greedy exact match."""
    model.eval()
    right: dict[str, list[bool]] = {}
    for start in range(0, len(items), 64):
        part = items[start : start + 64]
        longest = max(len(i["prompt"]) + len(i["reference"]) for i in part)
        ids = np.zeros((len(part), longest), dtype=np.int64)
        mask = np.zeros((len(part), longest), dtype=bool)
        for row, entry in enumerate(part):
            text = np.frombuffer((entry["prompt"] + entry["reference"]).encode(), dtype=np.uint8)
            ids[row, : len(text)] = tasks.BYTE_TO_ID[text]
            mask[row, len(entry["prompt"]) : len(text)] = True
        ids, mask = torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
        with context():
            best = model(input_ids=ids, attention_mask=CAUSAL, use_cache=False).logits[:, :-1].argmax(-1)
        exact = ((best == ids[:, 1:]) | ~mask[:, 1:]).all(-1).tolist()
        for entry, good in zip(part, exact):
            right.setdefault(entry["task"], []).append(good)
    model.train()
    return {task: sum(good) / len(good) for task, good in right.items()}


@torch.no_grad()
def generated_accuracy(folder: Path, device: torch.device, limit: int | None = None) -> dict[str, float]:
    """Greedy generation through AutoModel and AutoTokenizer, scored by each item's rule."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    right: dict[str, list[bool]] = {}
    for task in tasks.TASKS:
        items = [json.loads(line) for line in (folder / "tasks.jsonl").open()]
        items = [i for i in items if i["task"] == task][:limit]
        inputs = tokenizer([i["prompt"] for i in items], return_tensors="pt", padding=True).to(device)
        out = model.generate(**inputs, max_new_tokens=tasks.MAX_NEW_TOKENS[task], do_sample=False)
        answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right[task] = [tasks.is_right(i, a) for i, a in zip(items, answers)]
    return {task: sum(good) / len(good) for task, good in right.items()}


def write_data(folder: Path, args: argparse.Namespace) -> None:
    def write(name: str, rows: list[dict]) -> None:
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    for name, seed, lines in (("calibration", CALIBRATION_SEED, 48), ("text", TEXT_SEED, 16)):
        rng = random.Random(seed)
        write(name, [{"text": tasks.text_line(rng, 528)} for _ in range(lines)])
    write("tasks", tasks.items(TASKS_SEED, args.items))


def train(args: argparse.Namespace) -> None:
    started = time.time()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    stage = torch.multiprocessing.get_context("fork").Value("i", 0)
    loader = DataLoader(
        Notebooks(args.seed, args.batch * args.length, args.length, stage),
        batch_size=None,
        num_workers=args.workers,
        collate_fn=lambda pair: pair,
        prefetch_factor=4 if args.workers else None,
        multiprocessing_context="fork" if args.workers else None,
    )
    batches = iter(loader)  # workers fork before the device is touched
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    model = build_model(args).to(device).train()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {device}, {args.workers} data workers", flush=True)
    trainer = Trainer(model, args, device)
    shortest = min(160, args.length // 2)
    held_out = tasks.items(EVAL_SEED, args.eval_items, shortest, max(shortest, args.length - 62))
    history, step, mark, mark_step = [], 0, time.time(), 0
    while True:
        elapsed = (time.time() - started) / 60
        progress = max(step / args.steps, elapsed / args.minutes if args.minutes else 0.0)
        if progress >= 1.0:
            break
        loss, answer_loss = trainer.step(*next(batches), rate_at(progress, step, args))
        step += 1
        if stage.value < len(STAGES) - 1 and STAGES[stage.value][0] < args.length:
            learned = step % STAGE_STEPS == 0 and answer_loss.item() < STAGE_LOSS
            if learned or progress >= STAGES[stage.value][2]:
                stage.value += 1
                print(f"step={step} stage={STAGES[stage.value][0]} answer_loss={answer_loss.item():.4g}", flush=True)
        if step % args.log_every == 0 or step == 1:
            line = {"step": step, "loss": loss.item(), "answer_loss": answer_loss.item()}  # synchronizes
            line["steps_per_s"] = (step - mark_step) / (time.time() - mark)
            if step % (args.log_every * 2) == 0:
                line |= teacher_forced_accuracy(model, held_out, device, trainer.autocast)
            line |= {"progress": progress, "minutes": (time.time() - started) / 60}
            mark, mark_step = time.time(), step
            history.append(line)
            print(" ".join(f"{k}={v:.4g}" for k, v in line.items()), flush=True)
    del batches, loader
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16).eval()
    model.config.dtype = torch.bfloat16
    model.generation_config._from_model_config = False
    model.generation_config.do_sample = False
    model.generation_config.pad_token_id = tasks.EOS_ID
    model.generation_config.eos_token_id = tasks.EOS_ID
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    build_tokenizer(folder)
    write_data(folder, args)
    items = tasks.items(TASKS_SEED, args.items)
    report = {
        "parameters": parameters,
        "steps": step,
        "seed": args.seed,
        "minutes": round((time.time() - started) / 60, 2),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "accuracy_teacher_forced": teacher_forced_accuracy(model, items, device),
        "history": [{k: round(v, 4) for k, v in line.items()} for line in history[-1:]],
    }
    (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report), flush=True)
    if args.generate:
        report["accuracy_generated"] = generated_accuracy(folder, device)
        print(json.dumps(report["accuracy_generated"]), flush=True)
        (folder / "training.json").write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--output", default="hf_lowbit/demo/model", help="folder to write (or to check)")
    parser.add_argument("--minutes", type=float, help="time budget: the schedules stretch to fit and training stops")
    parser.add_argument("--steps", type=int, default=8000, help="most optimizer steps")
    parser.add_argument("--batch", type=int, default=128, help="sequences of --length tokens a step")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=default_device)
    parser.add_argument("--workers", type=int, default=10 if default_device == "cuda" else 0)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--mlp", type=int, default=448)
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--eval-items", type=int, default=64, help="held-out items a task for the log")
    parser.add_argument("--items", type=int, default=60, help="items a task in tasks.jsonl")
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--generate", action=argparse.BooleanOptionalAction, default=True, help="score by generate()")
    parser.add_argument("--check-only", action="store_true", help="score --output and exit")
    args = parser.parse_args()
    if args.check_only:
        print(json.dumps(generated_accuracy(Path(args.output), torch.device(args.device))))
        return
    train(args)


if __name__ == "__main__":
    main()
