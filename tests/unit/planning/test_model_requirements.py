"""Each row of the table: a setting that a model does not support, and the facts of the error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.config.schema import Data, EngineKwargs, Fsdp, Model, Rollout
from alphaapollo.planning.model_requirements import ModelUse, check_models, find_unsupported_features
from tests.unit.tiny import build_model

SHORT, LONG = (Data(max_prompt_length=size, max_response_length=28) for size in (100, 101))  # the context: 128 tokens
SCORES: dict[str, Any] = {"writes_text": False, "trains_scores": True}


def list_errors(path: Path, model: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    use = ModelUse("model.path", Model(path=str(path), **(model or {})), **settings)
    return [*find_unsupported_features(use)]


@pytest.mark.parametrize(
    ("family", "model", "settings", "facts"),
    [
        ("granite", {}, SCORES, "main_rm: granite Choose"),
        ("qwen3", {}, {"engine": Rollout(), "lengths": LONG}, "max_prompt_length=101 = 129 128 Lower"),
        ("qwen3", {}, {"engine": Rollout(tensor_model_parallel_size=3)}, "parallel_size=3 has 4 of 1, 2, 4."),
        (
            *("qwen3", {}, {"engine": Rollout(tensor_model_parallel_size=2, expert_parallel_size=2)}),
            "expert_parallel_size=2: qwen3 Set rollout.expert_parallel_size=1.",
        ),
        ("qwen3", {}, {"ulysses_size": 3, "ulysses_section": "a."}, "a.ulysses_sequence_parallel_size=3 4 heads =1."),
        ("qwen3", {"router_aux_loss_coef": 0.1}, {"fsdp": Fsdp()}, "model.router_aux_loss_coef=0.1: qwen3 Remove"),
        (
            *("qwen3", {}, {"fsdp": Fsdp(), "engine": Rollout(router_replay=True)}),
            "rollout.router_replay=true: qwen3 Remove rollout.router_replay=true.",
        ),
        ("qwen3", {}, {"fsdp": Fsdp(ep_size=2), "num_ranks": 2}, "fsdp_config.ep_size=2: qwen3 ep_size 1."),
        ("qwen3_moe", {}, {"fsdp": Fsdp(ep_size=8), "num_ranks": 8}, "ep_size=8: 4 experts 1, 2, 4."),
        ("qwen3_moe", {}, {"fsdp": Fsdp(ep_size=2), "num_ranks": 10}, "ep_size=2: 48 rows 5 ranks"),
        *(
            (
                *("llama", {"lora_rank": 4, "target_modules": ["q_proj", target]}, {"fsdp": Fsdp()}),
                f"model.lora_rank=4: '{target}' down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
            )
            for target in ("query", "lm_head", "embed_tokens", "layers")
        ),
    ],
)
def test_an_unsupported_setting_is_named(
    model_folder: Any, family: str, model: dict[str, Any], settings: dict[str, Any], facts: str
) -> None:
    (error,) = list_errors(model_folder(family), model, **settings)
    assert f"model.path={model_folder(family)} ({family}) " in error and error.endswith(".")
    assert [fact for fact in facts.split() if fact not in error] == [], error


@pytest.mark.parametrize(
    ("family", "model", "settings"),
    [
        ("qwen3", {}, SCORES),
        ("qwen3", {"lora_rank": 4}, {"fsdp": Fsdp()}),
        ("qwen3", {"lora_rank": 4, "target_modules": ["missing"]}, {}),  # not trained
        ("qwen3", {}, {"engine": Rollout(name="hf"), "lengths": LONG}),
        ("qwen3", {}, {"engine": Rollout(), "lengths": SHORT}),
        ("qwen3", {}, {"engine": Rollout(router_replay=True)}),  # not trained
        *(("qwen3", {}, {"engine": Rollout(tensor_model_parallel_size=n), "ulysses_size": n}) for n in (1, 2, 4)),
        *(("qwen3_moe", {}, {"fsdp": Fsdp(ep_size=size), "num_ranks": 4}) for size in (1, 2, 4)),
        ("qwen3_moe", {"router_aux_loss_coef": 0.1}, {"fsdp": Fsdp(), "engine": Rollout(router_replay=True)}),
        ("qwen3_moe", {}, {"engine": Rollout(tensor_model_parallel_size=2, expert_parallel_size=2)}),
    ],
)
def test_supported_settings(model_folder: Any, family: str, model: dict[str, Any], settings: dict[str, Any]) -> None:
    assert list_errors(model_folder(family), model, **settings) == []


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"name": "fake", "top_p": 0.9}, True),
        ({"name": "fake", "min_p": 0.1, "sampling_mask": True}, True),
        ({"name": "fake", "top_k": 5, "sampling_mask": False}, False),
        ({"name": "fake"}, False),
        *(({"name": name, "top_p": 0.9}, False) for name in ("vllm", "hf")),
    ],
)
def test_truncated_sampling_needs_the_kept_tokens(
    model_folder: Any, settings: dict[str, Any], is_refused: bool
) -> None:
    engine = Rollout(**settings)
    errors = list_errors(model_folder("qwen3"), engine=engine, fsdp=Fsdp())
    assert [error for error in errors if "top_p" in error and "sampling_mask=False" in error] == errors
    assert len(errors) == is_refused and not list_errors(model_folder("qwen3"), engine=engine), "not trained"


def test_own_modeling_code_has_unknown_attention(tmp_path: Path) -> None:
    """Custom code runs only with trust_remote_code; a model of transformers may carry some, too."""
    config = build_model("qwen3").config
    config.auto_map = {"AutoModelForCausalLM": "own.Model"}
    config.save_pretrained(tmp_path)
    assert list_errors(tmp_path, ulysses_size=2) == []
    (error,) = list_errors(tmp_path, {"trust_remote_code": True}, ulysses_size=2)
    assert "its own modeling code" in error and error.endswith("=1.")


def test_a_classifier_does_not_write_text(tmp_path: Path) -> None:
    config = build_model("qwen3").config
    config.architectures = ["Qwen3ForSequenceClassification"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification"):
        check_models([ModelUse("model.path", Model(path=str(tmp_path)))])
    assert list_errors(tmp_path, writes_text=False) == []


def test_images_are_for_vllm_and_are_read_like_by_the_policy(
    vision_folder: Callable[[str], Path], model_folder: Any
) -> None:
    """The Qwen-VL models have the same processor and placeholder tokens; InternVL and the text model do not."""
    policy = Model(path=str(vision_folder("qwen3_vl")))
    (error,) = list_errors(vision_folder("qwen3_vl"), engine=Rollout(name="hf"))
    assert error.startswith("rollout.name=hf: ") and "rollout.name=vllm" in error
    assert list_errors(vision_folder("qwen3_vl"), engine=Rollout()) == []
    assert list_errors(vision_folder("qwen2_5_vl"), policy=policy) == []
    for other in (vision_folder("internvl"), model_folder("qwen3")):
        (error,) = list_errors(other, policy=policy)
        assert error.startswith(f"images: model.path={other} ")
    assert list_errors(model_folder("qwen3"), policy=Model(path=str(model_folder("qwen3")))) == []


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("max-model-len", "max_model_len: other keys set it"),
        ("speculative_config", "speculative_config: with it, tokens are sampled from another distribution"),
        ("disable-mm-cache", "disable_mm_cache: vllm has no such argument"),
    ],
)
def test_refused_arguments_of_vllm(model_folder: Any, key: str, reason: str) -> None:
    engine = Rollout(engine_kwargs=EngineKwargs(vllm={"compilation-config": {}, key: 1}))
    (error,) = list_errors(model_folder("qwen3"), engine=engine)
    assert error.startswith(f"rollout.engine_kwargs.vllm.{reason}")
