"""Which runs belong together, by the content of their inputs and their settings: seeds of one experiment, labels by the
keys that differ, and differences over the same prompts."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from alphaapollo.evaluation.estimates import pass_at_k
from alphaapollo.evaluation.metrics import Estimate, estimate_means
from alphaapollo.runs.run_history import read_input_digests
from alphaapollo.utils.redaction import find_secret_keys_and_reasons
from alphaapollo.viewer.curves import list_steps, tabulate
from alphaapollo.viewer.index import KIND_NAMES
from alphaapollo.viewer.run_folders import make_run_name, read_config, read_flat_config

NAMES = re.compile(r"trainer\.(experiment_name|project_name|output_dir)")
SEEDS = re.compile(r"seed")
PATHS = re.compile(r"(_files|\.path|\.val_prompts)$")  # keys of inputs that count by content
MAX_LABEL_KEYS = 3
Groups = Mapping[str, Sequence[int]]  # runs by label


class PairedDifference(NamedTuple):
    """Difference of two groups of runs in the mean of a figure over the prompts that both have."""

    samples: str  # e.g. "validation, iteration 12"
    figure: str
    name: str  # of the group that is compared with the first one
    before: Estimate | None
    after: Estimate | None
    difference: Estimate
    prompts: int


def identify_inputs(folder: Path) -> tuple[object, ...]:
    """Return the digests of a run's inputs; empty if those of its model or its data are not recorded."""
    inputs = read_input_digests(folder)
    unknown = [key for key in _list_paths(folder) if not inputs.keys() & {key, key.partition(".")[0]}]
    return () if unknown else tuple((key, *(digest for _, digest in inputs[key])) for key in sorted(inputs))


def group_runs(folders: Mapping[int, Path], root: Path, by_seed: bool) -> dict[str, list[int]]:
    """Return the runs by label: one run per group or, `by_seed`, all runs that have the same inputs and settings except
    seeds and names."""
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for run, folder in folders.items():
        inputs, config = identify_inputs(folder) if by_seed else (), read_flat_config(folder)
        hidden = _list_paths(folder)
        settings = [(key, config[key]) for key in sorted(config) if key not in hidden and not _is_name(key, by_seed)]
        groups[(inputs, *settings) if inputs else run].append(run)
    labels = label_runs([[folders[run] for run in runs] for runs in groups.values()], root)
    return dict(zip(labels, groups.values(), strict=True))


def label_runs(groups: Sequence[Sequence[Path]], root: Path) -> list[str]:
    """Label groups of runs by the keys that differ, e.g. `lr=0.001 seed=2`; by names if many keys differ, or none."""
    configs, has_seeds = [read_flat_config(group[0]) for group in groups], any(len(group) > 1 for group in groups)
    columns: dict[tuple[str, ...], str] = {}  # values -> the first key that has them
    secrets = {key for group in groups for key, _ in find_secret_keys_and_reasons(read_config(group[0]))}
    for key in sorted({key for config in configs for key in config if not _is_name(key, has_seeds)} - secrets):
        values = tuple(config.get(key, "-") for config in configs)
        if len(set(values)) > 1:
            columns.setdefault(tuple(value.rpartition("/")[2].strip("[]'") for value in values), key.rpartition(".")[2])
    labels = [" ".join(f"{key}={values[at]}" for values, key in columns.items()) for at in range(len(groups))]
    if len(columns) > MAX_LABEL_KEYS or len(set(labels)) < len(groups) or not columns:
        labels = [make_run_name(group[0], root) for group in groups]
    counts = (f" ({len(group)} seeds)" if len(group) > 1 else "" for group in groups)
    return [label + count for label, count in zip(labels, counts, strict=True)]


def list_paired_differences(database: sqlite3.Connection, groups: Groups) -> Iterator[PairedDifference]:
    """Yield the differences of evaluations, and of the last validation that both have, from those of the first group.
    Groups of several training runs have intervals over seeds instead."""
    (_, first), *others = groups.items()
    for kind in ("results", "val_greedy", "val"):
        for name, runs in others:
            found = [set(list_steps(database, run, kind)) for run in chain(first, runs)]
            if not (steps := set.intersection(*found)) or (kind != "results" and len(found) > 2):
                continue
            tables = [tabulate(database, own, kind, max(steps)) for own in (first, runs)]
            k = int(min(table["samples"].max() for table in tables))
            for table in tables if k > 1 else ():
                table[f"pass@{k}"] = pass_at_k(*table[["samples", "right"]].to_numpy().T, k)[:, -1]
            shared = tables[0].index.intersection(tables[1].index)
            old, new = (table.loc[shared].drop(columns=["samples", "right"]) for table in tables)
            samples, known = KIND_NAMES[kind] + f", iteration {max(steps)}" * (kind != "results"), list[object]()
            for figure, *means in zip(
                old, *(estimate_means(one.to_numpy()) for one in (old, new, new - old)), strict=True
            ):
                if means[2] and means not in known:  # the reward often is the accuracy
                    known.append(means)
                    yield PairedDifference(samples, str(figure), name, *means, means[2].problems)


def _list_paths(folder: Path) -> set[str]:
    config = read_flat_config(folder)
    return {key for key, value in config.items() if PATHS.search(key) and value not in ("", "[]", "null")}


def _is_name(key: str, with_seeds: bool) -> bool:
    return bool(NAMES.search(key) or (with_seeds and SEEDS.search(key)))
