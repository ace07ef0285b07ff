"""`alphaapollo plot RUN METRIC ...`: plot metrics of a run in the terminal, and into a file."""

from __future__ import annotations

from collections.abc import Sequence

from alphaapollo.cli.main import make_parser
from alphaapollo.cli.subcommand import report_refusals
from alphaapollo.config.metrics import describe_axis
from alphaapollo.observability.curve import plot_curves, plot_curves_as_figure, read_curves, save_figure
from alphaapollo.observability.terminal import Terminal
from alphaapollo.utils.hub import expand_home


@report_refusals
def plot(argv: Sequence[str]) -> int:
    """Plot up to four metrics. Returns exit code 2 if the run has no values of a metric, or for a wrong file."""
    parser = make_parser("plot")
    parser.add_argument("run", metavar="RUN", type=expand_home, help="the run's folder, or its metrics.jsonl")
    parser.add_argument("metrics", metavar="METRIC", nargs="+", help="up to 4, e.g. critic/score/mean val/accuracy")
    parser.add_argument(
        "--figure", "--png", metavar="FILE", type=expand_home, help="also save the plot as .png, .svg or .pdf"
    )
    options = parser.parse_args(argv)
    path = options.run / "metrics.jsonl" if options.run.is_dir() else options.run
    curves = read_curves(path, options.metrics)
    text = plot_curves(curves)
    if options.figure:
        figure = plot_curves_as_figure(curves, str(options.run), y_label=describe_axis(curves))
        save_figure(figure, options.figure)
    Terminal(highlight=False).print(text, soft_wrap=True)
    return 0
