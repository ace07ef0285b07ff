"""Compare the planned memory of an update (planning/memory.py) with the measured peak of a policy worker on a CPU.

    .venv/bin/python scripts/bench/memory.py

Each configuration runs in separate processes, one per rank. The measurement is the peak resident memory (VmHWM) of the
second of two updates, minus the memory of the process after its imports. glibc returns freed memory at once
(MALLOC_MMAP_THRESHOLD_), because the plan counts tensors; --as-run keeps glibc's defaults. The last line is a JSON
object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from alphaapollo.config.resolve import resolve_model  # noqa: E402
from alphaapollo.config.schema import Actor, Model, Reference  # noqa: E402
from alphaapollo.models.activation_memory import load_on_meta_device  # noqa: E402
from alphaapollo.planning.memory import (  # noqa: E402
    DIVERGENCE_COPIES,
    LOGIT_COPIES,
    Usage,
    count_frozen_bytes,
    estimate_update,
    make_trained_model,
)
from alphaapollo.workers.policy import PolicyWorker, PolicyWorkerConfig  # noqa: E402
from alphaapollo.workers.process_group import RankPlacement  # noqa: E402
from examples.quickstart.make_task import make_tokenizer  # noqa: E402
from scripts.bench._task import machine  # noqa: E402
from scripts.gpu_check.kit import pad_vocabulary  # noqa: E402
from scripts.random_batch import random_batch  # noqa: E402


@dataclass(frozen=True)
class Case:
    """Model (arguments of a transformers configuration) and how it is trained."""

    model: str
    config: dict[str, object]
    rows: int  # of one micro-batch
    length: int
    checkpointing: bool = False
    reference: bool = False  # with full KL to the reference
    ranks: int = 1


DENSE = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}  # fmt: skip
WORDY = DENSE | {"vocab_size": 100_000, "hidden_size": 512}
EXPERTS = DENSE | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
CASES = {
    "dense": Case("Qwen3", DENSE, rows=4, length=512),
    "dense, checkpointing": Case("Qwen3", DENSE, rows=8, length=512, checkpointing=True),
    "large vocabulary": Case("Qwen3", WORDY, rows=1, length=128),
    "full KL to a reference": Case("Qwen3", DENSE | {"vocab_size": 64_000}, rows=2, length=256, reference=True),
    "mixture of experts": Case("Qwen3Moe", EXPERTS, rows=2, length=512),
    "two ranks": Case("Qwen3", DENSE, rows=4, length=512, ranks=2),
}


def planned(case: Case, folder: str) -> Usage:
    model = resolve_model(Model(path=folder, enable_gradient_checkpointing=case.checkpointing), "cpu")
    copies, shape = DIVERGENCE_COPIES if case.reference else LOGIT_COPIES, (case.rows, case.length)
    trained = make_trained_model(model, Actor().fsdp_config, "cpu", case.ranks, shape, logit_copies=copies)
    frozen = count_frozen_bytes(model, case.ranks, model.dtype) if case.reference else 0
    return estimate_update(trained) + Usage({"frozen models": frozen})


def measure(case: Case, folder: str, rank: int) -> float:
    """Peak GiB of the second update of a rank."""
    load_on_meta_device(Model(path=folder), torch.float32)  # imports the libraries of the worker
    before = resident("VmRSS")
    setup = PolicyWorkerConfig(
        model=resolve_model(Model(path=folder, enable_gradient_checkpointing=case.checkpointing), "cpu"),
        actor=Actor(use_kl_loss=case.reference, kl_loss_type="full"),
        ref=Reference(),
        needs_reference=case.reference,
        optimizer_steps=10,
        temperature=1.0,
    )
    worker = PolicyWorker(setup, RankPlacement(rank, case.ranks, f"file://{folder}/meeting", "cpu", 1))
    lengths, vocabulary = [case.length] * case.rows * case.ranks, int(str(case.config["vocab_size"]))
    batch, columns = random_batch(lengths, vocabulary, case.rows * case.length, True, case.ranks, rank)
    worker.load_batch(batch)
    worker.update(columns)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    worker.update(columns)
    peak = resident("VmHWM") - before
    worker.close()
    return peak


def resident(name: str) -> float:
    """Entry `name` of this process's status, in GiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 2**20


def make_model(case: Case, folder: str) -> None:
    import transformers

    config = getattr(transformers, f"{case.model}Config")(**case.config)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer(Path(folder))
    pad_vocabulary(Path(folder, "tokenizer.json"), config.vocab_size)


def run(name: str, as_run: bool) -> dict[str, object]:
    case = CASES[name]
    environment = os.environ | ({} if as_run else {"MALLOC_MMAP_THRESHOLD_": str(2**16)})
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--make", name, "--folder", folder], check=True)
        commands = [
            [sys.executable, __file__, "--rank", str(rank), "--case", name, "--folder", folder]
            for rank in range(case.ranks)
        ]
        started = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for command in commands
        ]
        peaks = [float(process.communicate(timeout=600)[0].split()[-1]) for process in started]
        plan, peak = planned(case, folder).total() / 2**30, max(peaks)
    print(f"| {name} | {plan:.2f} | {peak:.2f} | {plan / peak - 1:+.0%} |", flush=True)
    return {"case": name, "planned_gib": round(plan, 3), "measured_gib": round(peak, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="", choices=["", *CASES])
    parser.add_argument("--as-run", action="store_true", help="use glibc's default thresholds")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--make", default="")
    parser.add_argument("--folder", default="")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.make:
        make_model(CASES[args.make], args.folder)
    elif args.rank is not None:
        print(measure(CASES[args.case], args.folder, args.rank))
    else:
        print("| configuration | planned GiB | measured GiB | difference |\n|---|---|---|---|")
        cases = [run(name, args.as_run) for name in ([args.case] if args.case else CASES)]
        print(json.dumps({"benchmark": "memory", "cases": cases, **machine()}))


if __name__ == "__main__":
    main()
