"""Models, prompts and settings that cannot work are refused or reported before workers start."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alphaapollo.config.schema import Config, Data, Env, GenerationConfig, Model, Rollout
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.environments.base import get_environment_spec
from alphaapollo.launch.input_checks import (
    check_engine_supports_model,
    check_sequence_parallel_size,
    check_tensor_parallel_size,
    collect_environment_notices,
    find_local_paths,
    make_renderer,
    read_prompts,
)
from tests.unit.data.pictures import make_picture
from tests.unit.tiny import build_model
from tests.vision.models import make

ULYSSES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"


def test_transformers_engine_refuses_vision_language_models(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3VLConfig

    model = Model(path=str(tmp_path))
    Qwen3VLConfig().save_pretrained(tmp_path)
    check_engine_supports_model(model, Rollout(), "rollout")
    with pytest.raises(ValueError, match=r"rollout\.name=hf .* rollout\.name=vllm"):
        check_engine_supports_model(model, Rollout(name="hf"), "rollout")
    Qwen3Config().save_pretrained(tmp_path)
    check_engine_supports_model(model, Rollout(name="hf"), "rollout")


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


def test_tools_with_unseen_results_are_reported() -> None:
    env = Env(env_name="informal_math", tools=["local_rag"])
    (notice,) = collect_environment_notices(GenerationConfig(env=env), get_environment_spec("informal_math"))
    assert notice.startswith("env.max_steps=1 ") and "python_code, local_rag" in notice
    turns = env.model_copy(update={"max_steps": 2})
    assert collect_environment_notices(GenerationConfig(env=turns), get_environment_spec("informal_math")) == []


def test_prompts_with_pictures_need_a_model_that_reads_them(tmp_path: Path) -> None:
    make("qwen3_vl", tmp_path / "model")
    path, key, ask = str(tmp_path / "data.parquet"), "data.train_files", "<image> How many?"
    pictures = [{"bytes": make_picture(32, 48, seed)} for seed in range(2)]
    rows = [{"prompt": [{"role": "user", "content": ask}], "images": [picture]} for picture in pictures]
    pq.write_table(pa.Table.from_pylist(rows), path)
    renderer = make_renderer(Env(), Model(path=str(tmp_path / "model")), {})
    prompts, notices = read_prompts(path, key, renderer, Data(max_prompt_length=64))
    assert len(prompts) == 2 and not notices
    assert len(renderer.encode_prompt(prompts[0].content)) <= 64
    with pytest.raises(ValueError, match=r"files: 2 of 2 .*max_prompt_length=20"):
        read_prompts(path, key, renderer, Data(max_prompt_length=20))
    with pytest.raises(ValueError, match=r"train_files: 2 of 2 .*row 0.* not read"):
        read_prompts(path, key, Renderer(load_tokenizer(str(tmp_path / "model"))), Data())


def test_sequence_parallel_ranks_split_the_heads_of_each_model(tmp_path: Path) -> None:
    build_model("qwen3").config.save_pretrained(tmp_path)  # 4 heads
    models = {"actor_rollout_ref.model.path": Model(path=str(tmp_path)), "critic.model.path": Model()}
    for size in (1, 2, 4):
        check_sequence_parallel_size(size, ULYSSES, models)
    with pytest.raises(ValueError, match=r"=3 .*_ref\.model\.path=.* 4 .*=1\.$"):
        check_sequence_parallel_size(3, ULYSSES, models)


def test_a_model_that_transformers_has_itself_may_carry_code(tmp_path: Path) -> None:
    """Custom model code runs only with trust_remote_code, and only then its attention is unknown."""
    config = build_model("qwen3").config
    config.auto_map = {"AutoModelForCausalLM": "own.Model"}
    config.save_pretrained(tmp_path)
    check_sequence_parallel_size(2, ULYSSES, {"model.path": Model(path=str(tmp_path))})
    with pytest.raises(ValueError, match="its own modeling code"):
        check_sequence_parallel_size(2, ULYSSES, {"model.path": Model(path=str(tmp_path), trust_remote_code=True)})


def test_an_engine_splits_whole_heads(tmp_path: Path) -> None:
    def check(**sizes: int) -> None:
        check_tensor_parallel_size(Model(path=str(tmp_path)), Rollout(**sizes), "rollout")

    build_model("qwen3").config.save_pretrained(tmp_path)  # 4 heads
    for size in (1, 2, 4):
        check(tensor_model_parallel_size=size)
    with pytest.raises(ValueError, match=r"parallel_size=3 .*one of 1, 2, 4\.$"):
        check(tensor_model_parallel_size=3)
    with pytest.raises(ValueError, match=r"expert_parallel_size=2: .* Set .*=1\.$"):
        check(tensor_model_parallel_size=2, expert_parallel_size=2)
    build_model("qwen3_moe").config.save_pretrained(tmp_path)
    check(tensor_model_parallel_size=2, expert_parallel_size=2)
