"""Build the documentation site in site/: `make docs-site`.

The pages are README.md, CONTRIBUTING.md, docs/, the READMEs of examples/, and the generated pages, which only the site
has: keys, interfaces and tested models. They have the same places relative to each other, so that links work on a git
host and on the site. Other files and folders that a page links to become pages too: a file is shown as code, and a
folder as a list. Formulas become MathML, which needs no script.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import yaml
from latex2mathml.converter import convert

from scripts import api_page, metric_page, models_page
from scripts.config_pages import render_pages as render_config_pages

ROOT = Path(__file__).resolve().parents[1]
CODE = re.compile(
    r"^( *)(```+).*?^\1\2$|(?<=\n\n)(?: {4}[^\n]*\n)+|(?P<ticks>`+).+?(?P=ticks)", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)[^)\s#]+")
MATH_BLOCK = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(^(```+).*?^\2$)|^<!--.*?-->$", re.MULTILINE | re.DOTALL)  # group 1: a fenced block, which stays
FORMULA = re.compile(r'<(?:span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</(?:span|div)>', re.DOTALL)
GENERATED = {
    "docs/reference.md": api_page.render_page,
    "docs/tested_models.md": models_page.render_page,
    "docs/all_metrics.md": metric_page.render_page,
}
SHOWN_ON_PAGES = {  # links to these sources lead to the generated page on the site
    "alphaapollo/config/schema": "docs/config/main_ppo.md",
    "alphaapollo/config/metrics.yaml": "docs/all_metrics.md",
    **{f"alphaapollo/config/{name}_keys.yaml": f"docs/{name}_keys.md" for name in ("verl", "trl", "openrlhf", "swift")},
}
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml"}
REDIRECT = '<!doctype html><title>Moved</title><meta http-equiv="refresh" content="0; url={0}"><a href="{0}">{0}</a>\n'
LINKED_PAGE = "---\ntitle: {name}\nsearch:\n  exclude: true\n---\n\n# {name}\n\n`{path}`\n\n{content}\n"


def main_pages(root: Path) -> list[Path]:
    """Pages that the navigation must contain."""
    return [
        root / "README.md",
        root / "CONTRIBUTING.md",
        *root.glob("docs/**/*.md"),
        *root.glob("examples/**/README.md"),
    ]


def change_outside_code(change: Callable[[str], str], text: str) -> str:
    """Text with a change of everything but its fenced, indented and inline code."""
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def show_file(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells)
    return f"`````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n`````"


def show_folder(path: Path) -> str:
    names = [child.name for child in sorted(path.iterdir()) if not child.name.startswith(("_", "."))]
    return "\n".join(f"* [{name}]({name})" for name in names)


class Pages:
    """Copy of the pages of a repository, with everything that they link to."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.places = {path: self.find_place(path) for path in main_pages(root)}
        self.waiting = [*self.places]
        self.places |= {root / source: folder / page for source, page in SHOWN_ON_PAGES.items()}
        self.broken: list[str] = []

    def find_place(self, path: Path) -> Path:
        """Where the copy of a file or folder is written."""
        place = self.folder / path.relative_to(self.root)
        if path.is_dir():
            return place / "index.md"
        if path.name == "README.md":
            return place.with_name("index.md")
        return place if path.suffix in (".md", ".svg", ".png") else place.with_name(f"{place.name}.md")

    def move_link(self, page: Path, target: str) -> str:
        """The link of a page to a file or folder of the repository, as a link to its copy."""
        path = Path(os.path.normpath((page if page.is_dir() else page.parent) / target))
        path = path / "README.md" if (path / "README.md").is_file() else path
        if not path.exists() or not path.is_relative_to(self.root):
            self.broken.append(f"{page.relative_to(self.root)}: {target}")
            return target
        if path not in self.places:
            self.places[path] = self.find_place(path)
            self.waiting.append(path)
        return os.path.relpath(self.places[path], self.places[page].parent)

    def read(self, path: Path) -> str:
        if path.suffix == ".md":
            return MATH_BLOCK.sub(r"$$\n\1$$", COMMENT.sub(r"\1", path.read_text(encoding="utf-8")))
        content = show_folder(path) if path.is_dir() else show_file(path)
        return LINKED_PAGE.format(name=path.name, path=path.relative_to(self.root), content=content)

    def write(self) -> None:
        """Write all copies. Raises ValueError for links to files that do not exist."""
        while self.waiting:
            path = self.waiting.pop()
            place = self.places[path]
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.suffix != ".md":
                shutil.copyfile(path, place)
                continue

            def move_links(text: str, page: Path = path) -> str:
                return LINK.sub(lambda link: self.move_link(page, link[0]), text)

            place.write_text(change_outside_code(move_links, self.read(path)), encoding="utf-8")
        if self.broken:
            raise ValueError("These links lead to files that do not exist:\n" + "\n".join(self.broken))


def finish_html(text: str) -> str:
    """A built page with formulas as MathML, and with tables and formulas that the keyboard can scroll."""

    def draw(formula: re.Match[str]) -> str:
        if formula[1] == "(":
            return convert(unescape(formula[2]))
        return f'<div class="formula" tabindex="0">{convert(unescape(formula[2]), display="block")}</div>'

    return FORMULA.sub(draw, text).replace("<table>", '<table tabindex="0">')


def write_redirects(site: Path, moved: dict[str, str]) -> None:
    """Write a redirect for each earlier page: {path of the page: path#anchor of the section that it became}."""
    for old, new in moved.items():
        path, _, anchor = new.partition("#")
        place = site / old.removesuffix(".md")
        target = os.path.relpath(site / path.removesuffix("README.md").removesuffix(".md"), place)
        place.mkdir(parents=True)
        (place / "index.html").write_text(REDIRECT.format(f"{target}/#{anchor}"), encoding="utf-8")


def write_llms_txt(pages: Path, nav: list[Any], site: Path) -> None:
    """Write llms.txt (https://llmstxt.org): the pages of each tab of the navigation with title and first paragraph."""
    lines = ["# alphaapollo", "", f"> {first_paragraph((pages / 'index.md').read_text(encoding='utf-8'))}"]
    for tab in nav:
        (title, entries), *_ = tab.items()
        lines += ["", f"## {title}", ""]
        for name in list_pages(entries):
            text = (pages / name).read_text(encoding="utf-8")
            address = f"{name.removesuffix('.md').removesuffix('index')}/".replace("//", "/").lstrip("/")
            heading = re.search(r"^# (.*)$", text, re.MULTILINE)
            lines.append(f"- [{heading[1] if heading else name}]({address}): {first_paragraph(text)}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def list_pages(entries: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation, in its order."""
    if isinstance(entries, str):
        yield entries
    for part in entries.values() if isinstance(entries, dict) else entries if isinstance(entries, list) else ():
        yield from list_pages(part)


def first_paragraph(text: str) -> str:
    """First paragraph of a page, on one line and without links."""
    paragraphs = (part for part in COMMENT.sub("", text).split("\n\n") if re.match(r"\s*[\w\[`]", part))
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(next(paragraphs, "").split()))


def build(folder: Path) -> Path:
    """Build the site in an empty folder, and return the folder of its pages. Any warning ends the program."""
    Pages(ROOT, folder / "pages").write()
    for name, text in {**{name: render() for name, render in GENERATED.items()}, **render_config_pages()}.items():
        (folder / "pages" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "pages" / name).write_text(text, encoding="utf-8")
    shutil.copyfile(ROOT / "mkdocs.yml", folder / "mkdocs.yml")
    shutil.copyfile(ROOT / "docs" / "site.css", folder / "pages" / "site.css")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stderr.partition('Traceback')[0]}The strict build of the site failed.")
    for page in (folder / "site").rglob("*.html"):
        page.write_text(finish_html(page.read_text(encoding="utf-8")), encoding="utf-8")
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8")).get("nav", [])
    write_llms_txt(folder / "pages", nav, folder / "site")
    write_redirects(folder / "site", yaml.safe_load((ROOT / "docs" / "redirects.yaml").read_text(encoding="utf-8")))
    return folder / "site"


def main() -> None:
    folder, site = ROOT / "build" / "docs", ROOT / "site"
    for old in (folder, site):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.move(build(folder), site)
    print("The site is in site/. To look at it: .venv/bin/python -m http.server -d site -b 127.0.0.1 8000")


if __name__ == "__main__":
    main()
