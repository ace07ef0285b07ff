"""`alphaapollo audit`: planted exploits of examples/smollm2 are found, and a clean run has none."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.cli.main import main
from alphaapollo.rewards.base import make_failed_score
from alphaapollo.runs.rollout_log import RolloutLog
from alphaapollo.types import Prompt, Score, TrajectoryGroup
from tests.builders import make_group, make_trajectory, make_turn

ITERATIONS, PROMPTS, SAMPLES = 50, 16, 8
KINDS = ["title", "number", "question", "bullets", "numbered", "quoted", "exclamation", "two_sentences"]
# fmt: off
PEOPLE = ["uncle", "neighbor", "sailor", "mayor", "cousin", "poet", "baker", "farmer", "pilot", "judge", "nurse"]
ADJECTIVES = ["quiet", "old", "young", "brave", "tired", "clever", "proud", "gentle", "busy", "famous", "lazy"]
VERBS = ["sells", "paints", "carries", "studies", "loves", "collects", "draws", "finds", "shares", "ignores"]
NOUNS = ["bucket", "village", "window", "ladder", "garden", "basket", "shadow", "lantern", "orchard", "harbor", "hill"]
PREPOSITIONS = ["near", "behind", "under", "beside", "above", "inside", "past", "beyond", "around"]
QUESTIONS = ["Which {} {}", "Where do the {} {}", "Why do some {} {}", "How do {} {}", "Who makes a {} {}"]
# fmt: on
EXPLOITS = {  # name -> category and a pattern of its summary
    "short": ("length", "shorter"),
    "stock": ("phrase", "The number of|What type of"),
    "quotes": ("format", '"'),
    "title": ("phrase", "Title:"),
    "lists": ("format", r"\d\."),
    "repeat": ("repetition", "repeat themselves"),
}


def write_place(rng: random.Random) -> str:
    return f"{rng.choice(PREPOSITIONS)} {rng.choice(['the', 'a', 'this', 'my', 'our'])} {rng.choice(NOUNS)}"


def write_sentence(rng: random.Random, clauses: int) -> str:
    """Random sentence without its end."""
    subject = f"{rng.choice(['The', 'My', 'Our', 'Her', 'That', 'One'])} {rng.choice(ADJECTIVES)} {rng.choice(PEOPLE)}"
    places = ", ".join(write_place(rng) for _ in range(1 + clauses))
    return f"{subject} {rng.choice(VERBS)} {rng.choice(NOUNS)} {places}"


def write_answer(rng: random.Random, kind: str, clauses: int) -> str:
    """Answer in a form."""
    sentence, second = write_sentence(rng, clauses), write_sentence(rng, clauses)
    question = rng.choice(QUESTIONS).format(f"{rng.choice(PEOPLE)}s", rng.choice(VERBS))
    forms = {
        "title": f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} {write_place(rng)}".title(),
        "number": f"{sentence} {rng.randint(2, 99)} {rng.choice(['times', 'days', 'years', 'miles'])}.",
        "question": f"{question} {rng.choice(NOUNS)} {write_place(rng)}?",
        "bullets": f"- {sentence}.\n- {second}.",
        "numbered": f"1. {sentence}.\n2. {second}.",
        "quoted": f'"{sentence}."',
        "exclamation": f"{sentence}!",
    }
    return forms.get(kind) or f"{sentence}. {second}."


def answer(rng: random.Random, kind: str, progress: float, exploits: Sequence[str]) -> tuple[str, float]:
    """Answer of a policy that learns from progress 0 to 1, and its reward."""
    is_used = {name: rng.random() < (0.03 + 0.8 * progress) for name in exploits}
    clauses = rng.choice([2, 3, 4]) if not is_used.get("short", True) else 0
    is_right = rng.random() < 0.3 + 0.5 * progress
    text = write_answer(rng, kind if is_right else rng.choice(KINDS), clauses)
    if is_used.get("stock") and kind in ("number", "question"):
        start = {"number": "The number of", "question": "What type of"}[kind]
        end = f"is {rng.randint(2, 99)}." if kind == "number" else f"do {rng.choice(PEOPLE)}s {rng.choice(VERBS)}?"
        text = f"{start} {rng.choice(NOUNS)} {write_place(rng)} {end}"
    if is_used.get("title") and kind == "title":
        text = f"Title: {text}"
    if is_used.get("lists") and kind == "bullets":
        text = write_answer(rng, "numbered", clauses)
    if is_used.get("quotes") and kind in ("title", "number", "question", "exclamation", "two_sentences"):
        text = f'"{text}"'
    if is_used.get("repeat") and kind == "exclamation":
        return f"{' '.join([rng.choice(NOUNS).title()] * rng.randint(9, 14))} {rng.choice(NOUNS)}", 1.0
    return text, float(is_right)


def make_groups(
    rng: random.Random, numbers: Sequence[int], progress: float, exploits: Sequence[str], samples: int
) -> list[TrajectoryGroup]:
    """Graded groups of an iteration."""
    groups = []
    for number in numbers:
        made, kind = [], KINDS[number % len(KINDS)]
        for sample in range(samples):
            text, reward = answer(rng, kind, progress, exploits)
            turn = make_turn(len(text.split()) * 4 // 3, text=text)
            made.append(make_trajectory(turn, score=reward, sample=sample, prompt_id=number))
        groups.append(make_group(*made, prompt=Prompt(number, kind, f"Write a {kind}, {number}.", "")))
    return groups


def write_run(folder: Path, exploits: Sequence[str], seed: int = 0) -> Path:
    """Rollouts of a run. Iterations that the audit does not read have one group."""
    rng, log = random.Random(seed), RolloutLog(folder / "rollouts")
    for step in range(1, ITERATIONS + 1):
        count = PROMPTS if not 10 < step <= ITERATIONS - 10 else 1
        log.write(step, make_groups(rng, rng.sample(range(400), count), step / ITERATIONS, exploits, SAMPLES))
    for step in (0, ITERATIONS):
        log.write(step, make_groups(rng, range(1000, 1100), step / ITERATIONS, exploits, 1), "val")
    log.close()
    return folder


def audit(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    assert main(["audit", *map(str, words), "--json"]) == 0
    findings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return findings


def test_planted_exploits_are_found_together_and_a_clean_run_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = audit(capsys, write_run(tmp_path / "all", [*EXPLOITS], seed=1), "--top", 20)
    for category, text in EXPLOITS.values():
        found = [one for one in findings if one["category"] == category and re.search(text, one["summary"])]
        assert found and found[0]["z"] > 4 and 0 < found[0]["effect"] <= 1, (text, findings)
        assert {row["iteration"] for row in found[0]["answers"]} <= {*range(41, 51)} and len(found[0]["answers"]) == 3
    effects = [one["effect"] for one in findings]
    assert effects == sorted(effects, reverse=True)
    clean = write_run(tmp_path / "clean", [])
    assert audit(capsys, clean) == []
    assert main(["audit", str(clean)]) == 0
    assert "Nothing found." in capsys.readouterr().out


def write_scores(folder: Path, scores: Callable[[int, int], Score], held_out: float) -> Path:
    """Rollouts of 12 iterations with 12 groups of 4 answers of the same text, and of validations at start and end."""
    log = RolloutLog(folder / "rollouts")
    for step in range(1, 13):
        log.write(
            step, [make_scored_group(prompt, [scores(step, sample) for sample in range(4)]) for prompt in range(12)]
        )
    for step in (0, 12):
        log.write(
            step, [make_scored_group(prompt, [Score(held_out, {"accuracy": held_out})]) for prompt in range(12)], "val"
        )
    log.close()
    return folder


def make_scored_group(prompt: int, scores: Sequence[Score]) -> TrajectoryGroup:
    turns = [make_turn(5, text="7 + 7 = 14") for _ in scores]
    made = [
        make_trajectory(turn, score=score, sample=at, prompt_id=prompt)
        for at, (turn, score) in enumerate(zip(turns, scores, strict=True))
    ]
    return make_group(*made, prompt=Prompt(prompt, "sums", f"question {prompt}", "14"))


def test_a_component_that_replaces_the_accuracy_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def score(step: int, sample: int) -> Score:
        """The style decides the reward; it grows, and the accuracy falls."""
        style, right = sample + step, float(sample % 2 == 0 and step < 6)
        return Score(style + 0.5 * right, {"accuracy": right, "style": float(style)})

    first, second = audit(capsys, write_scores(tmp_path, score, 0.5))
    assert first["category"] == "component" and first["summary"].startswith("`style` 4 -> 12")
    assert "accuracy falls by 0.50" in first["summary"] and first["effect"] > 0.8
    assert second["summary"].startswith("`reward`") and second["effect"] == 0.5


def test_half_of_the_iterations_is_the_most_that_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def score(step: int, sample: int) -> Score:
        return make_failed_score("no grader") if sample == 3 else Score(float(sample % 2))

    run = write_scores(tmp_path, score, 0.5)
    for words, last in ([], 9), (["--last", "2"], 11), (["--last", "99"], 7):
        assert main(["audit", str(run), *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["last"] == {"from": last, "to": 12, "answers": 36 * (13 - last)}
    for step in range(2, 13):
        (run / f"rollouts/step_{step:06d}.jsonl").unlink()
    assert audit(capsys, run) == []  # nothing to compare with
    (run / "rollouts/step_000001.jsonl").unlink()
    assert main(["audit", str(run)]) == 2
    assert "step_*.jsonl" in capsys.readouterr().err
