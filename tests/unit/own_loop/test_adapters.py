"""Names, folders and versions of the adapters of a user's loop, with training ranks that record their calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alphaapollo.config.schema import Model
from alphaapollo.controller.errors import WorkerDied
from alphaapollo.engines.types import EngineError
from alphaapollo.engines.weight_sync.transport import WeightUpdate
from alphaapollo.engines.weight_sync.verification import WeightSyncError
from alphaapollo.own_loop.adapters import FORM, Adapters
from alphaapollo.runs.checkpoint_folder import write_manifest
from alphaapollo.types import BASE_MODEL, Adapter
from alphaapollo.workers.adapter_slots import OWN, AdapterForm


class Policy:
    """Training ranks that record their calls, and write a file with the adapter in the model."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = OWN

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> None:
            self.calls.append(" ".join([name, *(one for one in arguments if isinstance(one, str))]))

        return call

    async def use_adapter(self, name: str) -> None:
        self.calls.append(f"use_adapter {name}")
        self.current = name

    async def save(self, folder: str) -> None:
        Path(folder).mkdir()
        Path(folder, "weights").write_text(self.current)


class Engines:
    """Engines that load an adapter, or raise an error. They are the publisher, too."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.loaded = error, list[Adapter]()

    async def load_adapter(self, adapter: Adapter, *_: Any) -> float:
        if self.error:
            raise self.error
        self.loaded.append(adapter)
        return 0.5


def make_adapters(folder: Path, lora_rank: int = 8, name: str = "vllm", lora: str = "adapter") -> Any:
    trainer, rollout = SimpleNamespace(folder=folder), SimpleNamespace(lora=lora, name=name)
    config: Any = SimpleNamespace(trainer=trainer, actor_rollout_ref=SimpleNamespace(rollout=rollout))
    return Adapters(config, Model(path="m", lora_rank=lora_rank), Policy())  # type: ignore[arg-type]


def add(adapters: Any, name: str, rank: int | None = None, alpha: float | None = None) -> AdapterForm:
    form: AdapterForm = adapters.make_form(name, rank, alpha, (), 0)
    asyncio.run(adapters.add(name, form))
    return form


def publish(adapters: Any, name: str, engines: Any = None, folder: Path | None = None) -> Adapter:
    version: Adapter = adapters.begin_publish(name, folder)
    Path(version.folder).mkdir(parents=True)
    update = WeightUpdate(version.version, "digest")
    asyncio.run(adapters.end_publish(name, version, engines or Engines(), update, [0.0]))
    return version


def find(adapters: Any, which: str | Path | None, engines: Any = None) -> Adapter | None:
    found: Adapter | None = asyncio.run(adapters.find(which, engines or Engines()))
    return found


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "a\n", "/tmp"])
def test_refused_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError) as refused:
        make_adapters(tmp_path).make_form(name, None, None, (), 0)
    assert repr(name) in str(refused.value)


def test_ranks_and_scales(tmp_path: Path) -> None:
    adapters = make_adapters(tmp_path)
    for rank in (0, -1, 9):
        with pytest.raises(ValueError, match=f"lora_rank={rank} .* 8"):
            adapters.make_form("a", rank, None, (), 0)
    configured = Model(path="m", lora_rank=8).alpha
    assert add(adapters, "a") == AdapterForm(8, configured)
    assert add(adapters, "b", 3, 7.0) == AdapterForm(3, 7.0)
    with pytest.raises(ValueError, match="'a' already"):
        adapters.make_form("a", None, None, (), 0)
    with pytest.raises(ValueError, match="lora_rank"):
        make_adapters(tmp_path, lora_rank=0).make_form("a", None, None, (), 0)


def test_the_version_to_sample_with(tmp_path: Path) -> None:
    adapters = make_adapters(tmp_path)
    add(adapters, "a")
    assert find(adapters, OWN) is None and find(adapters, None) == BASE_MODEL
    with pytest.raises(ValueError, match=r"'a'.*publish"):
        find(adapters, "a")
    with pytest.raises(ValueError, match=r"'b'.*Adapters: a\."):
        find(adapters, "b")
    version = publish(adapters, "a")
    assert find(adapters, "a") == version and find(adapters, Path(version.folder)) == version
    kept, engines = tmp_path / "kept", Engines()
    kept.mkdir()
    first = find(adapters, kept, engines)
    assert first == find(adapters, tmp_path / "x" / ".." / "kept", engines) and engines.loaded == [first]
    assert first and first.version > version.version  # no two folders have the same version
    (kept / "adapter_model.safetensors").touch()  # the folder has other weights
    assert find(adapters, kept, engines) == engines.loaded[-1] != first
    for error, kind in ((EngineError("no file"), ValueError), (WorkerDied("core", "rollout"), WorkerDied)):
        with pytest.raises(kind, match=str(error)):
            find(adapters, tmp_path / "gone", Engines(error))
    assert find(adapters, tmp_path / "gone", engines) == engines.loaded[-1]  # a failed folder is tried again


@pytest.mark.parametrize("engine", [{"lora": "merged"}, {"name": "hf"}])
def test_other_engines_serve_only_the_trainers_weights(tmp_path: Path, engine: dict[str, str]) -> None:
    adapters = make_adapters(tmp_path, **engine)
    add(adapters, "a")
    assert find(adapters, OWN) is None
    for which in ("a", None, tmp_path):
        with pytest.raises(ValueError, match=next(iter(engine.values()))):
            find(adapters, which)


def list_folders(tmp_path: Path, name: str) -> list[str]:
    return sorted(one.name for one in (tmp_path / "adapters" / name).iterdir())


def test_the_run_keeps_the_last_two_published_versions(tmp_path: Path) -> None:
    adapters = make_adapters(tmp_path)
    add(adapters, "a")
    add(adapters, "b")
    own = publish(adapters, "b", folder=tmp_path / "mine")
    versions = [publish(adapters, "a") for _ in range(4)]
    publish(adapters, "b")
    assert list_folders(tmp_path, "a") == [Path(one.folder).name for one in versions[-2:]]
    assert Path(own.folder).is_dir() and len(list_folders(tmp_path, "b")) == 1
    with pytest.raises(ValueError, match="mine exists"):
        publish(adapters, "b", folder=tmp_path / "mine")
    with pytest.raises(ValueError, match="no adapter 'c'"):
        publish(adapters, "c")
    with pytest.raises(WeightSyncError):
        publish(adapters, "a", Engines(WeightSyncError("differ")))
    assert find(adapters, "a") == versions[-1]


def test_a_removed_version_is_not_sampled_with(tmp_path: Path) -> None:
    """Its folder is gone, so an engine could not load it again."""
    adapters = make_adapters(tmp_path)
    add(adapters, "a")
    first, *_ = [publish(adapters, "a") for _ in range(4)]
    with pytest.raises(ValueError, match="v000001"):
        find(adapters, Path(first.folder), Engines(EngineError("no file")))


def test_a_resumed_run_publishes_the_same_versions_again(tmp_path: Path) -> None:
    """It counts versions from the step of its checkpoint."""
    earlier = make_adapters(tmp_path)
    add(earlier, "a")
    for _ in range(3):
        publish(earlier, "a")
    resumed = make_adapters(tmp_path)
    resumed.remove_published()
    add(resumed, "a")
    for _ in range(4):
        version = publish(resumed, "a")
        assert Path(version.folder).is_dir()
    assert len(list_folders(tmp_path, "a")) == 2


def test_saved_adapters_are_loaded(tmp_path: Path) -> None:
    adapters = make_adapters(tmp_path)
    small, full = add(adapters, "small", 2, 4.0), add(adapters, "full")
    asyncio.run(adapters.save_all(tmp_path / "saved", None))
    assert sorted(one.name for one in (tmp_path / "saved").iterdir()) == ["full", "small"]
    assert (tmp_path / "saved" / "small" / "policy" / "weights").read_text() == "small"
    add(adapters, "third")
    asyncio.run(adapters.load_all(tmp_path / "saved"))
    assert adapters.states.keys() == {OWN, "full", "small"}
    assert (adapters["small"].form, adapters["full"].form) == (small, full)
    adapters._policy.calls.clear()
    asyncio.run(adapters.load("copy", tmp_path / "saved" / "small", with_optimizer=False))
    folder = tmp_path / "saved" / "small" / "policy"
    assert adapters._policy.calls == ["add_adapter copy", "use_adapter copy", f"load {folder}", "reset_optimizer"]
    asyncio.run(adapters.remove("copy"))
    with pytest.raises(ValueError, match="cannot be removed"):
        asyncio.run(adapters.remove(OWN))
    with pytest.raises(ValueError, match="no adapter 'copy'"):
        asyncio.run(adapters.remove("copy"))
    asyncio.run(adapters.load_all(tmp_path / "nowhere"))
    assert adapters.states.keys() == {OWN}


def test_folders_that_cannot_be_loaded_change_nothing(tmp_path: Path) -> None:
    adapters, folder = make_adapters(tmp_path), tmp_path / "saved"
    add(adapters, "a", 2)
    asyncio.run(adapters.save("a", folder, None))
    other = make_adapters(tmp_path, lora_rank=4)

    def refuse(adapters: Any, path: Path, *facts: str) -> None:
        before, form = list(adapters._policy.calls), adapters.states.copy()
        with pytest.raises(ValueError) as refused:
            asyncio.run(adapters.load("a", path))
        assert all(fact in str(refused.value) for fact in (str(path), *facts)), refused.value
        assert adapters._policy.calls == before and adapters.states == form

    refuse(other, folder, "lora_rank=8", "lora_rank=4")
    refuse(adapters, tmp_path / "nowhere")
    checkpoint = tmp_path / "other"  # complete, but not of an adapter
    checkpoint.mkdir()
    (checkpoint / "file").write_text("1")
    write_manifest(checkpoint)
    refuse(adapters, checkpoint)
    (folder / "policy" / "weights").write_text("c")
    refuse(adapters, folder, "weights")
    (folder / "policy" / "weights").unlink()
    refuse(adapters, folder, "weights")
    assert json.loads((folder / FORM).read_text())["largest_rank"] == 8
    asyncio.run(adapters.save("a", folder, None))  # replaces the damaged folder
    asyncio.run(adapters.load("a", folder))
