r"""Prepare validation data from one or more sources, each with its own number of repeats (for avg@k and pass@k).

    python -m examples.data_preprocess.prepare_validation --data_sources math-ai/aime24 gsm8k_test.jsonl --repeat 32 1

Writes <local_dir>/<split>.parquet in the RL schema, and the sources and counts to <local_dir>/<split>_info.json.
Repeats of a problem have the same data_source and extra_info.index.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphaapollo.data.files import DataRow
from examples.data_preprocess.columns import Columns, chosen_columns, column_arguments
from examples.data_preprocess.common import (
    Count,
    common_arguments,
    convert,
    data_source_of,
    finish,
    maths_row,
    output_folder,
    read_splits,
    run,
    source_name,
)


def prepare(
    sources: Sequence[str],
    repeats: Sequence[int],
    folder: Path,
    splits: Sequence[str],
    config_name: str | None,
    columns: Columns,
) -> None:
    """Write the rows of all sources by split.

    Raises:
        ValueError: --repeat has the wrong length or a value below 1, two sources have the same name, or a source is
            unreadable or has no usable row.
    """
    repeats = list(repeats) * len(sources) if len(repeats) == 1 else list(repeats)
    if len(repeats) != len(sources) or min(repeats) < 1:
        raise ValueError(f"--repeat {repeats}: give one number, or one for each of {len(sources)} sources.")
    names = {source: data_source_of(source, fallback="math") for source in sources}
    if len(set(names.values())) < len(sources):
        raise ValueError(f"--data_sources {' '.join(sources)}: two have the same name ({', '.join(names.values())}).")
    found = {source: read_splits(source, splits, config_name) for source in sources}
    for split in [split for split in splits if any(split in one for one in found.values())]:
        rows: list[DataRow] = []
        total = Count()
        infos: list[dict[str, Any]] = []
        for source, repeat in zip(sources, repeats, strict=True):
            if split not in found[source]:
                continue
            make, what = maths_row(names[source], split, columns), f"{split} of {names[source]}"
            made, count = convert(found[source][split], make, what, columns)
            if not made:
                raise ValueError(f"{source}: split {split} has no usable row: {count}")
            rows += [row for row in made for _ in range(repeat)]
            total.dropped += count.dropped
            infos.append(
                {"data_source": names[source], "source": source, "problems": len(made), "repeat": repeat}
                | {"rows": repeat * len(made), "dropped": dict(count.dropped)}
            )
        total.kept = len(rows)
        finish(rows, total, folder / f"{split}.parquet", ", ".join(info["data_source"] for info in infos))
        info = {"split": split, "rows": len(rows), "sources": infos}
        (folder / f"{split}_info.json").write_text(json.dumps(info, indent=2, ensure_ascii=False) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_sources", "--data_source", nargs="+", required=True, help="hub ids, files or folders")
    parser.add_argument("--repeat", nargs="+", type=int, default=[1], help="repeats per source, or one for all")
    common_arguments(parser, ["test"])
    column_arguments(parser)
    args = parser.parse_args()
    name = "+".join(source_name(source) for source in args.data_sources)
    folder = output_folder(args.local_dir, f"validation/{name}")
    run(lambda: prepare(args.data_sources, args.repeat, folder, args.splits, args.config_name, chosen_columns(args)))


if __name__ == "__main__":
    main()
