"""Check that bad input gives one error or a counted outcome: `python -m tests.fuzz.check --seed 7`.

    configs         keys with invalid values in YAML and on the command line, up to the start of workers
    data            parquet and jsonl files: truncated, damaged, with wrong types, partial characters, huge values
    templates       chat templates that are invalid, do not show the chat, or recurse
    tool calls      random model outputs, through the tool call parsers to the tools

Anything else is a failure: another exception, an error that names neither key nor file, a hang, a configuration that
differs after loading its config.yaml.

The last line is a JSON object; the exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from tests.fuzz import answers, configs, data_files
from tests.fuzz.verdict import Case, Report

SHARES = {"configs": 0.4, "data": 0.25, "templates": 0.1, "tool calls": 0.25}
Draw = Callable[[st.DataObject, Path], Case]


def check(chosen_seed: int, cases: int, folder: Path, quick: bool = False, progress: bool = False) -> Report:
    """`quick`: no vLLM parsers."""
    report = Report()
    for kind, draw in kinds(folder, quick).items():
        _run(kind, draw, max(1, round(SHARES[kind] * cases)), chosen_seed, folder, report)
        if progress:
            print(f"{kind}: {dict(report.kinds[kind])}, {len(report.failures)} failures", flush=True)
    return report


def kinds(folder: Path, quick: bool) -> dict[str, Draw]:
    task = configs.Task.make(folder / "task")
    renderer = Renderer(load_tokenizer(str(folder / "task" / "model")))
    renderer.tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    template_renderer = Renderer(load_tokenizer(str(folder / "task" / "model")))
    parsers = [answers.make_parser("")] if quick else [answers.make_parser(""), answers.make_parser("hermes")]

    def config(data: st.DataObject, place: Path) -> Case:
        if data.draw(st.booleans()):
            arguments = data.draw(configs.command_lines())
            return Case(repr(arguments), lambda: configs.from_words(task, arguments), _parts(arguments))
        keys = data.draw(configs.settings())
        names = (*_parts(keys), "memory:", "own.yaml")
        return Case(repr(keys), lambda: configs.from_yaml(task, keys, place), names)

    def data_file(data: st.DataObject, place: Path) -> Case:
        path = data.draw(data_files.files(place))
        return Case(
            repr(path.read_bytes()[:300]), lambda: data_files.read(path, renderer), (path.name, "chat template")
        )

    def template(data: st.DataObject, place: Path) -> Case:
        text = data.draw(data_files.templates)
        return Case(repr(text), lambda: data_files.render(text, template_renderer), ("chat template", "chat_template"))

    def tool_call(data: st.DataObject, place: Path) -> Case:
        if data.draw(st.booleans()):
            name, given = data.draw(st.sampled_from(answers.NAMES)), data.draw(answers.arguments)
            return Case(repr((name, given[:200])), lambda: answers.call_directly(name, given), ())
        text, parse = data.draw(answers.turns), data.draw(st.sampled_from(parsers))
        return Case(repr(text[:300]), lambda: answers.call_tools(text, parse), ())

    return {"configs": config, "data": data_file, "templates": template, "tool calls": tool_call}


def _parts(keys: object) -> tuple[str, ...]:
    """The keys and their parts: an error may name a section, or the last part of a key."""
    assert isinstance(keys, dict | list)
    whole = [str(key).split("=")[0].strip("+~") for key in keys]
    parts = {part for key in whole for part in [key, *key.split(".")] if len(part) > 1}
    return tuple({*parts, "override", "KEY=VALUE", "option"} if isinstance(keys, list) else parts)


def _run(kind: str, draw: Draw, cases: int, chosen_seed: int, folder: Path, report: Report) -> None:
    @seed(chosen_seed)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def once(data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as place, contextlib.redirect_stderr(io.StringIO()):
            report.take(kind, draw(data, Path(place)))

    once()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = check(options.seed, options.cases, Path(folder), progress=True)
    for failure in report.failures:
        print(failure)
    print(report.summary())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
