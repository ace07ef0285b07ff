import pytest

from alphaapollo.config.schema import EngineKwargs, Rollout
from alphaapollo.engines.protocol import EngineSpec
from alphaapollo.engines.vllm.settings import RESERVED_ARGUMENTS, build_engine_arguments


def arguments(device: str, **own: object) -> dict:
    rollout = Rollout(engine_kwargs=EngineKwargs(vllm=own), max_num_seqs=256, gpu_memory_utilization=0.5)
    return build_engine_arguments(EngineSpec(0, "org/model", False, rollout, device, "float32", 300, "log"))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_user_arguments_reach_the_engine(device: str):
    plain, own = arguments(device), arguments(device, max_cudagraph_capture_size=64, hf_overrides={"a": 1})
    assert own == plain | {"max_cudagraph_capture_size": 64, "hf_overrides": {"a": 1}}


def test_arguments_set_by_the_project_are_refused():
    assert {*arguments("cpu"), *arguments("cuda")} <= RESERVED_ARGUMENTS | {"max_cudagraph_capture_size"}


def test_vllm_knows_all_reserved_arguments():
    vllm = pytest.importorskip("vllm.engine.arg_utils")
    assert set(vllm.AsyncEngineArgs.__dataclass_fields__) >= RESERVED_ARGUMENTS
