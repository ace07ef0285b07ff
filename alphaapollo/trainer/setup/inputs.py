"""Read and check the data, tokenizers and reward function of a run before a worker starts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from alphaapollo.algorithms.advantages import get_estimator
from alphaapollo.config.schema import Config, Model, Teacher, TeacherModel
from alphaapollo.data.findings import DataFinding
from alphaapollo.data.images import make_example_image
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.data.stream import choose_rows
from alphaapollo.environments.base import get_environment_spec
from alphaapollo.launch.input_checks import check_rewards, explain_missing_cluster, make_renderer, read_prompts
from alphaapollo.launch.model_requirements import ModelUse, check_models
from alphaapollo.models.load import list_template_notices, load_config
from alphaapollo.planning.trials import describe_sources, try_environment
from alphaapollo.rollout.self_teacher import check_demonstrations
from alphaapollo.trainer.progress import TrainingGoal
from alphaapollo.trainer.step.curriculum import assign_stages
from alphaapollo.trainer.step.distillation import TeacherClient
from alphaapollo.trainer.step.reward_model_tokenizer import (
    RewardModelTokenizer,
    make_reward_model_settings,
    make_reward_model_tokenizer,
    uses_reward_function,
)
from alphaapollo.trainer.step.shaped_rewards import check_prompts_have_length_budgets
from alphaapollo.types import ImageInput, Message, Prompt
from alphaapollo.weight_sync.verification import Probe
from alphaapollo.workers.builders import make_critic_model_section, make_teacher_model_sections


@dataclass(frozen=True)
class TrainingInputs:
    """Checked inputs of a training run."""

    prompts: list[Prompt]
    val_prompts: list[Prompt]
    goal: TrainingGoal
    probe: Probe  # weight syncs are verified by its log-probs
    reward_model_tokenizer: RewardModelTokenizer | None
    has_reward_function: bool  # whether a reward function or the environment computes a reward, besides a reward model
    notices: list[str]
    findings: list[DataFinding]
    sources: dict[str, str]  # data source -> what is known about its training prompts
    stops: str  # tokens that end a turn


def read_training_inputs(config: Config) -> TrainingInputs:
    """Read the tokenizers and the data, then try the reward function and one environment reset.

    Raises ValueError if one of them cannot be used.
    """
    data, trainer = config.data, config.trainer
    check_models(list_model_uses(config))
    renderer = make_renderer(config.env, config.actor_rollout_ref.model, data.apply_chat_template_kwargs)

    def read_split(
        files: str | list[str], config_key: str, max_samples: int
    ) -> tuple[list[Prompt], list[str], list[DataFinding]]:
        choose = partial(choose_rows, max_rows=max_samples, seed=data.seed, shuffle=data.shuffle)
        return read_prompts(files, config_key, renderer, data, choose)

    prompts, notices, findings = read_split(data.train_files, "data.train_files", data.train_max_samples)
    if config.teacher.divergence:
        notices += check_teachers(config, renderer, prompts)
    notices += list_template_notices(config.actor_rollout_ref.model, renderer, data.apply_chat_template_kwargs)
    notices += filter(None, [explain_missing_cluster(config)])
    val_prompts: list[Prompt] = []
    if data.val_files:
        val_prompts, more, found = read_split(data.val_files, "data.val_files", data.val_max_samples)
        notices, findings = notices + more, list(dict.fromkeys(findings + found))
    assign_stages(prompts, data)
    if config.algorithm.length_budget.mode:
        check_prompts_have_length_budgets(prompts)
    everything = [*prompts, *val_prompts]
    has_reward_function, more, truths = _try_reward_function(config, everything)
    notices += more
    reads_columns = bool(config.custom_reward_function.path or config.env.custom_module)
    notices += try_environment(config.env, [*prompts[:1], *val_prompts[:1]])
    goal = TrainingGoal.from_schedule(
        trainer.total_training_steps, trainer.total_epochs, len(prompts), data.train_batch_size
    )
    uses_reward_model = config.reward_model.enable
    return TrainingInputs(
        prompts,
        val_prompts,
        goal=goal,
        probe=make_probe(renderer, prompts[0].content, data.max_length - 1),
        reward_model_tokenizer=make_reward_model_tokenizer(config, renderer, everything) if uses_reward_model else None,
        has_reward_function=has_reward_function,
        notices=notices,
        findings=findings,
        sources=describe_sources(prompts, renderer, truths, reads_columns),
        stops=renderer.describe_stops(),
    )


def list_model_uses(config: Config) -> Iterator[ModelUse]:
    """Yield the models of a training run, and the settings that each of them must support."""
    role, actor = config.actor_rollout_ref, "actor_rollout_ref.actor"
    policy = ModelUse(
        "actor_rollout_ref.model.path",
        role.model,
        engine=role.rollout,
        engine_section="actor_rollout_ref.rollout",
        lengths=config.data,
        fsdp=role.actor.fsdp_config,
        fsdp_section=f"{actor}.fsdp_config",
        num_ranks=config.trainer.num_ranks,
        ulysses_size=role.actor.ulysses_sequence_parallel_size,
        ulysses_section=f"{actor}.",
        optimizer=role.actor.optim.name,
        self_teacher_length=config.max_teacher_length if config.teacher.uses_self_teacher else 0,
    )
    yield policy
    other = replace(
        policy, writes_text=False, engine=None, lengths=None, fsdp=None, optimizer="", self_teacher_length=0
    )
    if "values" in get_estimator(config.algorithm.adv_estimator).needs:
        model, fsdp = make_critic_model_section(role.model, config.critic), config.critic.fsdp_config
        critic = replace(other, key="critic.model.path", model=model, fsdp=fsdp, policy=role.model)
        yield replace(critic, fsdp_section="critic.fsdp_config")
    for key, model in make_teacher_model_sections(role.model, config.teacher).items():
        yield replace(other, key=f"{key}.path", model=model, policy=role.model)
    if config.reward_model.enable:
        scorer = make_reward_model_settings(config.reward_model, role.model)
        yield replace(other, key="reward_model.model.path", model=scorer)


def _try_reward_function(config: Config, prompts: Sequence[Prompt]) -> tuple[bool, list[str], dict[str, str]]:
    """Try the reward function on some rows. Returns whether there is a reward function, notices, and how many rows of
    each data source score with their own ground truth."""
    graded = get_environment_spec(config.env.env_name).is_graded(config.env)
    has_function = uses_reward_function(config, graded, prompts)
    needs_grading = graded and has_function
    filters, best = config.algorithm.filter_groups, config.trainer.keep_best or ""
    needs_accuracy = [
        *["algorithm.filter_groups.metric=accuracy"] * (filters.enable and filters.metric == "accuracy"),
        *[f"trainer.keep_best={best}"] * best.startswith(("val/accuracy", "val/pass@", "val/maj@")),
        *["data.sampler or data.curriculum"] * config.data.is_adaptive,
    ]
    custom = config.custom_reward_function
    notices, truths = check_rewards(prompts, config.reward, custom, needs_grading, needs_accuracy)
    if not has_function and not config.reward_model.enable:
        notices = [
            *notices,
            "nothing gives a reward, so reward/* and val/* are 0. For rewards, add to each row a data_source "
            "with a built-in grader and its ground truth, or set custom_reward_function.path.",
        ]
    return has_function, notices, truths


DECODED_TOKENS = 1000  # per request to a server
CHECK_PATIENCE = 15.0  # seconds for which a failed request is sent again
FIX = (
    "Use a teacher with the policy's tokenizer (e.g. a larger model of its family), or train on the teacher's texts "
    "(docs/sft.md)."
)


def check_teachers(config: Config, renderer: Renderer, prompts: Sequence[Prompt]) -> list[str]:
    """Check the teachers of the training prompts. Returns notices; raises ValueError if one cannot be used."""
    if config.teacher.self_teacher.context == "demonstration":
        check_demonstrations(prompts, config.teacher.self_teacher.demonstration_key)
    teacher, notices = config.teacher, []
    sources = {prompt.data_source: prompt for prompt in prompts}
    weights = {source: teacher.find_shares(source) for source in sources}
    if missing := [source for source, one in weights.items() if not any(one)]:
        raise ValueError(
            f"no teacher for the data_source {missing[0]!r} of row {sources[missing[0]].id}. Add a pattern to "
            "teacher.by_source, e.g. *, which matches all."
        )
    for index, key in enumerate(teacher.models_by_key):
        if not any(one[index] for one in weights.values()):
            notices.append(f"{key} is not used: teacher.by_source assigns no training prompt to it.")
    if teacher.servers and any(_has_images(prompt) for prompt in prompts):
        key = next(iter(teacher.servers))
        raise ValueError(f"{key}.base_url: teachers behind servers do not support images. Set {key}.path instead.")
    for key, model in teacher.local_models.items():
        notices += check_teacher_vocabulary(key, model, teacher, config.actor_rollout_ref.model, renderer)
    for key, model in teacher.servers.items():
        asyncio.run(_check_server(key, model, teacher.top_k or 0, renderer, config.data.max_length))
    return notices


def _has_images(prompt: Prompt) -> bool:
    return not isinstance(prompt.content, str) and any(message.get("images") for message in prompt.content)


async def _check_server(key: str, model: TeacherModel, k: int, renderer: Renderer, max_length: int) -> None:
    """Compare the server's decoding of every token id with the policy's tokenizer, then request the log-probs of a
    sequence of maximum length. Raises ValueError or TeacherServerError."""
    tokenizer, client = renderer.tokenizer, TeacherClient(key, model, CHECK_PATIENCE)
    url = model.base_url.rstrip("/").removesuffix("/v1") + "/detokenize"

    try:
        for start in range(0, len(tokenizer), DECODED_TOKENS):
            ids = [*range(start, min(start + DECODED_TOKENS, len(tokenizer)))]
            reply = json.loads(await client.post(url, {"model": model.name, "tokens": ids}))
            if reply["prompt"] != tokenizer.decode(ids):
                raise ValueError(
                    f"{key}.base_url={model.base_url}: the server has another tokenizer than the policy: it decodes "
                    f"tokens {ids[0]} to {ids[-1]} differently. {FIX}"
                )
        await client.score([number % len(tokenizer) for number in range(max_length)], k)
    finally:
        await client.close()


def check_teacher_vocabulary(
    key: str, model: TeacherModel, teacher: Teacher, policy: Model, policy_renderer: Renderer
) -> list[str]:
    """Check that a teacher on the ranks can read the policy's token ids. Returns notices; raises ValueError if not.

    Each token id must mean the same token in both models. To compare full distributions (all values of
    teacher.divergence except `sampled`), the teacher must also have no extra tokens, and at least as many logits.
    """
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    known, written = tokenizer.get_vocab(), policy_renderer.tokenizer.get_vocab()
    path = f"{key}.path={model.path}"
    if other := [token for token, number in written.items() if known.get(token) != number]:
        raise ValueError(
            f"{path} lacks these tokens of the policy, or has them with another id: {_format_tokens(other)}. {FIX}"
        )
    if teacher.uses_full_vocabulary:
        cause = f"teacher.divergence={teacher.divergence} compares full distributions"
        reader = Model(path=model.path, trust_remote_code=model.trust_remote_code)
        rows, needed = (int(load_config(one).get_text_config().vocab_size) for one in (reader, policy))
        if (more := [token for token in known if token not in written]) or rows < needed:
            raise ValueError(
                f"{cause}, but {path} has {rows} logits (the policy {needed}), and these tokens that the policy lacks: "
                f"{_format_tokens(more) or 'none'}. Set teacher.divergence=sampled, or use another teacher."
            )
    if tokenizer.chat_template == policy_renderer.tokenizer.chat_template:
        return []
    return [f"{path} has another chat template than the policy. The teacher reads chats in the policy's template."]


def _format_tokens(tokens: list[str]) -> str:
    """Format the first three tokens and the total number, e.g. `'a', 'b', 'c', ... (23)`."""
    return ", ".join(map(repr, sorted(tokens)[:3])) + (f", ... ({len(tokens)})" if len(tokens) > 3 else "")


PROBE_TOKENS = 64


def make_probe(renderer: Renderer, content: list[Message] | str, max_tokens: int) -> Probe:
    """Make a probe of at most `max_tokens` tokens: a generated image if the model has vision, and the start of the
    text of a prompt. The image comes first, so that the log-probs of the text depend on it."""
    text = renderer.encode_prompt(content)
    images: tuple[ImageInput, ...] = ()
    if renderer.images is not None:
        text = [token for token in text if token != renderer.images.placeholder_id]
        image = renderer.images.prepare(make_example_image())
        images = (image,) * (len(image.token_ids) < max_tokens)  # if it does not fit, prompts have no images either
    token_ids = [token for image in images for token in image.token_ids]
    length = min(PROBE_TOKENS, max_tokens - len(token_ids))
    return Probe(token_ids + (text * PROBE_TOKENS)[:length], images)  # a prompt may be a single token
