from __future__ import annotations

import re
from pathlib import Path

import pytest

from alphaapollo.config.check_tuning import check_answers, check_tuning
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.load import load_config
from alphaapollo.config.notices import answer_notices
from alphaapollo.config.schema import SftConfig


@pytest.fixture
def needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "train.jsonl").touch()
    return ["model.path=some/model", "data.train_files=train.jsonl"]


def test_checks_of_fine_tuning(needed: list[str]):
    with pytest.raises(ConfigError) as caught:
        check_tuning(load_config(SftConfig, "sft", []), num_gpus=0)
    assert len(caught.value.problems) == 2
    asked = ["model.path=a/b", needed[1], "fsdp_config.optimizer_offload=True"]
    fine = load_config(SftConfig, "sft", asked)
    assert check_tuning(fine, num_gpus=0) == ["fsdp_config.optimizer_offload=true has no effect: it needs a GPU."]
    both = load_config(SftConfig, "sft", [*asked, "fsdp_config.offload_policy=True"])
    assert check_tuning(both, num_gpus=1) == [
        "fsdp_config.optimizer_offload=true has no effect: fsdp_config.offload_policy is true."
    ]
    with pytest.raises(ConfigError, match=r"the ranks share their GPUs with nobody.*instead: fsdp_config.offload_pol"):
        load_config(SftConfig, "sft", ["fsdp_config.param_offload=True"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trainer.controller=local", "trainer.n_gpus_per_node=2"], "trainer.controller=local: it has one process"),
        (["trainer.device=cuda"], "trainer.device: got cuda, but this machine has no GPU"),
        (["ulysses_sequence_parallel_size=2"], "does not divide the trainer.n_gpus_per_node x trainer.nnodes = 1"),
        (["trainer.n_gpus_per_node=4", "fsdp_config.fsdp_size=3"], "fsdp_config.fsdp_size=3: does not divide"),
        (["data.source_weights=[1,2]"], "data.source_weights: 2 weights for the 1 files of data.train_files"),
        (["trainer.stall_timeout=5"], "trainer.stall_timeout=5: the run would end before"),
    ],
)
def test_ranks_and_sources_of_fine_tuning(needed: list[str], words: list[str], says: str):
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_tuning(load_config(SftConfig, "sft", ["model.path=a/b", needed[1], *words]), num_gpus=0)


def test_keys_about_held_out_prompts(needed: list[str], tmp_path: Path):
    def of(*words: str) -> SftConfig:
        return load_config(SftConfig, "sft", [*needed, *words])

    prompts = ("data.val_prompts=train.jsonl", "trainer.test_freq=5")
    assert answer_notices(of()) == answer_notices(of(*prompts)) == []
    assert answer_notices(of("rollout.val_kwargs.n=4", "reward.timeout=3")) == [
        "rollout.val_kwargs.n=4 has no effect: data.val_prompts is empty.",
        "reward.timeout=3.0 has no effect: data.val_prompts is empty.",
    ]
    assert answer_notices(of(prompts[0])) == ["data.val_prompts=train.jsonl has no effect: trainer.test_freq is -1."]
    assert answer_notices(of(*prompts, "env.max_steps=3", "env.rollout.n=2")) == [
        "env.rollout.n=2 has no effect: rollout.val_kwargs.n counts the samples.",
        "env.max_steps=3 has no effect: env.env_name is single_turn, which has one turn.",
    ]
    wrong = of("data.val_prompts=no.jsonl", "custom_reward_function.path=no.py", "rollout.val_kwargs.top_p=0")
    assert [line.split(":")[0] for line in check_answers(wrong)] == [
        "data.val_prompts",
        "custom_reward_function.path",
        "rollout.val_kwargs.top_p=0",
    ]
