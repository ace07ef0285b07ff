"""Write small tasks in Harbor's format, which a command of less than 60 characters solves.

python -m examples.tasks.make_tasks --out outputs/tasks --seed 0 --train 12 --held-out 12

Each of the twelve kinds of tasks is a template, whose names, words and numbers are drawn. The held-out tasks are other
instances of the same kinds: no instruction is in both folders, whatever the seeds. The reward is 1 for a solved task,
0.5 for a partly solved task of most kinds, and otherwise 0. examples/tasks/local has the training tasks of seed 0.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from examples.tasks.templates import DOCKERFILE, RUN, SOLVE, TASK_TOML, TEST

WORDS = (
    "amber", "apple", "beach", "bear", "bird", "blue", "boat", "bread", "cloud", "coat", "corn", "deer", "dove",
    "fern", "fish", "fog", "fox", "frog", "gold", "gray", "green", "hill", "iron", "jade", "kite", "lake", "lamp",
    "leaf", "lime", "lion", "mint", "moon", "nut", "olive", "owl", "pear", "pine", "plum", "pond", "rain", "red",
    "rice", "river", "road", "rose", "ruby", "salt", "sand", "ship", "snow", "star", "stone", "sun", "swan", "tea",
    "tiger", "tree", "tulip", "wind", "wolf", "wood", "zebra",
)  # fmt: skip
PROGRAMS = {"add.py": "+", "sub.py": "-", "mul.py": "*"}
PROGRAM = "import sys\n\nprint(int(sys.argv[1]) {} int(sys.argv[2]))\n"
COMPUTE: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True)
class TaskInstance:
    """A task: what the agent reads and finds, and Python expressions that tests/test.sh evaluates."""

    instruction: str
    command: str  # solves the task
    solved: str  # true: reward 1
    partly: str = "False"  # true: reward 0.5
    files: dict[str, str] = field(default_factory=dict)  # in /app at the start
    kept: tuple[str, ...] = ()  # files whose change costs the reward


def draw_names(rng: random.Random, count: int) -> list[str]:
    return [f"{word}.txt" for word in rng.sample(WORDS, count)]


def draw_text(rng: random.Random, count: int) -> str:
    """Distinct words, one a line."""
    return "".join(f"{word}\n" for word in rng.sample(WORDS, count))


def make_create(rng: random.Random) -> TaskInstance:
    (name,), word = draw_names(rng, 1), rng.choice(WORDS)
    solved, partly = f"lines({name!r}) == [{word!r}]", f"read({name!r}) is not None"
    return TaskInstance(f"Write the word {word} to {name}.", f"echo {word} > {name}", solved, partly)


def make_delete(rng: random.Random) -> TaskInstance:
    first, second, third = (f"{word}.{rng.choice(('txt', 'log', 'csv'))}" for word in rng.sample(WORDS, 3))
    files = {name: draw_text(rng, 2) for name in (first, second, third)}
    solved = f"not os.path.lexists('/app/{first}')"
    return TaskInstance(f"Delete {first}.", f"rm {first}", solved, files=files, kept=(second, third))


def make_rename(rng: random.Random) -> TaskInstance:
    (old, new), text = draw_names(rng, 2), draw_text(rng, 3)
    partly = f"read({new!r}) == {text!r}"
    solved = f"{partly} and not os.path.lexists('/app/{old}')"
    return TaskInstance(f"Rename {old} to {new}.", f"mv {old} {new}", solved, partly, {old: text})


def make_copy(rng: random.Random) -> TaskInstance:
    (old, new), text = draw_names(rng, 2), draw_text(rng, 3)
    partly = f"read({new!r}) == {text!r}"
    solved = f"read({old!r}) == read({new!r}) == {text!r}"
    return TaskInstance(f"Copy {old} to {new}.", f"cp {old} {new}", solved, partly, {old: text})


def make_count(rng: random.Random) -> TaskInstance:
    (name, result), count = draw_names(rng, 2), rng.randint(5, 15)
    solved, partly = (f"lines({result!r}) == [{text!r}]" for text in (f"{count}", f"{count} {name}"))
    instruction = f"Write the number of lines of {name} to {result}."
    files = {name: draw_text(rng, count)}
    return TaskInstance(instruction, f"wc -l < {name} > {result}", solved, partly, files, (name,))


def make_largest(rng: random.Random) -> TaskInstance:
    result, *names = draw_names(rng, 5)
    sizes = dict(zip(names, rng.sample(range(3, 40), 4), strict=True))
    found = f"[os.path.basename(line) for line in lines({result!r})]"
    solved, partly = (f"{found}{part} == [{max(names, key=sizes.__getitem__)!r}]" for part in ("", "[:1]"))
    instruction = f"Write the name of the largest file to {result}."
    files = {name: "x" * size + "\n" for name, size in sizes.items()}
    return TaskInstance(instruction, f"ls -S | head -1 > {result}", solved, partly, files, tuple(names))


def make_replace(rng: random.Random) -> TaskInstance:
    (name, other), (old, new, *words) = draw_names(rng, 2), rng.sample(WORDS, 6)
    rows = [[old, words[0], old], [words[1], old], [words[2], words[3]], [old, old, words[3]]]
    rng.shuffle(rows)
    text = "".join(" ".join(row) + "\n" for row in rows)
    first_of_each_line = "".join(" ".join(row).replace(old, new, 1) + "\n" for row in rows)
    solved, partly = (
        f"lines({name!r}) == {result.splitlines()!r}" for result in (text.replace(old, new), first_of_each_line)
    )
    files = {name: text, other: f"{old} {words[0]}\n"}
    instruction = f"Replace {old} with {new} everywhere in {name}."
    return TaskInstance(instruction, f"sed -i s/{old}/{new}/g {name}", solved, partly, files, (other,))


def make_sort(rng: random.Random) -> TaskInstance:
    (name, result), words = draw_names(rng, 2), rng.sample(WORDS, 6)
    while words == sorted(words):
        rng.shuffle(words)
    solved, partly = f"lines({result!r}) == {sorted(words)!r}", f"sorted(lines({result!r})) == {sorted(words)!r}"
    instruction = f"Write the sorted lines of {name} to {result}."
    files = {name: "\n".join(words) + "\n"}
    return TaskInstance(instruction, f"sort {name} > {result}", solved, partly, files, (name,))


def make_column(rng: random.Random) -> TaskInstance:
    (result,), name, number = draw_names(rng, 1), f"{rng.choice(WORDS)}.csv", rng.randint(1, 3)
    columns = [rng.sample(WORDS, 4), [str(value) for value in rng.sample(range(10, 100), 4)], rng.sample(WORDS, 4)]
    solved = f"lines({result!r}) == {columns[number - 1]!r}"
    partly = f"lines({result!r}) in {[column for column in columns if column != columns[number - 1]]!r}"
    instruction = f"Write column {number} of {name} to {result}."
    files = {name: "".join(",".join(row) + "\n" for row in zip(*columns, strict=True))}
    return TaskInstance(instruction, f"cut -d, -f{number} {name} > {result}", solved, partly, files, (name,))


def make_upper(rng: random.Random) -> TaskInstance:
    (name, result), text = draw_names(rng, 2), draw_text(rng, 3)
    words = text.upper().split()
    solved = f"lines({result!r}) == {words!r}"
    partly = f"[line.upper() for line in lines({result!r})] == {words!r}"
    instruction = f"Write {name} in uppercase to {result}."
    return TaskInstance(instruction, f"tr a-z A-Z < {name} > {result}", solved, partly, {name: text}, (name,))


def make_repair(rng: random.Random) -> TaskInstance:
    name, right = rng.choice(sorted(PROGRAMS.items()))
    wrong = rng.choice([sign for sign in PROGRAMS.values() if sign != right])
    shown = rng.randint(3, 9), rng.randint(3, 9)
    pairs = [(rng.randint(11, 99), rng.randint(11, 99)) for _ in range(3)]
    results = {f"{a} {b}": str(COMPUTE[right](a, b)) for a, b in (shown, *pairs)}
    printed = f"run('/usr/bin/python3', '-I', '-S', '/app/{name}', *pair.split())"
    solved = f"all(\n    {printed} == result\n    for pair, result in {results!r}.items()\n)"
    instruction = f"Repair {name}: `python3 {name} {shown[0]} {shown[1]}` must print {COMPUTE[right](*shown)}."
    return TaskInstance(instruction, f"sed -i 's/{wrong}/{right}/' {name}", solved, files={name: PROGRAM.format(wrong)})


def make_script(rng: random.Random) -> TaskInstance:
    stem, word = rng.sample(WORDS, 2)
    name = f"{stem}.sh"
    solved, partly = f"run('/usr/bin/bash', '/app/{name}') == {word!r}", f"{word!r} in (read({name!r}) or '')"
    return TaskInstance(f"Write a script {name} that prints {word}.", f"echo echo {word} > {name}", solved, partly)


KINDS: dict[str, Callable[[random.Random], TaskInstance]] = {
    "create": make_create, "delete": make_delete, "rename": make_rename, "copy": make_copy, "count": make_count,
    "largest": make_largest, "replace": make_replace, "sort": make_sort, "column": make_column, "upper": make_upper,
    "repair": make_repair, "script": make_script,
}  # fmt: skip


def is_held_out(instruction: str) -> bool:
    """One instruction in four is in the held-out tasks alone."""
    return zlib.crc32(instruction.encode()) % 4 == 0


def draw_tasks(split: str, seed: int, kind: str) -> Iterator[TaskInstance]:
    """Yield tasks of a kind with distinct instructions. Raises ValueError if there are no more."""
    rng, drawn = random.Random(f"{seed} {split} {kind}"), set[str]()
    while True:
        tasks = (KINDS[kind](rng) for _ in range(2000))
        new = (one for one in tasks if is_held_out(one.instruction) == (split == "held_out"))
        task = next((one for one in new if one.instruction not in drawn), None)
        if task is None:
            raise ValueError(f"{split} has only {len(drawn)} tasks of the kind {kind!r}. Ask for fewer tasks.")
        drawn.add(task.instruction)
        yield task


def write_task(folder: Path, split: str, kind: str, task: TaskInstance) -> None:
    """Replace a task's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    kept = "".join(f"\n    {name!r}: {task.files[name]!r}," for name in task.kept)
    test = TEST.replace("@RUN@", RUN if "run(" in task.solved else "").replace("@KEPT@", kept + "\n" if kept else "")
    files = {f"environment/{name}": text for name, text in task.files.items()} | {
        "task.toml": TASK_TOML.format(split=split, name=folder.name, kind=kind),
        "instruction.md": f"{task.instruction}\n",
        "environment/Dockerfile": DOCKERFILE + "".join(f"COPY {name} /app/{name}\n" for name in task.files),
        "solution/solve.sh": SOLVE.format(command=task.command),
        "tests/test.sh": test.replace("@SOLVED@", task.solved).replace("@PARTLY@", task.partly),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def write_tasks(folder: Path, split: str, seed: int, count: int) -> None:
    """Write tasks of all kinds in turn, e.g. FOLDER/copy-0. Raises ValueError if FOLDER has other tasks."""
    drawn = {kind: draw_tasks(split, seed, kind) for kind in KINDS}
    kinds = itertools.islice(itertools.cycle(KINDS), count)
    tasks = {f"{kind}-{index // len(KINDS)}": (kind, next(drawn[kind])) for index, kind in enumerate(kinds)}
    if others := {path.name for path in folder.glob("*")} - set(tasks):
        raise ValueError(f"{folder} contains {min(others)!r}, which is not one of its {count} tasks. Remove {folder}.")
    for name, (kind, task) in tasks.items():
        write_task(folder / name, split, kind, task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for train/NAME and held_out/NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=12, help="number of training tasks")
    parser.add_argument("--held-out", type=int, default=12, help="number of held-out tasks")
    args = parser.parse_args()
    try:
        write_tasks(args.out / "train", "train", args.seed, args.train)
        write_tasks(args.out / "held_out", "held_out", args.seed, args.held_out)
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.train} training and {args.held_out} held-out tasks in {args.out}")


if __name__ == "__main__":
    main()
