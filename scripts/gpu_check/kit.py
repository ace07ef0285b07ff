"""What the checks share: sizes by device, models from a configuration. Heavy libraries are imported inside."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.checks import ROOT, Untested

if TYPE_CHECKING:
    import torch

    from alphaapollo.workers.policy import PolicyWorker

PUBLISHED = ROOT / "scripts" / "published_models"
SMALL = {"vocab_size": 512, "hidden_size": 448, "intermediate_size": 896, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Kit:
    """device: cuda or cpu. folder: of this run, for models and files."""

    device: str
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def need_gpu(self, what: str) -> None:
        if not self.on_gpu:
            raise Untested(f"{what} needs a GPU")

    def model(self, name: str = "qwen2.5-0.5b", **changes: Any) -> Path:
        """A random model of a published size, with a tokenizer; on a CPU two narrow layers, whatever the name."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from examples.quickstart.make_task import make_tokenizer

        folder = self.folder / "models" / name
        if (folder / "model.safetensors").is_file():
            return folder
        values = json.loads((PUBLISHED / name / "config.json").read_text()) | ({} if self.on_gpu else SMALL) | changes
        torch.manual_seed(0)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**values), dtype=torch.bfloat16 if self.on_gpu else torch.float32
            )
        model.save_pretrained(folder)
        make_tokenizer(folder)
        return folder

    def worker(self, folder: Path, **settings: Any) -> PolicyWorker:
        """A policy worker of one rank. settings: model, actor, ref: keys of those sections; needs_reference."""
        from alphaapollo.config.resolve import resolve_model
        from alphaapollo.config.schema import Actor, Model, Reference
        from alphaapollo.workers.policy import PolicyWorker, PolicyWorkerConfig
        from alphaapollo.workers.process_group import NO_RENDEZVOUS, RankPlacement

        setup = PolicyWorkerConfig(
            model=resolve_model(Model(path=str(folder), **settings.get("model", {})), self.device),  # type: ignore[arg-type]
            actor=Actor(**{"optim": {"lr": 1e-4}} | settings.get("actor", {})),
            ref=Reference(**settings.get("ref", {})),
            needs_reference=settings.get("needs_reference", False),
            optimizer_steps=10,
            temperature=1.0,
        )
        return PolicyWorker(setup, RankPlacement(0, 1, NO_RENDEZVOUS, self.device, 2))

    def synchronize(self) -> None:
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()

    @contextmanager
    def clock(self) -> Iterator[list[float]]:
        """Seconds of the block, the device's work included, in the list that it yields."""
        seconds: list[float] = []
        self.synchronize()
        start = time.perf_counter()
        yield seconds
        self.synchronize()
        seconds.append(time.perf_counter() - start)


def need(*modules: str) -> None:
    """Untested where one is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise Untested(f"{', '.join(missing)} not installed")


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    difference = (ours.double() - reference.double()).norm()
    return float(difference / reference.double().norm().clamp_min(1e-30))


def vocabulary_of(folder: Path) -> int:
    size: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    return size
