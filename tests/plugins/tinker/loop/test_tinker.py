"""`alphaapollo tinker` with the real client: every call, exact numbers of several tenants, and refusals."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from alphaapollo.plugins.tinker.app import MAX_BODY
from alphaapollo.utils.seeds import derive_seed
from tests.loop.conftest import Runner, Task, processes_of, wait_until_nothing_is_left
from tests.plugins.tinker.loop.tinker_kit import KEYS, TinkerServer, start_server
from tests.quantized import save_quantized

tinker = pytest.importorskip("tinker")
from tests.plugins.tinker.loop import tinker_calls as calls  # noqa: E402  needs the client
from tests.plugins.tinker.loop.tinker_calls import PROMPT, TARGETS, TEXTS, connect, get, make_datum, train  # noqa: E402

types = tinker.types


@pytest.fixture(scope="module")
def server(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    runner = Runner(task, tmp_path_factory.mktemp("tinker"))
    try:
        yield start_server(runner)
    finally:
        runner.close()
    wait_until_nothing_is_left(runner)


@pytest.fixture
def client(server: TinkerServer) -> Iterator[Any]:
    with connect(server.url, KEYS[0]) as made:
        yield made


@pytest.mark.parametrize("check", calls.CHECKS, ids=lambda check: check.__name__)
def test_call(check: Callable[[Any], None], client: Any) -> None:
    check(client)


# Exact numbers.


@dataclass(frozen=True)
class Tenant:
    loss: str
    rank: int
    seed: int
    attention: bool = True
    mlp: bool = True


TENANTS = (
    Tenant("cross_entropy", 32, 11),
    Tenant("importance_sampling", 4, 12, mlp=False),
    Tenant("ppo", 8, 13, attention=False),
    Tenant("cispo", 32, 14),
    Tenant("dro", 2, 15),
)
STEPS, LR, CLIP = 4, 1e-3, 1.0
SIZES = ((1, 2), (2, 1), (3,), (1, 1, 2))  # datums of each forward_backward in each step
Sample = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # tokens, targets, advantages, log-probs of the sampler


def make_samples(count: int, seed: int) -> list[Sample]:
    random = np.random.default_rng(seed)

    def make() -> Sample:
        n = int(random.integers(5, 30))
        tokens, targets = random.integers(5, 250, n), random.integers(5, 250, n)
        return tokens, targets, random.normal(size=n).astype(np.float32), random.normal(size=n).astype(np.float32) - 5

    return [make() for _ in range(count)]


def make_tenant_datum(sample: Sample, loss: str) -> Any:
    tokens, targets, advantages, old = sample
    if loss == "cross_entropy":
        return make_datum(tokens.tolist(), targets, weights=np.abs(advantages))
    return make_datum(tokens.tolist(), targets, logprobs=old, advantages=advantages)


def make_reference(tenant: Tenant, folder: Path) -> Any:
    """Model with peft's adapter in float64. Its initial A is that of the server."""
    from peft import LoraConfig, get_peft_model

    layers = ["q_proj", "k_proj", "v_proj", "o_proj"] * tenant.attention
    layers += ["gate_proj", "up_proj", "down_proj"] * tenant.mlp
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=tenant.rank, lora_alpha=32, target_modules=layers))
    generator = torch.Generator().manual_seed(derive_seed(tenant.seed, "lora"))
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            torch.nn.init.kaiming_uniform_(parameter.data, a=math.sqrt(5), generator=generator)
    return model.double()


def compute_losses(loss: str, logp: Tensor, advantages: Tensor, old: Tensor) -> Tensor:
    """Loss of each token."""
    ratio = (logp - old).exp()
    losses = {
        "cross_entropy": -logp * advantages.abs(),
        "importance_sampling": -ratio * advantages,
        "ppo": -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages),
        "cispo": -ratio.clamp(0, 4).detach() * logp * advantages,
        "dro": -(logp * advantages - 0.025 * (logp - old) ** 2),
    }
    return losses[loss]


def train_reference(tenant: Tenant, folder: Path, data: list[list[Sample]]) -> Iterator[tuple[float, float, float]]:
    """Loss of each step of plain PyTorch, its size (sum of the absolute losses of the tokens), and gradient norm."""
    model = make_reference(tenant, folder)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, LR, (0.9, 0.95), eps=1e-12, weight_decay=0.0)
    for samples in data:
        made = list[Tensor]()
        for tokens, targets, advantages, old in samples:
            logits = model(input_ids=torch.tensor(tokens)[None]).logits[0]
            logp = logits.log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0]
            columns = torch.tensor(advantages).double(), torch.tensor(old).double()
            made.append(compute_losses(tenant.loss, logp, *columns))
        losses = torch.cat(made)
        losses.sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        yield float(losses.detach().sum()), float(losses.detach().abs().sum()), float(norm)


def check_interleaved_tenants(client: Any, folder: Path) -> None:
    """Compare losses and gradient norms of five tenants with those of peft and torch.optim.AdamW."""
    clients = [
        client.create(one.rank, one.seed, train_attn=one.attention, train_mlp=one.mlp, train_unembed=False)
        for one in TENANTS
    ]
    data = [
        [make_samples(sum(sizes), 100 * number + step) for step, sizes in enumerate(SIZES)]
        for number in range(len(TENANTS))
    ]
    adam, futures = types.AdamParams(learning_rate=LR, grad_clip_norm=CLIP), []
    for step, sizes in enumerate(SIZES):
        for tenant, trained, batches in zip(TENANTS, clients, data, strict=True):
            datums, sent = [make_tenant_datum(one, tenant.loss) for one in batches[step]], []
            for size in sizes:
                sent.append(trained.forward_backward(datums[:size], tenant.loss))
                del datums[:size]
            futures.append((sent, trained.optim_step(adam)))
    got = [
        (sum(get(one).metrics["loss:sum"] for one in sent), get(step).metrics["grad_norm:mean"])
        for sent, step in futures
    ]
    for number, tenant in enumerate(TENANTS):
        expected = train_reference(tenant, folder, data[number])
        for (loss, norm), (true_loss, total, true_norm) in zip(got[number :: len(TENANTS)], expected, strict=True):
            assert abs(loss - true_loss) < 1e-6 * total and abs(norm - true_norm) < 1e-6 * true_norm, tenant


def test_interleaved_tenants_equal_plain_pytorch(client: Any, task: Task) -> None:
    check_interleaved_tenants(client, task.model)


def test_a_base_model_with_weights_of_4_bits(ppo: Runner, tmp_path: Path) -> None:
    """Numbers are those of the dequantized model. A version is refused if an engine has other codes than the ranks."""
    folder, plain = save_quantized(ppo.task.model, tmp_path, group_size=32)
    others = list_engines(ppo)
    server = start_server(ppo, model=folder)
    with connect(server.url, KEYS[0]) as client:
        check_interleaved_tenants(client, plain)
        calls.check_samplers(client)
        calls.check_saved_states(client)
        trained = client.create(4)
        change_a_code(folder / "model.safetensors")
        (engine,) = list_engines(ppo) - others
        os.kill(engine, signal.SIGKILL)  # the next one loads the changed file
        with pytest.raises(tinker.TinkerError, match="digest"):
            get(trained.save_weights_and_get_sampling_client())


def list_engines(ppo: Runner) -> set[int]:
    """Pids of the engines, also of the server that other tests share."""
    return {pid for pid, line in processes_of(ppo).items() if "EngineCore" in line}


def change_a_code(file: Path) -> None:
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if name.endswith("_packed"))[0, 0] ^= 1
    save_file(tensors, file, {"format": "pt"})


# Refusals: one clear error each, and the client goes on.


def fails(call: Callable[[Any, Any], Any], *words: str) -> Any:
    return pytest.param(call, words, id=" ".join(words))


def one_datum(tokens: Any = PROMPT, targets: Any = TARGETS[0], **inputs: Any) -> list[Any]:
    return [make_datum(tokens, targets, **inputs)]


def forward(data: list[Any], loss: str = "cross_entropy", config: Any = None) -> Callable[[Any, Any], Any]:
    return lambda c, trained: trained.forward_backward(data, loss, config)


def sample(tokens: Any = PROMPT, max_tokens: int = 4, **options: Any) -> Callable[[Any, Any], Any]:
    def call(c: Any, trained: Any) -> Any:
        sampler = get(trained.save_weights_and_get_sampling_client())
        return sampler.sample(calls.prompt_of(*tokens), 1, types.SamplingParams(max_tokens=max_tokens), **options)

    return call


def overflow(c: Any, trained: Any) -> Any:
    """Step with gradients that are not finite."""
    data = [make_datum(PROMPT, TARGETS[0], logprobs=[-1000.0] * 5, advantages=[1.0] * 5)]
    trained.forward_backward(data, "importance_sampling")
    return trained.optim_step(types.AdamParams())


STATE = "tinker://nothing/weights/state"
REFUSED = (
    fails(lambda c, t: c.service.create_lora_training_client("other/model", 4), "other/model"),
    fails(lambda c, t: c.service.create_lora_training_client(c.model, 33), "rank=33", "lora_rank=33"),
    fails(
        lambda c, t: c.service.create_lora_training_client(c.model, 4, train_mlp=False, train_attn=False), "train_attn"
    ),
    fails(forward([*TEXTS, make_datum(PROMPT, [1, 2])]), "datum 2", "[2]", "5 tokens"),
    fails(forward(one_datum([5, 272], [5, 6])), "272"),
    fails(forward(one_datum([5, 6], [5, 272])), "272"),
    fails(forward(one_datum([5] * 600, [5] * 600)), "60"),
    fails(lambda c, t: t.optim_step(types.AdamParams()), "no gradients"),
    fails(overflow, "finite"),
    fails(sample([5, 272]), "272"),
    fails(sample([5] * 510), "510", "512"),
    fails(sample(include_prompt_logprobs=True, topk_prompt_logprobs=21), "topk_prompt_logprobs=21", "20"),
    fails(lambda c, t: c.service.create_sampling_client(model_path=STATE), "nothing"),
    fails(lambda c, t: c.service.create_sampling_client(model_path="tinker://../x/sampler_weights/y"), "'..'"),
    fails(
        lambda c, t: c.service.create_sampling_client(model_path=f"tinker://{t.model_id}/sampler_weights/../../x"), ".."
    ),
    fails(lambda c, t: c.service.create_sampling_client(model_path=get(t.save_state("s")).path), "sampler weights"),
)


@pytest.mark.parametrize("call, words", REFUSED)
def test_refusal(call: Callable[[Any, Any], Any], words: tuple[str, ...], client: Any) -> None:
    trained = client.create(4)
    with pytest.raises(tinker.TinkerError) as error:
        call(client, trained).result(timeout=60)
    assert all(word in str(error.value) for word in words), error.value
    assert trained.forward(TEXTS, "cross_entropy").result(timeout=60).metrics["loss:sum"] > 0
    if call is overflow:
        assert train(trained, 2) == train(client.create(4), 2)


def test_another_key_sees_nothing(client: Any, server: TinkerServer) -> None:
    trained = client.create(4)
    state, weights = get(trained.save_state("state")).path, get(trained.save_weights_for_sampler("weights")).path
    with connect(server.url, KEYS[1]) as other:
        assert not get(other.rest.list_training_runs()).training_runs
        for call in (
            lambda: other.service.create_sampling_client(model_path=weights),
            lambda: other.service.create_training_client_from_state(state),
            lambda: other.rest.get_training_run(trained.model_id),
            lambda: other.rest.delete_checkpoint_from_tinker_path(state),
            lambda: other.rest.get_session(trained.model_id.partition(":")[0]),
        ):
            with pytest.raises((tinker.NotFoundError, tinker.RequestFailedError), match=r"there is no|has ended"):
                get(call())
        body = {"model_id": trained.model_id, "type": "get_info"}
        assert server.post("get_info", body, x_api_key=KEYS[1])[0] == 404
        assert other.create(4).model_id
    assert server.post("get_info", body, x_api_key="tml-wrong")[0] == 401
    assert server.post("get_info", body)[0] == 200
    with pytest.raises(tinker.AuthenticationError, match="TINKER_API_KEY"):
        get(tinker.RestClient(base_url=server.url, api_key="tml-wrong").list_training_runs())


BIG = bytes(MAX_BODY + 1)


def test_requests_that_the_client_does_not_send(client: Any, server: TinkerServer) -> None:
    """Unknown endpoints and fields name the client's version, and damaged or large bodies are refused."""
    version: Any = {"x_stainless_package_version": "9.87.6"}
    for path, content in (
        ("train_everything", {}),
        ("get_info", {"type": "get_info", "model_id": "x", "new_field": 1}),
    ):
        code, text = server.post(path, content, **version)
        assert code in (404, 422) and "9.87.6" in text and ("new_field" in text or path in text)
    assert server.request("DELETE", "everything", **version)[0] == 404
    assert server.request("GET", "training_runs?limit=many")[0] == 422
    for path, body, headers, status in (
        ("get_info", b"{", {}, 400),
        ("forward_backward", b"no protobuf", {}, 400),
        ("forward_backward", pa.compress(BIG, "zstd", asbytes=True), {"content_encoding": "zstd"}, 413),
        ("forward_backward", BIG, {}, 413),
    ):
        assert server.request("POST", path, body, **headers)[0] == status, path
    assert train(client.create(4), 1)
