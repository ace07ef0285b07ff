"""Task folders of Harbor: which folders are tasks, what is read of them, and the rows and files that result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from alphaapollo.config.schema import Config
from alphaapollo.data.files import HELD_OUT, read_rows, read_rows_leniently, resolve_entry
from alphaapollo.plugins.tasks.folders import find_tasks, read_task
from alphaapollo.rewards.registry import get_grader
from alphaapollo.runs.input_digests import compute_input_digests
from tests.builders import write_rows

TOML = """
version = "1.0"
[task]
name = "org/sum"
later_key = 1
[agent]
timeout_sec = 60
user = "root"
[verifier]
timeout_sec = 30.0
env = {LEVEL = "2", MODEL = "${MODEL:-tiny}"}
[environment]
build_timeout_sec = "90"
docker_image = "python:3.12"
cpus = 2
memory = "1.5G"
storage_mb = 512
workdir = "/app"
allow_internet = false
env = {A = "b ${HOME}"}
[solution.env]
KEY = "${KEY:-}"
"""


def make_task(folder: Path, toml: str = "", instruction: str = "Add 2 and 3.") -> Path:
    files = {
        "task.toml": toml,
        "instruction.md": instruction,
        "environment/Dockerfile": "FROM python:3.12",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt",
        "solution/solve.sh": "true",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_values_of_a_task(folder):
    task = read_task(make_task(folder / "a", TOML))
    assert (task.name, task.instruction, task.folder) == ("org/sum", "Add 2 and 3.", folder / "a")
    assert (task.agent_timeout, task.verifier_timeout, task.build_timeout) == (60, 30, 90)
    assert (task.cpus, task.memory_mb, task.storage_mb, task.allow_internet) == (2, 1536, 512, False)
    assert (task.docker_image, task.workdir, task.environment) == ("python:3.12", "/app", {"A": "b ${HOME}"})
    assert (task.verifier_environment, task.solution_environment) == ({"LEVEL": "2", "MODEL": "tiny"}, {"KEY": ""})
    assert task.unsupported == ()


def test_defaults_are_those_of_harbor(folder):
    task = read_task(make_task(folder / "a"))
    assert (task.name, task.docker_image, task.workdir) == ("a", "", "")
    assert (task.agent_timeout, task.verifier_timeout, task.build_timeout) == (600, 600, 600)
    assert (task.cpus, task.memory_mb, task.storage_mb, task.allow_internet) == (1, 2048, 10240, True)


@pytest.mark.parametrize(
    ("toml", "unsupported"),
    [
        ('[[steps]]\nname = "one"', "steps (several steps)"),
        ('[environment]\nos = "Windows"', "environment.os=Windows"),
        ('[[environment.mcp_servers]]\nname = "files"', "environment.mcp_servers"),
        ('[verifier]\nnetwork_mode = "no-network"', "verifier.network_mode=no-network"),
        ("[agent]\nuser = 1000", "agent.user=1000"),
        ('[verifier]\nenvironment_mode = "separate"', "verifier.environment (a sandbox for the tests)"),
        ('[verifier.env]\nKEY = "${HOME}"', "${HOME} in verifier.env"),
        ('[environment.env]\nKEY = "${HOME}"', "${HOME} in environment.env"),
    ],
)
def test_what_is_not_supported_is_named(folder, toml, unsupported):
    task = read_task(make_task(folder, toml))
    assert task.unsupported == (unsupported,)
    assert "KEY" not in {**task.environment, **task.verifier_environment}  # never the value of this machine


@pytest.mark.parametrize("name", ["environment/docker-compose.yaml", "trajectory.json"])
def test_files_that_are_not_supported(folder, name):
    (make_task(folder) / name).write_text("")
    assert read_task(folder).unsupported == (name,)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[agent", "task.toml: Expected ']'"),
        ('[agent]\ntimeout_sec = "soon"', "task.toml: Expected `float`, got `str` - at `agent.timeout_sec`. Correct"),
        ("[agent]\ntimeout_sec = inf", "`float` <= 100000000.0 - at `agent.timeout_sec`"),
        ('[environment]\nmemory = "2 gigabytes"', "environment.memory='2 gigabytes' is not a size such as 2G or 512M"),
        ('[environment]\nmemory = "2G"\nmemory_mb = 1', "environment.memory='2G' contradicts environment.memory_mb=1"),
        ('[environment]\nnetwork_mode = "on"', "Invalid enum value 'on' - at `environment.network_mode`"),
        ("x = " + "[" * 5000, "task.toml: "),
        ('x = {y = """\nz"""' + ", 'a'.a" + ".a" * 50_000 + " = 1}", "task.toml: "),
        (f'[environment]\nmemory = "{"9" * 400}G"', "task.toml: "),
    ],
)
def test_wrong_values_are_errors(folder, toml, message):
    with pytest.raises(ValueError) as error:
        read_task(make_task(folder, toml))
    assert str(error.value).startswith(f"{folder}/task.toml: ") and message in str(error.value)


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh"])
def test_missing_files_are_errors(folder, name):
    (make_task(folder) / name).unlink()
    with pytest.raises(ValueError, match=f"{folder}/{name}: no such file. Write"):
        read_task(folder)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("<!-- harbor-canary GUID 1 -->\n# CANARY 2\n\n\nAdd.\n# canary\n", "Add.\n# canary\n"),
        ("\n# Title\nAdd.", "# Title\nAdd."),
        ("The canary <!-- canary -->", "The canary <!-- canary -->"),
    ],
)
def test_canary_lines_are_not_shown(folder, written, shown):
    assert read_task(make_task(folder, instruction=written)).instruction == shown


def test_where_tasks_are_found(folder):
    for name in ("b", "a", "x/c", "x/y/d", "x/y/z/too_deep", ".hidden/e", "a/environment/inner"):
        make_task(folder / name)
    (folder / "x/rows.jsonl").write_text("")  # not at the top
    (folder / "registry.json").write_text("[]")
    (folder / "link").symlink_to("a")
    (folder / "loop").symlink_to(".")
    assert [str(task.relative_to(folder)) for task in find_tasks(folder)] == ["a", "b", "x/c", "x/y/d"]
    assert find_tasks(folder / "a") == [folder / "a"]
    assert find_tasks(folder / "x/y/z/too_deep/tests") == find_tasks(folder / "nothing") == []
    (folder / "rows.jsonl").write_text("")
    assert find_tasks(folder) == []


def test_a_task_of_terminal_bench_1_is_named(folder):
    for name in ("task.yaml", "docker-compose.yaml", "Dockerfile", "run-tests.sh"):
        (folder / "tasks/a").mkdir(parents=True, exist_ok=True)
        (folder / "tasks/a" / name).write_text("")
    with pytest.raises(ValueError, match=r"tasks/a: a task of terminal-bench 1"):
        find_tasks(folder)


def test_rows_and_files_of_a_folder(folder):
    for name in ("b", "a"):
        make_task(folder / "tasks" / name, f'[task]\nname = "org/{name}"')
    (folder / "tasks/a/.git").mkdir()
    (folder / "tasks/a/.git/HEAD").write_text("")
    (folder / "tasks/README.md").write_text("")
    found = resolve_entry("tasks", HELD_OUT)
    assert len(found.files) == 10 and folder / "tasks/b/tests/test.sh" in found.files
    assert found.entry == str(folder / "tasks")  # in another working folder, the same text is other tasks
    rows = read_rows(found.entry)
    assert rows == [
        {
            "prompt": [{"role": "user", "content": "Add 2 and 3."}],
            "data_source": "harbor",
            "env_kwargs": {"task": f"{folder}/tasks/{name}"},
            "extra_info": {"name": f"org/{name}"},
        }
        for name in ("a", "b")
    ]
    assert rows.locations == [f"{folder}/tasks/a", f"{folder}/tasks/b"]
    assert read_rows("tasks/[a-b]") == rows == [*read_rows("tasks/a"), *read_rows("./tasks/../tasks/b")]
    with pytest.raises(ValueError, match=r"tasks#train: a folder of tasks has no splits or configs\. Use tasks"):
        resolve_entry("tasks#train")
    with pytest.raises(ValueError, match=r"tasks has 10 files\. Use one data file\."):
        read_rows_leniently("tasks")
    write_rows(folder / "tasks_2.jsonl", [{"prompt": "2+2?"}])
    with pytest.raises(ValueError, match=r"matches folders of tasks and other data\. Use one entry for each"):
        resolve_entry("tasks*")


def test_invalid_tasks_are_listed(folder):
    make_task(folder / "valid")
    for number in range(7):
        make_task(folder / f"bad{number}", instruction=" \n")
    make_task(folder / "bad0", "[agent]\ntimeout_sec = -1")
    make_task(folder / "bad1", '[[steps]]\nname = "one"')
    with pytest.raises(ValueError) as error:
        read_rows(folder)
    lines = str(error.value).splitlines()
    assert lines[0] == "7 of 8 tasks are invalid:"
    assert lines[1].startswith(f"  {folder}/bad0/task.toml: Expected `float` > 0.0 - at `agent.timeout_sec`.")
    assert "bad1/instruction.md: no instruction (unsupported: steps (several steps)). Write one, or" in lines[2]
    assert "bad2/instruction.md: no instruction (the file is empty)" in lines[3] and lines[6:] == ["  and 2 more"]


def test_links_out_of_a_task_are_not_read(folder):
    (folder / "secret").write_text("")
    task = make_task(folder / "a")
    (task / "tests/inside").symlink_to("test.sh")
    (task / "tests/dangling").symlink_to("nothing")
    assert read_task(task) and len(resolve_entry("a").files) == 6
    for make in (lambda path: path.symlink_to(folder / "secret"), lambda path: path.symlink_to(folder), os.mkfifo):
        make(task / "tests/other")
        assert len(resolve_entry("a").files) == 6
        with pytest.raises(ValueError, match=r"a/tests/other: (a link out of the task's folder|not a regular file)\."):
            read_rows("a")
        (task / "tests/other").unlink()


@pytest.mark.parametrize("name", ["tests/test.sh", "environment/Dockerfile", "tests/new.py"])
def test_every_file_counts_as_data(folder, name):
    make_task(folder / "a")
    config = Config.model_validate({"data": {"train_files": str(folder)}})
    digests = [compute_input_digests(config)["data.train_files"]]
    (folder / "a" / name).write_text("changed")
    digests.append(compute_input_digests(config)["data.train_files"])
    assert [digest for _, digest in digests[0]] != [digest for _, digest in digests[1]]


def test_rows_of_tasks_need_their_environment():
    with pytest.raises(ValueError, match=r"Set env\.env_name=harbor"):
        get_grader("harbor")


THREADS = """
import sys, threading
from pathlib import Path
from alphaapollo.plugins.tasks.folders import read_task

sys.setswitchinterval(1e-6)
start = threading.Barrier(8)
threads = [threading.Thread(target=lambda: (start.wait(), read_task(Path(sys.argv[1])))) for _ in range(8)]
[one.start() for one in threads]
[one.join() for one in threads]
"""


def test_threads_read_tasks_at_the_same_time():
    """Without the first conversion in folders.py, one in three of these processes ends by a segmentation fault."""
    task = Path(__file__).parents[3] / "examples" / "tasks" / "local" / "copy-0"
    for _ in range(3):
        subprocess.run([sys.executable, "-c", THREADS, str(task)], check=True, timeout=60)
