import os
import sys
import threading
from pathlib import Path

import pytest

from alphaapollo.utils.user_module import load_user_module, load_user_object
from tests.processes import run_python

KEY = "env.custom_module"


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_is_imported_once_by_its_path(tmp_path: Path):
    (tmp_path / "other").mkdir()
    one, other = write(tmp_path, "things = [1]"), write(tmp_path / "other", "things = [2]")
    load_user_module(one, KEY).things.append(3)
    assert load_user_module(one, "reward.custom_module").things == [1, 3]
    assert load_user_module(other, KEY).things == [2], "a file of the same name is another module"


def test_it_may_import_its_neighbours_but_they_shadow_nothing(tmp_path: Path):
    write(tmp_path, "value = 7", "a_neighbour.py")
    write(tmp_path, "raise ValueError('the wrong one')", "json.py")
    assert load_user_module(write(tmp_path, "import json, a_neighbour"), KEY).a_neighbour.value == 7


def test_a_file_that_is_edited_within_a_second_is_loaded_as_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a process that writes bytecode, with the same size and the same time of change before and after."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    mine, neighbour = Path(write(tmp_path, "import near\nx = 1")), Path(write(tmp_path, "y = 1", "near.py"))
    command = "from alphaapollo.utils.user_module import load_user_module\n"
    command += f"m = load_user_module({str(mine)!r}, 'k'); print(m.x, m.near.y)"
    times = mine.stat().st_atime_ns, mine.stat().st_mtime_ns
    for value in (1, 2):
        mine.write_text(f"import near\nx = {value}", encoding="utf-8")
        neighbour.write_text(f"y = {value}", encoding="utf-8")
        for path in (mine, neighbour):
            os.utime(path, ns=times)
        assert run_python("-c", command).stdout == f"{value} {value}\n"


def test_second_thread_waits_for_the_complete_import(tmp_path: Path):
    path = write(tmp_path, "import sys\nsys.half_done.set()\nsys.go_on.wait(10)\nx = 1", "slow.py")
    sys.half_done, sys.go_on = threading.Event(), threading.Event()
    found = []
    first = threading.Thread(target=load_user_module, args=(path, KEY))
    second = threading.Thread(target=lambda: found.append(load_user_module(path, KEY).x))
    try:
        first.start()
        assert sys.half_done.wait(10)
        second.start()
    finally:
        sys.go_on.set()
        first.join(10)
        second.join(10)
        del sys.half_done, sys.go_on
    assert found == [1]


@pytest.mark.parametrize("path", ["missing.py", "", "."])
def test_no_such_file(tmp_path: Path, path: str):
    with pytest.raises(ValueError, match=rf"^{KEY}=.*: no such file"):
        load_user_module(str(tmp_path / path) if path else "", KEY)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("import nowhere_to_be_found", ["ModuleNotFoundError", "line 1: import nowhere_to_be_found", "package"]),
        ("x = 1\n1 / 0", ["ZeroDivisionError: division by zero (", "line 2: 1 / 0"]),
        ("x = 1\ndef broken(:", ["SyntaxError", "line 2: def broken(:"]),
    ],
)
def test_a_module_that_fails(tmp_path: Path, text: str, facts: list[str]):
    path = write(tmp_path, text, "bad.py")
    for _ in range(2):  # a failed module is not taken for a loaded one
        with pytest.raises(ValueError, match=rf"^{KEY}: .*bad\.py") as error:
            load_user_module(path, KEY)
        assert [fact for fact in facts if fact not in str(error.value)] == [], error.value


def test_missing_name_lists_functions_and_classes_of_the_file(tmp_path: Path):
    path = write(tmp_path, "from json import loads\ndef grade(): ...\nclass Grader: ...\nx = 1")
    assert load_user_object(path, "x", "f.path", "f.name") == 1
    with pytest.raises(ValueError, match=r"^f\.name=grad: .*'grade'"):
        load_user_object(path, "grad", "f.path", "f.name")
    with pytest.raises(ValueError, match=r" grade, Grader\."):
        load_user_object(path, "zzz", "f.path", "f.name")
    with pytest.raises(ValueError, match=r"^f\.path=gone\.py"):
        load_user_object("gone.py", "grade", "f.path", "f.name")
    with pytest.raises(ValueError, match=rf"^{KEY}=.*notes\.txt.*Python"):
        load_user_module(write(tmp_path, "", "notes.txt"), KEY)


MAIN = """
import utils
def at_import(): return utils.NAME, utils.helper.NAME
def when_called():
    import utils as again
    from package.part import NAME
    again.calls.append(1)
    return NAME, again is utils, len(utils.calls)
"""


def test_files_of_equal_names_beside_several_user_files(tmp_path):
    folders = [tmp_path / name for name in ("first", "second", "second/inner")]
    modules = []
    for folder in folders:
        (folder / "package").mkdir(parents=True)
        (folder / "package" / "part.py").write_text(f"NAME = {str(folder)!r}")
        (folder / "helper.py").write_text(f"NAME = {str(folder)!r}")
        (folder / "utils.py").write_text(f"import helper\nNAME = {str(folder)!r}\ncalls = []")
        (folder / "main.py").write_text(MAIN)
        modules.append(load_user_module(str(folder / "main.py"), "key"))
    for number in (1, 2):
        for folder, module in zip(folders, modules, strict=True):
            assert module.at_import() == (str(folder), str(folder))
            assert module.when_called() == (str(folder), True, number)
