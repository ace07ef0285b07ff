"""Compare the policy update (FSDP2, packing, losses, metrics) with a bare torch loop over the same rows.

    .venv/bin/python scripts/bench/update.py --size 3M
    .venv/bin/python scripts/bench/update.py --model DIR --dtype bfloat16 --rows 64 --rounds 3 --profile

The rows are groups of 8 responses to a prompt of the same length. The bare loop has no FSDP, groups or metrics: it runs
the plain Hugging Face model on right-padded micro-batches of rows sorted by length, with as many tokens as ours,
log-softmax, PPO's clipped loss, backward, clip and AdamW. The sides alternate. The last line is a JSON object: `ratio`
is bare seconds over ours, the median of the rounds (1 = no overhead). `processor_ratio` is the same for processor time
of all threads, which is more reliable on a busy machine. The bare loop's model has the dtype of `--dtype`.

`matrix_products` are those of the update's linear layers alone, and `attention` those of its attention: the same shapes
in the same dtype, in the same rounds. `bound_ratio` is the processor time of both over that of our update (1: it only
multiplies matrices), and `linear_bound_ratio` that of the linear layers. `--profile` adds the seconds of each kind of
operation in one update (torch.profiler).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from alphaapollo.batching.batch import Columns, RankBatch  # noqa: E402
from alphaapollo.batching.packing import build_batch_layout  # noqa: E402
from alphaapollo.batching.shared_prompts import find_shared_prompts  # noqa: E402
from alphaapollo.config.resolve import resolve_model  # noqa: E402
from alphaapollo.config.schema import Actor, Model, Reference  # noqa: E402
from alphaapollo.config.schema.algorithm import PolicyOptimizer  # noqa: E402
from alphaapollo.types import Row  # noqa: E402
from alphaapollo.workers.policy import PolicyWorker, PolicyWorkerConfig  # noqa: E402
from alphaapollo.workers.process_group import NO_RENDEZVOUS, RankPlacement  # noqa: E402
from scripts.bench._products import BatchedProducts, MatrixProducts, count_update_products, profile_operations  # noqa: E402
from scripts.bench._task import SIZES, machine, make_model  # noqa: E402

FOLDER = ROOT / "outputs" / "bench"
GROUP = 8
OPTIMIZER = PolicyOptimizer(lr=1e-6, weight_decay=0.0)


def make_rows(count: int, longest: int, vocab_size: int) -> list[Row]:
    """Groups of responses of `longest` / 2 to `longest` tokens, each to a prompt of such a length."""
    rng = random.Random(0)

    def text() -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(longest // 2, longest))]

    rows = []
    for index in range(count):
        if index % GROUP == 0:
            prompt = text()
        answer = text()
        mask = [0] * len(prompt) + [1] * len(answer)
        logprobs = [0.0] * len(prompt) + [-5.0] * len(answer)
        tokens = prompt + answer
        rows.append(Row(tokens, mask, logprobs, turn_ends=[len(tokens) - 1]))
    return rows


def plain_micro_batches(batch: RankBatch, positions: list[int], max_tokens: int) -> list[list[int]]:
    """Rows sorted by length; each micro-batch has as many as fit when padded to the longest."""
    parts: list[list[int]] = [[]]
    for position in sorted(positions, key=lambda one: -int(batch.rows.lengths[one])):
        width = int(batch.rows.lengths[(parts[-1] or [position])[0]])
        if (len(parts[-1]) + 1) * width > max_tokens:
            parts.append([])
        parts[-1].append(position)
    return parts


def bare_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: RankBatch, columns: Columns, max_tokens: int
) -> None:
    """Plain PyTorch implementation with one optimizer step per mini-batch."""
    assert columns.advantages is not None and columns.old_logprobs is not None
    rows = batch.rows
    for mini_batch in batch.mini_batches:
        num_tokens = sum(int(rows.action_mask[slice(*rows.response_offsets[[p, p + 1]])].sum())
                         for micro in mini_batch.micro_batches for p in micro)  # fmt: skip
        for micro in plain_micro_batches(batch, mini_batch.row_indices, max_tokens):
            width = int(rows.lengths[micro].max())
            tokens = torch.zeros(len(micro), width, dtype=torch.long)
            mask, advantages, old = (torch.zeros(len(micro), width) for _ in range(3))
            for index, position in enumerate(micro):
                length, start = int(rows.lengths[position]), int(rows.response_starts[position])
                whole = slice(*rows.token_offsets[[position, position + 1]])
                response = slice(*rows.response_offsets[[position, position + 1]])
                tokens[index, :length] = torch.from_numpy(rows.token_ids[whole])
                mask[index, start:length] = torch.from_numpy(rows.action_mask[response].astype(np.float32))
                advantages[index, start:length] = torch.from_numpy(columns.advantages[response])
                old[index, start:length] = torch.from_numpy(columns.old_logprobs[response])
            logits = model(tokens, use_cache=False).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
            ratio = (logprobs - old[:, 1:]).exp()
            clipped = ratio.clamp(0.8, 1.2) * advantages[:, 1:]
            loss = -(torch.minimum(ratio * advantages[:, 1:], clipped) * mask[:, 1:]).sum() / num_tokens
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3M")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of --size")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of both sides")
    parser.add_argument("--rows", type=int, default=256, help=f"responses, in groups of {GROUP}")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of the longest response and prompt")
    parser.add_argument("--plain", action="store_true", help="do not share prompts")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--skip-bare", action="store_true", help="measure only this project's update")
    parser.add_argument("--profile", action="store_true", help="profile one more update")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    print(json.dumps(measure(args)))


def make_worker(model: Path, threads: int, dtype: Literal["float32", "bfloat16"] = "float32") -> PolicyWorker:
    setup = PolicyWorkerConfig(
        resolve_model(Model(path=str(model), dtype=dtype), "cpu"),
        Actor(optim=OPTIMIZER),
        Reference(),
        needs_reference=False,
        optimizer_steps=1000,
        temperature=1.0,
    )
    return PolicyWorker(setup, RankPlacement(0, 1, NO_RENDEZVOUS, "cpu", threads))


def measure(args: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(args.threads)
    folder = args.model or FOLDER / args.size
    if not args.model:
        make_model(folder, SIZES[args.size])
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    parameters = model.num_parameters()
    batch, columns = make_batch(args, model.config.vocab_size)
    products = MatrixProducts(count_update_products(model, batch), getattr(torch, args.dtype))
    worker = make_worker(folder, args.threads, args.dtype)
    worker.load_batch(batch)
    with BatchedProducts() as attention:
        worker.update(columns)
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: worker.update(columns),
        "products": products.compute,
        "attention": attention.compute,
    }
    if not args.skip_bare:
        optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIMIZER.lr, weight_decay=0.0)
        sides["bare"] = lambda: bare_update(model, optimizer, batch, columns, args.micro_batch_tokens)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    processor: dict[str, list[float]] = {side: [] for side in sides}
    for round_number in range(args.rounds + 1):
        for side, run in sides.items():
            start, processor_start = time.perf_counter(), time.process_time()
            run()
            if round_number:  # the first round warms up
                seconds[side].append(time.perf_counter() - start)
                processor[side].append(time.process_time() - processor_start)
    operations = profile_operations(sides["ours"]) if args.profile else None
    worker.close()
    middle = {side: statistics.median(values) for side, values in processor.items()}
    ratios = [a / b for a, b in zip(seconds.get("bare", []), seconds["ours"], strict=False)]
    return {
        "benchmark": "update",
        "model": str(args.model or args.size),
        "parameters": parameters,
        "dtype": args.dtype,
        "ratio": round(statistics.median(ratios), 3) if ratios else None,
        "seconds": {side: round(statistics.median(values), 4) for side, values in seconds.items()},
        "processor_ratio": round(middle["bare"] / middle["ours"], 3) if ratios else None,
        "processor_seconds": {side: round(value, 4) for side, value in middle.items()},
        "bound_ratio": round((middle["products"] + middle["attention"]) / middle["ours"], 3),
        "linear_bound_ratio": round(middle["products"] / middle["ours"], 3),
        "matrix_products": products.describe(middle["products"]),
        "operations": operations,
        "tokens": int(batch.rows.lengths.sum()),
        "shared_prompts": not args.plain,
        "threads": args.threads,
        **machine(),
    }


def make_batch(args: argparse.Namespace, vocab_size: int) -> tuple[RankBatch, Columns]:
    """Random rows with random advantages in two mini-batches, which split groups as in a run."""
    rows = make_rows(args.rows, args.max_tokens, vocab_size - 3)
    layout = build_batch_layout(
        rows,
        range(len(rows)),
        num_ranks=1,
        mini_batch_size=args.rows // 2,
        max_tokens=args.micro_batch_tokens,
        padded=True,
        seed=0,
        shuffle=True,
        shared_prompts=None
        if args.plain
        else find_shared_prompts(rows, [index // GROUP for index in range(len(rows))]),
    )
    batch = layout.rank_batches[0]
    total = int(batch.rows.response_offsets[-1])
    return batch, Columns(
        advantages=np.random.default_rng(0).normal(size=total).astype(np.float32),
        old_logprobs=np.full(total, -5.5, dtype=np.float32),
        loss_weights=np.full(len(rows), 2 / total, dtype=np.float32),
        sequence_weights=np.full(len(rows), 2 / len(rows), dtype=np.float32),
        trajectory_ids=np.arange(len(rows)),
    )


if __name__ == "__main__":
    main()
