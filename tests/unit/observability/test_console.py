import io
import math
from dataclasses import replace
from pathlib import Path

import pytest

from alphaapollo.config.errors import report_error
from alphaapollo.observability.console import Console, RunView, format_duration, format_plain_line, render_view
from alphaapollo.observability.terminal import Terminal
from alphaapollo.types import Completion, EpisodeEnd, Prompt, Score, StopReason, Trajectory, TrajectoryGroup, Turn

METRICS = {
    "critic/score/mean": 0.5,
    "reward/accuracy": 0.25,
    "response_length/mean": 34.2,
    "rollout/tokens_per_second": 7431.0,
    "timing/step": 1.5,
}


def show(view: RunView, width: int = 80) -> list[str]:
    terminal = Terminal(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with terminal.capture() as capture:
        terminal.print(render_view(view, elapsed=75.0, width=width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_view_shows_bars_curve_and_figures():
    view = RunView(total_steps=80)
    for step in (1, 2):
        view.update(step, METRICS | {"reward/accuracy": step / 4, "val/accuracy": 0.125})
    view.step_times.append(1.0)
    view.phase_progress = {"generate": (12, 32), "update": (0, 1)}
    lines = show(view)
    assert lines[0].startswith("run ")
    assert lines[0].endswith("2/80 steps   1:15 elapsed, 1:18 left")
    assert lines[1].startswith("generate  ━━━")
    assert lines[1].endswith("12/32")
    assert lines[2].startswith("update ")
    assert lines[2].endswith("running")
    assert lines[4] == "reward/accuracy"
    assert lines[-3:] == [
        "train     reward 0.500   accuracy 0.500   length 34.2",
        "val       accuracy 0.125",
        "speed     7,431 tokens/s   1.50 s per step",
    ]


def test_the_view_fits_a_narrow_terminal_and_an_empty_run():
    view = RunView(total_steps=3)
    assert len(show(view)) == 3
    for step in (1, 2, 3):
        view.update(step, METRICS)
    for width in (40, 80, 200):
        assert max(map(len, show(view, width))) <= width
    assert show(view)[0].endswith("3/3 steps   1:15 elapsed")


def test_values_that_are_not_numbers_are_shown_but_not_drawn():
    view = RunView(total_steps=3)
    view.update(1, {"critic/score/mean": float("nan")})
    assert view.curve_points == []
    assert show(view)[-1] == "train     reward nan"


def test_one_plain_line_an_iteration():
    view = RunView(total_steps=80, step=0)
    view.update(7, METRICS)
    view.step_times.extend([1.0, 2.0])
    assert format_plain_line(view, METRICS | {"val/accuracy": 0.5}) == (
        "step  7/80   reward 0.500   accuracy 0.250   length 34.2   val: accuracy 0.500   7,431 tokens/s   "
        "1.50 s per step   1:50 left"
    )


def test_failures_are_shown_if_there_are_any():
    view = RunView(total_steps=2)
    view.update(1, METRICS)
    clean = format_plain_line(view, METRICS | {"outcome/failed": 0.0, "end/time_limit": 0.0})
    lossy = METRICS | {"outcome/failed": 0.44, "response_length/clip_ratio": 0.125, "end/time_limit": 0.0}
    assert "failed" not in clean and "timed out" not in clean
    assert "   failed 44%   truncated 12%   7,431 tokens/s" in format_plain_line(view, lossy)


def test_warnings_are_printed_with_their_iteration(tmp_path: Path):
    with (tmp_path / "out.txt").open("w") as file:
        console = Console(Terminal(file=file, width=200))
        console.start(total_steps=2, completed_steps=0)
        for step in (1, 2):
            console.show_step(step, METRICS | {"outcome/grader_failed": 0.44})
        console.close()
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("note step 1: 44% of the trajectories have no reward because the grader failed")


def test_without_a_terminal_there_are_plain_lines(tmp_path: Path):
    with (tmp_path / "out.txt").open("w") as file:
        console = Console(Terminal(file=file))
        console.start(total_steps=2, completed_steps=0)
        console.show_phase("generate", 0, 4)
        console.notify("trainer.cpu_threads=2 has no effect")
        console.show_step(1, METRICS)
        console.show_step(2, METRICS)
        console.close()
    phase, first, second, third = (tmp_path / "out.txt").read_text().splitlines()
    assert phase.split() == ["0:00", "generate", "..."]
    assert first == "note trainer.cpu_threads=2 has no effect"
    assert second.startswith("step 1/2   reward 0.500")
    assert third.endswith("1.50 s per step")


def make_samples(*rewards: float) -> list[TrajectoryGroup]:
    """One group per reward."""
    groups = []
    for number, reward in enumerate(rewards):
        text = f"\x1b[2J  of [bold]{number}[/]\n\n\n" + "hm " * 300 + "\nthe answer is\t42"
        turn = Turn([1], Completion([1], [0.0], StopReason.STOP, 0), text)
        prompt = Prompt(number, "sums", [{"role": "user", "content": f"[red]6*7={number}"}])
        trajectory = Trajectory(number, 0, [turn], [], Score(reward), EpisodeEnd.DONE)
        groups.append(TrajectoryGroup(prompt, [trajectory]))
    return groups


def test_a_bad_a_median_and_a_good_sample_are_plain_lines_in_a_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    console = Console(Terminal(file=file))
    console.show_samples(make_samples(0.5, 1.0, math.nan, 0.0, 0.5, 0.25, 0.0))
    lines = file.getvalue().splitlines()
    starts = [line[: line.index("of")] for line in lines]
    assert starts == [
        f"val sample: reward {reward:.3f}   prompt: [red]6*7={number}   answer: [2J "
        for number, reward in ((3, 0.0), (0, 0.5), (1, 1.0))
    ]
    assert all(line.endswith("the answer is 42") and " ... " in line and len(line) < 300 for line in lines)
    assert "\x1b" not in file.getvalue()


def test_equal_or_missing_rewards_need_no_second_sample():
    file = io.StringIO()
    console = Console(Terminal(file=file))
    console.show_samples(make_samples(math.nan, 0.0, 0.0, 0.0))
    assert [line[:33] for line in file.getvalue().splitlines()] == ["val sample: reward 0.000   prompt"]
    console.show_samples(make_samples(math.nan))
    console.show_samples([])
    assert file.getvalue().count("\n") == 1


def test_samples_are_a_table_in_a_terminal_and_any_text_can_be_shown(tmp_path: Path):
    with (tmp_path / "out").open("w", encoding="ascii") as file:  # cannot encode é; \ud800 has no encoding at all
        Console(Terminal(file=file)).show_samples(
            [replace(group, prompt=Prompt(0, "", "é \ud800 ?")) for group in make_samples(1.0)]
        )
    assert "prompt: ?   ?" in (tmp_path / "out").read_text()
    shown = io.StringIO()
    terminal = Terminal(file=shown, force_terminal=True, width=80, color_system=None, _environ={"TERM": "xterm"})
    console = Console(terminal)
    console.start(total_steps=2, completed_steps=0)
    console.show_samples(make_samples(0.0, 1.0))
    console.close()
    lines = shown.getvalue().splitlines()
    (start,) = (index for index, line in enumerate(lines) if "validation prompt" in line)
    assert [line.split()[:2] for line in lines[start + 2 :] if line.startswith(("  0.", "  1."))] == [
        ["0.000", "[red]6*7=0"],
        ["1.000", "[red]6*7=1"],
    ]
    assert "42" in shown.getvalue() and "\x1b[2J" not in shown.getvalue()


def test_forced_colours_do_not_make_a_file_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    console = Console(Terminal(file=file))
    console.start(total_steps=2, completed_steps=0)
    console.show_step(1, METRICS)
    console.notify("[bold]resumed[/] after 7 s")
    console.close()
    assert "\x1b" not in file.getvalue()


def test_a_closed_stdout_hides_no_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", None)  # as Python has it after `command >&-`
    Console().notify("resumed")
    assert report_error(ValueError("no such file"), 2) == 2
    assert capsys.readouterr().err == "error: no such file\n"


def test_phases_before_the_first_iteration_are_printed_without_a_terminal():
    file = io.StringIO()
    console = Console(Terminal(file=file, width=80))
    console.start(total_steps=2, completed_steps=0)
    console.show_phase("start", 0, 1)
    console.show_phase("validate", 0, 4)
    console.show_phase("validate", 2, 4)
    console.show_step(0, METRICS)
    console.show_phase("generate", 0, 4)
    console.close()
    first, second, line = file.getvalue().splitlines()
    assert [first.split(), second.split()] == [["0:00", "start", "..."], ["0:00", "validate", "..."]]
    assert line.startswith("step 0/2")


def test_the_live_view_leaves_its_last_state_and_the_notices():
    file = io.StringIO()
    console = Console(Terminal(file=file, force_terminal=True, width=80, color_system=None, _environ={"TERM": "xterm"}))
    console.start(total_steps=2, completed_steps=1)
    console.show_phase("generate", 1, 4)
    console.notify("resumed")
    console.show_step(2, METRICS)
    console.close()
    console.close()
    text = file.getvalue()
    assert "note resumed" in text
    assert "2/2 steps" in text


def test_notice_contains_no_secret(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "canary-7f3a91c2d4")
    file = io.StringIO()
    Console(Terminal(file=file)).notify("401: canary-7f3a91c2d4 is no key")
    assert file.getvalue() == "note 401: $SOME_API_KEY is no key\n"


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


def test_clock():
    assert [format_duration(7.4), format_duration(750), format_duration(3900), format_duration(None)] == [
        "0:07",
        "12:30",
        "1:05:00",
        "?",
    ]
