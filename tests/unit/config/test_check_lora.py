from pathlib import Path

import pytest

from alphaapollo.config.check_tuning import check_tuning
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.schema import SftConfig
from tests.unit.config.test_check import needed, outcome, problems  # noqa: F401 - a fixture

RANK = "actor_rollout_ref.model.lora_rank=16"
SERVED = "actor_rollout_ref.rollout.lora=adapter"
RESET = ["actor_rollout_ref.actor.use_kl_loss=True", "algorithm.reference_reset.every=5"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["actor_rollout_ref.model.lora_alpha=32"],
            "actor_rollout_ref.model.lora_alpha=32: there are no adapters, for actor_rollout_ref.model.lora_rank is 0. "
            "Set actor_rollout_ref.model.lora_rank=16, or leave lora_alpha out.",
        ),
        (["actor_rollout_ref.model.target_modules=[q_proj]"], "target_modules=[q_proj]: there are no adapters"),
        ([RANK, "actor_rollout_ref.model.target_modules=[]"], "no layer would get an adapter"),
        (
            [RANK, "actor_rollout_ref.model.router_aux_loss_coef=0.01"],
            "router_aux_loss_coef=0.01: with actor_rollout_ref.model.lora_rank=16 the routers are frozen",
        ),
        (["critic.model.lora_alpha=8"], "Set critic.model.lora_rank=16, or leave lora_alpha out."),
        (["trainer.export_lora=adapter"], "trainer.export_lora=adapter: there is none"),
        ([SERVED], "rollout.lora=adapter: there is none, for actor_rollout_ref.model.lora_rank is 0"),
        ([RANK, SERVED, "actor_rollout_ref.rollout.name=hf"], "only the vllm engine serves adapters, not hf"),
        (
            [RANK, SERVED, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
            "tensor_model_parallel_size=2: what",
        ),
        (["actor_rollout_ref.model.lora_rank=513", SERVED], "vLLM serves ranks up to 512"),
        ([RANK, *RESET], "with actor_rollout_ref.model.lora_rank=16 the reference is the model without its adapters"),
    ],
)
def test_one_problem_says_what_got_and_fix(needed: list[str], overrides: list[str], says: str):  # noqa: F811
    (text,) = problems([*needed, *overrides])
    assert says in text and text.endswith(".")


def test_a_negative_rank_is_refused(needed: list[str]):  # noqa: F811
    (text,) = problems([*needed, "actor_rollout_ref.model.lora_rank=-1"])
    assert text.startswith("actor_rollout_ref.model.lora_rank: ") and "-1" in text


def test_with_lora(needed: list[str]):  # noqa: F811
    both = [RANK, "actor_rollout_ref.model.lora_alpha=32", "actor_rollout_ref.model.target_modules=[q_proj,v_proj]"]
    assert outcome([*needed, *both, "trainer.export_lora=adapter", SERVED]) == []
    assert outcome([*needed, RANK, "trainer.export_lora=adapter", "trainer.export_hf=False"]) == [
        "trainer.export_lora=adapter has no effect: trainer.export_hf is false."
    ]
    assert outcome([*needed, RANK, "actor_rollout_ref.ref.fsdp_config.param_offload=True"], num_gpus=1) == [
        "actor_rollout_ref.ref.fsdp_config.param_offload=true has no effect: with LoRA the reference is the policy "
        "without its adapters."
    ]


def test_fine_tuning_has_the_same_rules(tmp_path: Path):
    (tmp_path / "train.jsonl").touch()
    data = {"train_files": str(tmp_path / "train.jsonl")}
    with pytest.raises(ConfigError, match=r"model\.lora_alpha=8: there are no adapters, for model\.lora_rank is 0"):
        check_tuning(SftConfig(data=data, model={"path": "some/model", "lora_alpha": 8}), num_gpus=0)
    fine = SftConfig(data=data, model={"path": "some/model", "lora_rank": 8, "lora_alpha": 8})
    assert check_tuning(fine, num_gpus=0) == []
