import pytest

from alphaapollo.config.schema import EngineKwargs, Rollout
from alphaapollo.engines.spec import EngineSpec
from alphaapollo.engines.vllm.settings import MANAGED_ARGUMENTS, UNSUPPORTED_ARGUMENTS, engine_arguments
from alphaapollo.engines.vllm.user_arguments import (
    check_engine_kwargs,
    check_known_arguments,
    check_not_managed,
    vllm_argument_names,
)

KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def arguments(device: str, **own: object) -> dict:
    rollout = Rollout(engine_kwargs=EngineKwargs(vllm=own))
    return engine_arguments(EngineSpec(0, "org/model", False, rollout, device, "float32", 300, "log"))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_user_arguments_reach_the_engine(device: str):
    plain, own = arguments(device), arguments(device, max_cudagraph_capture_size=64, hf_overrides={"a": 1})
    assert own == plain | {"max_cudagraph_capture_size": 64, "hf_overrides": {"a": 1}}


def test_arguments_set_by_the_project_are_refused():
    assert {*arguments("cpu"), *arguments("cuda")} <= MANAGED_ARGUMENTS.keys()


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("max_num_seqs", "actor_rollout_ref.rollout.max_num_seqs"),
        ("trust_remote_code", "actor_rollout_ref.model.trust_remote_code"),
        ("max_model_len", "data.max_prompt_length and data.max_response_length"),
        ("skip_tokenizer_init", "the project"),
    ],
)
def test_arguments_with_a_config_key_are_refused(name: str, owner: str):
    with pytest.raises(ValueError, match=rf"^{KEY}\.{name} is set by {owner}\. Remove it\.$"):
        check_not_managed([name], KEY, "actor_rollout_ref.rollout")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "enable_expert_parallel",
            r"expert parallelism is not supported .*\.rollout\.tensor_model_parallel_size",
        ),
        ("data_parallel_size", r"set the number of replicas by actor_rollout_ref\.rollout\.num_engines"),
    ],
)
def test_unsupported_arguments_are_refused_with_the_reason(name: str, reason: str):
    with pytest.raises(ValueError, match=rf"^{KEY}\.{name}: {reason}.* Remove it\.$"):
        check_not_managed([name], KEY, "actor_rollout_ref.rollout")


def test_names_unknown_to_vllm_are_refused():
    known = {"max_cudagraph_capture_size", "hf_overrides"}
    check_known_arguments(["hf_overrides"], known, KEY)
    with pytest.raises(ValueError, match=r"hf_override: vLLM's EngineArgs has no such argument\. Did you mean 'hf_ov"):
        check_known_arguments(["hf_override"], known, KEY)


def test_other_engines_are_not_checked():
    check_engine_kwargs(Rollout(name="fake", engine_kwargs=EngineKwargs(vllm={"x": 1})), "rollout")
    check_engine_kwargs(Rollout(), "rollout")


def test_vllm_knows_all_managed_arguments():
    pytest.importorskip("vllm")
    assert MANAGED_ARGUMENTS.keys() | UNSUPPORTED_ARGUMENTS.keys() <= vllm_argument_names()
