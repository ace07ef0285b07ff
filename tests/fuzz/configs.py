"""Command lines and YAML files of main_ppo, up to the start of workers."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from alphaapollo.config.keys import Key, list_keys, list_sections
from alphaapollo.config.load import load_config_and_user_settings, save_config
from alphaapollo.config.schema import Config
from alphaapollo.observability.console import Console
from alphaapollo.trainer.lifecycle import prepare_run
from tests.fuzz.values import anything, numbers, texts
from tests.unit.tiny import save_model

KEYS = list_keys(Config)
NOT_TRIED = {
    "trainer.controller", "trainer.device", "trainer.logger", "env.mcp_servers",
    "actor_rollout_ref.model.trust_remote_code", "env.openenv.url",
}  # fmt: skip
"""Keys that depend on the machine: a cluster, GPUs, accounts, servers."""
HUBS = ("path", "tokenizer_path")
"""Keys that accept a hub id, which would need the network. They get only values that look like folders."""


@dataclass(frozen=True)
class Task:
    """A tiny model and its data, used by every command line."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Task:
        save_model("qwen3", folder / "model")
        rows = [
            {"prompt": f"w{2 + n} w3", "data_source": "exact", "reward_model": {"ground_truth": "w5"}} for n in range(8)
        ]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return cls(folder)

    def words(self) -> dict[str, Any]:
        return {
            "data.train_files": str(self.folder / "data.jsonl"),
            "data.train_batch_size": 4,
            "data.max_prompt_length": 32,
            "data.max_response_length": 16,
            "actor_rollout_ref.model.path": str(self.folder / "model"),
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "actor_rollout_ref.rollout.kv_cache_gib": 0.1,
            "env.rollout.n": 4,
            "trainer.output_dir": str(self.folder / "out"),
            "trainer.project_name": "p",
            "trainer.experiment_name": "e",
            "trainer.total_training_steps": 2,
            "trainer.controller": "local",
            "actor_rollout_ref.rollout.name": "hf",
        }


def tried_keys() -> list[str]:
    return [name for name in KEYS if name not in NOT_TRIED]


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    """One to three keys with values of their types, or with other values."""
    names = draw(st.lists(st.sampled_from(tried_keys()), min_size=1, max_size=3, unique=True))
    value_of = _fitting if draw(st.booleans()) else _any_value
    return {name: _local(name, draw(value_of(KEYS[name]))) for name in names}


def _fitting(key: Key) -> st.SearchStrategy[Any]:
    words = [word for word in re.split(r" \| | or ", key.type) if " " not in word]
    values = [key.default, *(yaml.safe_load(word) for word in words if word not in ("integer", "number", "text"))]
    if key.type.startswith("integer"):
        values += [1, 2, 2 * (key.default or 4)]
    elif key.type.startswith("number"):
        values += [1.0, 0.5 * (key.default or 1.0)]
    return st.sampled_from(values)


def _any_value(key: Key) -> st.SearchStrategy[Any]:
    near = _fitting(key)
    if key.type.startswith(("integer", "number")):
        near |= numbers
    elif key.type.startswith("text"):
        near |= texts
    elif key.type.startswith("list of"):
        near |= st.lists(texts | numbers, max_size=3)
    elif key.type.startswith("map of"):
        near |= st.dictionaries(texts, anything, max_size=2)
    return near | near | near | anything


def _local(name: str, value: Any) -> Any:
    """Exclude hub ids, which would need the network."""
    is_model = name.endswith(HUBS) and "model" in name
    return f"/{value}" if is_model and isinstance(value, str) and value else value


def from_yaml(task: Task, given: dict[str, Any], folder: Path) -> str:
    """Write the keys to a YAML file with which the run is started."""
    values: dict[str, Any] = {"defaults": ["/ppo"]}
    for name, value in (task.words() | given).items():
        place = values
        *path, last = name.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.yaml").write_text(yaml.safe_dump(values))
    return up_to_the_workers(["--config-dir", str(folder), "--config-name", "own", "trainer.dry_run=true"])


def from_words(task: Task, words: Sequence[str]) -> str:
    """Arguments of the command, after those that every run needs."""
    given = {word.split("=")[0].lstrip("+~") for word in words}
    first = [f"{name}={value}" for name, value in task.words().items() if name not in given]
    return up_to_the_workers([*first, *words, "trainer.dry_run=true"])


def up_to_the_workers(argv: list[str]) -> str:
    """A configuration is accepted if it is equal after loading the run's config.yaml."""
    with contextlib.redirect_stdout(io.StringIO()):
        config, user_settings = load_config_and_user_settings(Config, "ppo", argv)
        prepared = prepare_run(config, user_settings, Console())
    path = Path(prepared.config.trainer.output_dir) / "saved.yaml"
    save_config(config, path)
    again = Config.model_validate_json(json.dumps(yaml.safe_load(path.read_text(encoding="utf-8"))), strict=True)
    path.unlink()
    assert again == config, "config.yaml does not give the configuration back"
    return "accepted"


WORDS = ["=", "==", "a", "trainer", "trainer=", "=1", "+trainer.seed=1", "~trainer.seed", "~trainer", "trainer.seed",
         "algorithm=", "algorithm=nothing", "algorithm=[dapo,grpo]", "--", "-", "--nothing", "trainer={seed: 1}",
         "trainer=[]", "trainer.seed=1,2", "trainer.seed=[", "trainer.seed={", "trainer.seed=${oc.env:HOME}",
         "trainer.seed=${trainer.seed}", "trainer.seed=${nothing.there}", "trainer.seed=???", "hydra.run.dir=x",
         "defaults=[]", "env=math_long", "trainer..seed=1", ".=1", "trainer.seed='", "data.train_files=[[1],[2]]",
         "a\0b=1", "\udcff=1", "trainer.experiment_name=\udcff", "trainer.seed=" + "9" * 5000, "+x.y.z=1",
         "trainer.seed=glob(*)", "trainer.seed=range(3)", "trainer.seed=choice(1,2)", "env.tools=[a,a]"]  # fmt: skip


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Arguments that are not KEY=VALUE, or unusual ones."""
    odd = st.sampled_from(WORDS)
    keys = st.sampled_from([*tried_keys(), *list_sections(Config)])
    return draw(st.lists(odd | st.builds("{}={}".format, keys, texts.map(_flat)), min_size=1, max_size=2))


def _flat(text: str) -> str:
    return text if text.startswith("/") or not text.isascii() else f"/{text}"
