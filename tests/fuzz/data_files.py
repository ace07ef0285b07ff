"""Prompt files that are truncated, damaged or have wrong types; and chat templates."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pandas as pd
from hypothesis import strategies as st

from alphaapollo.data.prompts import apply_length_limit, load_prompts
from alphaapollo.data.rendering import Renderer, check_chat_is_shown
from tests.fuzz.values import anything, scalars, texts

CHAT = [{"role": "user", "content": "w2 w3"}]
VALID_ROW = {"prompt": CHAT, "data_source": "exact", "reward_model": {"ground_truth": "w4"}, "extra_info": {"index": 1}}
COLUMNS = ["prompt", "data_source", "reward_model", "extra_info", "env_kwargs", "metadata", "answer"]

rows = st.dictionaries(st.sampled_from(COLUMNS), anything, max_size=4).map(lambda changed: VALID_ROW | changed)
messages = st.lists(
    st.fixed_dictionaries({}, optional={"role": scalars, "content": anything, "name": scalars}) | anything, max_size=3
)
random_rows = st.builds(lambda prompt: VALID_ROW | {"prompt": prompt}, messages | texts) | rows
LONG_PROMPT = {"prompt": [{"role": "user", "content": "w2 " * 100_000}]}


@st.composite
def files(draw: st.DrawFn, folder: Path) -> Path:
    kind = draw(st.sampled_from(["jsonl", "jsonl", "json", "parquet", "columns", "bytes", "txt"]))
    if kind == "bytes":
        path = folder / draw(st.sampled_from(["data.jsonl", "data.json", "data.parquet"]))
        path.write_bytes(draw(st.binary(max_size=60)))
        return path
    if kind == "columns":
        return _columns(draw, folder / "data.parquet")
    given = draw(st.lists(random_rows | st.just(VALID_ROW | LONG_PROMPT) | st.just(VALID_ROW), min_size=0, max_size=4))
    path = folder / f"data.{kind}"
    if kind == "parquet":
        try:
            pd.DataFrame(given).to_parquet(path)
        except Exception:  # noqa: BLE001 pyarrow raises many types for unsupported rows
            path.write_bytes(b"PAR1")
    else:
        ascii = draw(st.booleans())
        text = json.dumps(given, ensure_ascii=ascii) if kind == "json" else _lines(given, ascii)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    _damage(draw, path)
    return path


def _lines(given: list[Any], ascii: bool) -> str:
    return "".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in given)


def _columns(draw: st.DrawFn, path: Path) -> Path:
    """A parquet file with types that JSON does not have."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    odd = [b"\xff", None, "w2", 7, 1.5, float("nan"), True, ["w2"], {"role": "user", "content": "w2"}]
    names = draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=4))
    arrays = [pa.array([draw(st.sampled_from(odd))] * 2) for _ in names]
    if draw(st.booleans()):
        arrays[0] = pa.array([b"good", b"\xff"]).view(pa.string())
    pq.write_table(pa.table(arrays, names=names), path)
    return path


def _damage(draw: st.DrawFn, path: Path) -> None:
    data = path.read_bytes()
    how = draw(st.sampled_from(["no", "no", "cut", "flip", "zero"]))
    if how == "no" or not data:
        return
    at = draw(st.integers(0, len(data) - 1))
    changed = {
        "cut": data[:at],
        "flip": data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :],
        "zero": data[:at] + b"\0" + data[at:],
    }
    path.write_bytes(changed[how])


def read(path: Path, renderer: Renderer) -> str:
    """Read the file as in a run. It is accepted if its prompts can be tokenized, sent to a grader and logged."""
    prompts = load_prompts(str(path), "prompt")
    if isinstance(prompts[0].content, list):
        check_chat_is_shown(prompts[0].content, renderer)
    kept, _ = apply_length_limit(prompts, renderer, 32, "left")
    for prompt in kept:
        pickle.loads(pickle.dumps(prompt))
        str(prompt.ground_truth or "").encode()
    return "accepted"


PIECES = ["{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages[0].content }}", "{{ m.role }}",
          "{% if add_generation_prompt %}", "{% endif %}", "{{ missing }}", "{{ missing.entry }}", "{{ 1 / 0 }}",
          "{{ 'a' + 1 }}", "{{ messages[9] }}", "{{ raise_exception('no') }}", "{% for i in range(10**9) %}", "text",
          "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages | tojson }}", "{{ m.content | nothing }}",
          "{% set x = messages | first %}{{ x['content'] }}", "{{ 'x' * 10**6 }}", "{{ '%d' % 'x' }}", "{{ m.a.b }}",
          "{% include 'x' %}", "{{ messages.__class__ }}", "{%", "}}", "\ud800", "{{ [1,2][5] }}", "{{ {}['a'] }}",
          "{{ m.content.format(1) }}", "{{ '{0.x}'.format(1) }}", "{{ m.content | int }}",
          "{{ none | length }}"]  # fmt: skip
templates = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)


def render(template: str, renderer: Renderer) -> str:
    """Render a valid prompt: the template works, or the error names it."""
    renderer.tokenizer.chat_template = template
    chat = [{"role": "user", "content": "w2 w3"}]
    check_chat_is_shown(chat, renderer)  # type: ignore[arg-type]
    renderer.encode_prompt(chat)  # type: ignore[arg-type]
    return "accepted"
