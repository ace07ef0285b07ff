from __future__ import annotations

import asyncio
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from alphaapollo._version import __version__
from alphaapollo.processes import watchdog
from alphaapollo.processes.entry_point import entry_point
from alphaapollo.processes.watchdog import treat_signals_as_ctrl_c
from tests.processes import ROOT, run_python

UNGUARDED = """
import multiprocessing, os, sys
from alphaapollo.processes.entry_point import entry_point

print("the script runs")

@entry_point
def main(argv=None):
    process = multiprocessing.get_context(argv[0]).Process(target=os.getpid)
    process.start()
    process.join(60)
    return process.exitcode

code = main(sys.argv[1:])
print(f"exit code {code} in {__file__}")
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_without_a_guard_runs_once(tmp_path: Path, method: str) -> None:
    script = tmp_path / "run.py"
    script.write_text(UNGUARDED)
    done = run_python(str(script), method)
    assert done.stdout.splitlines() == ["the script runs", f"exit code 0 in {script}"], done.stderr


CHILDREN = """
import multiprocessing, subprocess
from alphaapollo.processes.entry_point import entry_point
from alphaapollo.processes.python_command import make_module_command, make_subprocess_environ
from alphaapollo.processes.watchdog import new_run_id, start_reaper

@entry_point
def main(argv=None):
    start_reaper(new_run_id(), [])
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        context.Semaphore()  # needs multiprocessing's resource tracker
        process = context.Process(target=print, args=["works"])
        process.start()
        process.join()
    command = make_module_command("alphaapollo", "--version")
    return subprocess.run(command, env=make_subprocess_environ()).returncode

main([])
"""


def test_no_child_imports_modules_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = tmp_path / "others"
    others.mkdir()
    for name in ("psutil", "uuid", "ctypes", "shutil", "socket", "secrets", "tempfile"):
        (others / f"{name}.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'a').write(__file__)")
    monkeypatch.chdir(others)
    (tmp_path / "run.py").write_text(CHILDREN)
    done = run_python(str(tmp_path / "run.py"))
    assert done.stdout.split() == ["works", "works", __version__], done.stderr
    assert not (tmp_path / "planted").exists(), (tmp_path / "planted").read_text()


def test_call_in_a_running_event_loop_is_refused_with_a_fix(capsys: pytest.CaptureFixture[str]) -> None:
    @entry_point
    def main(argv: Sequence[str] | None = None) -> int:
        raise AssertionError("nothing is begun")

    async def cell() -> int:
        return main(["trainer.seed=1", "data.train_files=[a b]"])

    assert asyncio.run(cell()) == 2
    said = capsys.readouterr().err
    assert "already running in this process (a notebook?)" in said
    assert said.endswith(f"!{shlex.quote(sys.executable)} -m {__name__} trainer.seed=1 'data.train_files=[a b]'\n")


BUG = r"""
import os, sys
from alphaapollo.processes.entry_point import entry_point

@entry_point
def main(argv=None):
    raise RuntimeError("\x1b]52;c;Y2F0\x07" + os.environ["SOME_API_KEY"])

sys.exit(main([]))
"""


def test_the_traceback_of_a_bug_tells_no_secret(tmp_path: Path) -> None:
    (tmp_path / "bug.py").write_text(BUG)
    done = run_python(str(tmp_path / "bug.py"), SOME_API_KEY="canary-0123456789")
    assert done.returncode == 1 and "canary" not in done.stderr
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("RuntimeError:  ]52;c;Y2F0 $SOME_API_KEY\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_before_the_start_ends_the_command(capsys: pytest.CaptureFixture[str], number: int) -> None:
    before = signal.getsignal(number)
    if number == signal.SIGHUP and before is signal.SIG_IGN:
        pytest.skip("these tests run under nohup")

    @entry_point
    def main(argv: Sequence[str] | None = None) -> int:
        signal.raise_signal(number)
        raise AssertionError("it goes on")

    assert main([]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("seconds", "count"), [(60.0, 1), (-1.0, 3)])
def test_signals_to_a_process_and_then_its_group_count_once(
    monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    monkeypatch.setattr(watchdog, "_REPEAT_SECONDS", seconds)
    interrupts = 0
    with treat_signals_as_ctrl_c():
        for _ in range(3):
            try:
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt:
                interrupts += 1
    assert interrupts == count


PROGRAM = """
import atexit, sys, threading, time
from alphaapollo.processes.entry_point import run_program

class Loud:
    def __del__(self):
        print("freed", flush=True)

def main():
    sys.loud = Loud()
    atexit.register(print, "atexit")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    {end}

if __name__ == "__main__":
    run_program(main)
"""


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("return 3", 3, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong\n"),
    ],
)
def test_a_program_exits_with_its_code_and_frees_nothing(tmp_path: Path, end: str, code: int, error: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(end=end))
    done = run_python(str(script))
    assert (done.returncode, done.stdout) == (code, "thread\natexit\n")
    assert done.stderr.endswith(error)


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ("ROLE_WORLD_SIZE=2 RANK=0", "torchrun"),
        ("SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0", "srun"),
        ("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0", "mpirun"),
        ("RANK=0 WORLD_SIZE=2", ""),  # a job of Kubernetes sets them for the only process of a pod
        ("SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 RAY_ADDRESS=10.0.0.1:6379", ""),
    ],
)
def test_a_command_that_a_launcher_started_several_times_is_refused_once(
    variables: str, launcher: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (word.split("=") for word in variables.split()):
        monkeypatch.setenv(name, value)
    assert entry_point(lambda argv=None: 7)([]) == (2 if launcher else 7)
    shown = capsys.readouterr().err
    assert f"started 2 times by {launcher}" in shown and "n_gpus_per_node=2" in shown if launcher else not shown
    if launcher == "torchrun":
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(SystemExit, match="0"):
            entry_point(lambda argv=None: 7)([])
        assert not capsys.readouterr().err


USER = """
import getpass, os, pathlib
from alphaapollo.processes.entry_point import entry_point

@entry_point
def main(argv=None):
    print(getpass.getuser(), pathlib.Path.home(), os.environ["TORCHINDUCTOR_CACHE_DIR"])
    return 0

main()
"""


def test_a_user_without_a_name_and_a_home(tmp_path: Path) -> None:
    as_other = ["unshare", "-U", "--map-user=54321"]
    if subprocess.run([*as_other, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow unshare -U")
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run([*as_other, sys.executable, "-c", USER], env=variables, capture_output=True, text=True)
    name, home, cache = done.stdout.split()
    assert (name, home) == ("54321", "/") and cache.endswith("torchinductor_54321"), done.stderr
