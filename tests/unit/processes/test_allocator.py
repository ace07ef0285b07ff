"""Freed memory stays in the process, also that of a thread. Each case is a process of its own."""

from __future__ import annotations

import pytest

from alphaapollo.processes.allocator import ONE_ARENA
from tests.processes import run_python

SCRIPT = """
import ctypes, threading
from alphaapollo.processes.allocator import keep_freed_memory, share_main_arena

libc, GIB = ctypes.CDLL(None), 1 << 30
libc.malloc.argtypes, libc.malloc.restype, libc.free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]

def read_size():
    return int(open("/proc/self/statm").read().split()[0]) * 4096

def allocate_and_free():
    keep_freed_memory()
    before = read_size()
    libc.free(libc.malloc(3 * GIB))  # no page is touched
    print(round((read_size() - before) / GIB))

def compute_in_thread(prepare=lambda: None):
    prepare()
    thread = threading.Thread(target=allocate_and_free)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize(
    ("call", "environment", "kept_gib"),
    [
        pytest.param("allocate_and_free()", {}, 3, id="main thread"),
        pytest.param("compute_in_thread()", {}, 0, id="thread with an arena of its own"),
        pytest.param("compute_in_thread(share_main_arena)", {}, 3, id="thread of a user's loop"),
        pytest.param("compute_in_thread()", ONE_ARENA, 3, id="thread of a Ray worker"),
    ],
)
def test_kept_memory(monkeypatch: pytest.MonkeyPatch, call: str, environment: dict[str, str], kept_gib: int) -> None:
    for name in ONE_ARENA:
        monkeypatch.delenv(name, raising=False)
    done = run_python("-c", SCRIPT + call, **environment)
    assert done.stdout == f"{kept_gib}\n", done.stderr
