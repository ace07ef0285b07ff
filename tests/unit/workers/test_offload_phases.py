"""A worker that offloads tensors between its phases computes the same. Offloading needs a GPU; the tests enable it by
hand, because offloaded memory is freed on a CPU, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from alphaapollo.models.sharding import local_tensor
from alphaapollo.workers.policy import PolicyWorker
from tests.unit.tiny import run_ranks
from tests.unit.workers.training import Case, Recorder, assert_close, make_batch, make_columns, make_worker


def held(worker: PolicyWorker) -> int:
    """Bytes of parameters, reference and moments on the device."""
    models = worker.policy, worker.find_plugin("reference").model
    tensors = [parameter for model in models for parameter in model.parameters()]
    tensors += [moment for _, moment in worker.state._iterate_moments()]
    return sum(local_tensor(tensor.detach()).untyped_storage().nbytes() for tensor in tensors)


def phases(rank: int, num_ranks: int, address: str, case: Case, offload: bool, folder: str) -> dict[str, Any]:
    """Results of two iterations with every call of the protocol as a phase."""
    sender = Recorder()
    worker = make_worker(case, rank, num_ranks, address, sender=sender, saves_in_background=offload)
    for one in (
        worker.state.parameter_offloader,
        worker.state.moment_offloader,
        worker.find_plugin("reference").offloader,
    ):
        one.enabled = offload
    batch = make_batch(case, num_ranks)
    worker.offload()
    resting = [held(worker)]
    worker.load_batch(batch.rank_batches[rank])
    found: dict[str, Any] = {}
    for step in (1, 2):
        found[f"old {step}"] = worker.compute_log_probs()
        found[f"ref {step}"] = worker.compute_log_probs("reference")
        worker.offload()
        found[f"metrics {step}"] = worker.update(make_columns(case, batch, rank, old=step == 2))
        worker.offload()
        found[f"probe {step}"] = worker.compute_probe_log_probs([3, 4, 5, 6])
        worker.send_weights(step)
        worker.release_sent_weights()
        worker.offload()
        resting.append(held(worker))
    worker.reset_reference_and_optimizer()
    worker.offload()
    worker.save(folder)
    worker.offload()
    worker.get_save_future().result()
    worker.load(folder)
    worker.offload()
    resting.append(held(worker))
    found["after"] = worker.compute_log_probs("reference")
    found["resting"] = resting
    found["sent"] = {name: tensor.numpy() for name, tensor in sender.sent.items()}
    worker.offload()
    worker.close()
    return found


def test_offloading_between_phases_changes_nothing(model_folder: Any, tmp_path: Path) -> None:
    case = Case(str(model_folder("qwen3")), needs_reference=True, actor={"use_kl_loss": True, "kl_loss_type": "full"})
    ours, kept = (run_ranks(phases, 2, case, offload, str(tmp_path / str(offload))) for offload in (True, False))
    for own, other in zip(ours, kept, strict=True):
        assert own.pop("resting") == [0] * 4
        assert min(other.pop("resting")) > 0
        assert_close(own.pop("sent"), other.pop("sent"), atol=0, rtol=0)
        for name, value in own.items():
            assert np.array_equal(value, other[name]), name
