"""What the checks of several commands have in common: paths, an optimiser's section, a chat template's arguments. Each
yields a line a problem."""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Iterator
from pathlib import Path

from alphaapollo.config.keys import plain
from alphaapollo.config.schema import CustomRewardFunction, Env, Optimizer, Reward
from alphaapollo.utils.hub import looks_local

TEMPLATE_ARGUMENTS = {  # of apply_chat_template that are not the template's own, or that the project gives
    "tools": "env.action_format=chat_template gives it the tools",
    "chat_template": "save the tokenizer with your template and give its folder as tokenizer_path",
    **dict.fromkeys(
        ("messages", "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "return_tensors"),
        "the project gives it",
    ),
    **dict.fromkeys(("padding", "truncation", "max_length", "return_dict"), "it is not the template's"),
}


def check_template_arguments(arguments: Iterable[str]) -> Iterator[str]:
    for name in arguments:
        if name in TEMPLATE_ARGUMENTS:
            yield f"data.apply_chat_template_kwargs.{name}: {TEMPLATE_ARGUMENTS[name]}. Leave it out."


def check_required(key: str, value: str | list[str]) -> Iterator[str]:
    if not value:
        yield f"{key}: required, got nothing. Give {key}=..."


def check_files(key: str, files: str | list[str]) -> Iterator[str]:
    for file in [files] if isinstance(files, str) else files:
        if file and not _is_file(file):
            yield f"{key}: no such file: {file} (looked in {Path.cwd()}). Give the path of a parquet or jsonl file."


def check_model(key: str, path: str) -> Iterator[str]:
    if path and _is_folder(path):
        if not _is_file(os.path.join(path, "config.json")):
            yield f"{key}: {path} holds no config.json. Give the folder of a Hugging Face model, or a hub id."
    elif path and looks_local(path):
        fix = "Give the folder of a Hugging Face model, or a hub id OWNER/NAME."
        yield f"{key}: no such folder: {path} (looked in {Path.cwd()}). {fix}"


def check_python_file(key: str, path: str) -> Iterator[str]:
    if path and not _is_file(path):
        yield f"{key}: no such file: {path} (looked in {Path.cwd()}). Give the path of a Python file."


def check_user_files(env: Env, reward: Reward, function: CustomRewardFunction) -> Iterator[str]:
    """Of who plays and grades."""
    yield from check_python_file("custom_reward_function.path", function.path)
    yield from check_python_file("reward.custom_module", reward.custom_module)
    yield from check_python_file("env.custom_module", env.custom_module)


def check_resume(mode: str, path: str) -> Iterator[str]:
    if mode == "resume_path" and not path:
        yield "trainer.resume_from_path: required with trainer.resume_mode=resume_path. Give a checkpoint folder."
    elif mode == "resume_path" and not _is_folder(path):
        yield f"trainer.resume_from_path: no such folder: {path}. Give a checkpoint folder."


def check_optimizer(prefix: str, optim: Optimizer) -> Iterator[str]:
    if optim.lr > 1:
        yield f"{prefix}.lr={optim.lr:g}: AdamW moves every weight by about that much a step. Set 1e-6 to 1e-3."
    if 1.0 in optim.betas:
        yield f"{prefix}.betas={plain(optim.betas)}: AdamW needs decay rates below 1. Set [0.9,0.999]."


def _is_file(path: str) -> bool:
    """False also for a name that no file system takes, where pathlib raises."""
    return os.path.isfile(os.path.expanduser(path))


def _is_folder(path: str) -> bool:
    """As _is_file."""
    return os.path.isdir(os.path.expanduser(path))
