"""JSON requests of the client `tinker` 0.38: one struct per request body, with the client's fields and defaults."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from alphaapollo.plugins.tinker.wire import MAX_FIELDS, UPGRADE, RequestError
from alphaapollo.utils.json_types import Json, JsonObject

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Nonnegative = Annotated[float, Meta(ge=0)]
Beta = Annotated[float, Meta(ge=0, lt=1)]
StopString = Annotated[str, Meta(min_length=1)]
Lifetime = Annotated[int, Meta(ge=3600, le=10 * 365 * 24 * 3600)]  # seconds
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=256)], Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)
]
CheckpointName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}\Z")]  # also the name of its folder


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request. The tag of a class is the client's field `type`."""


class CreateSession(Request, tag="create_session"):
    tags: list[str]
    sdk_version: str
    user_metadata: JsonObject | None = None
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeat(Request, tag="session_heartbeat"):
    session_id: str


class LoraConfig(Request):
    rank: Number
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Request, tag="create_model"):
    session_id: str
    model_seq_id: Count
    base_model: str
    lora_config: LoraConfig
    user_metadata: JsonObject | None = None


class GetInfo(Request, tag="get_info"):
    model_id: str


class AdamParams(Request):
    learning_rate: Nonnegative = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Annotated[float, Meta(gt=0)] = 1e-12
    weight_decay: Nonnegative = 0.0
    grad_clip_norm: Nonnegative = 0.0  # 0: no clipping


class OptimStep(Request, tag="optim_step"):
    model_id: str
    seq_id: Number
    adam_params: AdamParams


class SaveWeights(Request, tag="save_weights"):
    model_id: str
    seq_id: Number
    path: CheckpointName | None = None
    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSampler(Request, tag="save_weights_for_sampler"):
    model_id: str
    seq_id: Number
    path: CheckpointName | None = None
    sampling_session_seq_id: Count | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Lifetime | None = None
    user_metadata: Metadata | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("set path for a checkpoint, or sampling_session_seq_id for a sampling session")


class LoadWeights(Request, tag="load_weights"):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: JsonObject | None = None

    def __post_init__(self) -> None:
        names = ("model_id", "seq_id", "session_id", "model_seq_id")
        given = [name for name in names if getattr(self, name) is not None]
        if given not in (["model_id", "seq_id"], ["session_id", "model_seq_id"]):
            raise ValueError("set model_id and seq_id, or session_id and model_seq_id for a new model")


class WeightsInfo(Request, tag="weights_info"):
    tinker_path: str


class TTL(Request, tag="ttl"):
    ttl_seconds: Lifetime | None  # None: the checkpoint never expires


class CreateSamplingSession(Request, tag="create_sampling_session"):
    session_id: str
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None


class EncodedText(Request, tag="encoded_text"):
    tokens: list[Token]


class ModelInput(Request):
    chunks: list[EncodedText]


class SamplingParams(Request):
    max_tokens: Number | None = None
    seed: Seed | None = None
    stop: StopString | list[StopString | Token] | None = None  # None: the model's stop tokens; []: only max_tokens
    temperature: Nonnegative = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = -1  # -1: all tokens
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Sample(Request, tag="sample"):
    prompt: ModelInput
    sampling_params: SamplingParams
    sampling_session_id: str
    seq_id: Count
    num_samples: Annotated[int, Meta(ge=1, le=4096)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    record_stability_info: bool | None = None  # no effect: this server's stable_reinforce needs only the log-probs


class RetrieveFuture(Request, tag="retrieve_future"):
    request_id: str
    allow_metadata_only: bool = False


ADAMW = "Use the optimizer adamw with tinker.AdamParams."
UNSUPPORTED: dict[type[Request], dict[str, str]] = {
    CreateModel: {"optimizer_config": ADAMW},
    OptimStep: {"optimizer_params": ADAMW},
    LoadWeights: {"optimizer_config": ADAMW, "weights_access_token": "Leave it out."},
    Sample: {
        **dict.fromkeys(("base_model", "model_path"), "Use a sampling session."),
        "target_prompt_logprobs": "Use topk_prompt_logprobs.",
        "prompt_alt_tokens_k": "Leave it out.",
        "prompt_logprobs_last_n": "Leave it out: the log-probs of the whole prompt are returned.",
    },
}
"""Fields that the client sends, but this server does not support, with a fix. Values without an effect are accepted."""

T = TypeVar("T", bound=Request)


def read_json(body: bytes, kind: type[T], client_version: str) -> T:
    """Parse the body of a request. Raises RequestError for a damaged body, and for values that are not supported."""
    name, content = kind.__struct_config__.tag, decode_json(body)
    if isinstance(content, dict):
        for field, fix in UNSUPPORTED.get(kind, {}).items():
            if content.pop(field, None) not in (None, False, 0, {"type": "adamw"}):
                raise RequestError(f"{name}: the field {field} is not supported by this server. {fix}")
    try:
        return msgspec.convert(content, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise RequestError(f"{name}: {_describe_problem(str(error), client_version)}") from None


def decode_json(body: bytes) -> Json:
    """Parse JSON. Raises RequestError for a body that is damaged, or that would become too many objects."""
    if sum(map(body.count, (b",", b"[", b"{"))) > MAX_FIELDS:
        raise RequestError(f"the body has more than {MAX_FIELDS} elements. Send smaller requests.", status=413)
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}. Send a JSON object.", status=400) from None


def _describe_problem(message: str, client_version: str) -> str:
    """Return msgspec's message as a sentence with the field first, and a fix."""
    problem, _, path = message.replace("`", "").partition(" - at $")
    path = path.removeprefix(".")
    if path.startswith("prompt.chunks[") and problem.startswith(("Object contains unknown", "Invalid value")):
        return f"{path} is not a chunk of the type encoded_text. Pass token ids, not images or audio."
    if problem.startswith("Object contains unknown field "):
        field = f"{path}.{problem.removeprefix('Object contains unknown field ')}".removeprefix(".")
        return f"tinker {client_version} sends the field {field}, which this server does not know. {UPGRADE}"
    if "matching regex" in problem:
        return f"{path} must consist of up to 128 letters, digits, `.`, `_` and `-`, and must not begin with `.`."
    return f"{path or 'the body'}: {problem[0].lower()}{problem[1:]}."
