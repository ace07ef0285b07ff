from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.symptoms.runs import FOLDER, HEALTHY, WARM_UP, holds, load_symptoms, read_points

ROOT = Path(__file__).resolve().parents[3]
SYMPTOMS = load_symptoms()


def test_page_has_a_section_and_a_figure_for_each_symptom() -> None:
    text = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    sections = [title.lower().replace(" ", "_") for title in re.findall(r"^### (.*)$", text, re.MULTILINE)]
    assert sections == [*SYMPTOMS]
    assert re.findall(r"!\[\w+\]\(symptoms/(\w+)\.svg\)", text) == sections
    links = re.findall(r"^\| \[([^]]+)\]\(#([\w-]+)\)", text, re.MULTILINE)
    assert [name.lower().replace(" ", "_") for name, _ in links] == sections
    assert [anchor.replace("-", "_") for _, anchor in links] == sections


def test_each_configuration_is_listed_and_says_what_is_wrong() -> None:
    files = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.yaml")}
    others = {"symptoms", HEALTHY, WARM_UP} | {one.after for one in SYMPTOMS.values()} - {""}
    assert files.keys() - others == SYMPTOMS.keys()
    assert [name for name in SYMPTOMS if not files[name].startswith("# Wrong: ")] == []
    assert [name for name in SYMPTOMS if f"experiment_name: {name}\n" not in files[name]] == []


def test_figures_are_small() -> None:
    figures = {path.stem: path.stat().st_size for path in (ROOT / "docs" / "symptoms").glob("*.svg")}
    assert figures.keys() == SYMPTOMS.keys()
    assert max(figures.values()) < 15_000


def test_conditions() -> None:
    lines = [{"step": 0, "a": 3.0}, {"step": 1, "a": 1.0, "b": 5.0}, {"step": 2, "a": -2.0}]
    texts = ("last a < 0", "max a > 2.5", "last a < -0.5 x first", "max b > 0.5 x last", "first a < 0", "min a > -1e-3")
    assert [text for text in texts if holds(text, lines)] == [*texts[:4]]
    with pytest.raises(ValueError, match="no values of c"):
        read_points(lines, "c")
    with pytest.raises(ValueError, match="'a is low' is not a condition"):
        holds("a is low", lines)
