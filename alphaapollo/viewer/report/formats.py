"""Turn the values of a report into a page in which no text of a model is markup, and its charts into images."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from alphaapollo.evaluation.metrics import Estimate
from alphaapollo.observability.curve import Band, plot_curves_as_figure
from alphaapollo.observability.run_view import format_duration
from alphaapollo.observability.terminal import shorten_text
from alphaapollo.viewer.curves import PALETTE, Curve, thin_out
from alphaapollo.viewer.pages.query import format_time

VIEWER = Path(__file__).parents[1]
TEMPLATES = VIEWER / "templates"
MAX_CHARS = 1500  # of a text in a line or of a sample
MAX_POINTS = 300  # of a curve


@dataclass(frozen=True)
class Chart:
    """Curves of a metric, by name, with their 95 % intervals."""

    title: str
    curves: dict[str, Curve]
    bands: dict[str, Band] = field(default_factory=dict)


def format_value(value: object) -> str:
    """Format a value in one line: texts shortened, without control characters, bidirectional controls and lone
    surrogates."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, Estimate):
        return f"{value.value:.4g}" + ("" if value.low is None else f" [{value.low:.3g}, {value.high:.3g}]")
    if value is None or isinstance(value, float):
        return "-" if value is None else f"{value:.4g}"
    return " ".join(shorten_text(str(value), MAX_CHARS).split())


def make_code(value: object) -> Markup:
    """Format a text as code in a line."""
    return Markup("<code>{}</code>").format(format_value(value) or "-")


def make_block(text: object, max_chars: int = MAX_CHARS) -> Markup:
    """Format a text as a block of code."""
    return Markup("<pre><code>{}\n</code></pre>").format(shorten_text(str(text), max_chars) or "(empty)")


def render_page(values: Mapping[str, object]) -> bytes:
    """Render report.html. The page loads nothing and runs nothing."""
    files = (VIEWER / "static" / "style.css", TEMPLATES / "report.css")
    style = "".join(file.read_text(encoding="utf-8") for file in files)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=format_value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    templates.filters |= {"block": make_block, "svg": draw_as_svg, "time": format_time, "duration": format_duration}
    return templates.get_template("report.html").render(style=style, digest=digest, **values).lstrip().encode()


def draw_as_svg(chart: Chart) -> Markup:
    """Draw a chart as SVG, in base64."""
    import matplotlib as mpl
    from matplotlib.rcsetup import cycler

    curves = {name: thin_out(curve, MAX_POINTS) for name, curve in chart.curves.items()}
    points = {name: list(zip(curve.steps, curve.values, strict=True)) for name, curve in curves.items()}
    with mpl.rc_context({"svg.hashsalt": "report", "axes.prop_cycle": cycler(color=PALETTE), "font.size": 10}):
        figure, content = plot_curves_as_figure(points, "", "iteration", chart.bands), StringIO()
        figure.set_size_inches(6.4, 3.2)
        figure.savefig(content, format="svg", metadata={"Date": None})
    return Markup(base64.b64encode(content.getvalue().encode()).decode())
