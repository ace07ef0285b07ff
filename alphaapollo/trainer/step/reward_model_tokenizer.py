"""Settings and input of a trained reward model, and the checks before its worker starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from alphaapollo.algorithms.advantages.base import NO_ESTIMATOR
from alphaapollo.config.schema import Config, RewardModel
from alphaapollo.data.rendering import Renderer
from alphaapollo.data.vocabulary import load_tokenizer
from alphaapollo.models.load import find_reward_model_class, load_config
from alphaapollo.rewards.components import TASK
from alphaapollo.rewards.registry import is_gradable
from alphaapollo.types import Message, Prompt, StopReason, Trajectory
from alphaapollo.workers.builders import make_reward_model_section


@dataclass(frozen=True)
class RewardModelTokenizer:
    """Converter of trajectories into token ids of the reward model.

    If policy and reward model have the same tokens and chat template, the policy's token ids are used. Otherwise the
    trajectory, which must have one turn, is rendered and tokenized again.
    """

    renderer: Renderer  # of the reward model
    shares_tokens: bool
    max_length: int | None  # number of last tokens that the reward model reads; None: all
    vocab_size: int

    def describe_reward(self, config: RewardModel) -> str:
        """Return the reward model's part of the reward in the table that is printed before training."""
        text = "the policy's tokens" if self.shares_tokens else "chats in its own template"
        limit = "" if self.max_length is None else f", the last {self.max_length}"
        return f"{config.weight:g} x the reward model's score (of {text}{limit}): {config.model.path}"

    def encode_trajectory(self, trajectory: Trajectory) -> list[int]:
        """Return all token ids of a trajectory, not truncated; empty if the model has sampled nothing."""
        if not trajectory.rows:
            return []
        if self.shares_tokens:
            return self.renderer.append_turn_end(list(trajectory.rows[-1].token_ids))
        prompt, turn = trajectory.first_observation, trajectory.turns[-1]
        assert prompt is not None and len(trajectory.turns) == 1, "make_reward_model_tokenizer refuses several turns"
        rendered_end, end = self.renderer.template_end_ids, self.renderer.turn_end_ids
        if isinstance(prompt, str):
            ids = self.renderer.encode([prompt + turn.text], add_special_tokens=True)[0]
            eos = self.renderer.tokenizer.eos_token_id
            rendered_end = end = [] if eos is None else [eos]
        else:
            chat = self.renderer.render_chat(_append_answer(prompt, turn.text), add_generation_prompt=False)
            ids = self.renderer.encode([chat])[0]
        end_start = len(ids) - len(rendered_end)
        ids = ids[:end_start] if ids[end_start:] == rendered_end else ids
        return ids + end if turn.completion.stop_reason is StopReason.STOP else ids

    def find_input_error(self, token_ids: list[int]) -> str | None:
        """Return why the reward model cannot score these token ids, or None if it can."""
        if len(token_ids) < 2:
            return "there is no text to score"
        if max(token_ids) >= self.vocab_size:
            return f"token {max(token_ids)} is not in the reward model's vocabulary of {self.vocab_size}"
        return None


def uses_reward_function(config: Config, environment_uses_grader: bool, prompts: Iterable[Prompt]) -> bool:
    """Whether a reward function or the environment gives a reward, besides the reward model.

    True for a user's function, for an environment that computes rewards without a grader, if a prompt has a built-in
    grader, or if the advantage estimator needs rewards and there is no reward model. Otherwise raises ValueError if the
    estimator needs rewards, but reward_model.weight is 0 or reward.required contains `task`.
    """
    reward_model, needs_reward = config.reward_model, config.algorithm.adv_estimator != NO_ESTIMATOR
    if needs_reward and not reward_model.enable:
        return True
    if config.custom_reward_function.path or not environment_uses_grader or any(map(is_gradable, prompts)):
        return True
    if needs_reward and (reward_model.weight == 0 or TASK in config.reward.required):
        key, state = ("reward_model.weight", "=0") if reward_model.weight == 0 else ("reward.required", f" has {TASK}")
        raise ValueError(
            f"{key}{state}, but the reward model is the only reward. Change {key}, or add another reward: set custom_"
            "reward_function.path, or give the rows a ground truth and a data_source that has a built-in grader."
        )
    return False


def make_reward_model_tokenizer(
    config: Config, policy_renderer: Renderer, prompts: Sequence[Prompt]
) -> RewardModelTokenizer:
    """Build the tokenizer of the reward model.

    Raises ValueError if reward_model.model.path is not a reward model, or its chat template cannot render a prompt.
    """
    model = make_reward_model_section(config.actor_rollout_ref.model, config.reward_model)
    loaded = load_config(model)
    find_reward_model_class(loaded, model.path)
    if policy_renderer.images is not None:
        raise ValueError(
            "reward_model.enable=true: reward models do not read images, but the policy is a vision-language model. "
            "Set reward_model.enable=false and use a reward function."
        )
    renderer = Renderer(load_tokenizer(model.path, model.trust_remote_code))
    text = loaded.get_text_config()
    highest = max(renderer.tokenizer.get_vocab().values())
    if highest >= text.vocab_size:
        raise ValueError(
            f"the tokenizer of reward_model.model.path={model.path} has token id {highest}, but the model has only "
            f"{text.vocab_size} tokens. Use the tokenizer that the model was trained with."
        )
    shares_tokens = can_share_tokens(policy_renderer, renderer)
    if not shares_tokens:
        _check_chats_can_be_rendered(config, renderer, prompts)
    limit, positions = config.reward_model.max_length, getattr(text, "max_position_embeddings", None)
    if limit is not None and positions is not None and limit > positions:
        raise ValueError(
            f"reward_model.max_length={limit} exceeds the {positions} positions of {model.path}. Set at most "
            f"{positions}, or null."
        )
    return RewardModelTokenizer(renderer, shares_tokens, positions if limit is None else limit, text.vocab_size)


def can_share_tokens(policy: Renderer, reward_model: Renderer) -> bool:
    """Whether the reward model can read the policy's token ids: same ids, and no or the same chat template."""
    token_ids = reward_model.tokenizer.get_vocab()
    same_ids = all(token_ids.get(token) == number for token, number in policy.tokenizer.get_vocab().items())
    return same_ids and reward_model.tokenizer.chat_template in (None, policy.tokenizer.chat_template)


def _check_chats_can_be_rendered(config: Config, renderer: Renderer, prompts: Sequence[Prompt]) -> None:
    """Raise ValueError if the prompts' chats cannot be rendered with the reward model's chat template."""
    path = config.reward_model.model.path
    mismatch = f"the tokenizer or chat template of reward_model.model.path={path} differs from the policy's"
    is_agent = config.env.env_name == "agent"
    if config.env.max_steps > 1 or is_agent:
        setting = "env.env_name=agent" if is_agent else f"env.max_steps={config.env.max_steps}"
        raise ValueError(
            f"{mismatch}, so the reward model can score only chats of one turn. {setting} allows more. Use a reward "
            "model with the policy's tokenizer and chat template, or episodes of one turn."
        )
    contents = [prompt.content for prompt in prompts if not isinstance(prompt.content, str)]
    chats = {tuple(message["role"] for message in content): content for content in contents}
    if chats and not renderer.tokenizer.chat_template:
        raise ValueError(f"{mismatch}, and the reward model has no chat template for the prompts. Save one in {path}.")
    for content in chats.values():  # one chat per sequence of roles, because templates may reject some sequences
        renderer.render_chat(_append_answer(content, "!"), add_generation_prompt=False)


def _append_answer(chat: Iterable[Message], answer: str) -> list[Message]:
    return [*chat, Message(role="assistant", content=answer)]
