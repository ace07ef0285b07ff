"""Make the warm-up data: chats that run one command and submit. Most commands do not solve their task.

python -m examples.tasks.make_lessons --out outputs/learn_tasks --seed 0 --tiny-model

A fifth of the commands are correct. The others are changed: some of them solve a task partly, such as `wc -l x.txt >
y.txt`, which writes the name of the file, too. The model sees the same task with different commands, and only the
reward of reinforcement learning tells which one is correct. With --tiny-model, the script also makes a tokenizer, which
has a token for each word of the tasks, and an untrained model.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from examples.quickstart.make_task import make_model, make_tokenizer
from examples.task_files import Row, write_tables
from examples.tasks.make_tasks import KINDS, PROGRAMS, WORDS, is_held_out

# What the environment appends to an instruction, and how it shows the output of a command
TOOLS = """

Do exactly one thing:
call <bash>{"command": "..."}</bash> (Run a command with bash.),
call <submit>{}</submit> (Submit your work. Call this when the task is done.),
or end with <answer>...</answer>."""
CALL = '<bash>{"command": "%s"}</bash>'
RESPONSE = '<tool_response>{"status": "ok", "text": "exit code %d"}</tool_response>'
SUBMIT = "<submit>{}</submit>"
RATE = 0.2  # share of correct commands
INIT: dict[str, Any] = {"initializer_range": 0.08}  # with the default 0.02, copying a word takes twice as long to learn
PHRASES = (
    "Write", "Delete", "Rename", "Copy", "Replace", "Repair", " the", " word", " number", " of", " lines", " name",
    " largest", " file", " with", " everywhere", " in ", " sorted", " column", " uppercase", " must", " print", " a ",
    " script", " that", " to ", "python3", ".txt", ".csv", ".log", ".py", ".sh",
)  # fmt: skip

# Changes of the correct command by kind: {part: replacement}. Comments: those that get the reward 0.5
CHANGES: dict[str, tuple[tuple[str, str], ...]] = {
    "create": (("echo", "touch"), ("echo", "cat"), (" >", "")),  # touch, cat
    "delete": (("rm", "ls"), ("rm", "cat"), ("rm", "touch")),
    "rename": (("mv", "cp"), ("mv", "cat"), ("mv", "rm")),  # cp
    "copy": (("cp", "mv"), ("cp", "cat"), ("cp", "ls")),  # mv
    "count": (("-l <", "-l"), ("-l", "-w"), ("-l", "-c"), ("wc -l <", "cat")),  # -l without <; -w is correct, too
    "largest": ((" | head -1", ""), ("-S", "-r"), ("-S", "-1"), ("head", "tail")),  # without head
    "replace": (("/g ", "/ "), ("-i ", ""), ("/g ", "/p ")),  # without g
    "sort": (("sort", "cat"), ("sort", "tac"), ("sort", "sort -r"), ("sort", "head -1")),  # cat, tac, sort -r
    "column": (("-f1", "-f2"), ("-f2", "-f1"), ("-f3", "-f2"), ("-d,", "-d:"), ("cut -d,", "cut")),  # the first three
    "upper": (("tr a-z A-Z", "tr A-Z a-z"), ("tr a-z A-Z <", "cat"), ("A-Z", "a-z")),  # all
    "repair": (),
    "script": (("echo echo", "echo"), (" >", ""), ("echo echo", "cat")),  # echo
}


def change_repair(name: str, rng: random.Random) -> str:
    """Return a command that replaces one sign, or any sign, by a sign. The model cannot know which sign is wrong."""
    wrong = rng.choice([*PROGRAMS.values(), "[-*+]"])
    return f"sed -i 's/{wrong}/{rng.choice([*PROGRAMS.values()])}/' {name}"


def change_command(kind: str, command: str, rng: random.Random) -> str:
    if kind == "repair":
        return change_repair(command.split()[-1], rng)
    if rng.random() < RATE:
        return command
    old, new = rng.choice([change for change in CHANGES[kind] if change[0] in command])
    return command.replace(old, new, 1)


def make_lesson(instruction: str, command: str, rng: random.Random) -> Row:
    turns = [f"{instruction}\n{TOOLS}", CALL % command, RESPONSE % rng.randint(0, 1), SUBMIT]
    roles = ("user", "assistant", "user", "assistant")
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]}


def make_lessons(count: int, seed: int) -> list[Row]:
    """Return lessons on training tasks of all kinds."""
    rng, rows = random.Random(seed), list[Row]()
    while len(rows) < count:
        kind = rng.choice([*KINDS])
        task = KINDS[kind](rng)
        if not is_held_out(task.instruction):
            rows.append(make_lesson(task.instruction, change_command(kind, task.command, rng), rng))
    return rows


def make_tiny_model(folder: Path, seed: int) -> None:
    make_tokenizer(folder, [*WORDS, *PHRASES, TOOLS, *CALL.split("%s"), *RESPONSE.split("%d"), SUBMIT])
    make_model(folder, seed, **INIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/learn_tasks"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=19200)
    parser.add_argument("--tiny-model", action="store_true", help="make a tokenizer and an untrained model, too")
    args = parser.parse_args()
    if args.tiny_model:
        make_tiny_model(args.out / "model", args.seed)
    write_tables(args.out / "data", {"sft": make_lessons(args.count, args.seed)})


if __name__ == "__main__":
    main()
