"""The engine of docs/engines.md, in two iterations of main_ppo."""

from __future__ import annotations

import re

from tests.loop.conftest import ROOT, Runner


class PageRunner(Runner):
    """Runs main_ppo with the engine of the page."""

    module = "tests.loop.page_engine"

    def words(self, overrides: tuple[str, ...], name: str = "run") -> list[str]:  # type: ignore[override]
        return [str(self.out), *super().words(overrides, name)]


def test_engine_of_the_page(ppo: Runner) -> None:
    page = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    code, *_ = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 80
    (ppo.out / "small_engine.py").write_text(code)
    runner = PageRunner(ppo.task, ppo.out)
    try:
        done = runner.run("trainer.controller=local", "actor_rollout_ref.rollout.name=hf", "data.val_files=")
    finally:
        runner.close()
    lines = [line for line in done.metrics if line["step"] in (1, 2)]
    assert len(lines) == 2 and all(line["sync/probe_gap"] < 5e-5 for line in lines), lines
