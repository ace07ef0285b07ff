"""Protobuf messages of the client `tinker` 0.38, declared here: the client's .proto file is not published."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from alphaapollo.engines.types import HttpAnswer
from alphaapollo.types import StopReason

CLIENT_VERSION = "0.38"
UPGRADE = f"This server speaks tinker {CLIENT_VERSION}. Install tinker=={CLIENT_VERSION}.0, or a newer alphaapollo."

MESSAGES = """
SparseCsr values:bytes=1 crow_indices:bytes=2 col_indices:bytes=3
Tensor dense?:bytes=1 sparse_csr?:SparseCsr=2 dtype:int32=3 shape*:int64=4
NamedTensor key:string=1 value:Tensor=2
EncodedTextChunk tokens:bytes=1
Chunk encoded_text?:EncodedTextChunk=1 image?:bytes=2 dmel?:bytes=3
Datum model_input*:Chunk=1 loss_fn_inputs*:NamedTensor=2 model_input_spans*:bytes=3 loss_fn_input_spans*:bytes=4
NamedNumber key:string=1 value:double=2
LossConfigValue number?:double=1 text?:string=2
NamedValue key:string=1 value:LossConfigValue=2
ForwardBackwardRequest model_id:string=1 seq_id:int32=2 data*:Datum=3 loss_fn:string=4 loss_fn_config*:NamedNumber=5\
 forward_only:bool=6 loss_fn_config_v2*:NamedValue=7
BatchedTensor data:bytes=1 offsets:bytes=2 dtype:int32=3 trailing_shape*:int64=4
NamedBatchedTensor key:string=1 value:BatchedTensor=2
ArrayRecord type_tag:string=1 fields*:NamedBatchedTensor=2 num_datums:int64=3
ForwardBackwardOutput loss_fn_output_type:string=1 loss_fn_outputs*:ArrayRecord=2 metrics*:NamedNumber=3
TopkLogprobs token_ids:bytes=1 logprobs:bytes=2 k:uint32=3 length:uint32=4
SampledSequence stop_reason:int32=1 tokens:bytes=2 logprobs:bytes=3 topk_sampled_logprobs:TopkLogprobs=4
SampleResponse sequences*:SampledSequence=1 prompt_logprobs:bytes=2 topk_prompt_logprobs:TopkLogprobs=3\
 prompt_cache_hit_tokens:int32=4
"""
"""One message per line, with fields `name:type=number`; `*`: repeated, `?`: member of the message's oneof. Enums are
int32, a map is a repeated Named... message, and the content of bytes fields that are messages is never read."""

DTYPES: dict[int, np.dtype] = {1: np.dtype(np.float32), 2: np.dtype(np.int64)}  # of DType; the client sends no others
MAX_FIELDS = 1 << 18  # of a request: elements of JSON, fields of protobuf's messages
MAX_TARGETS = 4 << 20  # of one forward_backward; with K targets per token, each costs as much as a token
MAX_DENSE_SIZE = 2 * MAX_TARGETS  # elements of the sparse tensors of one request
MISSING_LOGPROB = -99999.0  # with token id 0: an empty entry of TopkLogprobs


class RequestError(ValueError):
    """Error in a request that the user of the client can fix."""

    def __init__(self, message: str, *, status: int = 422):
        super().__init__(message)
        self.status = status  # of the HTTP response


def _declare_messages() -> SimpleNamespace:
    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="alphaapollo_tinker.proto", package="alphaapollo", syntax="proto3")
    for name, *fields in (line.split() for line in MESSAGES.strip().splitlines()):
        message = file.message_type.add(name=name)
        for label, kind, number in (field.replace("=", ":").split(":") for field in fields):
            field = message.field.add(name=label.rstrip("*?"), number=int(number), label=3 if "*" in label else 1)
            if kind[0].isupper():
                field.type, field.type_name = types.TYPE_MESSAGE, f".alphaapollo.{kind}"
            else:
                field.type = types.Type.Value(f"TYPE_{kind.upper()}")
            if "?" in label:
                field.oneof_index = 0
        if "?" in "".join(fields):
            message.oneof_decl.add(name="kind")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    names = [message.name for message in file.message_type]
    get_class = message_factory.GetMessageClass
    return SimpleNamespace(**{name: get_class(pool.FindMessageTypeByName(f"alphaapollo.{name}")) for name in names})


PROTO = _declare_messages()


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the content of a request's body, of at most `limit` bytes. encoding: its header Content-Encoding."""
    if encoding in ("gzip", "zstd"):
        try:
            with pa.CompressedInputStream(pa.BufferReader(body), encoding) as stream:
                body = stream.read(limit + 1)
        except (OSError, ValueError) as error:
            raise RequestError(f"the body is not valid {encoding}: {error}. Send it again.", status=400) from None
    elif encoding not in ("", "identity"):
        raise RequestError(f"Content-Encoding={encoding} is not supported. Use zstd, gzip or none.", status=415)
    if len(body) > limit:
        raise RequestError(f"the body has more than {limit} bytes. Send fewer datums per request.", status=413)
    return body


@dataclass(frozen=True)
class Datum:
    """Token sequence, and the arrays [N] or [N, K] (float32 or int64) that its loss needs."""

    tokens: list[int]
    inputs: dict[str, np.ndarray]


@dataclass(frozen=True)
class ForwardBackwardRequest:
    data: list[Datum]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool


def read_call_number(body: bytes) -> tuple[str, int, bool]:
    """Return model_id, seq_id and forward_only of the body of forward_backward. Raises RequestError for a body that is
    damaged, or that would become too many objects."""
    try:
        _count_fields(body, 0, len(body), PROTO.ForwardBackwardRequest.DESCRIPTOR, MAX_FIELDS)
        call = PROTO.ForwardBackwardRequest.FromString(body)
    except (DecodeError, IndexError):
        raise RequestError(f"forward_backward: the body is not a protobuf message. {UPGRADE}", status=400) from None
    if call.seq_id < 1:
        raise RequestError(f"forward_backward: seq_id={call.seq_id} must be at least 1. Number requests from 1.")
    return call.model_id, call.seq_id, call.forward_only


def _count_fields(data: bytes, start: int, end: int, message: Any, left: int) -> int:
    """Return how many fields are left after those of a message, data[start:end]. Raises RequestError if it has more."""
    while start < end:
        tag, start = _read_varint(data, start)
        size, left, field = 0, left - 1, message.fields_by_number.get(tag >> 3)
        match tag & 7:
            case 0:
                _, start = _read_varint(data, start)
            case 1 | 5 as wire:
                size = 8 if wire == 1 else 4
            case 2:
                size, start = _read_varint(data, start)
                if start + size > end:
                    raise DecodeError
                if field is not None and field.message_type is not None:
                    left = _count_fields(data, start, start + size, field.message_type, left)
                elif field is not None and field.type == field.TYPE_INT64:
                    left -= size  # packed: up to a number per byte
            case _:
                raise DecodeError
        if left < 0:
            text = f"forward_backward: the request has more than {MAX_FIELDS} fields. Send fewer datums per request."
            raise RequestError(text, status=413)
        start += size
    return left


def _read_varint(data: bytes, start: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte, start = data[start], start + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, start
    raise DecodeError


def read_forward_backward(body: bytes, context: int) -> ForwardBackwardRequest:
    """Parse the body of forward_backward, which read_call_number has checked. context: most tokens of a datum. Raises
    RequestError for unsupported content."""
    request = PROTO.ForwardBackwardRequest.FromString(body)
    size = request.ByteSize()
    request.DiscardUnknownFields()
    if request.ByteSize() != size:
        raise RequestError(f"forward_backward: the request has a field that this server does not know. {UPGRADE}")
    config: dict[str, float | str] = {entry.key: entry.value for entry in request.loss_fn_config}
    for entry in request.loss_fn_config_v2:
        if (kind := entry.value.WhichOneof("kind")) is None:
            raise RequestError(f"forward_backward: loss_fn_config[{entry.key!r}] has no value. Pass a number.")
        config[entry.key] = getattr(entry.value, kind)
    data, budget = [], MAX_DENSE_SIZE
    for number, message in enumerate(request.data):
        inputs = {}
        for entry in message.loss_fn_inputs:
            try:
                inputs[entry.key] = _read_tensor(entry.value, budget)
            except ValueError as error:
                raise RequestError(f"datum {number}: loss_fn_inputs[{entry.key!r}] {error}") from None
            budget -= inputs[entry.key].size if entry.value.HasField("sparse_csr") else 0
        data.append(Datum(_read_tokens(f"datum {number}", message.model_input, context), inputs))
    return ForwardBackwardRequest(data, request.loss_fn, config, request.forward_only)


def _read_tokens(label: str, chunks: Sequence[Any], context: int) -> list[int]:
    if any(chunk.WhichOneof("kind") != "encoded_text" for chunk in chunks):
        raise RequestError(f"{label}: model_input has a chunk that is not text. Pass token ids, not images or audio.")
    tokens = b"".join(chunk.encoded_text.tokens for chunk in chunks)
    if len(tokens) % 4:
        raise RequestError(f"{label}: model_input has {len(tokens)} bytes, not 4 per token. Pass int32 token ids.")
    if len(tokens) > 4 * context:
        raise RequestError(f"{label} has {len(tokens) // 4} tokens, but the context is {context}. Cut it.")
    return list(np.frombuffer(tokens, np.int32).tolist())


def _read_tensor(tensor: Any, max_dense_size: int) -> np.ndarray:
    """Return an array [N] or [N, K]. Raises ValueError with what is wrong, as the end of a sentence."""
    if (dtype := DTYPES.get(tensor.dtype)) is None:
        raise ValueError(f"has the dtype number {tensor.dtype}. Pass float32 or int64.")
    if (encoding := tensor.WhichOneof("kind")) is None:
        raise ValueError("has no values. Pass an array.")
    shape, csr = list(tensor.shape), tensor.sparse_csr
    values = _read_array(csr.values if encoding == "sparse_csr" else tensor.dense, dtype)
    if not np.isfinite(values).all():
        raise ValueError("has non-finite values. Pass finite numbers.")
    if encoding == "sparse_csr":
        return _densify(values, _read_array(csr.crow_indices), _read_array(csr.col_indices), shape, max_dense_size)
    shape = shape or [len(values)]
    if len(shape) > 2 or not 0 <= min(shape) <= max(shape) <= MAX_DENSE_SIZE or math.prod(shape) != len(values):
        raise ValueError(f"has {len(values)} values for the shape {shape}. Pass an array [N] or [N, K].")
    return values.reshape(shape)


def _read_array(data: bytes, dtype: np.dtype = DTYPES[2]) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ValueError(f"has {len(data)} bytes, not {dtype.itemsize} per number. Pass {dtype} numbers.")
    return np.frombuffer(data, dtype)


def _densify(values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: list[int], max_size: int) -> np.ndarray:
    """Return the dense array of a CSR tensor. rows: offset of each row in `values`, and their total number."""
    if len(shape) != 2 or min(shape) < 0 or max(shape) > max_size or math.prod(shape) > max_size:
        raise ValueError(
            f"is sparse with the shape {shape}. Pass [N, K] with at most {max_size} entries in all datums."
        )
    if len(rows) != shape[0] + 1 or rows[0] != 0 or rows[-1] != len(values) or (rows[1:] < rows[:-1]).any():
        raise ValueError(f"has invalid crow_indices for {len(values)} values of the shape {shape}. Pass a CSR tensor.")
    dense = np.zeros(shape, values.dtype)
    if len(columns) != len(values) or not ((columns >= 0) & (columns < shape[1])).all():
        raise ValueError(f"has invalid col_indices for {len(values)} values of the shape {shape}. Pass a CSR tensor.")
    positions = np.repeat(np.arange(shape[0]) * shape[1], np.diff(rows)) + columns
    if (positions[1:] <= positions[:-1]).any():
        raise ValueError("has col_indices that are not increasing in each row. Pass a CSR tensor.")
    dense.reshape(-1)[positions] = values
    return dense


def write_forward_backward(loss: float, logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Encode the result of forward_backward.

    Args:
        logprobs: log-probs of each datum's targets, [N] or [N, K].
        metrics: further metrics, named `name:reduction`; the client combines the chunks of a call by the reduction.
    """
    output = PROTO.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in {"loss:sum": loss, **metrics}.items():
        output.metrics.add(key=name, value=value)
    for one in logprobs:
        data = one.astype(np.float32).tobytes()
        offsets = np.array([0, len(data)], np.int64).tobytes()
        array = PROTO.BatchedTensor(data=data, offsets=offsets, dtype=1, trailing_shape=one.shape[1:])
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        record.fields.add(key="logprobs", value=array)
    return bytes(output.SerializeToString())


def write_sample(
    answers: Sequence[HttpAnswer], token_ids: Sequence[int], scores_prompt: bool, prompt_top: int, top: int
) -> bytes:
    """Encode the answers of an engine to a prompt of P tokens. The first answer has the log-probs of the prompt.

    Args:
        token_ids: [P], of the prompt.
        scores_prompt: whether to return the log-probs of the prompt's tokens after the first.
        prompt_top, top: number of most probable tokens to return per position of prompt and answers.
    """
    first, scored = answers[0].completion, answers[0].prompt_logprobs
    response = PROTO.SampleResponse(prompt_cache_hit_tokens=first.num_cached_tokens)
    if scores_prompt:
        own = [found[token] for token, found in zip(token_ids[1:], scored, strict=True)]
        response.prompt_logprobs = np.array([math.nan, *own], np.float32).tobytes()
    if prompt_top and scored:
        response.topk_prompt_logprobs.CopyFrom(_make_topk([{}, *scored], prompt_top))
    for answer in answers:
        is_cut = answer.completion.stop_reason is StopReason.LENGTH
        sequence = response.sequences.add(stop_reason=int(is_cut))
        sequence.tokens = np.array(answer.completion.token_ids, np.int32).tobytes()
        sequence.logprobs = np.array(answer.completion.logprobs, np.float32).tobytes()
        if top:
            sequence.topk_sampled_logprobs.CopyFrom(_make_topk(answer.logprobs, top))
    return bytes(response.SerializeToString())


def _make_topk(positions: Sequence[Mapping[int, float]], k: int) -> Any:
    """Encode the k most probable tokens at each position, of their log-probs."""
    ids, logprobs = np.zeros((len(positions), k), np.int32), np.full((len(positions), k), MISSING_LOGPROB, np.float32)
    for position, found in enumerate(positions):
        for place, (token, logprob) in enumerate(sorted(found.items(), key=lambda pair: -pair[1])[:k]):
            ids[position, place], logprobs[position, place] = token, logprob
    return PROTO.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(positions))
