"""Vision-language models on a GPU: attention kernels of the trainer, and a colocated engine with sleep and CUDA IPC."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from alphaapollo.batching.batch import Rows
from alphaapollo.config.schema import Model
from alphaapollo.models.export import gather_parameters
from alphaapollo.models.load import load_causal_lm
from alphaapollo.models.micro_batch import MicroBatchBuilder
from alphaapollo.models.policy import PolicyModel
from tests.gpu.test_attention import KINDS
from tests.loop.engine_kit import PROBE, mean_abs_difference
from tests.loop.weight_transfer import Client, TransferCase, make_sender, send, sleep
from tests.vision.models import FAMILIES, make
from tests.vision.rows import compute_plain_logprobs, load_plain, make_row, make_rows_with_images


@pytest.mark.parametrize("kind", ["padded", *KINDS])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_agree_with_transformers_on_a_cpu(tmp_path: Path, family: str, kind: str):
    """Log-probs and gradients, those of the vision tower too, in bfloat16, against float32."""
    make(family, tmp_path)
    rows, plain, device = make_rows_with_images(tmp_path), load_plain(tmp_path), torch.device("cuda")
    expected = torch.cat([compute_plain_logprobs(plain, row) for row in rows])
    expected.sum().backward()
    model = load_causal_lm(Model(path=str(tmp_path)), kind).to(device, torch.bfloat16)  # type: ignore[arg-type]
    batch = Rows.from_rows(rows)
    logprobs = PolicyModel(model)(
        MicroBatchBuilder(kind == "padded", device).build(batch, range(len(rows))), 1.0
    ).logprobs
    chosen = expected > -1e6  # a response may contain an image, whose placeholders are excluded
    logprobs[chosen.to(device)].sum().backward()
    assert (logprobs.detach().cpu() - expected.detach())[chosen].abs().mean() < 0.03
    gradients = [torch.cat([p.grad.flatten().float().cpu() for p in one.parameters()]) for one in (model, plain)]
    difference = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    assert difference < 0.2, f"{difference:.2g}; in bfloat16 on a CPU it is 0.06 to 0.1"


def test_images_go_up_without_waiting(tmp_path: Path):
    make("qwen3_vl", tmp_path)
    batch, builder = Rows.from_rows(make_rows_with_images(tmp_path)), MicroBatchBuilder(False, torch.device("cuda"))
    builder.build(batch, range(len(batch)))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        images = builder.build(batch, range(len(batch))).images
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert images is not None and images.tensors["pixel_values"].is_cuda


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_sees_images_after_sleep(tmp_path: Path, family: str) -> None:
    pytest.importorskip("vllm")
    asyncio.run(publish_and_compare(TransferCase(), family, tmp_path))


async def publish_and_compare(case: TransferCase, family: str, folder: Path) -> None:
    """Start an engine, send other weights while it sleeps, and compare log-probs of rows with transformers'."""
    make(family, folder / "model")
    rows, text = make_rows_with_images(folder / "model")[:3:2], make_row([], PROBE)
    model = perturb(load_plain(folder / "model"))
    engine = case.make_engine(folder)
    await engine.start()
    try:
        sender = make_sender(case, Client(engine, asyncio.get_running_loop()))
        await sleep(engine, case)
        await engine.wake_weights()
        weights = {name: tensor.to(case.device) for name, tensor in gather_parameters(model, case.dtype)}
        update = await send(sender, engine, weights, 1)
        assert (await engine.confirm_weights(1)).digest == update.digest
        sender.release_sent_weights()
        await engine.wake_cache()
        for row in (text, *rows, text):  # vLLM's buffers of image features must be empty for a text
            found = await engine.log_probs(row.token_ids, row.images)
            expected = compute_plain_logprobs(model, row).tolist()
            assert mean_abs_difference(found[row.response_start - 1 :], expected) < case.limit
    finally:
        await engine.close()


@torch.no_grad()
def perturb(model: Any) -> Any:
    """Change the weights, so that probabilities differ."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    return model
