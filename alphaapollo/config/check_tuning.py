"""Combinations of keys with which fine-tuning cannot work, as check.py has them of main_ppo."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from alphaapollo.config.check_common import (
    check_files,
    check_model,
    check_optimizer,
    check_required,
    check_resume,
    check_template_arguments,
    check_user_files,
)
from alphaapollo.config.check_engine import check_nucleus
from alphaapollo.config.check_experts import check_balance
from alphaapollo.config.check_folder import check_folder
from alphaapollo.config.check_lora import check_tuning_lora
from alphaapollo.config.check_parallelism import check_fsdp_size, check_group
from alphaapollo.config.check_stalls import check_stalls
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.notices import tuning_notices
from alphaapollo.config.resolve import resolve_device
from alphaapollo.config.schema import SftConfig, TuningConfig, TuningData
from alphaapollo.config.schema.base import Device


def check_tuning(config: TuningConfig, num_gpus: int, own: Iterable[str] = ()) -> list[str]:
    """Notices about keys without effect; raises ConfigError naming every impossible combination: those that all kinds
    of fine-tuning have, and a kind's `own`.

    num_gpus: of one node.
    """
    device = resolve_device(config.trainer.device, num_gpus)
    problems = [*_problems(config, device, num_gpus), *own]
    if problems:
        raise ConfigError(problems)
    return tuning_notices(config, device)


def _problems(config: TuningConfig, device: Device, num_gpus: int) -> Iterator[str]:
    """A line each."""
    yield from check_required("model.path", config.model.path)
    yield from check_model("model.path", config.model.path)
    yield from check_required("data.train_files", config.data.train_files)
    yield from check_files("data.train_files", config.data.train_files)
    yield from check_files("data.val_files", config.data.val_files)
    yield from check_template_arguments(config.data.apply_chat_template_kwargs)
    yield from _check_weights(config.data)
    yield from check_optimizer("optim", config.optim)
    yield from check_tuning_lora(config)
    yield from check_balance("model", config.model)
    yield from _check_ranks(config, device, num_gpus)
    yield from check_resume(config.trainer.resume_mode, config.trainer.resume_from_path)
    yield from check_stalls(config.trainer)
    yield from check_folder(config.trainer)


def check_answers(config: SftConfig) -> Iterator[str]:
    """What cannot work of main_sft's validation by answers: a line each."""
    sampling = config.rollout.val_kwargs
    yield from check_files("data.val_prompts", config.data.val_prompts)
    yield from check_user_files(config.env, config.reward, config.custom_reward_function)
    yield from check_nucleus("rollout.val_kwargs", sampling.top_p, sampling.top_k)


def _check_weights(data: TuningData) -> Iterator[str]:
    files = [data.train_files] if isinstance(data.train_files, str) else data.train_files
    if data.source_weights is not None and len(data.source_weights) != len(files):
        yield (
            f"data.source_weights: {len(data.source_weights)} weights for the {len(files)} files of data.train_files. "
            "Give one each."
        )


def _check_ranks(config: TuningConfig, device: Device, num_gpus: int) -> Iterator[str]:
    trainer, ranks = config.trainer, config.trainer.num_ranks
    if trainer.controller == "local" and ranks > 1:
        yield (
            f"trainer.controller=local: it has one process, but trainer.n_gpus_per_node x trainer.nnodes is {ranks}. "
            "Set both to 1, or trainer.controller=auto."
        )
    if device == "cuda" and not num_gpus:
        yield "trainer.device: got cuda, but this machine has no GPU. Set trainer.device=auto or cpu."
    elif device == "cuda" and trainer.n_gpus_per_node > num_gpus:
        yield f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: a node has {num_gpus} GPUs. Set {num_gpus} or less."
    where = f"trainer.n_gpus_per_node x trainer.nnodes = {ranks} training ranks"
    per_node = trainer.n_gpus_per_node
    yield from check_fsdp_size("fsdp_config.fsdp_size", config.fsdp_config, ranks, per_node, where)
    size = config.ulysses_sequence_parallel_size
    yield from check_group("ulysses_sequence_parallel_size", size, ranks, per_node, where)
