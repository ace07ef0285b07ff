import pytest

from alphaapollo.config.schema import EngineKwargs, Rollout
from alphaapollo.engines.spec import EngineSpec
from alphaapollo.engines.vllm.settings import REFUSED, SET_BY, engine_arguments
from alphaapollo.engines.vllm.user_arguments import check_engine_kwargs, check_known, check_not_ours, known_arguments

KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def arguments(device: str, **own: object) -> dict:
    rollout = Rollout(engine_kwargs=EngineKwargs(vllm=own))
    return engine_arguments(EngineSpec(0, "org/model", False, rollout, device, "float32", 300, "log"))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_users_arguments_reach_the_engine(device: str):
    plain, own = arguments(device), arguments(device, max_cudagraph_capture_size=64, hf_overrides={"a": 1})
    assert own == plain | {"max_cudagraph_capture_size": 64, "hf_overrides": {"a": 1}}


def test_every_argument_that_the_project_gives_is_refused():
    assert {*arguments("cpu"), *arguments("cuda")} <= SET_BY.keys()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("max_num_seqs", "actor_rollout_ref.rollout.max_num_seqs sets it"),
        ("trust_remote_code", "actor_rollout_ref.model.trust_remote_code sets it"),
        ("max_model_len", "data.max_prompt_length and data.max_response_length sets it"),
        ("skip_tokenizer_init", "the project decides it"),
    ],
)
def test_what_another_key_sets_is_refused(name: str, says: str):
    with pytest.raises(ValueError, match=rf"^{KEY}\.{name}: {says}\. Leave it out\.$"):
        check_not_ours([name], KEY, "actor_rollout_ref.rollout")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("enable_expert_parallel", r"experts are not dealt to ranks: .*\(actor_rollout_ref\.rollout\.tensor_model_par"),
        ("data_parallel_size", r"every replica is an engine of its own, which actor_rollout_ref\.rollout\.num_engines"),
    ],
)
def test_what_is_not_built_is_refused_with_the_reason(name: str, says: str):
    with pytest.raises(ValueError, match=rf"^{KEY}\.{name}: {says}.* Leave it out\.$"):
        check_not_ours([name], KEY, "actor_rollout_ref.rollout")


def test_a_name_that_vllm_does_not_know():
    known = {"max_cudagraph_capture_size", "hf_overrides"}
    check_known(["hf_overrides"], known, KEY)
    with pytest.raises(ValueError, match=r"hf_override: vLLM's EngineArgs has no such argument\. Did you mean hf_ov"):
        check_known(["hf_override"], known, KEY)


def test_nothing_is_asked_of_other_engines():
    check_engine_kwargs(Rollout(name="fake", engine_kwargs=EngineKwargs(vllm={"x": 1})), "rollout")
    check_engine_kwargs(Rollout(), "rollout")


def test_vllm_knows_what_the_project_gives():
    pytest.importorskip("vllm")
    assert SET_BY.keys() | REFUSED.keys() <= known_arguments()
