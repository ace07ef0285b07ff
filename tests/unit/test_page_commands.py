"""Every command on a page can be run by tests/loop/test_documentation.py, or the page says why it is not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page_commands import PAGES, ROOT, Command, read_page

RUN = "python -m alphaapollo.trainer.main_ppo"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_can_be_run_or_are_marked(page: Path) -> None:
    _, problems = read_page(page.read_text(encoding="utf-8"))
    assert not problems, "\n".join(f"{page.relative_to(ROOT)}:{problem}" for problem in problems)


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("Run\n\n    frobnicate --all\n", 3, "program `frobnicate`"),
        ("```bash\necho\ncat a | frobnicate\n```\n", 3, "program `frobnicate`"),
        ("```\ncat a | frobnicate\n```\n", 2, "program `frobnicate`"),
        ("    make test && nvidia-smi\n", 1, "make with other"),
        ("    CUDA_VISIBLE_DEVICES=0 torchrun a.py\n", 1, "program `torchrun`"),
        ("    make gpu-check ARGS=-v\n", 1, "make gpu-check"),
        ("    python nowhere/a.py\n", 1, "program `python nowhere/a.py`"),
        ("    python\n", 1, "program `python `"),
        ("    python -m pip install flash-attn\n", 1, "module pip"),
        ("    examples/nowhere/run.sh\n", 1, "program `examples/nowhere/run.sh`"),
        ("    it's text\n", 1, "this is not shell"),
        ("* a list\n\n  ```\n  frobnicate\n  ```\n", 4, "program `frobnicate`"),
        ("<!-- not run: -->\n    frobnicate\n", 2, "the marking has no reason"),
        ("<!-- not run -->\n    frobnicate\n", 2, "the marking has no reason"),
        ("    frobnicate  # not run:\n", 1, "the marking has no reason"),
        ("    # not run: it is slow\n", 1, "the marking has no command"),
        ("<!-- not run: it is slow -->\n\nText\n\n    python -m alphaapollo\n", 1, "not above a block"),
        ("<!-- not run: it is slow -->\n```yaml\na: 1\n```\n", 1, "not above a block"),
        ("Text\n\n<!-- not run: it is slow -->\n", 3, "not above a block"),
        ("```console\n$ frobnicate\noutput\n```\n", 2, "program `frobnicate`"),
    ],
)
def test_problems_are_found(text: str, line: int, problem: str) -> None:
    _, (found,) = read_page(text)
    assert found.startswith(f"{line}: ") and problem in found


MARKED = f"""<!-- not run: needs a GPU -->
    make bench

Text

    {RUN} a.b=1  # first; not run: it is slow
    make test
"""
MIXED = f"""```bash
# a comment
{RUN} \\
    algorithm=grpo ...

cat <<'END'
it's
END
a.b=1 'c.d=[x y]'  # keys
```
"""
CONSOLE = """
```python
x = 1
```
```python
y = 2
```
```console
$ cat a
one
$ cat b
two
```
```text
frobnicate
```
"""


def test_markings() -> None:
    (marked, mixed), problems = read_page(MARKED)
    assert problems == []
    assert marked.commands == [Command(2, "make bench", "needs a GPU")]
    assert [command.reason for command in mixed.commands] == ["it is slow", None]
    assert mixed.make_script() == "\n"  # CI runs make test


def test_commands_keep_their_lines() -> None:
    (block,), problems = read_page(MIXED)
    assert problems == []
    assert [(command.line, command.is_keys) for command in block.commands] == [(3, False), (6, False), (9, True)]
    expected = f"\n{RUN} \\\n    algorithm=grpo ...\n\ncat <<'END'\nit's\nEND\nkeys a.b=1 'c.d=[x y]'  # keys\n"
    assert block.make_script() == expected


def test_output_and_named_files_are_kept() -> None:
    (block,), problems = read_page(CONSOLE)
    assert problems == []
    assert [command.text for command in block.commands] == ["cat a", "cat b"]
    assert block.output == "one\ntwo" and block.files == {"python": "y = 2\n"}
