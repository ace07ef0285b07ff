"""`from alphaapollo import evolve`, and its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from alphaapollo.api import run_command
from alphaapollo.config.keys import Settings
from alphaapollo.plugins.evolving.roles import Role
from alphaapollo.plugins.evolving.settings import EvolvingConfig
from alphaapollo.results import RunResult
from alphaapollo.run_process import OnIteration
from alphaapollo.utils.json_types import JsonObject


def evolve(
    config: Settings = None,
    *overrides: str,
    reward: Callable[..., object] | None = None,
    environment: type | None = None,
    tools: Sequence[Callable[..., object]] = (),
    roles: Mapping[str, type[Role]] | None = None,
    agent: Callable[..., object] | None = None,
    on_round: OnIteration | None = None,
    show: bool = True,
) -> EvolutionRun:
    """Improve a model's answers without training (evolving.main, docs/evolving.md). Resumes an interrupted call.

    Args:
        roles: Classes that replace built-in roles, e.g. `{"verifier": MyVerifier}`. Their methods: `build` and `read`.
        on_round: Callback `on_round(number, metrics)` after each round; an exception in it ends the run.

    Other arguments and errors as in `rl`, with the keys of evolving.main.
    """
    register, given = "plugins.evolving.roles:register_role", roles or {}
    objects: JsonObject = {
        "reward": reward,
        "environment": environment,
        "tools": tools,
        "agent": agent,
        "more": [(register, role.__name__, {}, role) for role in dict.fromkeys(given.values())],
        "more_settings": {f"roles.{slot}.plugin": role.__name__ for slot, role in given.items()},
        "module_key": "evolving.custom_module",
    }
    return EvolutionRun(*run_command(EvolvingConfig, "evolving", config, overrides, on_round, show, objects))


@dataclass(frozen=True)
class EvolutionRun(RunResult):
    """Result of a finished self-evolution. `folder` contains pool.jsonl, report.json, problems/ and metrics.jsonl."""

    X_LABEL: ClassVar[str] = "round"
    config: EvolvingConfig

    @property
    def report(self) -> JsonObject:
        """Contents of report.json. `halted` says why the run ended early, if it did."""
        report: JsonObject = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
        return report

    @property
    def problems(self) -> list[JsonObject]:
        """Contents of the files in problems/, one per problem: its final answer, and all solutions with their votes."""
        files = sorted((self.folder / "problems").glob("*.json"))
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    @property
    def pool(self) -> Path:
        """Path of pool.jsonl, the log of all model calls."""
        return self.folder / "pool.jsonl"
