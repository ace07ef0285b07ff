from dataclasses import fields

import pytest

from alphaapollo.config.schema import EngineKwargs, Rollout
from alphaapollo.engines.protocol import EngineSpec
from alphaapollo.engines.vllm.settings import (
    RESERVED_ARGUMENTS,
    build_engine_arguments,
    check_engine_kwargs,
)

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
    assert {*arguments("cpu"), *arguments("cuda")} <= RESERVED_ARGUMENTS


@pytest.mark.parametrize("name", ["trust_remote_code", "max_model_len", "enable_expert_parallel", "data_parallel_size"])
def test_reserved_arguments_are_refused(name: str):
    with pytest.raises(ValueError, match=rf"^{KEY}\.{name} "):
        check(**{name: 1})
    with pytest.raises(ValueError, match=r"rollout\.max_num_seqs\."):
        check(max_num_seqs=1)


def test_other_engines_are_not_checked():
    check_engine_kwargs(Rollout(name="fake", engine_kwargs=EngineKwargs(vllm={"x": 1})), "rollout")


def test_vllm_knows_all_reserved_arguments():
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    assert {field.name for field in fields(arg_utils.AsyncEngineArgs)} >= RESERVED_ARGUMENTS
