"""README.md and docs/ agree with the repository: links, presets, config keys, and the values of the recipes."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path

import pytest

from alphaapollo.algorithms.advantages import estimator_names, get_estimator
from alphaapollo.algorithms.policy_losses import get_policy_loss, policy_loss_names
from alphaapollo.config.keys import COMMANDS, VERL_GROUP_SIZE, format_value, list_keys, list_sections
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config
from tests.page_commands import DOCS, NEEDS_PLUGINS, SKILL

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS = ROOT / "docs" / "algorithms"
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml"))

LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PRESET = re.compile(r"(?<![\w.])algorithm=([a-z]\w*)")
SECTIONS = sorted({name for config in COMMANDS.values() for name in config.model_fields})
DOTTED_KEY = re.compile(rf"(?<![\w./$-])(?:{'|'.join(SECTIONS)})(?:\.[a-z]\w*)+(?![\w(/*])")
MAZE_LAB = ("maze", "maze_signs", "short_path", "walk")  # sections of the package that docs/plugins.md shows
NOT_OUR_KEYS = {  # columns of verl's data, and the example of a dropped key in README.md
    "reward_model.ground_truth",
    "reward_model.style",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
}
FILE_TYPES = {"parquet", "jsonl", "json", "pkl", "py", "md", "yaml", "sh"}
SHORT_KEY = re.compile(r"`([a-z]\w*)=[^=`]+`")


def broken_links(page: Path) -> list[str]:
    """Links to files and headings that do not exist."""
    found = []
    for name, anchor in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        target = page.parent / name if name else page
        is_wrong = anchor and target.suffix == ".md" and target.exists() and anchor not in list_anchors(target)
        if "://" not in name and (is_wrong or not target.exists()):
            found.append(f"{name}#{anchor}" if is_wrong else name)
    return found


@cache
def list_anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them: `## A b, c` has `a-b-c`."""
    headings = HEADING.findall(FENCED.sub("", page.read_text(encoding="utf-8")))
    texts = [re.sub(r"\]\([^)]*\)|[`*\[]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


def unknown_names(text: str) -> list[str]:
    """Presets and config keys in a text that do not exist."""
    known = known_keys()
    last = {key.rsplit(".", 1)[-1] for key in known}
    return [
        *(name for name in PRESET.findall(text) if name not in RECIPES),
        *unknown_dotted_keys(text),
        *(key for key in SHORT_KEY.findall(text) if key not in last),
    ]


@cache
def known_keys() -> set[str]:
    """Keys and sections of all commands, including verl's spellings."""
    own = {key for config in COMMANDS.values() for key in (*list_keys(config), *list_sections(config))}
    return own | {VERL_GROUP_SIZE}


def unknown_dotted_keys(text: str) -> list[str]:
    """Dotted names in a text that start like a key, but are not a key, module, file name or data column."""
    return [name for name in DOTTED_KEY.findall(text) if not is_known(name)]


def is_known(name: str) -> bool:
    parts = name.split(".")
    if parts[1] in MAZE_LAB:
        return True
    keys = {".".join(parts[:count]) for count in range(2, len(parts) + 1)}  # below a dict's key, any name may follow
    if keys & (known_keys() - sections_of_all()) or name in sections_of_all() or keys & NOT_OUR_KEYS:
        return True
    return parts[1] in FILE_TYPES or any((ROOT / "alphaapollo" / parts[0]).glob(f"{parts[1]}*"))


@cache
def sections_of_all() -> set[str]:
    return {section for config in COMMANDS.values() for section in list_sections(config)}


def rows_of(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """(header, cells) of every row of every table."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and header and not set(line) <= set("|-"):
            yield header, cells
        header = (header or cells) if cells else []


@cache
def recipe(name: str) -> Config:
    return load_config(Config, "ppo", [f"algorithm={name}"])


def value_of(config: Config, key: str) -> object:
    return reduce(getattr, key.split("."), config)


def shows(cell: str, value: object) -> bool:
    """Whether a cell of a table agrees with a value: the same number, the same word, or unset."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(re.fullmatch(r"[\d.e-]+", cell)) and float(cell) == value
    return cell == ("unset" if value is None else format_value(value))


def wrong_values(text: str) -> list[str]:
    """Rows `| key | value |` of a page with another value than the recipe in the header, or, under `here`, than any
    recipe that the page is about."""
    here = dict.fromkeys(PRESET.findall(text))
    found = []
    for header, cells in rows_of(text):
        key = cells[0].strip("`")
        if header[0] != "key" or key not in list_keys(Config):
            continue
        for title, cell in zip(header[1:], cells[1:], strict=True):
            names = list(here) if title == "here" else [title] if title in RECIPES else []
            if cell and names and not any(shows(cell, value_of(recipe(name), key)) for name in names):
                found.append(f"{key}: {cell}")
    return found


@pytest.mark.parametrize("page", [*DOCS, SKILL] if DOCS else [], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_presets_files_and_keys_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert broken_links(page) == []
    assert [name for name in PRESET.findall(text) if name not in RECIPES] == []
    assert unknown_paths(text) == []
    if "verl" not in page.name:
        assert unknown_dotted_keys(text) == []


@NEEDS_PLUGINS
def test_links_of_other_pages_lead_to_files() -> None:
    pages = [ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *ROOT.glob("examples/**/*.md"), *ROOT.glob("scripts/**/*.md")]
    assert {page: links for page in pages if (links := broken_links(page))} == {}


@pytest.mark.parametrize("page", sorted(ALGORITHMS.glob("*.md")), ids=lambda page: page.name)
def test_keys_and_values_are_those_of_the_configuration(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    assert unknown_names(text) == []
    assert wrong_values(text) == []


def test_the_index_has_every_recipe_with_its_parts() -> None:
    rows = {}
    for header, cells in rows_of((ALGORITHMS / "README.md").read_text(encoding="utf-8")):
        if header[0] == "`algorithm=`":
            rows[cells[0].split("]")[0].strip("[")] = cells[1:4] + cells[5:7]
    expected = {}
    for name in RECIPES:
        config = recipe(name)
        loss, mode = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.actor_rollout_ref.actor.loss_agg_mode
        by_row = get_policy_loss(loss).level == "sequence"
        expected[name] = [
            config.algorithm.adv_estimator,
            "" if loss == "ppo" else loss,
            "sequences" if by_row else "" if mode == "token-mean" else mode,
            "yes" if "values" in get_estimator(config.algorithm.adv_estimator).needs else "",
            "" if config.group_size == 1 else str(config.group_size),
        ]
    assert rows == expected


def test_the_index_has_every_estimator_and_loss() -> None:
    text = (ALGORITHMS / "README.md").read_text(encoding="utf-8")
    ours = [name for name in estimator_names() if get_estimator(name).fn.__module__.startswith("alphaapollo.")]
    ours += [name for name in policy_loss_names() if get_policy_loss(name).fn.__module__.startswith("alphaapollo.")]
    assert [name for name in ours if not re.search(rf"\b{name}\b", text)] == []


def test_figures_about_choosing_are_those_of_the_gallery() -> None:
    gallery = {cells[0]: cells[2] for _, cells in rows_of((ALGORITHMS / "gallery.md").read_text(encoding="utf-8"))}
    quoted = re.findall(r"`(\w+)` (\d\.\d+ ± \d\.\d+)", (ALGORITHMS / "README.md").read_text(encoding="utf-8"))
    assert len(quoted) > 10
    assert [(name, figure) for name, figure in quoted if gallery[name] != figure] == []


def test_the_checks_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    links = "[a](page.md) [b](gone.md#part) ![c](gone.svg) [d](https://x.y/z#a) [f](#one-two) [g](page.md#two)"
    page.write_text(f"## One `two`\n{links}\n```\n[e](code.md)\n```\n")
    assert broken_links(page) == ["gone.md", "gone.svg", "page.md#two"]
    names = "`algorithm=grop` `algorithm.gama` `algorithm.gamma` `kl_coeff=1` `kl_coef=1` `a == b`"
    assert unknown_names(names) == ["grop", "algorithm.gama", "kl_coeff"]
    table = "algorithm=ppo\n| key | here | |\n|---|---|---|\n| `algorithm.lam` | {} | |\n| `algorithm.gamma` | 1.0 | |"
    assert (wrong_values(table.format("0.95")), wrong_values(table.format("0.9"))) == ([], ["algorithm.lam: 0.9"])


PATH = re.compile(r"(?<![\w./*<{$-])(?:[\w-]+/)+[\w-]+\.(?:py|sh|sbatch)\b")


def unknown_paths(text: str) -> list[str]:
    """Source files that a text names by a path and that do not exist."""
    return [name for name in PATH.findall(text) if not any(file.endswith(f"/{name}") for file in source_files())]


@cache
def source_files() -> list[str]:
    folders = ("alphaapollo", "examples", "scripts", "tests", "configs")
    return [str(path) for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix != ".pyc"]


def prose(source: str) -> str:
    """Docstrings and comments of a Python file."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kinds = (tokenize.COMMENT, tokenize.STRING)
    texts = [token.string for token in tokens if token.type in kinds]
    return "\n".join(text for text in texts if text.startswith(("#", '"""', 'r"""')))


@pytest.mark.parametrize("folder", ["alphaapollo", "scripts", "examples", "tests"])
def test_docstrings_and_comments_name_files_that_exist(folder: Path) -> None:
    sources = [path for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    found = {str(path): unknown_paths(prose(path.read_text(encoding="utf-8"))) for path in sources}
    assert not {name: missing for name, missing in found.items() if missing}
    assert unknown_paths("see trainer/nowhere.py and trainer/loop.py") == ["trainer/nowhere.py"]
