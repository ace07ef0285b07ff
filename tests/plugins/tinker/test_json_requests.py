"""JSON requests of plugins/tinker/json_requests.py. Those of the client itself: loop/tinker_calls.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphaapollo.plugins.tinker import json_requests as r
from alphaapollo.plugins.tinker.wire import RequestError

KINDS = [kind for kind in r.Request.__subclasses__() if kind.__struct_config__.tag]
SAMPLE: dict[str, Any] = {
    "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
    "sampling_params": {"max_tokens": 4, "top_k": -1, "temperature": 1, "top_p": 1},
    "sampling_session_id": "s",
    "seq_id": 0,
    "type": "sample",
}
MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": {"rank": 4}, "type": "create_model"}
STEP = {"model_id": "m", "seq_id": 1, "adam_params": {}, "type": "optim_step"}
SAVE = {"model_id": "m", "seq_id": 1}
LOAD = {"path": "tinker://m/weights/a", "optimizer": True, "session_id": "s", "model_seq_id": 0}


def read(kind: type[r.T], content: object) -> r.T:
    return r.read_json(json.dumps(content).encode(), kind, "0.41.2")


@pytest.mark.parametrize("stop", [None, "a", ["a", "b"], [1, 2], []])
def test_sample(stop: object) -> None:
    params = SAMPLE["sampling_params"] | {"stop": stop}
    request = read(r.Sample, SAMPLE | {"sampling_params": params, "prompt_alt_tokens_k": 0, "num_samples": 3})
    assert request.sampling_params.stop == stop
    assert (request.prompt.chunks[0].tokens, request.num_samples) == ([1, 2], 3)


@pytest.mark.parametrize(
    "kind, content, message",
    [
        (r.CreateModel, MODEL | {"lora_config": {"rank": 0}}, "create_model: lora_config.rank: expected int >= 1"),
        (r.CreateModel, MODEL | {"optimizer_config": {"type": "dimuon"}}, "optimizer_config is not supported.*adamw"),
        (r.LoadWeights, LOAD | {"weights_access_token": "secret"}, "weights_access_token is not supported by"),
        (r.LoadWeights, LOAD | {"model_id": "m"}, "load_weights: the body: set model_id and seq_id, or session_id"),
        (r.OptimStep, SAVE | {"optimizer_params": {"type": "dimuon"}}, "optimizer_params is not supported.*adamw"),
        (r.OptimStep, STEP | {"adam_params": {"beta1": 1}}, "adam_params.beta1: expected float < 1"),
        (r.OptimStep, STEP | {"type": "sample"}, "optim_step: type: invalid value 'sample'"),
        (r.SaveWeights, SAVE | {"path": "../a"}, "save_weights: path must consist of up to 128 letters"),
        (r.SaveWeights, SAVE | {"path": "a\n"}, "save_weights: path must consist of up to 128 letters"),
        (r.SaveWeightsForSampler, SAVE, "set path for a checkpoint, or sampling_session_seq_id"),
        (r.Sample, SAMPLE | {"sampling_params": {"top_p": 0}}, "sampling_params.top_p: expected float > 0"),
        (r.Sample, SAMPLE | {"sampling_params": {"stop": [""]}}, r"sampling_params.stop\[0\]: expected str of length"),
        (r.Sample, SAMPLE | {"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
        (
            r.Sample,
            SAMPLE | {"prompt": {"chunks": [{"data": "x", "type": "image"}]}},
            r"sample: prompt.chunks\[0\] is not a chunk of the type encoded_text",
        ),
        (
            r.Sample,
            SAMPLE | {"sampling_params": {"min_p": 0.1}},
            "tinker 0.41.2 sends the field sampling_params.min_p, .*speaks tinker 0.38.*newer alphaapollo",
        ),
        (r.GetInfo, [], "get_info: the body: expected object"),
    ],
)
def test_wrong_requests(kind: type[r.Request], content: object, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        read(kind, content)
    assert caught.value.status == 422 and "secret" not in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"a": "\xff"}', b'{"a": NaN}', b"[" * 100_000])
def test_damaged_json(body: bytes) -> None:
    with pytest.raises(RequestError, match="the body is not JSON") as caught:
        r.read_json(body, r.GetInfo, "0.38.0")
    assert caught.value.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(SAMPLE)), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(KINDS), JSON, st.sampled_from(sorted(SAMPLE | STEP | LOAD)), st.binary(max_size=8))
def test_random_json_raises_only_request_errors(kind: type[r.Request], value: object, name: str, noise: bytes) -> None:
    for body in (noise, *(json.dumps(one).encode() for one in (value, SAMPLE | {name: value}, LOAD | {name: value}))):
        try:
            r.read_json(body, kind, "0.38.0")
        except RequestError as error:
            assert error.status in (400, 422)
            assert str(error).startswith((str(kind.__struct_config__.tag), "the body is not JSON"))
