"""Every call of the client `tinker`, once, against a running server. Needs only the client and torch, so that any
environment can run it: TINKER_API_KEY=... python tinker_calls.py URL"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types

SECONDS = 300.0  # deadline of one call
LR = 1e-2
PROMPT = [10, 20, 30, 40, 50]


@dataclass(frozen=True)
class Client:
    service: tinker.ServiceClient
    rest: tinker.RestClient
    model: str  # base model

    def create(self, rank: int = 8, seed: int = 1, **options: Any) -> Any:
        return get(self.service.create_lora_training_client(self.model, rank, seed, **options))


@contextmanager
def connect(url: str, key: str | None = None) -> Iterator[Client]:
    """Client with a session, which ends with the block."""
    service, rest = tinker.ServiceClient(base_url=url, api_key=key), tinker.RestClient(base_url=url, api_key=key)
    try:
        (model,) = get(rest.get_server_capabilities()).supported_models
        assert model.model_name is not None
        yield Client(service, rest, model.model_name)
    finally:
        get(service.close("success"))


def get(future: Any) -> Any:
    return future.result(timeout=SECONDS)


def make_datum(tokens: Any, targets: Any, **inputs: Any) -> types.Datum:
    """Datum with arrays or TensorData as inputs."""
    arrays = {"target_tokens": targets, **inputs}
    made = {
        name: one
        if isinstance(one, types.TensorData)
        else types.TensorData.from_numpy(np.asarray(one, np.int64 if name == "target_tokens" else np.float32))
        for name, one in arrays.items()
    }
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=made)


TARGETS = [[*PROMPT[1:], 60], [7, 8, 9]]
WEIGHTS = [[0.0, 0.5, 1.0, 1.0, 2.0], [1.0, 1.0, 0.0]]
TEXTS = [make_datum(PROMPT, TARGETS[0], weights=WEIGHTS[0]), make_datum([6, 7, 8], TARGETS[1], weights=WEIGHTS[1])]
OLD, ADVANTAGES = [-5.0, -6.0, -4.0, -5.5, -7.0], [1.0, -1.0, 0.5, 2.0, -0.25]
SAMPLED = make_datum(PROMPT, TARGETS[0], logprobs=OLD, advantages=ADVANTAGES)


def train(client: Any, steps: int, data: Any = None, loss: str = "cross_entropy") -> list[float]:
    """Losses of some steps. All requests are sent before the first result is awaited."""
    futures = []
    for _ in range(steps):
        futures.append(client.forward_backward(data or TEXTS, loss))
        futures.append(client.optim_step(types.AdamParams(learning_rate=LR)))
    results = [get(one) for one in futures]
    return [one.metrics["loss:sum"] for one in results[::2]]


def take_norm(client: Any) -> float:
    """Norm of the accumulated gradients, which a step of size 0 removes."""
    return float(get(client.optim_step(types.AdamParams(learning_rate=0.0))).metrics["grad_norm:mean"])


def evaluate(client: Any) -> float:
    return float(get(client.forward(TEXTS, "cross_entropy")).metrics["loss:sum"])


def prompt_of(*tokens: int) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens or PROMPT))


def score(sampler: Any, tokens: Any = ()) -> np.ndarray:
    """Log-probs [N - 1] of a prompt."""
    first, *rest = get(sampler.compute_logprobs(prompt_of(*tokens)))
    assert first is None
    return np.array(rest)


def draw(sampler: Any, count: int = 1, **options: Any) -> list[Any]:
    params = types.SamplingParams(**{"max_tokens": 8, "temperature": 1.0, **options})
    sequences = get(sampler.sample(prompt_of(), count, params)).sequences
    assert len(sequences) == count
    return list(sequences)


def check_information(c: Client) -> None:
    client = c.create(rank=4, train_mlp=False, train_unembed=False)
    info = client.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (c.model, True, 4)
    tokenizer = client.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("1+2=3")) == "1+2=3"


def check_losses(c: Client) -> None:
    """Losses with settings are the formulas of the log-probs that come back. forward does not add gradients."""
    client = c.create()
    with_tokens = get(client.forward(TEXTS, "cross_entropy"))
    pairs = zip(WEIGHTS, with_tokens.loss_fn_outputs, strict=True)
    expected = -sum(float(np.dot(weights, out["logprobs"].data)) for weights, out in pairs)
    assert np.isclose(with_tokens.metrics["loss:sum"], expected, rtol=1e-5)
    same = get(client.forward_backward(TEXTS, "cross_entropy"))
    assert np.isclose(same.metrics["loss:sum"], expected, rtol=1e-5)
    norm = take_norm(client)
    get(client.forward(TEXTS, "cross_entropy"))
    assert norm > 0 and np.isclose(norm, _accumulate(client, [TEXTS]), rtol=1e-5)
    old, advantages = np.array(OLD), np.array(ADVANTAGES)
    formulas: list[tuple[str, dict[str, float] | None, Callable[[Any, Any], Any]]] = [
        (
            "ppo",
            {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0},
            lambda lp, r: -np.minimum(r * advantages, r.clip(0.5, 3) * advantages),
        ),
        ("cispo", {"clip_high_threshold": 1.5}, lambda lp, r: -r.clip(0, 1.5) * lp * advantages),
        ("dro", {"beta": 0.5}, lambda lp, r: -(lp * advantages - 0.25 * (lp - old) ** 2)),
    ]
    for name, config, formula in formulas:
        result = get(client.forward_backward([SAMPLED], name, config))
        logp = np.array(result.loss_fn_outputs[0]["logprobs"].data)
        assert np.isclose(result.metrics["loss:sum"], formula(logp, np.exp(logp - old)).sum(), rtol=1e-5), name
        assert take_norm(client) > 0


def _accumulate(client: Any, calls: list[list[types.Datum]]) -> float:
    for data in calls:
        get(client.forward_backward(data, "cross_entropy"))
    return take_norm(client)


def check_custom_loss(c: Client) -> None:
    """A loss that the client computes has the gradients of the same loss of the server."""
    client, weights = c.create(), [torch.tensor(one) for one in WEIGHTS]

    def loss(data: Any, logprobs: Any) -> tuple[torch.Tensor, dict[str, float]]:
        total = -torch.stack([(w * logp).sum() for w, logp in zip(weights, logprobs, strict=True)]).sum()
        return total, {"mine": 2.0}

    result = get(client.forward_backward_custom(TEXTS, loss))
    assert result.metrics["mine"] == 2.0
    assert np.isclose(take_norm(client), _accumulate(client, [TEXTS]), rtol=1e-4)


def check_accumulation_and_chunks(c: Client) -> None:
    client = c.create()
    assert np.isclose(_accumulate(client, [TEXTS]), _accumulate(client, [TEXTS[:1], TEXTS[1:]]), rtol=1e-5)
    short = make_datum([5, 6], [6, 7])
    one, many = (get(client.forward([short] * count, "cross_entropy")) for count in (1, 1030))  # two requests
    assert len(many.loss_fn_outputs) == 1030
    assert np.isclose(many.metrics["loss:sum"], 1030 * one.metrics["loss:sum"], rtol=1e-4)


def check_pipelined_steps(c: Client) -> None:
    losses = train(c.create(), 12)
    assert losses[-1] < losses[0] - 3


def check_several_targets(c: Client) -> None:
    """Sparse targets [N, K] are K calls with targets [N]."""
    client, random, keep = c.create(), np.random.default_rng(0), np.eye(5, 40, dtype=np.int64)
    ids, weights = keep * random.integers(5, 250, (5, 40)), (keep * random.random((5, 40))).astype(np.float32)
    sparse_ids, sparse_weights = (types.TensorData.from_torch_sparse(torch.tensor(one)) for one in (ids, weights))
    assert sparse_ids.sparse_crow_indices is not None
    singles = [make_datum(PROMPT, ids[:, k], weights=weights[:, k]) for k in range(40)]
    result = get(client.forward_backward([make_datum(PROMPT, sparse_ids, weights=sparse_weights)], "cross_entropy"))
    norm, separate = take_norm(client), get(client.forward_backward(singles, "cross_entropy"))
    assert np.isclose(norm, take_norm(client), rtol=1e-4)
    assert np.isclose(result.metrics["loss:sum"], separate.metrics["loss:sum"], rtol=1e-5)
    (output,), columns = result.loss_fn_outputs, [one["logprobs"].data for one in separate.loss_fn_outputs]
    np.testing.assert_allclose(output["logprobs"].to_numpy(), np.stack(columns, -1), atol=1e-4)


def check_samplers(c: Client) -> None:
    """A snapshot is frozen while training goes on, inflight samplers follow it, and the base has no adapter."""
    client = c.create()
    base = get(c.service.create_sampling_client(base_model=c.model))
    assert base.get_base_model() == c.model
    frozen = get(client.save_weights_and_get_sampling_client())
    follower = get(client.save_weights_and_get_sampling_client(kind="inflight"))
    before = score(frozen)
    np.testing.assert_allclose(before, score(base), atol=1e-4)  # B is 0
    forward = get(client.forward([make_datum(PROMPT[:-1], PROMPT[1:])], "cross_entropy"))
    np.testing.assert_allclose(before, forward.loss_fn_outputs[0]["logprobs"].data, atol=1e-3)
    sampled = frozen.sample(prompt_of(), 8, types.SamplingParams(max_tokens=100, stop=[]))
    train(client, 5)
    assert {len(one.tokens) for one in get(sampled).sequences} == {100}
    np.testing.assert_allclose(score(frozen), before, atol=1e-5)
    np.testing.assert_allclose(score(follower), before, atol=1e-5)
    newest = get(client.save_weights_and_get_sampling_client(kind="inflight"))
    assert np.abs(score(newest) - before).max() > 0.1
    np.testing.assert_allclose(score(follower), score(newest), atol=1e-5)
    np.testing.assert_allclose(score(frozen), before, atol=1e-5)
    path = get(client.save_weights_for_sampler("kept")).path
    saved = get(c.service.create_sampling_client(model_path=path))
    np.testing.assert_allclose(score(saved), score(newest), atol=1e-5)
    assert saved.get_tokenizer().encode("1") == client.get_tokenizer().encode("1")


def check_sampling(c: Client) -> None:
    sampler = get(c.create().save_weights_and_get_sampling_client())
    seeded = [[one.tokens for one in draw(sampler, 3, seed=7, stop=[])] for _ in range(2)]
    free = [[one.tokens for one in draw(sampler, 3, stop=[])] for _ in range(2)]
    assert seeded[0] == seeded[1] != free[0] != free[1] and len({tuple(one) for one in seeded[0]}) == 3
    (sequence,) = draw(sampler, seed=7, stop=[], max_tokens=40)
    tokens = list(sequence.tokens)
    assert (len(tokens), sequence.stop_reason) == (40, "length")
    np.testing.assert_allclose(sequence.logprobs, score(sampler, PROMPT + tokens)[-40:], atol=1e-3)
    texts = [sampler.get_tokenizer().decode([token]) for token in tokens]
    place = next(i for i, text in enumerate(texts) if text.isascii() and text.isprintable() and text.strip())
    for stop in ([tokens[place]], texts[place], ["never occurs", texts[place]]):
        (stopped,) = draw(sampler, seed=7, stop=stop, max_tokens=40)
        assert stopped.stop_reason == "stop" and 0 < len(stopped.tokens) <= place + 1, stop
        assert list(stopped.tokens) == tokens[: len(stopped.tokens)]
    assert len(draw(sampler, max_tokens=2)[0].tokens) <= 2
    greedy = [one.tokens for one in draw(sampler, 2, temperature=0.0, stop=[])]
    assert greedy[0] == greedy[1]


def check_top_logprobs(c: Client) -> None:
    sampler = get(c.create().save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=3, seed=3, stop=[])
    options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 20}
    result = get(sampler.sample(prompt_of(), 2, params, **options))
    np.testing.assert_allclose(result.prompt_logprobs[1:], score(sampler), atol=1e-5)
    assert not result.topk_prompt_logprobs[0]
    for top, own in zip(result.topk_prompt_logprobs[1:], result.prompt_logprobs[1:], strict=True):
        assert len(top) == 2 and top[0][1] >= top[1][1] and max(top[0][1], own) == top[0][1]
    for sequence in result.sequences:
        for token, logprob, top in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
            found = dict(top)
            assert len(top) == 20 and np.isclose(found.get(token, logprob), logprob, atol=1e-4)
            assert logprob <= max(found.values()) + 1e-5


def check_saved_states(c: Client) -> None:
    """With its optimizer, a state continues bit for bit; without, from the same weights."""
    client = c.create()
    train(client, 3)
    path, expected = get(client.save_state("three")).path, train(client, 3)
    same = get(c.service.create_training_client_from_state_with_optimizer(path))
    assert train(same, 3) == expected and evaluate(same) == evaluate(client)
    other = get(c.service.create_training_client_from_state(path))
    losses = train(other, 3)
    assert losses[0] == expected[0] and losses[2] != expected[2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client announces the end of these two methods
        get(client.load_state_with_optimizer(path))
        assert train(client, 3) == expected
        get(client.load_state(path))
        assert train(client, 3) == losses
    train(same, 1)
    assert get(same.save_state("three")).path != path
    assert get(client.save_state("three", overwrite=True)).path == path


def check_tenants(c: Client) -> None:
    """A second tenant, of another rank and other layers, changes nothing for the first."""
    client = c.create()
    train(client, 1)
    before, other = evaluate(client), c.create(rank=4, seed=2, train_mlp=False, train_unembed=False)
    get(client.forward_backward(TEXTS, "cross_entropy"))
    train(other, 3)
    assert evaluate(client) == before and evaluate(other) != before
    assert np.isclose(take_norm(client), _accumulate(client, [TEXTS]), rtol=1e-5)


def check_checkpoints(c: Client) -> None:
    client, rest = c.create(rank=4, train_mlp=False), c.rest
    train(client, 1)
    state = get(client.save_state("state", user_metadata={"step": "1"})).path
    weights = get(client.save_weights_for_sampler("weights", ttl_seconds=3600)).path

    def find() -> dict[str, Any]:
        return {one.tinker_path: one for one in get(rest.list_checkpoints(client.model_id)).checkpoints}

    assert list(find()) == [state, weights]
    assert find()[state].user_metadata == {"step": "1"} and find()[weights].expires_at is not None
    get(rest.set_checkpoint_ttl_from_tinker_path(weights, None))
    get(rest.set_checkpoint_ttl_from_tinker_path(state, 7200))
    assert find()[weights].expires_at is None and find()[state].expires_at is not None
    info = get(rest.get_weights_info_by_tinker_path(state))
    assert (info.base_model, info.lora_rank, info.train_mlp, info.train_attn) == (c.model, 4, False, True)
    (run,) = [one for one in get(rest.list_training_runs()).training_runs if one.training_run_id == client.model_id]
    assert run.last_checkpoint.tinker_path == state and run.last_sampler_checkpoint.tinker_path == weights
    assert get(rest.get_training_run_by_tinker_path(state)).training_run_id == client.model_id
    assert {state, weights} <= {one.tinker_path for one in get(rest.list_user_checkpoints()).checkpoints}
    get(rest.delete_checkpoint_from_tinker_path(weights))
    get(rest.delete_checkpoint(client.model_id, "weights/state"))
    assert not find()


def check_sessions(c: Client) -> None:
    """A session has its models and samplers, and is gone after close."""
    client, rest = c.create(), c.rest
    sampler = get(client.save_weights_and_get_sampling_client())
    session_id = client.model_id.partition(":")[0]
    assert session_id in get(rest.list_sessions()).sessions
    session = get(rest.get_session(session_id))
    assert session.training_run_ids == [client.model_id] and len(session.sampler_ids) == 1
    assert get(rest.get_sampler(session.sampler_ids[0])).base_model == c.model
    assert draw(sampler)
    get(c.service.close("success"))
    assert session_id not in get(rest.list_sessions()).sessions


CHECKS = (
    check_information,
    check_losses,
    check_custom_loss,
    check_accumulation_and_chunks,
    check_pipelined_steps,
    check_several_targets,
    check_samplers,
    check_sampling,
    check_top_logprobs,
    check_saved_states,
    check_tenants,
    check_checkpoints,
    check_sessions,
)


def main(url: str) -> int:
    for check in CHECKS:
        try:
            with connect(url) as client:
                check(client)
        except Exception as error:
            raise SystemExit(f"tinker {tinker.__version__}, {check.__name__}: {error!r}") from error
        print(f"{check.__name__} passed", flush=True)
    print(f"tinker {tinker.__version__}: all calls passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
