"""Models, prompts and settings that cannot work are refused or reported before workers start."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphaapollo.config.schema import Config, Data, Env, GenerationConfig, Model, Rollout
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.engines.hf import HFEngine
from alphaapollo.environments.base import get_environment_spec
from alphaapollo.launch.inputs import (
    collect_environment_notices,
    find_local_paths,
    make_renderer,
    read_prompts,
)
from tests.unit.data.images import make_test_image
from tests.vision.models import make


def test_paths_that_workers_read_and_that_exist_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "vllm"):
        (tmp_path / folder).mkdir()
    for file in ("reward.py", "data.parquet"):
        (tmp_path / file).touch()
    config = Config.model_validate(
        {
            "actor_rollout_ref": {"model": {"path": str(tmp_path / "model")}},
            "critic": {"model": {"path": "owner/of-the-hub"}},
            "custom_reward_function": {"path": "reward.py"},
            "data": {"train_files": "./data.parquet"},
            "trainer": {"output_dir": str(tmp_path)},
        }
    )
    paths = {"actor_rollout_ref.model.path": str(tmp_path / "model"), "custom_reward_function.path": "reward.py"}
    assert find_local_paths(config) == paths
    monkeypatch.setattr(HFEngine, "find_python", lambda: Path("own/bin/python"))
    role = config.actor_rollout_ref.model_copy(update={"rollout": Rollout(name="hf")})
    python = {"actor_rollout_ref.rollout.name": "own/bin/python"}
    assert find_local_paths(config.model_copy(update={"actor_rollout_ref": role})) == paths | python


def test_tools_with_unseen_results_are_reported() -> None:
    env = Env(env_name="informal_math", tools=["local_rag"])
    (notice,) = collect_environment_notices(GenerationConfig(env=env), get_environment_spec("informal_math"))
    assert notice.startswith("env.max_steps=1 ") and "python_code, local_rag" in notice
    turns = env.model_copy(update={"max_steps": 2})
    assert collect_environment_notices(GenerationConfig(env=turns), get_environment_spec("informal_math")) == []


def test_prompts_with_images_need_a_model_that_reads_them(tmp_path: Path) -> None:
    make("qwen3_vl", tmp_path / "model")
    path, key, ask = str(tmp_path / "data.parquet"), "data.train_files", "<image> How many?"
    encoded_images = [{"bytes": make_test_image(32, 48, seed)} for seed in range(2)]
    rows = [
        {"prompt": [{"role": "user", "content": ask}], "images": [encoded_image]} for encoded_image in encoded_images
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    renderer = make_renderer(Env(), Model(path=str(tmp_path / "model")), {})
    prompts, notices, findings = read_prompts(path, key, renderer, Data(max_prompt_length=64))
    assert len(prompts) == 2 and not notices and not findings
    assert len(renderer.encode_prompt(prompts[0].content)) <= 64
    with pytest.raises(ValueError, match=r"files: 2 of 2 .*max_prompt_length=20"):
        read_prompts(path, key, renderer, Data(max_prompt_length=20))
    with pytest.raises(ValueError, match=r"train_files: 2 of 2 .*row 0.* not read"):
        read_prompts(path, key, Renderer(load_tokenizer(str(tmp_path / "model"))), Data())
