"""Measure memory and time of loading and exporting a sharded model, of this checkout and of another one in turn.

    .venv/bin/python scripts/bench/weights.py
    .venv/bin/python scripts/bench/weights.py --experts --other ../older_checkout --ranks 1 2 4

The model has random weights in bfloat16, and each rank keeps its slices in float32. Memory (MiB) is the increase of
rank 0's resident memory: its peak, and that of the part that is not mapped from files. The last line is a JSON object.
A ratio is the other checkout's value over ours.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
POLL_SECONDS = 0.002
RANK = "--rank"
KEYS = ("load_s", "load_peak", "load_anonymous", "export_s", "export_peak", "export_anonymous")


class Peak:
    """Context manager that measures seconds, and the increase of this process's resident memory in MiB."""

    def __enter__(self) -> Peak:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier work has freed would hide an increase
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self.before, self.anonymous, self.is_over = read_status(), 0, threading.Event()
        self.thread = threading.Thread(target=self._poll)
        self.thread.start()
        self.started = time.perf_counter()
        return self

    def _poll(self) -> None:
        while not self.is_over.wait(POLL_SECONDS):
            self.anonymous = max(self.anonymous, read_status()["RssAnon"] - self.before["RssAnon"])

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.started
        self.is_over.set()
        self.thread.join()
        self.peak = (read_status()["VmHWM"] - self.before["VmRSS"]) // MIB
        self.anonymous //= MIB


def read_status() -> dict[str, int]:
    """Read the sizes of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def make_model(folder: Path, has_experts: bool, layers: int) -> int:
    """Write a model with random weights in bfloat16 and a tokenizer. Returns the bytes of its weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from scripts.bench._task import SIZES
    from scripts.bench._task import make_model as make_tokenizer

    make_tokenizer(folder, SIZES["3M"])
    sizes = {"vocab_size": 32_000, "hidden_size": 1024, "num_hidden_layers": layers, "intermediate_size": 3072}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "dtype": torch.bfloat16}
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    if has_experts:
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    model.save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def run_rank(folder: Path, world_size: int, rank: int) -> None:
    """Load and export the model on one rank, and print what it took."""
    import torch
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    from alphaapollo.config.schema import Model
    from alphaapollo.models.export import export_model
    from alphaapollo.models.policy import load_policy
    from alphaapollo.models.sharding import join_process_group, make_mesh

    torch.set_num_threads(1)
    join_process_group("cpu", rank, world_size, f"file://{folder}/meeting")
    model = Model(path=str(folder), attention="padded", dtype="bfloat16")
    with Peak() as load:
        policy = load_policy(model, make_mesh("cpu"), torch.bfloat16, offload_policy=False, adapter_seed=0)
    with Peak() as export:
        export_model(str(folder / "exported"), policy.model, model, torch.bfloat16, "merged")
    values = (load.seconds, load.peak, load.anonymous, export.seconds, export.peak, export.anonymous)
    print(json.dumps(dict(zip(KEYS, values, strict=True))))
    torch.distributed.destroy_process_group()


def measure(checkout: Path, world_size: int, folder: Path) -> dict[str, float]:
    """Run all ranks with the code of a checkout. Returns what rank 0 took."""
    (folder / "meeting").unlink(missing_ok=True)
    command = [sys.executable, __file__, RANK, str(checkout), str(folder), str(world_size)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for rank in range(world_size)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="another checkout")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", action="store_true", help="a mixture of experts instead of a dense model")
    arguments = parser.parse_args()
    from scripts.bench._task import machine

    checkouts = {"ours": ROOT} | ({"other": arguments.other.resolve()} if arguments.other else {})
    result: dict[str, Any] = {"benchmark": "weights", **machine()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        result["MiB"] = make_model(folder, arguments.experts, arguments.layers) // MIB
        for world_size in arguments.ranks:
            found = {name: measure(checkout, world_size, folder) for name, checkout in checkouts.items()}
            for name, values in found.items():
                print(
                    f"{world_size} ranks, {name}:", *(f"{key} {value:.4g}" for key, value in values.items()), flush=True
                )
            result[f"{world_size} ranks"] = found
            if "other" in found:
                ratios = {key: round(found["other"][key] / max(found["ours"][key], 1e-9), 2) for key in KEYS}
                result[f"{world_size} ranks"]["ratios"] = ratios
    print(json.dumps(result))


if __name__ == "__main__":
    if RANK in sys.argv:  # one rank, started by `measure`
        sys.path.insert(0, sys.argv[2])
        run_rank(Path(sys.argv[3]), *map(int, sys.argv[4:]))
    else:
        sys.path.insert(0, str(ROOT))
        main()
