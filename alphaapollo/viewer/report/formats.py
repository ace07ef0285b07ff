"""Turn values into Markdown in which no text of a model is markup, and this Markdown into HTML and PDF."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token

from alphaapollo.evaluation.metrics import Estimate
from alphaapollo.observability.curve import Band, plot_curves, plot_curves_as_figure
from alphaapollo.observability.run_view import format_duration
from alphaapollo.observability.samples import shorten_text
from alphaapollo.viewer.curves import PALETTE, Curve, thin_out
from alphaapollo.viewer.pages.query import format_time

VIEWER = Path(__file__).parents[1]
TEMPLATES = VIEWER / "templates"
MAX_CHARS = 1500  # of a text in a line or of a sample
MAX_BLOCK_CHARS = 20_000  # of another block, e.g. a command
MAX_POINTS = 300  # of a curve
MARKUP = re.compile(r"[\\`*_\[\]<>&~$^]|(?<!\w)@|@(?=[\w-]+\.)|:(?=//)|(?<=\bwww)\.", re.IGNORECASE)
BLOCK_START = re.compile(r"^(?:[-+](?=\s)|-(?=-)|[=#]|\d+[.)](?!\S))")
PARSER = MarkdownIt("commonmark", {"html": False}).enable("table")
PARSER.disable(["link", "image", "autolink", "html_inline", "html_block"])


class Markdown(str):
    """Text that is Markdown. All other values in a template are escaped."""


@dataclass(frozen=True)
class Chart:
    """Curves of a metric, by name, with their 95 % intervals."""

    title: str
    curves: dict[str, Curve]
    bands: dict[str, Band] = field(default_factory=dict)


def clean(text: object) -> str:
    """Return a text in one line, shortened, without control characters, bidirectional controls and lone surrogates."""
    return " ".join(shorten_text(str(text), MAX_CHARS).split())


def to_markdown(value: object) -> str:
    """Format a value in one line. Texts are escaped, so that Markdown shows them as they are."""
    if isinstance(value, Markdown):
        return value
    if isinstance(value, Estimate):
        return f"{value.value:.4g}" + ("" if value.low is None else f" [{value.low:.3g}, {value.high:.3g}]")
    if value is None or isinstance(value, float):
        return "-" if value is None else f"{value:.4g}"
    text = MARKUP.sub(r"\\\g<0>", clean(value))
    return BLOCK_START.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", text)


def make_ticks(text: str, least: int) -> str:
    """Return at least `least` backticks, and more than the text has in a row."""
    return "`" * max(least, *(len(run) + 1 for run in re.findall("`+", text)), 1)


def make_code(value: object) -> Markdown:
    """Format a text as code in a line."""
    text = clean(value) or "-"
    ticks, pad = make_ticks(text, 1), " " if "`" in (text[0], text[-1]) else ""
    return Markdown(f"{ticks}{pad}{text}{pad}{ticks}")


def make_fence(value: object, kind: str = "text") -> Markdown:
    """Format a text as a block of code. Samples are shortened."""
    text = shorten_text(str(value), MAX_CHARS if kind == "text" else MAX_BLOCK_CHARS) or "(empty)"
    ticks = make_ticks(text, 3)
    return Markdown(f"{ticks}{kind}\n{text}\n{ticks}\n")


def make_table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> Markdown:
    """Format a table; nothing without rows. names: of the columns; `>` after a name aligns its column right."""
    lines = [[to_markdown(cell).replace("|", "\\|") for cell in row] for row in rows]
    marks = ["--:" if name.endswith(">") else "---" for name in names]
    head = [to_markdown(name.removesuffix(">")).replace("|", "\\|") for name in names]
    table = [head, marks, *lines]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in table) + "\n" if lines else "")


def render_template(values: Mapping[str, object], charts: Sequence[Chart], with_text_charts: bool) -> str:
    """Render report.md to Markdown.

    with_text_charts: draw charts as text. Otherwise a block of code of the kind `chart` has the number of the chart.
    """

    def draw(at: int) -> Markdown:
        return make_fence(draw_as_text(charts[at]), "plot") if with_text_charts else make_fence(at, "chart")

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    templates = Environment(loader=FileSystemLoader(TEMPLATES), finalize=to_markdown, **options)
    templates.filters |= {"code": make_code, "fence": make_fence, "time": format_time, "duration": format_duration}
    text = templates.get_template("report.md").render(table=make_table, draw=draw, charts=charts, **values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def describe(chart: Chart) -> str:
    """Describe a chart for readers who do not see it."""
    return clean(f"{chart.title} by iteration: {', '.join(chart.curves)}; a table above has the first and last values")


def draw_as_text(chart: Chart) -> str:
    """Draw a chart in characters. A single curve is drawn with its interval."""
    points = {name: list(zip(curve.steps, curve.values, strict=True)) for name, curve in chart.curves.items()}
    if len(points) == 1 and (band := chart.bands.get(next(iter(points)))):
        points |= {"lower bound": [one[:2] for one in band], "upper bound": [one[::2] for one in band]}
    return plot_curves(points).plain


def draw_as_svg(chart: Chart) -> str:
    """Draw a chart as SVG."""
    import matplotlib as mpl
    from matplotlib.rcsetup import cycler

    curves = {name: thin_out(curve, MAX_POINTS) for name, curve in chart.curves.items()}
    points = {name: list(zip(curve.steps, curve.values, strict=True)) for name, curve in curves.items()}
    with mpl.rc_context({"svg.hashsalt": "report", "axes.prop_cycle": cycler(color=PALETTE), "font.size": 10}):
        figure, content = plot_curves_as_figure(points, "", "iteration", chart.bands), StringIO()
        figure.set_size_inches(6.4, 3.2)
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def make_html(text: str, charts: Sequence[Chart], title: str) -> bytes:
    """Make a page of Markdown. The page loads nothing and runs nothing."""
    tokens: list[Token] = []
    for token in PARSER.parse(text):
        if token.type == "fence" and token.info == "chart":
            chart = charts[int(token.content)]
            picture = base64.b64encode(draw_as_svg(chart).encode()).decode()
            html = f'<img src="data:image/svg+xml;base64,{picture}" alt="{escape(describe(chart))}">\n'
            tokens.append(Token("html_block", "", 0, content=html))
            continue
        if token.attrs:  # text-align, which the content security policy does not allow as style
            token.attrs = {"class": "n"}
        tokens.append(token)
    files = (VIEWER / "static" / "style.css", TEMPLATES / "report.css")
    style = "".join(file.read_text(encoding="utf-8") for file in files)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    page = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True).get_template("report.html")
    body = PARSER.renderer.render(tokens, PARSER.options, {})
    return page.render(title=clean(title), style=style, digest=digest, body=body).encode()


def make_pdf(text: str, charts: Sequence[Chart], title: str) -> bytes:
    """Make a PDF of Markdown. Raises ValueError if typst is not installed."""
    try:
        import typst
    except ImportError:
        raise ValueError(
            "a PDF needs the package typst. Run pip install -e '.[pdf]' in the clone, or write .html or .md."
        ) from None
    head = (TEMPLATES / "report.typ").read_text(encoding="utf-8")
    body = "".join(_write_typst(PARSER.parse(text), charts))
    source = f"{head}\n#set document(title: {_quote(clean(title))}, date: none)\n#body(\n{body})\n"
    return bytes(typst.compile(source.encode()))


def _write_typst(tokens: Sequence[Token], charts: Sequence[Chart]) -> Iterator[str]:
    """Yield calls of the functions in report.typ, which are named like the elements of HTML. All texts are quoted."""
    for token in tokens:
        if token.type == "inline":
            yield from _write_typst(token.children or (), charts)
        elif token.type == "fence" and token.info == "chart":
            chart = charts[int(token.content)]
            yield f"picture({_quote(draw_as_svg(chart))}, {_quote(describe(chart))}),\n"
        elif token.type in ("fence", "code_inline"):
            yield f"raw({_quote(token.content.rstrip(chr(10)))}, block: {str(token.type == 'fence').lower()}),"
        elif token.nesting == 1:
            yield f"{token.tag}({'align: right,' if token.attrs else ''}"
        else:
            yield "),\n" if token.nesting == -1 else f"{_quote(token.content or ' ')},"


def _quote(text: str) -> str:
    """Quote a text of printable characters and line breaks as a string of Typst."""
    return json.dumps(text, ensure_ascii=False)
