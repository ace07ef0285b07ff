"""Arguments of SGLang's server, sampling settings, and outputs."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alphaapollo.config.schema import EngineKwargs
from alphaapollo.data.images import EXCLUDED_LOGIT
from alphaapollo.engines.types import EngineSpec, HttpSampling
from alphaapollo.engines.weight_sync.digest import compute_joint_digest, format_digest
from alphaapollo.plugins.sglang import patches, server_arguments
from alphaapollo.plugins.sglang.cpu_kernels import hash_murmur3
from alphaapollo.plugins.sglang.engine import RemoteSglangEngine
from alphaapollo.plugins.sglang.transfer import describe_bucket, flatten_bucket
from alphaapollo.types import Sampling, StopReason
from tests.plugins.sglang.environment import needs_sglang
from tests.unit.engines.specs import check_items, make_spec

KV_TOKEN_BYTES = 2**20


def spec(**keys: Any) -> EngineSpec:
    return make_spec(**{"name": "sglang", "kv_cache_gib": 1.0, "tokenizer_path": "org/tok"} | keys)


def gpu_spec(transport: Any = "ipc", **keys: Any) -> EngineSpec:
    return make_spec("cuda", **{"name": "sglang", "transport": transport, "lora_rank": 8} | keys)


FCFS = EngineKwargs(sglang={"schedule_policy": "fcfs"})
FA3 = EngineKwargs(sglang={"attention_backend": "fa3"})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (spec(), {"max_total_tokens": 1024, "max_running_requests": 256, "context_length": 308, "enable_lora": ...}),
        (spec(), {"skip_tokenizer_init": True, "sampling_backend": "pytorch"}),
        (spec(enable_prefix_caching=False), {"disable_radix_cache": True}),
        (spec(stop="\n"), {"tokenizer_path": "org/tok", "skip_tokenizer_init": False}),
        (spec(engine_kwargs=FCFS), {"schedule_policy": "fcfs"}),
        (spec(transport="adapter", lora_rank=12), {"enable_lora": True, "max_lora_rank": 12}),
        (gpu_spec(tensor_model_parallel_size=2), {"tp_size": 2, "mem_fraction_static": 0.5}),
        (gpu_spec(), {"enable_memory_saver": True, "enable_weights_cpu_backup": False}),
        (gpu_spec("adapter"), {"enable_weights_cpu_backup": True, "lora_backend": "triton"}),
        (gpu_spec(colocate=False), {"enable_memory_saver": False}),
    ],
)
def test_server_arguments(spec: EngineSpec, expected: dict[str, Any]) -> None:
    arguments = server_arguments.build_server_arguments(spec, KV_TOKEN_BYTES)
    check_items(arguments, expected)
    assert {*arguments} - server_arguments.RESERVED_ARGUMENTS <= {"schedule_policy", "attention_backend"}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (spec(engine_kwargs=FA3), r"engine_kwargs\.sglang\.attention_backend=fa3 .*Remove"),  # needs a GPU
        (spec(max_model_len=3000), r"kv_cache_gib=1 .*1024 tokens.*3000|kv_cache_gib=1 .*Set"),
    ],
)
def test_unusable_settings(spec: EngineSpec, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        server_arguments.build_server_arguments(spec, KV_TOKEN_BYTES)


def test_environment_variables() -> None:
    check_items(
        server_arguments.build_environment(spec(cpu_threads=3)), {"OMP_NUM_THREADS": "3", "HF_HUB_OFFLINE": ...}
    )
    check_items(server_arguments.build_environment(gpu_spec()), {"SGLANG_USE_CPU_ENGINE": ..., "OMP_NUM_THREADS": ...})


@needs_sglang
def test_sglang_accepts_the_arguments_of_gpus() -> None:
    built = [server_arguments.build_server_arguments(gpu_spec(kind), 1) for kind in ("ipc", "adapter")]
    code = "import json, sys; from sglang.srt.server_args import ServerArgs\n"
    code += "for arguments in json.loads(sys.argv[1]): print(ServerArgs(**arguments).mem_fraction_static)"
    environment = {**os.environ, **server_arguments.build_environment(spec())}  # without a GPU
    words = [str(RemoteSglangEngine.find_python()), "-c", code, json.dumps(built)]
    done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["0.5", "0.5"]


def test_sampling_settings() -> None:
    params = server_arguments.make_sampling_params(
        Sampling(5, temperature=0.0, top_k=0, seed=7, stop_token_ids=(2, 3), stop=("x",))
    )
    assert params["max_new_tokens"] == 5 and params["top_k"] == -1 and params["sampling_seed"] == 7
    assert params["stop_token_ids"] == [2, 3] and params["stop"] == ["x"]
    assert "ignore_eos" not in params  # SGLang would ignore the stop tokens


def answer(finish: str, **meta: Any) -> dict[str, Any]:
    logprobs = [(-0.5, 4, None), (-1.5, 5, None), (-2.5, 6, None)]
    meta = {"finish_reason": {"type": finish}, "weight_version": "7", "cached_tokens": 2} | meta
    return {"output_ids": [4, 5, 6], "meta_info": meta | {"output_token_logprobs": logprobs}}


def test_completions() -> None:
    one = server_arguments.build_completion(answer("stop"))
    assert one.token_ids == [4, 5, 6] and one.logprobs == [-0.5, -1.5, -2.5] and one.num_cached_tokens == 2
    assert one.stop_reason is StopReason.STOP and one.weight_versions == [(7, 3)]
    spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}]
    other = server_arguments.build_completion(answer("length", weight_versions=spans))
    assert other.stop_reason is StopReason.LENGTH and other.weight_versions == [(6, 1), (7, 2)]


def compute_murmur3(data: bytes, seed: int = 0) -> int:
    """MurmurHash3 (x86, 32 bits) of whole words, in Python's integers."""
    mask = 0xFFFFFFFF
    for start in range(0, len(data), 4):
        word = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & mask
        word = (word << 15 | word >> 17) & mask
        seed ^= word * 0x1B873593 & mask
        seed = ((seed << 13 | seed >> 19) & mask) * 5 + 0xE6546B64 & mask
    seed ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        seed = (seed ^ seed >> shift) * factor & mask
    return seed


def test_hash_of_seeded_sampling() -> None:
    assert compute_murmur3(b"test") == 0xBA6BD213  # published values
    assert compute_murmur3(b"", 1) == 0x514E28B7
    seeds, positions, columns = [0, 1, 2**40 + 5, 2**63 - 1], [0, 9, 2, 77], [0, 1, 151_935]
    found = hash_murmur3(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        words = [seed.to_bytes(8, "little") + position.to_bytes(4, "little") + c.to_bytes(4, "little") for c in columns]
        assert found[row].tolist() == list(map(compute_murmur3, words))


def test_requests_keep_their_seeds() -> None:
    make = patches.seed_requests(lambda batch, size: SimpleNamespace(temperatures=torch.ones(2, 1), size=size))
    requests = [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in (5, None)]
    info = make(SimpleNamespace(reqs=requests), 10)
    assert info.sampling_seed.tolist() == [5, 0] and info.size == 10


def test_digest_of_the_weights_and_of_a_loaded_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_adapter_digests", [])
    model = torch.nn.Linear(3, 2)
    handle = patches.compute_digest(lambda checker, action, *, role: action)
    checker = SimpleNamespace(_placement={"tp_rank": 0, "tp_size": 1}, _get_model=lambda: model)
    assert handle(checker, "compare", role="target") == "compare"
    answer = handle(checker, patches.DIGEST, role="target")
    assert answer["checksums"] == {patches.DIGEST: format_digest(compute_joint_digest(model.parameters()))}
    assert answer["parallelism_info"] == {"role": "target", "tp_rank": 0, "tp_size": 1, "rank": 0, "size": 1}
    first, second = torch.ones(2, 2), torch.zeros(1, 2)  # zeros of layers without adapter
    layers = [SimpleNamespace(weights={"a": first, "b": second})]
    manager = SimpleNamespace(loras={"id": SimpleNamespace(layers=layers)})
    patches.record_digest(lambda manager, adapter: None)(manager, SimpleNamespace(lora_id="id"))
    answer = handle(checker, patches.DIGEST, role="target")
    assert answer["checksums"] == {patches.DIGEST: format_digest(compute_joint_digest([first]))}


def test_excluded_tokens_have_no_probability() -> None:
    logits = patches.exclude_tokens(lambda: torch.zeros(2, 4), [1, 3])()
    assert logits.tolist() == [[0.0, EXCLUDED_LOGIT, 0.0, EXCLUDED_LOGIT]] * 2


def test_http_requests() -> None:
    params = server_arguments.make_http_params(HttpSampling(Sampling(4, seed=2), {"frequency_penalty": 0.5}))
    check_items(params, {"max_new_tokens": 4, "frequency_penalty": 0.5})
    with pytest.raises(ValueError, match="min_p: SGLang"):
        server_arguments.make_http_params(HttpSampling(Sampling(4), {"min_p": 0.1}))


def test_http_answers() -> None:
    top = {"output_top_logprobs": [[(-0.1, 9, None)], None, [(-2.5, 6, None)]]}
    prompt = {
        "input_token_logprobs": [(None, 1, None), (-0.3, 2, None)],
        "input_top_logprobs": [None, [(-0.2, 8, None)]],
    }
    one = server_arguments.build_http_answer(answer("stop", **top, **prompt))
    assert one.logprobs == [{4: -0.5, 9: -0.1}, {5: -1.5}, {6: -2.5}] and one.stop_string == ""
    assert one.prompt_logprobs == [{2: -0.3, 8: -0.2}]
    ended = answer("stop", input_token_logprobs=[])
    ended["meta_info"]["finish_reason"]["matched"] = "#"
    one = server_arguments.build_http_answer(ended)
    assert one.stop_string == "#" and one.logprobs == [{4: -0.5}, {5: -1.5}, {6: -2.5}]


def test_buckets_over_cuda_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine process opens the handle of its own GPU. The tensors are on a CPU here."""
    bucket = {"a": torch.randn(3, 2, dtype=torch.bfloat16), "b": torch.randn(5, dtype=torch.bfloat16)}
    memory = {("handle", gpu): flatten_bucket(bucket) + gpu for gpu in (0, 1)}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-b"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    rebuild = "torch.multiprocessing.reductions.rebuild_cuda_tensor"
    monkeypatch.setattr(rebuild, lambda *arguments: memory[arguments[0]] if arguments[6] == 0 else None)
    handles = {"GPU-a": (("handle", 1), *range(6)), "GPU-b": (("handle", 0), *range(6))}
    loaded: dict[str, torch.Tensor] = {}
    encoded = base64.b64encode(pickle.dumps({**describe_bucket(bucket), "handles": handles})).decode()
    model = SimpleNamespace(load_weights=lambda tensors: loaded.update(tensors))
    patches.load_cuda_bucket(model, [(encoded, torch.zeros(1))])
    assert loaded.keys() == bucket.keys() and all(torch.equal(loaded[name], bucket[name]) for name in bucket)


class ColumnParallelLinear(torch.nn.Linear):
    tp_size = 2


class QKVParallelLinear(ColumnParallelLinear):
    num_kv_head_replicas, num_heads, head_size = 2, 1, 2

    def __init__(self, tp_rank: int):
        super().__init__(2, 6, bias=False)
        self.tp_rank = tp_rank


class RowParallelLinear(torch.nn.Linear):
    tp_size = 2


def test_tensor_parallel_ranks_share_the_digest() -> None:
    """Rank 1 leaves out replicated parameters: the key and value heads, the bias of a row-parallel layer, norms."""
    counts = []
    for rank in (0, 1):
        layers = QKVParallelLinear(rank), ColumnParallelLinear(2, 3, bias=False), RowParallelLinear(3, 2)
        model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(2), layers[1])  # the last one is shared
        counts.append(sum(part.numel() for part in patches.select_tensors_for_digest(model, rank)))
    assert counts == [12 + 6 + 6 + 2 + 4, 4 + 6 + 6]


def test_spawned_processes_are_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(patches, "patch_sglang", lambda *arguments: calls.append(arguments))
    patches.run_patched(((5,), True, "cuda"), lambda *arguments: calls.append(arguments), "scheduler", 1)
    assert calls == [((5,), True, "cuda"), ("scheduler", 1)]
