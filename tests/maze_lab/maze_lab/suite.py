from collections.abc import Sequence
from pathlib import Path

from openai import AsyncOpenAI

from alphaapollo.rollout.suites import ModelServer, Suite, SuiteScore


class MazeSuite(Suite):
    """Suite `maze:CELLS`: whether a chat model walks so many cells in one answer."""

    def check(self) -> None:
        if not self.task.isdigit():
            raise ValueError(f"{self.text}: {self.task} is not a number of cells. Write e.g. maze:5.")

    async def run(self, server: ModelServer, folder: Path) -> Sequence[SuiteScore]:
        async with AsyncOpenAI(base_url=server.url, api_key=server.api_key) as client:
            answer = await client.chat.completions.create(
                model=server.model_name, messages=[{"role": "user", "content": f"Walk {self.task} cells."}]
            )
        path = answer.choices[0].message.content or ""
        return [SuiteScore("maze", "walked", float(path.count(">") >= int(self.task)), stderr=None, rows=1)]
