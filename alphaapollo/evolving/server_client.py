"""A model behind an OpenAI-compatible server: OpenAI's, vLLM's, or `alphaapollo serve`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alphaapollo.config.schema import ServedModel
from alphaapollo.evolving.client import CallFailed, Reply
from alphaapollo.rewards.openai_client import NOT_AS_OPENAI, client_options
from alphaapollo.types import Message, Sampling
from alphaapollo.utils.redaction import redacted

SEEDS = 2**31  # not every server takes larger ones
OF_THE_ASKER = (400, 404, 413, 422)  # statuses that blame what was asked; the others blame the server


class ServerClient:
    """`name`: of the model in the configuration. Retries are the openai package's, bounded by max_retries.

    ValueError: the package or the key is missing.
    """

    def __init__(self, name: str, model: ServedModel):
        options = client_options(f"models.{name}", model.base_url, model.api_key_env, model.timeout, model.max_retries)
        import openai

        self._name, self._model = name, model
        self.limit: float | None = model.timeout * (1 + model.max_retries)
        self._client = openai.AsyncOpenAI(**options)

    async def start(self) -> None:
        """Nothing: a server that is not there now may be there when it is asked."""

    async def generate(self, messages: Sequence[Message], sampling: Sampling, name: str) -> Reply:
        import openai

        try:
            reply: Any = await self._client.chat.completions.create(
                model=self._model.name,
                messages=list(messages),  # type: ignore[arg-type]  # ours are of plain roles
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=sampling.seed % SEEDS,
            )
            choice, usage = reply.choices[0], reply.usage
            text, stop = choice.message.content, choice.finish_reason
            counts = int(usage.prompt_tokens), int(usage.completion_tokens)
        except openai.APIStatusError as error:
            refused = error.status_code in OF_THE_ASKER
            raise CallFailed(redacted(f"status {error.status_code}: {error}"), down=not refused) from error
        except openai.APIError as error:
            raise CallFailed(redacted(f"{type(error).__name__}: {error}"), down=True) from error
        except NOT_AS_OPENAI as error:
            why = f"{self._name} does not answer as OpenAI's server does: {type(error).__name__}: {error}"
            raise CallFailed(redacted(why), down=True) from error
        if not isinstance(text, str):
            raise CallFailed(f"{self._name} answers without a text", down=True)
        return Reply(text, *counts, stop=str(stop))

    def fits(self, messages: Sequence[Message]) -> bool:
        return True  # the server knows

    async def close(self) -> None:
        await self._client.close()
