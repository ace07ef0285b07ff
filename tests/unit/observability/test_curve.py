from pathlib import Path

import numpy as np
import pytest

from alphaapollo.observability.curve import (
    PALETTE,
    Curve,
    compute_value_range,
    plot_curves,
    plot_curves_as_figure,
    plot_run,
    read_curves,
    save_figure,
)
from tests.builders import write_rows


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    rows = [{"step": step, "val/accuracy": value} for step, value in enumerate((0.25, None, 0.75))]
    return Path(write_rows(tmp_path / "metrics.jsonl", rows))


def make_curves(**curves: list[tuple[float, float]]) -> dict[str, Curve]:
    return {name: Curve(name, *np.array(points, dtype=float).T) for name, points in curves.items()}


def test_points_are_read_and_gaps_left_out(metrics: Path):
    (curve,) = read_curves(metrics, ["val/accuracy"]).values()
    assert (curve.name, curve.steps.tolist(), curve.values.tolist()) == ("val/accuracy", [0, 2], [0.25, 0.75])
    with pytest.raises(ValueError, match=r"'loss'.* val/accuracy"):
        read_curves(metrics, ["loss"])


def test_drawing_has_rows_steps_and_a_legend_for_several():
    curves = make_curves(**{"val/accuracy": [(0, 0.25), (80, 0.97)], "val/accuracy_greedy": [(0, 0.3), (80, 0.99)]})
    lines = plot_curves(curves, width=60, height=8).plain.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0] == "share, higher is better" and lines[1].lstrip().startswith("1.00┤")
    assert lines[9].split() == ["0", "80"]
    assert lines[10:] == ["   ━━━ val/accuracy 0.970", "   ••• val/accuracy_greedy 0.990"]


@pytest.mark.parametrize("points", [[(0, 0.5)], [(0, 2.0), (1, 2.0)], [(5, -1.0), (5, 3.0)]])
def test_short_and_flat_curves_are_drawn(points: list[tuple[float, float]]):
    assert plot_curves(make_curves(a=points), width=30, height=4).plain


def test_axis_and_ticks():
    ranges = {
        (0.24, 0.97): (0, 1),
        (0.01, 0.02): (0.01, 0.02),
        (-3.0, 5.0): (-3, 5),
        (2.0,): (1.5, 2.5),
        (7.0, 7 + 1e-8): (6.5, 7.5 + 1e-8),
    }
    assert {values: compute_value_range(values) for values in ranges} == ranges


def test_few_runs_are_thin_lines_and_many_have_a_band_of_the_same_color():
    steps, values = np.array([0.0, 1.0]), np.array([0.25, 0.5])
    band = np.array([[0, 0.2, 0.3], [1, 0.4, 0.6]])
    few, many = Curve("", steps, values, band, [Curve("", steps, values * 0.5), Curve("", steps, values * 3)]), band
    figure = plot_curves_as_figure({"few": few, "many": Curve("", steps, values, many)}, numbers=[9, 2])
    (axes,) = figure.axes
    colors, widths = [line.get_color() for line in axes.lines], [line.get_linewidth() for line in axes.lines]
    assert colors == [PALETTE[1]] * 3 + [PALETTE[2]] and axes.lines[0].get_linestyle() == "--"
    assert widths[1] == widths[2] < widths[0] and len(axes.collections) == 1 and axes.get_ylim()[1] > 1.5
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["few", "many"]


def test_a_plotted_run_has_its_intervals_and_is_shown_by_notebooks(tmp_path: Path):
    rows = [{"step": 1, "val/loss": 0.5}, {"step": 2, "val/loss": 0.7, "val/loss/low": 0.6, "val/loss/high": 0.9}]
    figure = plot_run(Path(write_rows(tmp_path / "metrics.jsonl", rows)), ["val/loss"], x_label="round")
    (axes,) = figure.axes
    (band,) = axes.collections
    assert band.get_paths()[0].get_extents().bounds == (2, 0.6, 0, pytest.approx(0.3))
    assert axes.get_xlabel() == "round" and axes.get_ylabel() == "nats per token, lower is better"
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_figure_is_saved_by_the_ending(tmp_path: Path, suffix: str, start: bytes):
    save_figure(plot_curves_as_figure(make_curves(a=[(0, 0.5)])), file := tmp_path / "out" / f"curve.{suffix}")
    assert file.read_bytes().startswith(start)
    with pytest.raises(ValueError, match=r"curve\.jpg must end in \.png, \.svg or \.pdf"):
        save_figure(plot_curves_as_figure(make_curves(a=[(0, 0.5)])), tmp_path / "curve.jpg")
