"""The configurations of the games of the examples are valid, and episodes look like the chats of their warm-up.

The test of the Gymnasium environment needs Gymnasium, installed or unpacked in a folder of PYTHONPATH.
"""

from pathlib import Path
from random import Random

import numpy as np
import pytest

from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, SftConfig
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.environments import base, check_environment
from alphaapollo.environments.text_game import derive_instance_seed
from alphaapollo.types import GroupRequest, Prompt, Sampling
from alphaapollo.utils.user_module import load_user_module
from examples.data_preprocess.prepare import seed_rows
from examples.guessing_game import teacher
from examples.guessing_game.make_task import write_tokenizer
from examples.quickstart.make_task import make_model
from tests.unit.rollout.worker_kit import TextEngine, generate, make_worker

EXAMPLES = Path(__file__).parents[3] / "examples"
MAIN = {"guessing_game": "grpo", "grid_world": "gigpo"}


def config(name: str, experiment: str = "") -> Config:
    words = ["--config-dir", str(EXAMPLES / name), "--config-name", experiment or MAIN.get(name, "grpo")]
    loaded = load_config(Config, "ppo", words)
    if loaded.env.custom_module:
        load_user_module(str(EXAMPLES.parent / loaded.env.custom_module), "env.custom_module")
    return loaded


@pytest.mark.parametrize("name", MAIN)
def test_configs_are_valid(name: str):
    assert not check_environment(config(name).env).graded
    sft = load_config(SftConfig, "sft", ["--config-dir", str(EXAMPLES / name), "--config-name", "sft"])
    assert sft.trainer.project_name == config(name).trainer.project_name == name


@pytest.mark.parametrize("name", ["gymnasium", "trl"])
def test_episodes_of_other_frameworks_are_the_chats_of_the_warm_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base._ENVIRONMENTS, "_entries", dict(base._ENVIRONMENTS._entries))
    if name == "gymnasium":
        pytest.importorskip("gymnasium")
    env = config("guessing_game", name).env
    env = env.model_copy(update={"custom_module": str(EXAMPLES.parent / (env.custom_module or ""))})
    write_tokenizer(tmp_path, calls_tool=name == "trl")
    make_model(tmp_path, seed=0)
    outcomes = set()
    for index, row in enumerate(seed_rows("train", 6, "text")):
        prompt = Prompt(index, "text", row["prompt"], env_kwargs=row["env_kwargs"])
        if name == "gymnasium":
            seed = derive_instance_seed(env, prompt) % 2**31
            target = int(np.random.default_rng(seed).integers(1, 31, endpoint=True))
            chat = teacher.play(target, Random(index))
        else:
            target = Random(row["env_kwargs"]["seed"]).randint(1, 31)
            chat = teacher.play_with_tool(target, Random(index))
        texts = [message["content"] for message in chat if message["role"] == "assistant"]
        wins = any(f"<answer>{target}<" in text or f": {target}}}}}" in text for text in texts)
        engine = TextEngine(tmp_path, lambda _, texts=texts: texts.pop(0))
        worker = make_worker(tmp_path, engine, env, max_prompt_length=96, max_response_length=112)
        (group,) = generate(worker, GroupRequest(prompt, 1, Sampling(max_tokens=112), 0))
        (done,) = group.trajectories
        tokenizer = load_tokenizer(str(tmp_path))
        assert tokenizer.decode(done.rows[0].token_ids) + "\n" == tokenizer.apply_chat_template(chat, tokenize=False)
        assert (done.reward, done.accuracy) == (wins, wins)
        outcomes.add(wins)
    assert outcomes == {False, True}
