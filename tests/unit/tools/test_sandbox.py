"""Results of snippets, sessions, runs at the same time, processes that die, and cleanup. The isolation is tested in
test_sandbox_attacks.py."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from alphaapollo.tools.sandbox import (
    SandboxError,
    SnippetSandbox,
    run_python,
    run_python_async,
)
from alphaapollo.tools.sandbox.processes import MAX_CODE_BYTES
from alphaapollo.tools.sandbox.zygote import remove_tree
from tests.processes import is_running, wait_until

ROOT = Path(__file__).resolve().parents[3]


def test_output_and_mode(sandbox: SnippetSandbox) -> None:
    result = sandbox.run("import sys\nprint(6 * 7)\nprint('oops', file=sys.stderr)")
    assert (result.status, result.stdout, result.stderr, result.reason) == ("ok", "42\n", "oops\n", "")
    assert result.mode == sandbox.mode and result.mode.startswith("prefork+")
    assert 0 < result.seconds < 10


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("1 + 1", "2\n"),
        ("'a\\n'", "'a\\n'\n"),
        ("None", ""),
        ("for i in range(2):\n    i", ""),
        ("import sympy\nx = sympy.Symbol('x')\nsympy.integrate(x**2, x)", "x**3/3\n"),
        ("", ""),
    ],
)
def test_echo_of_the_last_expression(sandbox: SnippetSandbox, code: str, printed: str) -> None:
    result = sandbox.run(code, echo=True)
    assert (result.status, result.stdout) == ("ok", printed), result
    assert sandbox.run(code).stdout == (printed if "print" in code else "")


@pytest.mark.parametrize(
    ("code", "status", "reason", "last_line"),
    [
        ("1 / 0", "error", "exit code 1", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "error", "exit code 3", ""),
        ("import sys; sys.exit('no')", "error", "exit code 1", "no"),
        ("x = bytearray(1 << 32)", "memory", "MemoryError", "MemoryError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "error", "killed by SIGSEGV", ""),
        ("while True: pass", "timeout", "stopped after 0.5 s", ""),
        ("raise KeyboardInterrupt", "error", "exit code 1", "KeyboardInterrupt"),
        ("x = 1\0", "error", "exit code 1", None),
        ("x = '\ud800'", "error", "exit code 1", None),
    ],
)
def test_status_and_reason(sandbox: SnippetSandbox, code: str, status: str, reason: str, last_line: str | None) -> None:
    result = sandbox.run(code, timeout=0.5 if "while" in code else 10)
    assert (result.status, result.reason) == (status, reason), result
    if last_line is not None:
        assert (result.stderr.strip().splitlines() or [""])[-1] == last_line


def test_traceback_contains_only_the_snippet(sandbox: SnippetSandbox) -> None:
    stderr = sandbox.run("def f(x):\n    return 1 / x\n\nf(0)").stderr
    assert "return 1 / x" in stderr and 'File "<snippet>", line 4' in stderr
    assert "alphaapollo" not in stderr


def test_stdin_and_unicode(sandbox: SnippetSandbox) -> None:
    assert sandbox.run("print(input()[::-1], len(input()))", stdin="αβγ\n€\n").stdout == "γβα 1\n"
    large = "7\n" * 500_000
    assert sandbox.run("import sys\nprint(sum(map(int, sys.stdin)))", stdin=large).stdout == "3500000\n"
    assert "EOFError" in sandbox.run("input()").stderr


def test_long_output_is_cut_in_the_middle(sandbox: SnippetSandbox) -> None:
    code = "for x in 'ab':\n    for _ in range(5000): print(x, end='', flush=True)\nprint()"
    assert sandbox.run(code, max_output=100).stdout == "a" * 50 + "\n... [9901 bytes cut] ...\n" + "b" * 49 + "\n"
    assert sandbox.run("print('abc')", max_output=4).stdout == "abc\n"


def test_long_code_is_refused(sandbox: SnippetSandbox) -> None:
    result = sandbox.run("#" * (MAX_CODE_BYTES + 1))
    assert (result.status, result.seconds) == ("refused", 0.0)
    assert result.reason == "1048577 bytes of code, the limit is 1048576"
    assert sandbox.run("#" * MAX_CODE_BYTES).status == "ok"


def test_files_exist_only_during_the_run(sandbox: SnippetSandbox) -> None:
    code = "import os, tempfile\nwith tempfile.NamedTemporaryFile('w+') as f: print(f.write('x'))\n"
    code += "open('kept', 'w').write('y')\nos.makedirs('a/b')\nprint(sorted(os.listdir('.')))"
    for _ in range(2):
        assert sandbox.run(code).stdout == "1\n['a', 'kept']\n"


def num_children(sandbox: SnippetSandbox) -> int:
    """Processes of snippets and sessions, if bubblewrap is not used."""
    assert sandbox._zygote is not None
    pid = sandbox._zygote.process.pid
    return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) - ("bubblewrap" in sandbox.mode)


def test_mixed_load_leaks_no_descriptors() -> None:
    """Many ends, timeouts and sessions at once."""

    def run(number: int) -> bool:
        if number % 5 == 0:
            return sandbox.run("x = 1\nx", session=f"s{number % 7}", echo=True).stdout == "1\n"
        if number % 11 == 0:
            return sandbox.run("while True: pass", timeout=0.05).status == "timeout"
        return sandbox.run(f"print({number})").stdout == f"{number}\n"

    with SnippetSandbox(max_concurrent=8) as sandbox:
        before = len(os.listdir("/proc/self/fd"))
        with ThreadPoolExecutor(16) as threads:
            assert all(threads.map(run, range(200)))
        for number in range(7):
            sandbox.end_session(f"s{number}")
        assert not sandbox._sessions and wait_until(lambda: num_children(sandbox) == 0)
        assert len(os.listdir("/proc/self/fd")) == before


def test_session_keeps_its_variables(sandbox: SnippetSandbox) -> None:
    assert sandbox.run("x = [1]", session="a").status == "ok"
    assert sandbox.run("x.append(2)\nx", session="a", echo=True).stdout == "[1, 2]\n"
    assert "NameError" in sandbox.run("x", session="b").stderr
    assert sandbox.run("1 / 0", session="a").status == "error"
    assert sandbox.run("x", session="a", echo=True).stdout == "[1, 2]\n"  # an error does not lose variables
    sandbox.end_session("a")
    after = sandbox.run("x", session="a")
    assert "NameError" in after.stderr and not after.restarted
    for session in ("a", "b"):
        sandbox.end_session(session)


def test_restarted_session_is_reported(sandbox: SnippetSandbox) -> None:
    sandbox.run("x = 1", session="c")
    assert sandbox.run("while True: pass", session="c", timeout=0.5).status == "timeout"
    after = sandbox.run("x", session="c")
    assert after.restarted and "NameError" in after.stderr
    assert not sandbox.run("y = 2", session="c").restarted
    assert sandbox.run("import os; os._exit(0)", session="c").status == "ok"
    assert sandbox.run("pass", session="c").restarted
    sandbox.end_session("c")


def test_false_end_of_a_session_affects_only_itself(sandbox: SnippetSandbox) -> None:
    """The snippet reports its end early; its later output belongs to its session's next snippet."""
    early = sandbox.run("import os, time\nos.write(3, b'D\\0')\ntime.sleep(30)\nprint('late')", session="d")
    assert (early.status, early.stdout) == ("ok", "")
    assert sandbox.run("print('other')", session="e").stdout == "other\n"
    for session in ("d", "e"):
        sandbox.end_session(session)


def test_dead_zygote_is_replaced(sandbox: SnippetSandbox) -> None:
    zygote = sandbox.start()._zygote
    assert zygote is not None and zygote._pidfd is not None
    sandbox.run("x = 1", session="h")
    signal.pidfd_send_signal(zygote._pidfd, signal.SIGKILL)
    assert sandbox.run("print('again')").stdout == "again\n"
    assert sandbox.run("pass", session="h").restarted
    sandbox.end_session("h")


def test_close_fails_unfinished_runs() -> None:
    with ThreadPoolExecutor(1) as thread, SnippetSandbox(without=["bubblewrap"]) as sandbox:
        assert sandbox._zygote is not None
        folder = Path(sandbox._zygote.folder)
        future = thread.submit(sandbox.run, "import time; time.sleep(60)", timeout=90)
        assert wait_until(lambda: num_children(sandbox) == 1)
        sandbox.close()
        with pytest.raises(SandboxError, match="closed"):
            future.result(timeout=10)
    assert not folder.exists()


def test_default_sandbox() -> None:
    assert run_python("print(1)").stdout == "1\n"
    assert asyncio.run(run_python_async("print(2)")).stdout == "2\n"
    assert asyncio.run(run_python_async("print(3)")).stdout == "3\n"  # on another event loop


def test_killed_program_leaves_no_processes() -> None:
    program = (
        "from alphaapollo.tools.sandbox import SnippetSandbox\nimport os, threading\n"
        "sandbox = SnippetSandbox(without=['bubblewrap']).start()\n"
        "threading.Thread(target=sandbox.run, args=('import time; time.sleep(60)',), kwargs={'timeout': 90}).start()\n"
        "import time; from pathlib import Path; pid = sandbox._zygote.process.pid\n"
        "while not Path(f'/proc/{pid}/task/{pid}/children').read_text(): time.sleep(0.01)\n"
        "print(pid, sandbox._zygote.folder, flush=True)\n"
        "time.sleep(60)"
    )
    host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert host.stdout is not None
    with host, host.stdout:
        zygote, folder = host.stdout.readline().split()
        children = Path(f"/proc/{zygote}/task/{zygote}/children")
        # Beside the snippet, a process may still remove the folder of the sandbox's own trial.
        assert wait_until(lambda: len(children.read_text().split()) == 1)
        snippets = children.read_text().split()
        host.kill()
    assert wait_until(lambda: not any(is_running(int(pid)) for pid in (zygote, *snippets)))
    assert not Path(folder).exists()


def test_code_is_refused_without_seccomp(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="ALPHAAPOLLO_UNSAFE_SANDBOX=1"), SnippetSandbox(without=["seccomp"]):
        pass
    with SnippetSandbox(without=["seccomp"], allow_unsafe=True) as unsafe:
        result = unsafe.run("print(1)")
    assert result.stdout == "1\n" and "seccomp" not in result.mode
    assert "use the network" in caplog.text  # the effect of the missing layer


def test_remove_tree(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    os.chdir(deep)
    for _ in range(2000):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(ROOT)
    (deep / "link").symlink_to(ROOT)
    (deep / "locked").mkdir()
    (deep / "locked" / "file").write_text("x")
    (deep / "locked").chmod(0)
    remove_tree(str(deep))
    assert not deep.exists() and (ROOT / "pyproject.toml").exists()


def test_cancelled_run_is_killed(sandbox: SnippetSandbox) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await sandbox.run_async("import time; time.sleep(60)", timeout=90, session="cancelled")
        after = await sandbox.run_async("print(1)", session="cancelled")
        assert after.restarted and after.stdout == "1\n"
        sandbox.end_session("cancelled")

    asyncio.run(main())
    assert sandbox._zygote is not None and not sandbox._zygote.has_ended
    assert not sandbox._sessions and wait_until(lambda: num_children(sandbox) == 0)


def test_package_is_self_contained() -> None:
    """In bubblewrap only this package exists."""
    folder = ROOT / "alphaapollo" / "tools" / "sandbox"
    for path in folder.glob("*.py"):
        for module in re.findall(r"^\s*(?:from|import) (alphaapollo\S*)", path.read_text(), re.MULTILINE):
            assert module.startswith("alphaapollo.tools.sandbox"), f"{path.name} imports {module}"
