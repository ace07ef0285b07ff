"""Protobuf messages of plugins/tinker/wire.py, also against the client's declaration and its decoder."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaapollo.engines.types import HttpAnswer
from alphaapollo.plugins.tinker.wire import (
    MAX_DENSE_SIZE,
    MAX_FIELDS,
    PROTO,
    ForwardBackwardRequest,
    RequestError,
    decompress,
    read_call_number,
    read_forward_backward,
    write_forward_backward,
    write_sample,
)
from alphaapollo.types import Completion, StopReason

INT64 = {"dtype": 2}


def encode(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


def make_body(tensor: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """Body with one datum of tokens 1, 2 and, if given, the input `weights`."""
    message = PROTO.ForwardBackwardRequest(**{"model_id": "m", "seq_id": 1, "loss_fn": "ppo", **fields})
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    if tensor is not None:
        datum.loss_fn_inputs.add(key="weights", value=PROTO.Tensor(**tensor))
    return bytes(message.SerializeToString())


def read(body: bytes) -> ForwardBackwardRequest:
    read_call_number(body)
    return read_forward_backward(body, context=64)


def make_csr(values: bytes, rows: bytes, columns: bytes, *shape: int) -> dict[str, Any]:
    csr = PROTO.SparseCsr(values=values, crow_indices=rows, col_indices=columns)
    return {"sparse_csr": csr, "shape": shape, **INT64}


@pytest.mark.parametrize(
    "tensor, expected",
    [
        ({"dense": encode(3, 4), "shape": [2], **INT64}, [3, 4]),
        ({"dense": encode(3, 4), "shape": [2, 1], **INT64}, [[3], [4]]),
        ({"dense": np.array([0.5, 2], np.float32).tobytes(), "dtype": 1}, [0.5, 2.0]),
        (make_csr(encode(7, 8), encode(0, 0, 2), encode(0, 2), 2, 3), [[0, 0, 0], [7, 0, 8]]),
    ],
)
def test_tensors(tensor: dict[str, Any], expected: list[Any]) -> None:
    (datum,) = read(make_body(tensor)).data
    assert datum.tokens == [1, 2]
    assert datum.inputs["weights"].tolist() == expected
    assert datum.inputs["weights"].dtype == (np.int64 if tensor["dtype"] == 2 else np.float32)


@pytest.mark.parametrize(
    "tensor, message",
    [
        ({"dense": encode(1), "dtype": 4}, "dtype number 4"),
        (INT64, "has no values"),
        ({"dense": b"123", **INT64}, "has 3 bytes"),
        ({"dense": encode(1, 2), "shape": [3], **INT64}, "2 values for the shape"),
        ({"dense": encode(1, 2), "shape": [-1, -2], **INT64}, "2 values for the shape"),
        ({"dense": b"", "shape": [0, 2**62], **INT64}, "0 values for the shape"),
        ({"dense": np.array([1, np.nan], np.float32).tobytes(), "dtype": 1}, "non-finite"),
        (make_csr(b"", encode(0, 0), b"", 1, MAX_DENSE_SIZE + 1), "sparse with the shape"),
        (make_csr(b"", encode(0), b"", 0, 2**62), "sparse with the shape"),
        (make_csr(b"", b"", b"", 1, 2), "invalid crow_indices"),
        (make_csr(encode(1), encode(0, 2**63 - 1, -(2**63), 1), encode(0), 3, 2), "invalid crow_indices"),
        (make_csr(encode(1), encode(0, 1), b"", 1, 2), "invalid col_indices"),
        (make_csr(encode(1), encode(0, 1), encode(2), 1, 2), "invalid col_indices"),
        (make_csr(encode(1), encode(0, 1), encode(-1), 1, 2), "invalid col_indices"),
        (make_csr(encode(1, 2), encode(0, 2), encode(1, 1), 1, 2), "not increasing"),
    ],
)
def test_wrong_tensors(tensor: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=rf"^datum 0: loss_fn_inputs\['weights'\] .*{message}"):
        read(make_body(tensor))


def test_dense_size_is_limited_for_all_datums_together() -> None:
    body = make_body(make_csr(b"", encode(0, 0), b"", 1, MAX_DENSE_SIZE // 2 + 1))
    read(body)
    with pytest.raises(RequestError, match="datum 1"):
        read(body * 2)  # concatenated messages are merged


def test_loss_config() -> None:
    text = PROTO.LossConfigValue(text="")
    number = PROTO.LossConfigValue(number=0)
    old = [{"key": "a", "value": 2.0}, {"key": "b", "value": 0.5}]
    new = [{"key": "b", "value": number}, {"key": "c", "value": text}]
    request = read(make_body(loss_fn_config=old, loss_fn_config_v2=new, forward_only=True))
    assert request.config == {"a": 2.0, "b": 0.0, "c": ""} and request.forward_only


def test_wrong_requests() -> None:
    wrong_tokens = PROTO.Datum(model_input=[{"encoded_text": {"tokens": b"123"}}])
    for body, message in [
        (make_body(seq_id=0), "seq_id=0"),
        (make_body(data=[PROTO.Datum(model_input=[{"image": b""}])]), "datum 0: model_input .*not text"),
        (make_body(data=[PROTO.Datum(model_input=[{}])]), "datum 0: model_input .*not text"),
        (make_body(data=[wrong_tokens]), "datum 0: model_input has 3 bytes"),
        (make_body(loss_fn_config_v2=[{"key": "a"}]), "loss_fn_config.* no value"),
        (make_body() + b"\xa0\x06\x01", "does not know.*Install tinker==0.38.0"),
        (make_body({"dense": b"", **INT64})[:-1], "not a protobuf message"),
    ]:
        with pytest.raises(RequestError, match=message):
            read(body)
    nested = PROTO.ForwardBackwardRequest.FromString(make_body(INT64))
    nested.data[0].loss_fn_inputs[0].value.MergeFromString(b"\xa0\x06\x01")
    with pytest.raises(RequestError, match="does not know"):
        read(nested.SerializeToString())


def field(number: int, content: bytes) -> bytes:
    return (
        bytes([number << 3 | 2])
        + struct.pack("<BBBB", *(len(content) >> 7 * i & 127 | 128 for i in range(3)), 0)
        + content
    )


@pytest.mark.parametrize("numbers", [(3,), (3, 1), (3, 2), (3, 2, 2, 4), (5,)])
def test_fields_are_counted_before_objects_are_made(numbers: tuple[int, ...]) -> None:
    """Empty datums, chunks and arrays, a packed shape, and settings."""
    body = b"\0" * (MAX_FIELDS + 1) if numbers[-1] == 4 else field(numbers[-1], b"")[:1] + b"\0"
    body = field(4, body) if numbers[-1] == 4 else body * (MAX_FIELDS + 1)
    for number in reversed(numbers[:-1]):
        body = field(number, body)
    with pytest.raises(RequestError) as error:
        read(make_body() + body)
    assert error.value.status == 413


@given(st.binary(max_size=60), st.integers(0, 200))
def test_random_bytes_raise_only_request_errors(noise: bytes, position: int) -> None:
    valid = make_body(make_csr(encode(7, 8), encode(0, 0, 2), encode(0, 2), 2, 3), loss_fn_config=[{"key": "a"}])
    for body in (noise, valid[:position] + noise + valid[position + len(noise) :]):
        try:
            read(body)
        except RequestError as error:
            assert error.status in (400, 422)


@pytest.mark.parametrize("encoding", ["", "identity", "gzip", "zstd"])
def test_decompress(encoding: str) -> None:
    compressed: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress,
        "zstd": lambda data: pa.compress(data, "zstd", asbytes=True),
    }
    body = compressed.get(encoding, bytes)(b"x" * 100)
    assert decompress(body, encoding, 100) == b"x" * 100
    with pytest.raises(RequestError) as caught:
        decompress(body, encoding, 99)
    assert caught.value.status == 413


def test_decompress_refuses_bombs_and_damaged_bodies() -> None:
    bomb = pa.compress(bytes(2**28), "zstd", asbytes=True)
    before = pa.total_allocated_bytes()
    for body, encoding, status in [
        (bomb, "zstd", 413),
        (bomb[:-1000], "gzip", 400),
        (b"junk", "zstd", 400),
        (pa.compress(b"x" * 99, "zstd", asbytes=True)[:-3], "zstd", 400),
        (b"", "br", 415),
    ]:
        with pytest.raises(RequestError) as caught:
            decompress(body, encoding, 1000)
        assert caught.value.status == status
    assert pa.total_allocated_bytes() - before < 2**20


def test_declaration_agrees_with_the_client() -> None:
    pytest.importorskip("tinker")
    from tinker.proto import tinker_public_pb2 as client

    own = vars(PROTO)
    for name in own.keys() & client.DESCRIPTOR.message_types_by_name.keys():
        theirs = client.DESCRIPTOR.message_types_by_name[name].fields_by_number
        for field in own[name].DESCRIPTOR.fields:
            other = theirs[field.number]
            assert (field.name, field.is_repeated) == (other.name, other.is_repeated)
            enum_as_int, opaque = (field.type, other.type) == (5, 14), (field.type, other.type) == (12, 11)
            assert field.type == other.type or enum_as_int or opaque, f"{name}.{field.name}"
    request = own["ForwardBackwardRequest"].DESCRIPTOR.fields_by_number
    assert request.keys() == client.ForwardBackwardRequest.DESCRIPTOR.fields_by_number.keys()
    assert {one for one in own if not one.startswith("Named")} <= {*client.DESCRIPTOR.message_types_by_name}


def test_results_in_the_client() -> None:
    pytest.importorskip("tinker")
    from tinker.proto import response_conv

    arrays = [np.array([-1.0, -2.0, -3.0]), np.array([[-1, -2], [-3, -4], [-5, -6]], np.float32)]
    body = write_forward_backward(2.5, arrays, {"tokens:sum": 4})
    output = response_conv.deserialize_forward_backward_output(body)
    assert output.metrics == {"loss:sum": 2.5, "tokens:sum": 4.0}
    for array, found in zip(arrays, output.loss_fn_outputs, strict=True):
        assert found["logprobs"].shape == list(array.shape) and np.array_equal(found["logprobs"].to_numpy(), array)

    stopped = Completion([5, 6], [-1.0, -2.0], StopReason.STOP, 1, num_cached_tokens=2)
    answers = [
        HttpAnswer(stopped, None, [{0: -2.0, 5: -1.0}, {6: -2.0}], [{2: -0.5}, {3: -1.5, 8: -0.25}]),
        HttpAnswer(Completion([7], [-3.0], StopReason.LENGTH, 1), None, [{7: -3.0}], []),
    ]
    sample = response_conv.deserialize_sample_response(write_sample(answers, [9, 2, 3], True, 1, 2))
    assert sample.prompt_logprobs == [None, -0.5, -1.5] and sample.prompt_cache_hit_tokens == 2
    assert sample.topk_prompt_logprobs == [None, [(2, -0.5)], [(8, -0.25)]]
    first, second = sample.sequences
    assert (first.tokens, first.logprobs, first.stop_reason) == ([5, 6], [-1.0, -2.0], "stop")
    assert first.topk_logprobs == [[(5, -1.0), (0, -2.0)], [(6, -2.0)]]
    assert (second.tokens, second.topk_logprobs, second.stop_reason) == ([7], [[(7, -3.0)]], "length")
    plain = response_conv.deserialize_sample_response(write_sample(answers, [9, 2, 3], False, 0, 0))
    assert plain.sequences[0].topk_logprobs is None
    assert plain.prompt_logprobs is None and plain.topk_prompt_logprobs is None
