"""Several LoRA adapters on the base model of a user's loop: which one is in the model, their versions in the engines,
and their folders."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from alphaapollo.config.schema import Config, Model
from alphaapollo.controller.engine_group import EngineGroup
from alphaapollo.controller.errors import WorkerFailed
from alphaapollo.controller.handles import PolicyGroup
from alphaapollo.engines.types import EngineError
from alphaapollo.engines.weight_sync.transport import WeightUpdate
from alphaapollo.runs.checkpoint_folder import find_damage, write_manifest
from alphaapollo.session.publish import WeightPublisher
from alphaapollo.types import BASE_MODEL, Adapter
from alphaapollo.utils.disk import read_json, replace_folder, restore_folder
from alphaapollo.workers.adapter_slots import OWN, AdapterForm

ADAPTERS = "adapters"
"""Folder in a checkpoint with all adapters but the model's own."""
FORM = "adapter.json"
"""File with the form of a saved adapter, and the largest rank of the trainer that wrote it."""
NAME = re.compile(r"[\w:-][\w.:-]*")
KEPT_VERSIONS = 2  # newest versions of an adapter that a run keeps, because requests may still use the last but one


@dataclass
class AdapterState:
    """Driver's state of one adapter."""

    form: AdapterForm
    num_accumulated: int = 0  # forward_backward calls since the last step
    trained_version: int | None = None  # version of the trainer's weights; None: not published
    published: Adapter | None = None


class Adapters:
    """The adapters of a loop. A loop without LoRA has one state, that of the model's own weights."""

    def __init__(self, config: Config, model: Model, policy: PolicyGroup):
        self._config, self._model, self._policy = config, model, policy
        self._current: str | None = OWN  # None: unknown, after a call to the ranks that failed
        self.version = 0
        self._folders = dict[tuple[Path, int], Adapter]()  # (folder, time of its weights) -> version in the engines
        self._load_lock = asyncio.Lock()
        self.states = {OWN: AdapterState(AdapterForm(model.lora_rank, model.alpha))}

    @property
    def names(self) -> list[str]:
        """Names of all adapters but the model's own."""
        return sorted(self.states.keys() - {OWN})

    def __getitem__(self, name: str) -> AdapterState:
        if name not in self.states:
            known = ", ".join(self.names) or "none"
            raise ValueError(f"there is no adapter {name!r}. Add it with add_adapter. Adapters: {known}.")
        return self.states[name]

    def make_form(
        self, name: str, rank: int | None, alpha: float | None, target_modules: tuple[str, ...], seed: int
    ) -> AdapterForm:
        """Complete and check the form of a new adapter. Raises ValueError."""
        model = self._model
        if not NAME.fullmatch(name):
            raise ValueError(f"the adapter name {name!r} must consist of letters, digits, `.`, `_`, `-` and `:`.")
        if name in self.states:
            raise ValueError(f"there is an adapter {name!r} already. Use another name, or call remove_adapter first.")
        if not model.lora_rank:
            raise ValueError("adapters need LoRA. Set lora_rank to the largest rank of an adapter.")
        if rank is not None and not 1 <= rank <= model.lora_rank:
            raise ValueError(
                f"lora_rank={rank} must be from 1 to {model.lora_rank}, the rank of the trainer's adapter."
            )
        return AdapterForm(rank or model.lora_rank, model.alpha if alpha is None else alpha, target_modules, seed)

    async def add(self, name: str, form: AdapterForm) -> None:
        """Add an adapter to the training ranks. An adapter of the same name is replaced."""
        await self._policy.add_adapter(name, form)
        self.states[name] = AdapterState(form)

    async def remove(self, name: str) -> None:
        """Remove an adapter from the training ranks. The model's own adapter cannot be removed."""
        if name == OWN:
            raise ValueError("the trainer's own adapter cannot be removed.")
        self[name]  # raises ValueError if there is no such adapter
        del self.states[name]
        self._current = None
        await self._policy.remove_adapter(name)

    async def use(self, name: str) -> AdapterState:
        """Put an adapter into the model of the training ranks, and return its state."""
        state = self[name]
        if name != self._current:
            self._current = None
            await self._policy.use_adapter(name)
            self._current = name
        return state

    def next_version(self) -> int:
        self.version += 1
        return self.version

    async def find(self, adapter: str | Path | None, engines: EngineGroup) -> Adapter | None:
        """Return the version to sample with, or None for the newest weights of the engine.

        adapter: name of a published adapter, or folder of an adapter; None: the model without adapters. The engines
        load a folder when it is first used. Raises ValueError if they cannot load it.
        """
        if adapter == OWN:
            return None
        self.check_engine()
        if adapter is None:
            return BASE_MODEL
        if isinstance(adapter, str):
            if (published := self[adapter].published) is None:
                raise ValueError(f"the adapter {adapter!r} was not published. Call publish(adapter={adapter!r}) first.")
            return published
        folder = adapter.resolve()
        key = folder, _read_time(folder)
        async with self._load_lock:
            if key not in self._folders:
                loaded = Adapter(str(folder), self.next_version())
                try:
                    await engines.load_adapter(loaded, [])
                except (EngineError, WorkerFailed, OSError) as error:
                    raise ValueError(f"{adapter} is no adapter that the engines can load: {error}") from error
                self._remember(folder, loaded)
        return self._folders[key]

    def _remember(self, folder: Path, adapter: Adapter) -> None:
        """Store which version the engines loaded from a folder. Forget folders that no longer exist."""
        self._folders = {key: loaded for key, loaded in self._folders.items() if key[0].is_dir()}
        self._folders[folder, _read_time(folder)] = adapter

    def check_engine(self) -> None:
        """Raise ValueError if the engines do not serve adapters by name."""
        rollout = self._config.actor_rollout_ref.rollout
        if rollout.lora != "adapter" or rollout.name != "vllm":
            raise ValueError(
                f"rollout.lora={rollout.lora}, rollout.name={rollout.name}: sampling with one of several adapters "
                "needs rollout.lora=adapter and rollout.name=vllm."
            )

    @property
    def _published_folder(self) -> Path:
        return self._config.trainer.folder.resolve() / "adapters"

    def remove_published(self) -> None:
        """Remove the versions that an earlier process of the run has published. No engine uses them any more."""
        shutil.rmtree(self._published_folder, ignore_errors=True)

    def begin_publish(self, name: str, folder: str | Path | None) -> Adapter:
        """Return the folder and version of an adapter that is published next. folder=None: a folder of the run."""
        self[name]  # raises ValueError if there is no such adapter
        version = self.next_version()
        target = Path(folder or self._published_folder / name / f"v{version:06d}")
        if target.exists():
            raise ValueError(f"{target} exists. Publish the adapter to a new folder.")
        return Adapter(str(target.resolve()), version)

    async def end_publish(
        self, name: str, adapter: Adapter, publisher: WeightPublisher, update: WeightUpdate, expected: Sequence[float]
    ) -> float:
        """Load a version on the engines, and verify that they compute with it as the trainer does. Later requests use
        this version. Removes old versions from the run. Returns the difference of the probe's log-probs."""
        folder, state = Path(adapter.folder), self[name]
        gap = await publisher.load_adapter(adapter, update, expected)
        state.published, state.trained_version = adapter, adapter.version
        if folder.parent == self._published_folder / name:
            for old_folder in sorted(folder.parent.glob("v*"))[:-KEPT_VERSIONS]:
                shutil.rmtree(old_folder)
        self._remember(folder, adapter)
        return gap

    async def save(self, name: str, folder: Path, publisher: WeightPublisher | None) -> None:
        """Save an adapter with its optimizer. An error leaves the folder as it was. publisher: checks that the weights
        are finite."""
        state, partial = await self.use(name), folder.with_name(f".writing_{folder.name}")
        if publisher:
            await publisher.compute_log_probs(self.version)
        restore_folder(folder)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            await self._policy.save(str(partial / "policy"))
            await self._policy.wait_for_save()
            content = {"largest_rank": self._model.lora_rank, "form": asdict(state.form)}
            (partial / FORM).write_text(json.dumps(content) + "\n")
            await asyncio.to_thread(write_manifest, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)  # the disk may be full
            raise
        replace_folder(partial, folder)

    async def save_all(self, folder: Path, publisher: WeightPublisher | None) -> None:
        """Save all adapters but the model's own to folders with their names."""
        for name in self.names:
            await self.save(name, folder / name, publisher)

    async def load_all(self, folder: Path) -> None:
        """Replace all adapters but the model's own by those in a folder, if it exists. The engines get them when they
        are published again."""
        for name in self.names:
            await self.remove(name)
        for saved in sorted(folder.glob("*")):
            await self.load(saved.name, saved)

    async def load(self, name: str, folder: Path, with_optimizer: bool = True) -> None:
        """Add a saved adapter. An adapter of the same name is replaced. Raises ValueError if it cannot be read."""
        restore_folder(folder)
        if damage := await asyncio.to_thread(find_damage, folder):
            raise ValueError(f"the adapter {folder} cannot be loaded: {damage[0]}.")
        if not (folder / FORM).is_file():
            raise ValueError(f"{folder} has no {FORM}. Pass a folder that save_adapter wrote.")
        saved = read_json(folder / FORM)
        if saved["largest_rank"] != self._model.lora_rank:
            raise ValueError(
                f"the adapter {folder} was saved with lora_rank={saved['largest_rank']}, but this trainer has "
                f"lora_rank={self._model.lora_rank}. Start it with the same rank."
            )
        form = saved["form"]
        await self.add(name, AdapterForm(**form | {"target_modules": tuple(form["target_modules"])}))
        try:
            await self.use(name)
            await self._policy.load(str(folder / "policy"))
            if not with_optimizer:
                await self._policy.reset_optimizer()
        except BaseException:
            await self.remove(name)
            raise


def _read_time(folder: Path) -> int:
    """Return when the weights in an adapter's folder were written, in nanoseconds; 0 without weights."""
    file = folder / "adapter_model.safetensors"
    return file.stat().st_mtime_ns if file.is_file() else 0
