"""Collect the options of TRL, OpenRLHF and ms-swift: those that example scripts use, and all of a release.

    cd tests/unit/config/port && python collect_options.py PROJECT GIT_DIR RELEASE > PROJECT_options.txt

GIT_DIR: a clone, whose example scripts are read. RELEASE: the unpacked package of a release, whose dataclasses and
parsers are read (releases contain no examples). Only names are kept: `PROGRAM OPTION OPTION ...`, a line for each
program. The lists were made from the examples of TRL at f2cd5771 (2026-07-24), OpenRLHF at 3c3be623 (2026-08-13) and
ms-swift at 3602360a (2026-08-22), and from the releases TRL 1.16.0, OpenRLHF 0.11.2 and ms-swift 4.6.0.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import yaml

OPTION = re.compile(r"(?<!\S)--([A-Za-z][\w.-]*)")
SWIFT = re.compile(r"\b(swift|megatron)\s+(sft|pt|rlhf)\b|swift/cli/(_megatron/)?(sft|pt|rlhf)\.py")
OTHER_SWIFT = re.compile(r"\b(?:swift|megatron)\s+(?:infer|deploy|export|eval|sample|app|rollout|web-ui|merge-lora)\b")
LAUNCHERS = ("LoraConfig", "GenerationConfig", "BitsAndBytesConfig", "Mxfp4Config", "OpenCodeConfig", "basicConfig")


def list_files(where: str, *suffixes: str) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of the example scripts of a repository."""
    git, commit = ["git", "-C", where], "HEAD"
    roots = ["examples", "trl/scripts"]
    listed = subprocess.check_output([*git, "ls-tree", "-r", "--name-only", commit, *roots], text=True)
    for path in listed.splitlines():
        if path.endswith(suffixes):
            yield path, subprocess.check_output([*git, "show", f"{commit}:{path}"], text=True)


def drop_comments(text: str) -> str:
    return re.sub(r"(?m)(^|\s)#.*$", "", text)


def collect_swift(where: str) -> Iterator[tuple[str, str]]:
    for path, text in list_files(where, ".sh", ".yaml"):
        if path.endswith(".yaml"):
            found = yaml.safe_load(text)
            if isinstance(found, dict) and "model" in found and "infer" not in path and "sampler" not in path:
                tool = "megatron" if "micro_batch_size" in found else "swift"
                verb = f"rlhf {found['rlhf_type']}" if "rlhf_type" in found else "sft"
                yield from ((f"{tool} {verb}", name) for name in flatten(found))
            continue
        text = drop_comments(text)
        starts = [*SWIFT.finditer(text), *OTHER_SWIFT.finditer(text)]
        starts.sort(key=lambda match: match.start())
        for match, following in zip(starts, [*starts[1:], None], strict=False):
            if match.re is SWIFT:
                part = text[match.end() : following.start() if following else None]
                tool = match[1] or ("megatron" if match[3] else "swift")
                verb = match[2] or match[4]
                kind = re.search(r"--rlhf_type\s+(\w+)", part)
                program = f"{tool} rlhf {kind[1] if kind else 'dpo'}" if verb == "rlhf" else f"{tool} {verb}"
                yield from ((program, name) for name in OPTION.findall(part))


def flatten(found: dict[str, object], prefix: str = "") -> Iterator[str]:
    for name, value in found.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield re.sub(r"^(?:train|rollout)\.(?!gpus$)", "", f"{prefix}{name}")


def collect_openrlhf(where: str) -> Iterator[tuple[str, str]]:
    for _, text in list_files(where, ".sh"):
        for part in re.split(r"(?=openrlhf\.cli\.)", drop_comments(text))[1:]:
            program = part.removeprefix("openrlhf.cli.").split()[0]
            if program.startswith("train"):
                yield from ((program, name) for name in OPTION.findall(part.partition("\nEOF")[0]))


def collect_trl(where: str) -> Iterator[tuple[str, str]]:
    for path, text in list_files(where, ".py", ".yaml"):
        if path.endswith(".yaml"):
            yield from (("sft", name) for name in yaml.safe_load(text) if "cli_configs" in path)
            continue
        tree = ast.parse(text)
        if "Parser((" in text or path.startswith("trl/"):  # its options are those of a trainer
            for part in re.split(r"(?=\b[\w/]+\.py\b)", ast.get_docstring(tree) or ""):
                if match := re.match(r"(?:\w+/)*(\w+)\.py", part):
                    yield from ((match[1], name) for name in OPTION.findall(part))
        for node in ast.walk(tree):
            name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if name.endswith("Config") and name not in LAUNCHERS and path.startswith("examples/scripts"):
                program = {"AsyncGRPOConfig": "async_grpo"}.get(name, name.removesuffix("Config").lower())
                yield from ((program, one.arg) for one in node.keywords if one.arg)


def read_fields(root: Path, pattern: str, *classes: str) -> set[str]:
    """Return the fields of dataclasses."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in root.glob(pattern)]
    found = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
    fields = [one.target.id for node in found for one in node.body if isinstance(one, ast.AnnAssign)]
    return {name for name in fields if not name.startswith("_")}


def read_release_of_trl(root: Path) -> Iterator[tuple[str, str]]:
    shared = read_fields(root, "trl/trainer/*config.py", "_BaseConfig", "ModelConfig")
    shared |= read_fields(root, "trl/scripts/utils.py", "ScriptArguments")
    for name in ("GRPO", "RLOO", "SFT", "DPO", "KTO", "Reward"):
        own = read_fields(root, "trl/trainer/*_config.py", f"{name}Config")
        yield from ((name.lower(), option) for option in shared | own)


def read_release_of_openrlhf(root: Path) -> Iterator[tuple[str, str]]:
    for path in root.glob("openrlhf/cli/train_*.py"):
        for option in re.findall(r'"--([\w.{}]+)"', path.read_text(encoding="utf-8")):
            yield from ((path.stem, option.replace("{prefix}", prefix)) for prefix in ("actor", "critic"))


def read_release_of_swift(root: Path) -> Iterator[tuple[str, str]]:
    names = ("Model", "Data", "Template", "Quantize", "Base", "Sft", "Swanlab", "Tuner")
    shared = read_fields(root, "swift/arguments/**/*.py", *(f"{name}Arguments" for name in names))
    shared |= read_fields(root, "swift/trainers/arguments.py", "TrainArgumentsMixin")
    names = ("RewardModel", "TeacherModel", "PPO", "GRPO", "RLHF")
    own = read_fields(root, "swift/arguments/rlhf_args.py", *(f"{name}Arguments" for name in names))
    mixins = ("VllmArguments", "RolloutTrainerArgumentsMixin", "GRPOArgumentsMixin")
    own |= read_fields(root, "swift/rlhf_trainers/args_mixin.py", *mixins)
    yield from (("swift sft", option) for option in shared)
    yield from (("swift rlhf grpo", option) for option in shared | own)


COLLECTORS = {
    "swift": (collect_swift, read_release_of_swift),
    "openrlhf": (collect_openrlhf, read_release_of_openrlhf),
    "trl": (collect_trl, read_release_of_trl),
}


def main(project: str, git_dir: str, release: str) -> None:
    found = defaultdict(set)
    read_examples, read_release = COLLECTORS[project]
    for program, option in (*read_examples(git_dir), *read_release(Path(release))):
        found[program].add(option.replace("-", "_"))
    print(
        "\n".join(" ".join([program.replace(" ", ":"), *sorted(options)]) for program, options in sorted(found.items()))
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
