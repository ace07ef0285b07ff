"""Are the user's own engine arguments ones that vLLM knows and that the project leaves to him?"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor

from alphaapollo.config.schema import Rollout
from alphaapollo.engines.vllm.settings import REFUSED, SET_BY
from alphaapollo.utils.registry import nearest


def check_engine_kwargs(rollout: Rollout, section: str) -> None:
    """ValueError: a name of engine_kwargs.vllm that vLLM does not know, or that another key sets.

    section: where the program has its rollout, `rollout` or `actor_rollout_ref.rollout`.
    """
    own = rollout.engine_kwargs.vllm
    if not own or rollout.name != "vllm":
        return
    check_not_ours(own, f"{section}.engine_kwargs.vllm", section)
    # in a process of its own: importing vLLM takes memory and fixes its settings
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        check_known(own, process.submit(known_arguments).result(), f"{section}.engine_kwargs.vllm")


def check_not_ours(own: Collection[str], key: str, section: str) -> None:
    """ValueError: a name that the project sets itself, or for which nothing is built here."""
    prefix = section.removesuffix("rollout")
    for name in own:
        if name in REFUSED:
            raise ValueError(f"{key}.{name}: {REFUSED[name].replace('rollout.', f'{prefix}rollout.')}. Leave it out.")
        if name in SET_BY:
            by = SET_BY[name]
            whole = prefix + by if by.startswith(("model.", "rollout.")) else by
            raise ValueError(f"{key}.{name}: {f'{whole} sets it' if by else 'the project decides it'}. Leave it out.")


def check_known(own: Collection[str], known: Collection[str], key: str) -> None:
    """ValueError: a name that is none of vLLM's."""
    for name in own:
        if name not in known:
            near = nearest(name, sorted(known))
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"{key}.{name}: vLLM's EngineArgs has no such argument.{hint}")


def known_arguments() -> set[str]:
    """The names that vLLM's engine takes."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    return {field.name for field in fields(AsyncEngineArgs)}
