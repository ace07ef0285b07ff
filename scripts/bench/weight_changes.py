"""Count the bytes that a weight sync sends to an engine's node: complete files, or what changed since the last version.

    .venv/bin/python scripts/bench/weight_changes.py --model DIR

A policy worker makes updates with the rows of scripts/bench/update.py and new advantages, and sends its weights after
each. One copy reads complete files each time, the other only changes. Both must have the digest of the sent weights.
Bytes are those of the arrays that Ray carries between nodes. `read` is the time of rank 0, with the comparison, `write`
that of the engine's node. The last line is a JSON object: `ratio` is complete bytes over sent bytes, the smallest of
all updates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from alphaapollo.engines.weight_sync.changes import FileChanges, SentFiles, WeightCopy  # noqa: E402
from alphaapollo.engines.weight_sync.digest import compute_joint_digest, format_digest  # noqa: E402
from alphaapollo.engines.weight_sync.shared_memory import SharedMemorySender, read_safetensors  # noqa: E402
from scripts.bench._task import SIZES, machine, make_model  # noqa: E402
from scripts.bench.update import FOLDER, OPTIMIZER, make_batch, make_worker  # noqa: E402

SIDES = ("complete", "changes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3M")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of --size")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of engine and update")
    parser.add_argument("--rows", type=int, default=64, help="responses of an update, in two mini-batches")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    args.max_tokens, args.micro_batch_tokens, args.plain = 64, 4096, False
    shared = Path(f"/dev/shm/alphaapollo-bench-{os.getpid()}")
    try:
        print(json.dumps(measure(args, shared)))
    finally:
        shutil.rmtree(shared, ignore_errors=True)


class Copies:
    """Copies of a sender's weights by side, and what each update of them cost."""

    def __init__(self, shared: Path, sender: SharedMemorySender):
        self.sender, self.copies = sender, {side: WeightCopy(shared / side, self._read) for side in SIDES}
        self.reading_seconds = 0.0
        self.sent: SentFiles | None = None

    async def _read(self, folder: str, base_id: str) -> SentFiles:
        start = time.perf_counter()
        self.sent = self.sender.read_files(folder, base_id)
        self.reading_seconds = time.perf_counter() - start
        return self.sent

    def update(self, side: str, folder: str, digest: str) -> dict[str, float]:
        """Update a copy, and return its bytes and seconds."""
        if side == "complete":
            self.copies[side] = WeightCopy(self.copies[side].folder, self._read)
        start = time.perf_counter()
        path = asyncio.run(self.copies[side].update(folder))
        seconds = time.perf_counter() - start
        received = format_digest(compute_joint_digest(tensor for _, tensor in read_safetensors(path)))
        assert received == digest, f"the {side} copy has digest {received} instead of {digest}"
        assert self.sent is not None
        words = sum(len(file.words) for file in self.sent.files.values() if isinstance(file, FileChanges))
        return {
            "bytes": self.copies[side].copied_bytes,
            "changed": words,
            "read": round(self.reading_seconds, 3),
            "write": round(seconds - self.reading_seconds, 3),
        }


def measure(args: argparse.Namespace, shared: Path) -> dict[str, object]:
    torch.set_num_threads(args.threads)
    model = args.model or FOLDER / args.size
    parameters = None if args.model else make_model(model, SIZES[args.size])
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    batch, columns = make_batch(args, vocab_size)
    worker = make_worker(model, args.threads, args.dtype)
    worker.load_batch(batch)
    worker.sender = sender = SharedMemorySender(shared / "rank_0", getattr(torch, args.dtype))
    copies, publishes, rng = Copies(shared, sender), [], np.random.default_rng(0)
    assert columns.advantages is not None
    for version in range(args.updates + 1):
        if version:
            advantages = rng.normal(size=len(columns.advantages)).astype(np.float32)
            worker.update(replace(columns, advantages=advantages, old_logprobs=None))
        update = worker.send_weights(version)
        assert update is not None
        sides = {side: copies.update(side, update.folder, update.digest) for side in SIDES}
        worker.release_sent_weights()
        complete, sent = (sides[side]["bytes"] for side in SIDES)
        share = sides["changes"]["changed"] * getattr(torch, args.dtype).itemsize / complete
        publishes.append({"ratio": round(complete / sent, 2), "changed_share": round(share, 5), **sides})
        print(json.dumps(publishes[-1]), flush=True)
    worker.close()
    return {
        "benchmark": "weight_changes",
        "model": str(args.model or args.size),
        "parameters": parameters,
        "dtype": args.dtype,
        "learning_rate": OPTIMIZER.lr,
        "optimizer_steps_per_update": len(batch.mini_batches),
        "ratio": min(one["ratio"] for one in publishes[1:]),
        "publishes": publishes,
        "threads": args.threads,
        **machine(),
    }


if __name__ == "__main__":
    main()
