"""Console output: live view, plain lines, samples; texts of models never control the terminal."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.file_proxy import FileProxy
from rich.text import Text

from alphaapollo.config.errors import ConfigError, exit_on_config_error, report_error
from alphaapollo.observability import console as console_module
from alphaapollo.observability.console import QUIET_SECONDS, REFRESH_SECONDS, Console
from alphaapollo.observability.console_view import ConsoleView, Phase, format_plain_line, render_view
from alphaapollo.observability.metric_texts import format_duration, format_metric_rows, format_time_summary
from alphaapollo.observability.terminal import Terminal
from alphaapollo.types import Prompt, TrajectoryGroup
from tests.builders import make_group, make_trajectory, make_turn

METRICS = {
    "critic/score/mean": 0.5,
    "reward/accuracy": 0.25,
    "response_length/mean": 34.2,
    "rollout/tokens_per_second": 7431.0,
    "timing/step": 1.5,
}


def show(view: ConsoleView, width: int = 80) -> list[str]:
    file = io.StringIO()
    RichConsole(file=file, width=width).print(render_view(view, 75.0))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def make_view() -> ConsoleView:
    """A run in its third iteration, with every part of the view."""
    view = ConsoleView("outputs/first", total_steps=80)
    for step in (1, 2):
        view.update(step, METRICS | {"reward/accuracy": step / 4, "val/accuracy": 0.125}, elapsed=73.0 + step)
    view.sample = "sample", "reward 1.000   [red]6*7=?[/]", "42"
    for warning in ("old", "step 1: first", "step 2: second", "step 3: [red]third"):
        view.add_warning(warning)
    return view


def make_console(width: int | None = None) -> tuple[io.StringIO, Console]:
    """Console without a terminal, and the file with its lines."""
    file = io.StringIO()
    return file, Console(Terminal(file=file, width=width))


def test_the_view_has_progress_metrics_sample_and_warnings():
    view = make_view()
    view.phase = Phase("generate", 32, since=70.0, done_before=0, done=12)
    assert show(view) == [
        "outputs/first",
        f"step        ╸{' ' * 23} 2/80 in 1:15, 1:18 left",
        f"generate    {'━' * 9}{' ' * 15} 12/32",
        "train       reward 0.500   accuracy 0.500   length 34.2",
        "val         accuracy 0.125",
        "speed       7,431 tokens/s   1.50 s per step",
        "sample      reward 1.000   [red]6*7=?[/]",
        "            42",
        "warning     step 1: first",
        "warning     step 2: second",
        "warning     step 3: [red]third",
    ]
    view.phase.done = 32
    view.activity = "update: policy 0"
    assert show(view)[2] == "update      policy 0"
    for width in (20, 40, 66, 200):
        assert max(map(cell_len, show(view, width))) <= width


def test_a_view_without_metrics_shows_what_the_command_does():
    lines = ["outputs/first", "time        1:15", "start       importing torch"]
    assert show(ConsoleView("outputs/first", activity="start: importing torch")) == lines
    view = ConsoleView(total_steps=3)
    view.update(1, {"critic/score/mean": float("nan")}, elapsed=1.0)
    assert show(view)[-1] == "train       reward nan"


def test_time_left_of_a_command_without_iterations():
    view = ConsoleView()
    view.phase = Phase("generate", total=120, since=10.0, done_before=60)
    view.phase.done = 60
    assert view.format_status(12.0) == " 0:12  generate 60/120"
    view.phase.done, view.phase.text = 80, "accuracy 0.500"
    assert view.format_status(20.0) == " 0:20  generate 80/120   accuracy 0.500   0:20 left"
    view.phase = Phase("generate", total=101, since=10.0, done_before=0, done=1, in_flight=100)
    assert view.format_time_left(61.0) == "0:50 left"  # 51 of 101 in 51 s


def test_rows_of_distillation_and_of_preferences():
    distilled = {"distill/reverse_kl": 0.5, "distill/divergence": 0.25, "distill/agreement": 0.75}
    rows = format_metric_rows(METRICS | distilled | {"critic/score/mean": 0.0})
    assert list(rows.items())[:2] == [
        ("distill", "divergence 0.2500   agreement 0.750"),
        ("train", "accuracy 0.250   length 34.2"),
    ]
    assert format_metric_rows({"distill/reverse_kl": 0.5}) == {"distill": "reverse KL 0.5000"}
    assert format_metric_rows({"critic/score/mean": 0.0}) == {"train": "reward 0.000"}
    metrics = {f"{split}/{name}": 0.5 for split in ("train", "val") for name in ("margin", "loss", "accuracy")}
    assert format_metric_rows(metrics)["val"] == "accuracy 0.500   loss 0.5000   margin 0.500"


def test_one_plain_line_an_iteration():
    view = ConsoleView(total_steps=80)
    view.update(5, METRICS, elapsed=7.0)
    view.update(7, METRICS, elapsed=10.0)
    line = format_plain_line(view, METRICS | {"val/accuracy": 0.5, "outcome/failed": 0.0}, elapsed=10.0)
    assert line.split("   ") == [
        *("step  7/80", "reward 0.500", "accuracy 0.250", "length 34.2", "val: accuracy 0.500", "7,431 tokens/s"),
        *("1.50 s per step", "1:50 left"),
    ]
    lossy = METRICS | {"outcome/failed": 0.44, "response_length/clip_ratio": 0.125, "end/time_limit": 0.0}
    assert format_plain_line(view, lossy, 10.0).split("   ")[3:6:2] == ["without a score 44%", "truncated 12%"]


def make_samples(*rewards: float) -> list[TrajectoryGroup]:
    """One group per reward."""
    groups = []
    for number, reward in enumerate(rewards):
        text = f"\x1b[2J  of [bold]{number}[/]\n\n\n" + "hm " * 300 + "\nthe answer is\t42"
        prompt = Prompt(number, "sums", [{"role": "user", "content": f"[red]6*7={number}"}])
        trajectory = make_trajectory(make_turn([1], text=text), score=reward, prompt_id=number)
        groups.append(make_group(trajectory, prompt=prompt))
    return groups


def test_a_bad_a_median_and_a_good_sample_are_plain_lines_in_a_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    file, console = make_console()
    console.show_samples(make_samples(0.5, 1.0, math.nan, 0.0, 0.5, 0.25, 0.0), is_validation=True)
    console.show_samples(make_samples(0.5))  # of training: only in the live view
    lines = file.getvalue().splitlines()
    starts = [line[: line.index("of")] for line in lines]
    assert starts == [
        f"val sample: reward {reward:.3f}   prompt: [red]6*7={number}   answer: [2J "
        for number, reward in ((3, 0.0), (0, 0.5), (1, 1.0))
    ]
    assert all(line.endswith("the answer is 42") and " ... " in line and len(line) < 300 for line in lines)
    assert "\x1b" not in file.getvalue()


def test_equal_or_missing_rewards_need_no_second_sample():
    file, console = make_console()
    for samples in (make_samples(math.nan, 0.0, 0.0, 0.0), make_samples(math.nan), []):
        console.show_samples(samples, is_validation=True)
    assert [line[:33] for line in file.getvalue().splitlines()] == ["val sample: reward 0.000   prompt"]


def test_any_text_can_be_printed(tmp_path: Path):
    with (tmp_path / "out").open("w", encoding="ascii") as file:  # cannot encode é; \ud800 has no encoding at all
        samples = [replace(group, prompt=Prompt(0, "", "é \ud800 ?")) for group in make_samples(1.0)]
        Console(Terminal(file=file)).show_samples(samples, is_validation=True)
    assert "prompt: ?   ?" in (tmp_path / "out").read_text()


def test_a_closed_stdout_hides_no_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", None)  # as Python has it after `command >&-`
    Console().notify("resumed")
    assert report_error(ValueError("no such file"), 2) == 2
    assert capsys.readouterr().err == "error: no such file\n"


def make_terminal(**environ: str) -> tuple[io.TextIOWrapper, Terminal]:
    """A terminal of 80x24 characters, and the file with what is written to it."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    environ = {"TERM": "xterm"} | environ
    return file, Terminal(file=file, force_terminal=True, width=80, height=24, _environ=environ)


def read(file: io.TextIOWrapper) -> str:
    return file.buffer.getvalue().decode()  # type: ignore[attr-defined]


class Clock:
    """Time of a console that passes only in `run`, which refreshes the console as its thread does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.activity = 100.0, ""
        monkeypatch.setattr(console_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(console_module, "find_activity", lambda: self.activity)

    def run(self, console: Console, seconds: float) -> None:
        for _ in range(int(seconds / REFRESH_SECONDS)):
            self.now += REFRESH_SECONDS
            console.refresh()


def test_status_lines_fill_silences(monkeypatch: pytest.MonkeyPatch):
    clock, (file, console) = Clock(monkeypatch), make_console()
    console.show_line("first")
    clock.activity = "start: importing torch"
    clock.run(console, 10.0)
    console.start(total_steps=3, completed_steps=0)
    clock.activity = ""  # unknown: the last one remains
    clock.run(console, 4.0)
    for _ in range(8):  # while there are other lines, there are no status lines
        clock.run(console, 2.0)
        console.terminal.write("line")
    console.shows_status_lines = False
    clock.run(console, 20.0)
    console.shows_status_lines = True
    console.show_phase("generate", 3, 32)
    clock.run(console, 5.0)
    console.show_phase("generate", 32, 32)
    clock.activity = "update: policy 0"
    clock.run(console, 70.0)
    lines = [line for line in file.getvalue().splitlines() if line != "line"]
    importing = [f" 0:{seconds}  start: importing torch" for seconds in ("03", "06", "10", "13")]
    assert lines[:6] == ["first", *importing, " 0:53  generate 3/32"]
    assert len(lines[6:]) == 22  # in 70 seconds
    assert QUIET_SECONDS + 2 * REFRESH_SECONDS < 5


def test_the_live_view_shows_the_last_sample_and_warnings_and_leaves_its_last_state(monkeypatch: pytest.MonkeyPatch):
    clock, (file, terminal) = Clock(monkeypatch), make_terminal()
    console = Console(terminal).open("outputs/first")
    clock.activity = "start: importing vllm"
    console.refresh()
    assert "importing vllm" in read(file)
    console.start(total_steps=2, completed_steps=1)
    console.show_samples(make_samples(0.0, 1.0, 0.5))
    console.notify("resumed")
    console.show_step(2, METRICS | {"outcome/grader_failed": 0.44})
    console.show_end(["val/accuracy  0.1 -> 0.9"])
    console.close()
    console.close()
    text = read(file)
    assert "\x1b[2J" not in text
    plain = Text.from_ansi(text).plain
    assert plain.count("note resumed") == 1 and plain.count("note step 2: 44% of the trajectories") == 1
    last = [line.rstrip() for line in plain[plain.rindex("2/2 in ") :].splitlines()]
    assert last[0] == "2/2 in 0:00" and last[-1] == "val/accuracy  0.1 -> 0.9"
    assert any(line.startswith("sample      reward 0.500   [red]6*7=2") for line in last)
    assert any(line.startswith("warning     step 2: 44% of the trajectories") for line in last)
    assert sys.stdout.isatty() is False and not isinstance(sys.stdout, FileProxy)


@pytest.mark.parametrize(("term", "encoding"), [("dumb", "utf-8"), ("unknown", "utf-8"), ("xterm", "latin-1")])
def test_a_terminal_that_cannot_show_the_view_has_plain_lines(term: str, encoding: str):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    terminal = Terminal(file=file, force_terminal=True, color_system=None, _environ={"TERM": term})
    with Console(terminal).open("outputs/first") as console:
        console.show_step(1, METRICS)
    assert read(file).startswith("step 1   reward 0.500") and "\x1b" not in read(file)


def test_a_bug_of_the_view_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch):
    file, console = make_console(width=200)
    monkeypatch.setattr(console_module, "find_activity", lambda: 1 / 0)
    console.open("outputs/first")
    console._thread.join(60)  # ends after its first refresh
    console.show_step(1, METRICS)
    console.close()
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("note the console failed")
    assert "ZeroDivisionError: division by zero" in lines and lines[-1].startswith("step 1 ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_display_that_cannot_be_written_does_not_stop_the_run():
    file = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    console = Console(Terminal(file=file))
    console.start(total_steps=2, completed_steps=0)
    console.show_step(1, METRICS)
    console.notify("still here")
    console.close()
    with pytest.raises(OSError, match="No space left"):
        file.write("the file is really full")


def test_the_end_has_the_times_of_all_iterations():
    assert [format_duration(seconds) for seconds in (7.4, 750, 3900)] == ["0:07", "12:30", "1:05:00"]
    assert format_time_summary({}) == ""
    spent = {"timing/start": 10.0, "timing/validate": 2.0, "timing/generate": 10.0, "timing/update": 6.0}
    spent |= {"timing/other": 1.98, "timing/publish": 0.02, "timing/step": 20.0}
    assert format_time_summary(spent).startswith("time: start 33%, generate 33%, update 20%, ")
    assert format_time_summary(spent).split("20%, ")[1].startswith("validate 7%, other 7% of 30.0 s")
    file, console = make_console()
    console.start(total_steps=2, completed_steps=0)
    console.show_step(1, {"timing/generate": 1.0, "timing/update": 0.5, "timing/step": 1.5})
    console.show_step(2, {"timing/generate": 2.0, "timing/update": 0.5, "timing/step": 2.5})
    console.show_end(["next"])
    times, end = file.getvalue().splitlines()[2:]
    assert times.startswith("time: generate 75%, update 25% of 4.0 s") and end == "next"


def test_notes_have_no_secrets_and_control_characters(monkeypatch: pytest.MonkeyPatch):
    """A note may quote the error of a grader, which may quote a model's text."""
    monkeypatch.setenv("SOME_API_KEY", "canary-7f3a91c2d4")
    file, console = make_console()
    console.notify("401: canary-7f3a91c2d4 \x1b[2J\x9b1m\u202e[bold]x\nsecond line")
    assert file.getvalue() == "note 401: $SOME_API_KEY  [2J 1m [bold]x\nsecond line\n"


HOSTILE = "\x1b]52;c;Y2F0\x1b\\\x1b[2J\x9b31m\u202eanswer\nnext"
SHOWN = " ]52;c;Y2F0 \\ [2J 31m answer\nnext"


@pytest.mark.parametrize("value", [HOSTILE, Text(HOSTILE), Text.assemble(("", "yellow"), HOSTILE)])
def test_a_terminal_prints_no_escape_codes(value: str | Text) -> None:
    file = io.StringIO()
    Terminal(file=file, force_terminal=True, color_system=None).print(value, markup=False, soft_wrap=True)
    assert file.getvalue() == SHOWN + "\n"


def test_errors_print_no_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(ValueError(HOSTILE), 1) == 1
    assert capsys.readouterr().err == f"error: {SHOWN}\n"
    with pytest.raises(SystemExit), exit_on_config_error():
        raise ConfigError(f"key={HOSTILE}")
    assert capsys.readouterr().err.endswith(f"key={SHOWN}\n")
