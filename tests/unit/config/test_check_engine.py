from alphaapollo.config.check_engine import check_engine
from alphaapollo.config.schema import Data, Rollout

DATA = Data(max_prompt_length=64, max_response_length=64)


def problems(device="cpu", **settings) -> list[str]:
    return list(check_engine("rollout", Rollout(**settings), DATA, device))


def test_what_vllm_takes_is_let_through():
    assert problems() == problems(block_size=64) == problems(max_num_batched_tokens=1, max_num_seqs=128) == []
    assert problems(name="hf", block_size=7, max_num_batched_tokens=1) == []
    assert problems(device="cuda", block_size=7) == []  # of a GPU's blocks vLLM decides itself


def test_blocks_on_a_cpu_are_multiples():
    assert problems(block_size=7) == ["rollout.block_size=7: on a CPU vLLM takes multiples of 32. Set 32."]
    assert problems(block_size=100)[0].endswith("Set 96.")


def test_a_step_has_room_for_a_token_of_each_sequence():
    (said,) = problems(max_num_batched_tokens=1, max_num_seqs=129)
    assert said.startswith("rollout.max_num_batched_tokens=1: ") and "rollout.max_num_seqs=129" in said
