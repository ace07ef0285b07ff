"""Check engine_kwargs.vllm: names must exist in vLLM and must not be set by the project."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.vllm.settings import MANAGED_ARGUMENTS, UNSUPPORTED_ARGUMENTS
from alphaapollo.utils.registry import did_you_mean


def check_engine_kwargs(rollout: Rollout, section: str) -> None:
    """Raise ValueError for a name in engine_kwargs.vllm that vLLM does not know or that another key sets.

    section: config section of the rollout, `rollout` or `actor_rollout_ref.rollout`.
    """
    own = rollout.engine_kwargs.vllm
    if not own or rollout.name != "vllm":
        return
    check_not_managed(own, f"{section}.engine_kwargs.vllm", section)
    # in a subprocess: importing vLLM takes memory and freezes its settings
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        check_known_arguments(own, process.submit(vllm_argument_names).result(), f"{section}.engine_kwargs.vllm")


def check_not_managed(own: Collection[str], key: str, section: str) -> None:
    """Raise ValueError for a name that the project sets or does not support."""
    prefix = section.removesuffix("rollout")
    for name in own:
        if name in UNSUPPORTED_ARGUMENTS:
            reason = UNSUPPORTED_ARGUMENTS[name].replace("rollout.", f"{prefix}rollout.")
            raise ValueError(f"{key}.{name}: {reason}. Remove it.")
        if name in MANAGED_ARGUMENTS:
            by = MANAGED_ARGUMENTS[name]
            whole = prefix + by if by.startswith(("model.", "rollout.")) else by
            owner = whole or "the project"
            raise ValueError(f"{key}.{name} is set by {owner}. Remove it.")


def check_known_arguments(own: Collection[str], known: Collection[str], key: str) -> None:
    """Raise ValueError for a name that vLLM does not know."""
    for name in own:
        if name not in known:
            hint = did_you_mean(name, sorted(known))
            raise ValueError(f"{key}.{name}: vLLM's EngineArgs has no such argument.{hint}")


def vllm_argument_names() -> set[str]:
    """Argument names of vLLM's AsyncEngineArgs."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    return {field.name for field in fields(AsyncEngineArgs)}
