"""`alphaapollo plan`: print the plan of a training with RL without starting it, or compare several plans.

alphaapollo plan KEY=VALUE ...                              as `alphaapollo rl KEY=VALUE ... trainer.dry_run=true`
alphaapollo plan KEY=VALUE ... vs KEY=VALUE ... [vs ...]    a table: the keys before the first vs, alone and with
                                                            the keys after each vs

The columns of the table are per engine: tokens of its KV cache, answers of full length at once, and answers that wait.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from rich.markup import escape
from rich.table import Column, Table

from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.config.load import load_config_and_user_settings
from alphaapollo.config.schema import Config
from alphaapollo.observability.console import Console
from alphaapollo.planning.model_memory import GIB
from alphaapollo.planning.plan_table import format_range
from alphaapollo.planning.speed import count_answers_at_once
from alphaapollo.runs.newest_model import resolve_model_paths
from alphaapollo.trainer.main_ppo import main as run_ppo
from alphaapollo.trainer.setup.preparation import RlPreparation

SEPARATOR, DRY_RUN = "vs", "trainer.dry_run"
COLUMNS = ("fits", "peak GiB", "KV cache, tokens", "at once", "wait", "s per iteration", "tokens/s")


@report_refusals
def main(argv: Sequence[str]) -> int:
    """Print a plan, or a table of several. Returns the exit code."""
    if {"-h", "--help"} & {*argv}:
        print((__doc__ or "").strip())
        return 0
    groups: list[list[str]] = [[]]
    for word in argv:
        if word == SEPARATOR:
            groups.append([])
        elif word.partition("=")[0] != DRY_RUN:
            groups[-1].append(word)
    base, *others = groups
    if not others:
        return run_ppo([*base, f"{DRY_RUN}=true"])
    if not all(others):
        raise ValueError(f"a candidate has no keys. Write KEY=VALUE after each {SEPARATOR}.")
    table = Table(Column("candidate", overflow="fold"), *(Column(name, justify="right") for name in COLUMNS), box=None)
    for words in ([], *others):
        changed = {word.partition("=")[0] for word in words}
        kept = [word for word in base if word.partition("=")[0] not in changed]
        print(f"planning {' '.join(words) or 'the keys before the first vs'}", file=sys.stderr)
        table.add_row(escape(" ".join(words)) or "(as given)", *plan_candidate([*kept, *words]))
    Console().terminal.print(table)
    return 0


class CandidatePreparation(RlPreparation):
    """Preparation of a row of the table."""

    LEFT_OUT: ClassVar = {"show_plan": "the table has it"}


def plan_candidate(words: Sequence[str]) -> list[str]:
    """Return the cells of COLUMNS for a candidate; if its configuration is wrong, only what is wrong."""
    try:
        config, user_settings = load_config_and_user_settings(Config, "ppo", [*words, f"{DRY_RUN}=true"])
        run = CandidatePreparation(resolve_model_paths(config), Console(), user_settings).prepare()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return ["error"]
    memory = run.memory
    if memory is None:
        return ["unknown"]
    cells = ["no" if memory.problem or memory.warning else "yes", f"{memory.peak[1].total() / GIB:.1f}"]
    at_once, waiting = count_answers_at_once(run.chosen, memory, config.data.max_length)
    cells += [f"{memory.kv_cache_tokens:,}", f"{at_once}", f"{waiting}"]
    if run.times:
        fast, slow = run.times
        speeds = sorted(time.tokens_per_second for time in run.times)
        cells += [format_range(fast.step, slow.step), format_range(*speeds)]
    return cells
