from alphaapollo.weights.transport import transport_kind


def test_kind_by_where_the_engines_run():
    assert transport_kind("cpu", colocate=True, vllm_on_ray=True) == "shared_memory"
    assert transport_kind("cuda", colocate=True, vllm_on_ray=True) == "ipc"
    assert transport_kind("cuda", colocate=False, vllm_on_ray=True) == "nccl"
    assert transport_kind("cuda", colocate=True, vllm_on_ray=False) == "shared_memory"  # hf, or one process
    assert transport_kind("cuda", colocate=True, vllm_on_ray=True, adapter=True) == "adapter"
