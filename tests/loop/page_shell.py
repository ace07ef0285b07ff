"""Runs the shell blocks of a page as a reader would. Programs of alphaapollo are forked from the warm process.

bash --- .venv/bin/python (a stand-in) --- socket --- CommandServer --- program forked from the warm process
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from alphaapollo.cli.main import SUBCOMMANDS
from alphaapollo.cli.subcommand import Subcommand
from alphaapollo.config.keys import COMMANDS, list_keys
from alphaapollo.config.load import find_command_module
from alphaapollo.processes.network import find_free_port
from alphaapollo.utils.plugins import load_plugin
from tests.loop.conftest import DEADLINE, ROOT
from tests.loop.warm import CONTEXT, Program, prepare_forked_process, run_command
from tests.page_commands import HOW_TO_MARK, Block

STAND_IN = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
stream = server.makefile("rw")
name = os.path.basename(sys.argv[0])
typed = sys.stdin.read() if name == "alphaapollo" else ""
print(json.dumps([name, sys.argv[1:], os.getcwd(), dict(os.environ), typed]), file=stream, flush=True)
answer = json.loads(stream.readline())
if "execute" in answer:
    os.execv(answer["execute"][0], answer["execute"])
(sys.stderr if answer["code"] else sys.stdout).buffer.write(answer["output"].encode())
sys.exit(answer["code"])
"""
FORKED = re.compile(  # of alphaapollo, those whose main accepts arguments
    r"alphaapollo\.(trainer|evolving|plugins|cli|config|observability|rewards\.audit)\b|examples\.|tests\."
)
PACKAGES = ("alphaapollo.config", "alphaapollo.trainer.replay")
DRY_RUN = ["trainer.dry_run=True", "trainer.resume_mode=disable"]
Sizes = Mapping[str, Mapping[str, object]]  # {module: {key: value}}


class CommandServer(socketserver.UnixStreamServer):
    """Runs the commands of the stand-ins of a page, one after the other: dry runs in one process, others in their own.

    needed: Keys that `...` in a command of the module stands for.
    full_runs: Sizes for the first command of the module, which is run to its end. The others get DRY_RUN.
    """

    def __init__(self, folder: Path, needed: Sizes, full_runs: Sizes):
        super().__init__(str(folder / "socket"), CommandHandler)
        self.folder, self.needed, self.full_runs = folder, needed, dict(full_runs)
        self.numbers = itertools.count()
        self.failed: list[str] = []
        self.dry_runs = ProcessPoolExecutor(1, CONTEXT, prepare_forked_process)

    def server_close(self) -> None:
        super().server_close()
        for process in self.dry_runs._processes.values():  # also one that hangs
            process.kill()
        self.dry_runs.shutdown()

    def run(
        self, program: str, words: list[str], folder: str, environment: dict[str, str], typed: str
    ) -> dict[str, Any]:
        """Return the exit code and the output of a command, or the command that the stand-in must execute."""
        module = "alphaapollo.cli.main"
        if program == "keys":
            module, words = self.find_module_of_keys(words), ["...", *words]
        elif program == "python":
            if words[0] != "-m" or not FORKED.match(words[1]):
                return {"execute": [sys.executable, *words]}
            module, words = words[1] + ".__main__" * (words[1] in PACKAGES), words[2:]
        words = self.complete(module, words)
        is_viewer = module == "alphaapollo.cli.main" and words[:1] == ["view"]
        if is_viewer:
            words += ["--port", str(find_free_port())]
            environment["XDG_CACHE_HOME"] = str(self.folder / "cache")
        output = self.folder / f"output_{next(self.numbers)}.txt"
        command = (module, words, output, environment, Path(folder))
        if DRY_RUN[0] in words:
            code = self.dry_runs.submit(run_command, *command, typed).result(DEADLINE)
        else:
            started = Program(*command, warm=True, typed=typed)
            try:
                code = request_page(started) if is_viewer else started.wait(DEADLINE)
            finally:
                started.signal(signal.SIGKILL)
        if code != 0:
            self.failed.append(f"{module} {' '.join(words)}: exit code {code}")
        return {"code": 124 if code is None else code, "output": output.read_text()}

    def find_module_of_keys(self, words: Sequence[str]) -> str:
        """Return the first training program that has all keys of the words, or main_ppo, which reports unknown ones."""
        schemas = {find_command_module(schema, name.removeprefix("main_")): schema for name, schema in COMMANDS.items()}
        for module in (one for one in self.needed if one in schemas):
            keys = list_keys(schemas[module])
            if all(any(f"{word.partition('=')[0]}.".startswith(f"{key}.") for key in keys) for word in words):
                return module
        return next(iter(self.needed))

    def complete(self, module: str, words: list[str]) -> list[str]:
        """Replace `...` by the keys that it stands for, and add the sizes of a full run or DRY_RUN."""
        name = words[0] if module == "alphaapollo.cli.main" and words else ""
        subcommand = SUBCOMMANDS.get(name) or load_plugin("commands", name)
        if isinstance(subcommand, Subcommand):
            program = getattr(COMMANDS.get(subcommand.command), "program", "")
            module = program or subcommand.main.partition(":")[0]
        if module not in self.needed or "--cfg" in words or "--help" in words:
            return words
        given = tuple(f"{word.partition('=')[0]}." for word in words if not word.endswith("..."))
        stands_for = [f"{key}={value}" for key, value in self.needed[module].items() if not f"{key}.".startswith(given)]
        has_dots = any(word.endswith("...") for word in words)
        words = [word for word in words if not word.endswith("...")] + (stands_for if has_dots else [])
        sizes = self.full_runs.pop(module, None)
        return words + (DRY_RUN if sizes is None else [f"{key}={value}" for key, value in sizes.items()])


class CommandHandler(socketserver.StreamRequestHandler):
    server: CommandServer

    def handle(self) -> None:
        self.wfile.write(json.dumps(self.server.run(*json.loads(self.rfile.readline()))).encode() + b"\n")


def request_page(viewer: Program) -> int | None:
    """Wait for the viewer's address, request its first page, and stop it. Returns 0, or its exit code if it failed."""
    end, address = time.monotonic() + DEADLINE, None
    while viewer.wait(0.05) is None and time.monotonic() < end:
        address = address or (re.search(r"http://[\d.]+:\d+\s", viewer.printed) if viewer.output.exists() else None)
        with contextlib.suppress(urllib.error.URLError):  # until it listens
            if address and urllib.request.urlopen(address[0].strip(), timeout=DEADLINE).status == 200:
                viewer.signal(signal.SIGINT)
                return 0 if viewer.wait(DEADLINE) in (0, 130) else viewer.wait(0)
    return viewer.wait(0)


def run_page(blocks: Sequence[Block], folder: Path, needed: Sizes, full_runs: Sizes) -> list[str]:
    """Run the blocks of a page in a folder. Returns the failures: `LINE: exit code, output, how to mark`."""
    failures = []
    with CommandServer(folder, needed, full_runs) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        variables = make_stand_ins(folder, server)
        for block in blocks:
            write_named_files(block, folder)
            script = "trap 'echo failed in line $LINENO >&2' ERR\n" + block.make_script()
            command = ["bash", "-eE", "-o", "pipefail", "-c", script]
            result = subprocess.run(
                command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
            if result.returncode or server.failed:
                found = re.findall(r"failed in line (\d+)", result.stdout)
                line = block.first_line + (int(found[0]) - 2 if found else 0)
                failures.append(f"{line}: exit code {result.returncode}\n{result.stdout[-3000:]}\n{server.failed}\n"
                                f"Fix the command or {HOW_TO_MARK}.")  # fmt: skip
                server.failed.clear()
            elif not has_output(result.stdout, block.output):
                failures.append(f"{block.first_line}: the page shows other output than\n{result.stdout[-3000:]}")
        server.shutdown()
        thread.join()
    return failures


def make_stand_ins(folder: Path, server: CommandServer) -> dict[str, str]:
    """Write .venv/bin with stand-ins. Returns the environment of a reader's shell."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "alphaapollo", "keys"):
        (programs / name).write_text(STAND_IN.format(python=sys.executable, address=server.server_address))
        (programs / name).chmod(0o755)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    return os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def write_named_files(block: Block, folder: Path) -> None:
    """Write the nearest python or yaml block above to the file that a command names, unless the repository has it."""
    for command in block.commands:
        for name, suffix in re.findall(r"(?<![\w./])(\w+\.(py|yaml))\b", command.text):
            text = block.files.get({"py": "python"}.get(suffix, suffix))
            if text and not (folder / name).is_symlink():
                (folder / name).write_text(text)


def has_output(printed: str, expected: str) -> bool:
    """Whether the output contains the expected words, where `...` stands for any words."""
    pattern = r"[\s\S]*".join(r"\s+".join(map(re.escape, part.split())) for part in expected.split("..."))
    return re.search(pattern, printed) is not None
