"""Collect the options that the example scripts of TRL, OpenRLHF and ms-swift use, for test_options.py.

    python -m tests.unit.config.port.collect_options PROJECT GIT_DIR[@COMMIT] > tests/unit/config/port/PROJECT_options.txt

Only names are kept: `PROGRAM OPTION OPTION ...`, a line for each program. The lists were made from TRL at f2cd5771
(2026-07-24, 1.10.0.dev0) and the scripts of its release 1.16.0, from OpenRLHF at 3c3be623 (2026-08-13, 0.11.0), and from
ms-swift at 3602360a (2026-08-22, 4.6.0.dev0).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import yaml

OPTION = re.compile(r"(?<!\S)--([A-Za-z][\w.-]*)")
SWIFT = re.compile(r"\b(swift|megatron)\s+(sft|pt|rlhf)\b|swift/cli/(_megatron/)?(sft|pt|rlhf)\.py")
OTHER_SWIFT = re.compile(r"\b(?:swift|megatron)\s+(?:infer|deploy|export|eval|sample|app|rollout|web-ui|merge-lora)\b")
LAUNCHERS = ("LoraConfig", "GenerationConfig", "BitsAndBytesConfig", "Mxfp4Config", "OpenCodeConfig", "basicConfig")


def list_files(where: str, *suffixes: str) -> Iterator[tuple[str, str]]:
    """Yield (path, text) of the example scripts of a repository."""
    folder, _, commit = where.partition("@")
    git = ["git", "-C", folder]
    commit = commit or "HEAD"
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


COLLECTORS = {"swift": collect_swift, "openrlhf": collect_openrlhf, "trl": collect_trl}


def main(project: str, where: str) -> None:
    found = defaultdict(set)
    for program, option in COLLECTORS[project](where):
        found[program].add(option.replace("-", "_"))
    print(
        "\n".join(" ".join([program.replace(" ", ":"), *sorted(options)]) for program, options in sorted(found.items()))
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
