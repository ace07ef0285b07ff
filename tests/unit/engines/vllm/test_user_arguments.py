import pytest

from alphaapollo.config.schema import EngineKwargs, Rollout
from alphaapollo.engines.spec import EngineSpec
from alphaapollo.engines.vllm.settings import build_engine_arguments
from alphaapollo.engines.vllm.user_arguments import RESERVED_ARGUMENTS, check_engine_kwargs, list_vllm_arguments

KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def arguments(device: str, **own: object) -> dict:
    rollout = Rollout(engine_kwargs=EngineKwargs(vllm=own), max_num_seqs=256, gpu_memory_utilization=0.5)
    return build_engine_arguments(EngineSpec(0, "org/model", False, rollout, device, "float32", 300, "log"))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_user_arguments_reach_the_engine(device: str):
    plain, own = arguments(device), arguments(device, max_cudagraph_capture_size=64, hf_overrides={"a": 1})
    assert own == plain | {"max_cudagraph_capture_size": 64, "hf_overrides": {"a": 1}}


def check(**own: object) -> None:
    check_engine_kwargs(Rollout(engine_kwargs=EngineKwargs(vllm=own)), "actor_rollout_ref.rollout")  # type: ignore[arg-type]


def test_arguments_set_by_the_project_are_refused():
    assert {*arguments("cpu"), *arguments("cuda")} <= RESERVED_ARGUMENTS.keys()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("max_num_seqs", "actor_rollout_ref.rollout.max_num_seqs"),
        ("trust_remote_code", "actor_rollout_ref.model.trust_remote_code"),
        ("max_model_len", "data.max_prompt_length and data.max_response_length"),
        ("skip_tokenizer_init", "is set by the project"),
        ("enable_expert_parallel", "actor_rollout_ref.rollout.expert_parallel_size"),
        ("data_parallel_size", "actor_rollout_ref.rollout.num_engines"),
    ],
)
def test_reserved_arguments_are_refused_with_the_reason(name: str, reason: str):
    with pytest.raises(ValueError, match=rf"^{KEY}\.{name} .*{reason}"):
        check(**{name: 1})


def test_names_unknown_to_vllm_are_refused():
    pytest.importorskip("vllm")
    check(hf_overrides={})
    with pytest.raises(ValueError, match=r"hf_override .*Did you mean 'hf_ov"):
        check(hf_override={})


def test_other_engines_are_not_checked():
    check_engine_kwargs(Rollout(name="fake", engine_kwargs=EngineKwargs(vllm={"x": 1})), "rollout")


def test_vllm_knows_all_reserved_arguments():
    pytest.importorskip("vllm")
    assert RESERVED_ARGUMENTS.keys() <= list_vllm_arguments()
