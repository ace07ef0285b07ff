"""Which runs belong together, by the content of their inputs and their settings, and how their prompts compare."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from alphaapollo.observability.estimates import pass_at_k
from alphaapollo.observability.sample_metrics import estimate_means
from alphaapollo.plugins.viewer import run_folders
from alphaapollo.plugins.viewer.curves import list_steps, tabulate
from alphaapollo.plugins.viewer.index import KIND_NAMES
from alphaapollo.plugins.viewer.run_folders import CONTENT
from alphaapollo.runs.run_plan import read_input_digests
from alphaapollo.utils.redaction import find_secret_keys_and_reasons

# Keys that may differ between seeds of one experiment.
NAMES = re.compile(r"seed|trainer\.(experiment_name|project_name|output_dir)")
PATHS = re.compile(r"(_files|\.path|\.val_prompts)$")  # keys of inputs, which count by content
MAX_LABEL_KEYS = 3
ENDED_EARLY = ("failed", "interrupted", "killed", "unreadable")  # states of runs that are no seed beside complete ones
Groups = Mapping[str, Sequence[int]]  # runs by label


def identify_run(folder: Path) -> tuple[tuple[object, ...], frozenset[tuple[str, str]]]:
    """Return the digests of a run's inputs, and the settings of all its starts without seeds and names. No digests are
    returned if one of its model or its data is not recorded."""
    config, inputs = run_folders.read_flat_config(folder), read_input_digests(folder)
    items = {item for _, start in run_folders.list_config_starts(folder) for item in start.items()}
    paths = {key for key, value in config.items() if PATHS.search(key) and value not in ("", "[]", "null")}
    is_known = all(inputs.keys() & {key, key.partition(".")[0]} for key in paths)
    digests = [(key, *(digest for _, digest in inputs[key])) for key in sorted(inputs) if is_known]
    settings = frozenset(item for item in items if item[0] not in paths and not NAMES.search(item[0]))
    return tuple(digests), settings


def group_runs(folders: Mapping[int, Path], root: Path, by_seed: bool) -> dict[str, list[int]]:
    """Return the runs by label: each run or, `by_seed`, those with the same inputs and settings that did not end early
    (ENDED_EARLY). Labels are the keys that differ, e.g. `lr=0.001 seed=2`, and the content of inputs that differs at
    the same path, or the name of the first run if none or many do."""
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for run, folder in folders.items():
        is_seed = by_seed and run_folders.read_run_state(folder).name not in ENDED_EARLY
        groups[identity if is_seed and (identity := identify_run(folder))[0] else run].append(run)
    firsts, counts = [folders[runs[0]] for runs in groups.values()], [len(runs) for runs in groups.values()]
    configs = [run_folders.read_settings(folder) for folder in firsts]
    columns = dict[tuple[str, ...], str]()
    secrets = {key for folder in firsts for key, _ in find_secret_keys_and_reasons(run_folders.read_config(folder))}
    for key in sorted({*chain(*configs)} - secrets, key=lambda key: ("seed" in key, key)):
        values = tuple(config.get(key, "-").rpartition("/")[2].strip("[]'") for config in configs)
        if key.endswith(CONTENT) and len({config.get(key.removesuffix(CONTENT)) for config in configs}) > 1:
            continue  # the paths differ, too
        if len(set(values)) > 1 and (not NAMES.search(key) or ("seed" in key and max(counts) == 1)):
            columns.setdefault(values, key.rpartition(".")[2])  # e.g. one of two seeds that are always equal
    labels = [" ".join(f"{key}={values[at]}" for values, key in columns.items()) for at in range(len(firsts))]
    if not 0 < len(columns) <= MAX_LABEL_KEYS or len(set(labels)) < len(labels):
        labels = [run_folders.make_run_name(folder, root) for folder in firsts]
    ends = (f" ({count} seeds)" if count > 1 else "" for count in counts)
    return {label + end: runs for label, end, runs in zip(labels, ends, groups.values(), strict=True)}


def compare_prompts(old: pd.DataFrame, new: pd.DataFrame) -> Iterator[tuple[Any, ...]]:
    """Yield (figure, mean of old, of new, of the difference) over the prompts that both tables of `tabulate` have."""
    shared = old.index.intersection(new.index)
    tables = [table.loc[shared] for table in (old, new)]
    if (k := int(min((table["samples"].max() for table in tables if len(shared)), default=0))) > 1:
        passes = (pass_at_k(table["samples"].to_numpy(), table["right"].to_numpy(), k)[:, -1] for table in tables)
        tables = [table.assign(**{f"pass@{k}": values}) for table, values in zip(tables, passes, strict=True)]
    for figure in tables[0].columns.drop(["samples", "right"]):
        before, after = (table[figure].to_numpy() for table in tables)
        means = estimate_means(np.stack([before, after, after - before], axis=1))
        if means[2] and (figure != "reward" or any(not table["reward"].equals(table["accuracy"]) for table in tables)):
            yield figure, *means


def list_paired_differences(database: sqlite3.Connection, groups: Groups) -> Iterator[tuple[Any, ...]]:
    """Yield (samples, group, figure, mean of the first group, of the group, of the difference) of evaluations, and of
    the last validation that both have. Groups of several training runs have intervals over seeds instead."""
    (_, first), *others = groups.items()
    for kind, (name, runs) in product(("results", "val_greedy", "val"), others):
        steps = set.intersection(*(set(list_steps(database, run, kind)) for run in chain(first, runs)))
        if steps and (kind == "results" or len(first) == len(runs) == 1):
            label = KIND_NAMES[kind] + f", iteration {max(steps)}" * (kind != "results")
            tables = (tabulate(database, group, kind, max(steps)) for group in (first, runs))
            yield from ((label, name, *row) for row in compare_prompts(*tables))
