"""Several adapters on one base model, compared with workers that have one adapter each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from alphaapollo.batching.batch import BatchLayout, Columns
from alphaapollo.engines.weight_sync.shared_memory import SharedAdapterSender
from alphaapollo.models.lora import get_lora_layers
from alphaapollo.models.sharding import full_tensor
from alphaapollo.models.train_state import AdamSettings
from alphaapollo.workers.adapter_slots import OWN, AdapterForm
from tests.unit.tiny import run_ranks
from tests.unit.workers import training
from tests.unit.workers.training import Case, make_batch, make_columns, make_worker

pytest.importorskip("peft")

Arrays = dict[str, np.ndarray]
CASE = Case("qwen3", {"optim": {"lr": 1e-2}, "entropy_coeff": 0.1}, lora_rank=4)
SMALL = AdapterForm(2, 3.0, ("q_proj", "down_proj"), seed=7)
FULL = AdapterForm(4, 16.0, seed=3)
ADAM = AdamSettings((0.8, 0.9), 1e-4, 0.1)


def accumulate(worker: Any, batch: BatchLayout, columns: Columns[np.ndarray], rank: int = 0) -> None:
    worker.accumulate(batch.rank_batches[rank], columns, "ppo")


def read_state(worker: Any) -> Arrays:
    """The adapter in the model, with its moments, gathered from all ranks."""
    state, found = worker.state, {}
    for name, parameter in worker.adapters.list_parameters().items():
        found[name] = full_tensor(parameter.detach()).clone().numpy()
        for key, value in state.optimizers[0].state.get(parameter, {}).items():
            found[f"{name} {key}"] = full_tensor(value).clone().numpy()
    return found | {"num_steps": np.array(state.num_steps)}


@pytest.fixture
def start_on(locate: Any, close_later: Any) -> Callable[..., Any]:
    def start_worker(case: Case = CASE, **arguments: Any) -> Any:
        return close_later(make_worker(locate(case), **arguments))

    return start_worker


def make_inputs(case: Case, row_seed: int, num_ranks: int = 1, rank: int = 0) -> Any:
    case = replace(case, row_seed=row_seed)
    batch = make_batch(case, num_ranks)
    return batch, replace(make_columns(case, batch, rank), returns=None, values=None)


def train(worker: Any, seeds: list[int], lr: float = 1e-2, *adam: AdamSettings) -> None:
    """Take a step on the rows of each seed."""
    for seed in seeds:
        accumulate(worker, *make_inputs(CASE, seed))
        worker.take_step(lr, None, *adam)


def make_pair(worker: Any) -> None:
    worker.adapters.add("a", FULL)
    worker.adapters.add("b", SMALL)


@pytest.mark.parametrize("offloads", [False, True])
def test_adapters_trained_in_turn_equal_adapters_trained_alone(start_on: Any, offloads: bool) -> None:
    """Each has its own rate and settings of AdamW; the model's own adapter is trained between them, and optimizer
    states are offloaded (on a CPU, to other host memory)."""

    def run(turns: list[str]) -> dict[str, Arrays]:
        worker, found = start_on(), {}
        worker.state.moment_offloader.enabled = offloads
        make_pair(worker)
        for number, name in enumerate(turns):
            worker.adapters.switch(name)
            train(worker, [turns[:number].count(name)], *((1e-2,) if name != "b" else (3e-2, ADAM)))
            worker.offload()
        for name in sorted(worker.adapters.names):
            worker.adapters.switch(name)
            worker.state.moment_offloader.reload()
            found[name] = read_state(worker)
        worker.close()
        return found

    together = run(["a", "b", OWN, "b", "a", "a", "b", OWN])
    for name, count in (("a", 3), ("b", 3), (OWN, 2)):
        alone = run([name] * count)[name]
        assert alone["num_steps"] == count
        training.assert_close(together[name], alone, atol=0, rtol=0)
    worker = start_on(seed=FULL.seed)  # whose own adapter has the same first values
    train(worker, [0, 1, 2])
    training.assert_close(together["a"], read_state(worker), atol=0, rtol=0)


def test_a_smaller_adapter_equals_a_model_with_that_rank_and_those_layers(start_on: Any) -> None:
    """The padding of the larger adapter stays 0, also in the optimizer."""
    actor = CASE.actor | {"optim": {"lr": 1e-2, "weight_decay": 0.1}}
    worker = start_on(replace(CASE, actor=actor))
    make_pair(worker)
    worker.adapters.switch("b")
    start = {name: full_tensor(one.detach()).clone() for name, one in worker.adapters.list_parameters().items()}
    train(worker, [0, 1, 2])
    found = {name: one for name, one in read_state(worker).items() if name == "num_steps" or SMALL.adapts(name)}
    others = {name: one for name, one in read_state(worker).items() if ".lora_" in name and name not in found}
    assert not any(one.any() for name, one in others.items() if not name.endswith(" step"))
    logprobs = worker.compute_probe_log_probs([5, 9, 3, 40])
    worker.close()

    def lora(model: Any) -> Any:
        return model.model_copy(
            update={"lora_rank": 2, "lora_alpha": SMALL.alpha, "target_modules": list(SMALL.target_modules)}
        )

    own = training.resolve_model
    with mock.patch.object(training, "resolve_model", lambda *arguments: lora(own(*arguments))):
        alone = start_on(replace(CASE, actor=actor))
    for name, parameter in alone.adapters.list_parameters().items():
        part = start[name][:2] if ".lora_A." in name else start[name][:, :2]
        training.local_tensor(parameter.data).copy_(part)
    train(alone, [0, 1, 2])
    expected = read_state(alone)
    cut = {name: cut_to(one, expected[name]) for name, one in found.items()}
    training.assert_close(cut, expected, atol=1e-6, rtol=1e-5)
    assert logprobs == pytest.approx(alone.compute_probe_log_probs([5, 9, 3, 40]), abs=1e-5)


def cut_to(array: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The part of an array that a smaller adapter has. The rest is 0."""
    part = array[tuple(slice(size) for size in like.shape)]
    assert np.count_nonzero(array) == np.count_nonzero(part)
    return part


def test_gradients_survive_a_switch_and_can_be_dropped(start_on: Any) -> None:
    worker = start_on()
    make_pair(worker)
    found = []
    for interrupts in (False, True):
        worker.adapters.add("a", FULL)
        worker.adapters.switch("a")
        for seed in (0, 1):
            accumulate(worker, *make_inputs(CASE, seed))
            if interrupts:
                before, gradients = read_state(worker), training.read_gradients(worker)
                worker.adapters.switch("b")
                assert not training.read_gradients(worker) and not worker.accumulated
                train(worker, [5])
                accumulate(worker, *make_inputs(CASE, 6))
                worker.clear_gradients()
                worker.adapters.switch("a")
                training.assert_close(read_state(worker), before, atol=0, rtol=0)
                training.assert_close(training.read_gradients(worker), gradients, atol=0, rtol=0)
        worker.take_step()
        found.append(read_state(worker))
    training.assert_close(found[1], found[0], atol=0, rtol=0)


def test_adapters_are_added_replaced_and_removed(start_on: Any, tmp_path: Path) -> None:
    worker = start_on(sender=SharedAdapterSender(tmp_path / "shared", torch.float32))
    slots = worker.adapters
    own = read_state(worker)
    make_pair(worker)
    training.assert_close(read_state(worker), own, atol=0, rtol=0)  # adding one does not use it
    for layers in (("q_proj", "qq_proj"), ("lm_head",)):
        with pytest.raises(ValueError, match=f"{layers[-1]}.*Use some of .*q_proj"):
            slots.add("c", replace(FULL, target_modules=layers))
    assert slots.names == {OWN, "a", "b"}
    slots.switch("b")
    assert {layer.scaling["default"] for layer in get_lora_layers(worker.policy).values()} == {1.5}
    fresh = read_state(worker)
    train(worker, [0])
    digest = worker.write_adapter(str(tmp_path / "b"))
    tensors, config = read_peft(tmp_path / "b")
    assert digest and config["r"] == 2 and config["target_modules"] == ["down_proj", "q_proj"]
    assert {min(one.shape) for one in tensors.values()} == {2}
    slots.add("b", SMALL)  # starts the current one again
    training.assert_close(read_state(worker), fresh, atol=0, rtol=0)
    slots.add("d", replace(SMALL, seed=8))
    slots.remove("b")
    assert slots.current == OWN and slots.names == {OWN, "a", "d"}
    training.assert_close(read_state(worker), own, atol=0, rtol=0)
    slots.switch("d")
    name = next(name for name in fresh if ".q_proj.lora_A." in name)
    assert np.abs(read_state(worker)[name] - fresh[name]).max() > 0.01


def read_peft(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return load_file(folder / "adapter_model.safetensors"), config


def train_on_ranks(rank: int, num_ranks: int, address: str, case: Case, folder: str) -> tuple[Arrays, ...]:
    sender = SharedAdapterSender(Path(folder, "shared"), torch.float32, is_writer=rank == 0)
    worker = make_worker(case, rank, num_ranks, address, sender=sender)
    make_pair(worker)
    for seed, name in enumerate(("a", "b", "a", "b")):
        worker.adapters.switch(name)
        accumulate(worker, *make_inputs(case, seed, num_ranks, rank), rank)
        worker.take_step()
    worker.write_adapter(f"{folder}/written")
    found = []
    for name in ("a", "b"):
        worker.adapters.switch(name)
        found.append(read_state(worker))
    worker.close()
    return tuple(found)


def test_two_ranks_equal_one(locate: Any, tmp_path: Path) -> None:
    case = locate(CASE)
    (one,) = run_ranks(train_on_ranks, 1, case, str(tmp_path / "one"))
    first, second = run_ranks(train_on_ranks, 2, case, str(tmp_path / "two"))
    for found in (first, second):
        for name in range(2):
            training.assert_close(found[name], one[name], atol=2e-5, rtol=1e-3)
    (whole, config), (parts, same) = (read_peft(tmp_path / number / "written") for number in ("one", "two"))
    assert config == same and whole.keys() == parts.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, atol=2e-5, rtol=1e-3)
