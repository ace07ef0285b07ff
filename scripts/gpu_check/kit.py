"""Shared utilities of the checks: measurements, sizes by device, models. Functions import heavy libraries."""

from __future__ import annotations

import importlib.util
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.checks import ROOT, Untested
from scripts.gpu_check.device import DeviceMemory

if TYPE_CHECKING:
    import torch

    from alphaapollo.workers.policy import PolicyWorker

PUBLISHED = ROOT / "scripts" / "published_models"
SMALL = {"vocab_size": 512, "hidden_size": 448, "intermediate_size": 896, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 14, "num_key_value_heads": 2}
SMALL_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32}
MODEL = {"use_liger": False, "enable_gradient_checkpointing": False}  # keys of each worker's section model
ROUNDS = 3


@dataclass(frozen=True)
class Kit:
    """Utilities of one check. device: cuda or cpu. folder: for models and files."""

    device: str
    folder: Path
    record: Callable[[str, Any], None] = print  # writes a measurement: name and value
    failures: list[str] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.on_gpu)

    def need_gpu(self, what: str) -> None:
        if not self.on_gpu:
            raise Untested(f"{what} needs a GPU")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Part of a check: if it fails, the following parts still run, and the check fails at its end."""
        try:
            yield
        except Untested as missing:
            self.record(name, f"untested: {missing}")
        except Exception as error:  # noqa: BLE001 any error of torch or a kernel; raise_failures reports it
            traceback.print_exc()
            text = (str(error).strip() or "no message").splitlines()[0][:200]
            self.failures.append(f"{name}: {type(error).__name__}: {text}")
            self.record(name, f"failed: {text}")
        self.memory.free_unused()

    def raise_failures(self) -> None:
        """Raise RuntimeError if a part failed."""
        if self.failures:
            raise RuntimeError("; ".join(self.failures))

    def model(self, name: str = "qwen2.5-0.5b", **changes: Any) -> Path:
        """Random model of a published size with a tokenizer. On a CPU it has two narrow layers for any name."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from examples.quickstart.make_task import make_tokenizer

        folder = self.folder / "models" / "-".join([name, *(str(value) for value in changes.values())])
        if (folder / "tokenizer.json").is_file():
            return folder
        values = read_config(PUBLISHED / name) | changes
        if not self.on_gpu:
            values |= SMALL | (SMALL_EXPERTS if "num_experts" in values else {})
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**values), dtype=torch.bfloat16 if self.on_gpu else torch.float32
            )
        model.save_pretrained(folder)
        make_tokenizer(folder)
        pad_vocabulary(folder / "tokenizer.json", values["vocab_size"])
        del model
        self.memory.free_unused()
        return folder

    def worker(self, folder: Path, **settings: Any) -> PolicyWorker:
        """Policy worker with one rank. settings: keys of the sections model, actor and ref, and needs_reference."""
        from alphaapollo.config.resolve import resolve_model
        from alphaapollo.config.schema import Actor, Model, Reference
        from alphaapollo.workers.policy import PolicyWorker, PolicyWorkerConfig
        from alphaapollo.workers.process_group import NO_RENDEZVOUS, RankPlacement

        model = MODEL | settings.get("model", {})
        setup = PolicyWorkerConfig(
            model=resolve_model(Model(path=str(folder), **model), self.device),  # type: ignore[arg-type]
            actor=Actor(**{"optim": {"lr": 1e-4}} | settings.get("actor", {})),
            ref=Reference(**settings.get("ref", {})),
            needs_reference=settings.get("needs_reference", False),
            optimizer_steps=100,
            temperature=1.0,
        )
        return PolicyWorker(setup, RankPlacement(0, 1, NO_RENDEZVOUS, self.device, 2))

    def synchronize(self) -> None:
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()

    @contextmanager
    def clock(self) -> Iterator[list[float]]:
        """Append the seconds of the block, including work on the device, to the yielded list."""
        seconds: list[float] = []
        self.synchronize()
        start = time.perf_counter()
        yield seconds
        self.synchronize()
        seconds.append(time.perf_counter() - start)

    def time(self, call: Callable[[], object]) -> float:
        """Seconds of the fastest of a few calls, after one for warm-up; on a CPU of one call."""
        best = float("inf")
        for number in range(1 + ROUNDS if self.on_gpu else 1):
            with self.clock() as seconds:
                call()
            if number or not self.on_gpu:
                best = min(best, *seconds)
        return best


def need(*modules: str) -> None:
    """Raise Untested if a package is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise Untested(f"{', '.join(missing)} not installed")


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference divided by the norm of the reference."""
    difference = (ours.double() - reference.double()).norm()
    return float(difference / reference.double().norm().clamp_min(1e-30))


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def pad_vocabulary(tokenizer_file: Path, size: int) -> None:
    """Give each of the model's embeddings a token, because ids without one have no probability."""
    tokenizer = json.loads(tokenizer_file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}  # else they get other ids
    vocabulary |= {f"unused{index}": index for index in range(len(vocabulary), size)}
    tokenizer_file.write_text(json.dumps(tokenizer))


def vocabulary_of(folder: Path) -> int:
    return int(read_config(folder)["vocab_size"])
