"""Preparation of commands that only generate: main_generation, chat and serve."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from alphaapollo.config.resolve import resolve_generation
from alphaapollo.config.schema import GenerationConfig, Rollout
from alphaapollo.config.schema.base import Device
from alphaapollo.controller.placement import detect_machine
from alphaapollo.controller.worker_groups import WorkerSpecs
from alphaapollo.engines.types import EngineSpec
from alphaapollo.launch.prepare import Preparation
from alphaapollo.launch.specs import make_inference_specs
from alphaapollo.models.load import load_config
from alphaapollo.planning.model_requirements import ModelUse
from alphaapollo.types import Sampling

DEFAULT_CONTEXT = 4096  # context length in tokens, if the model supports it
NO_RUN = "it has no run folder"
NO_PROMPTS = "prompts come from the user"
RUN_DECIDED = "the run that trained the model has decided it"


def choose_context_length(config: GenerationConfig) -> int:
    """Return the most tokens of a conversation: as in the run, but at least DEFAULT_CONTEXT if the model allows it."""
    length = max(config.data.max_length, DEFAULT_CONTEXT)
    return min(getattr(load_config(config.model).get_text_config(), "max_position_embeddings", length), length)


class InferencePreparation(Preparation):
    """Checked inputs of engines without training ranks."""

    config: GenerationConfig
    device: Device
    rollout: Rollout  # with resolved dtype and number of engines

    def list_models(self) -> list[ModelUse]:
        return [ModelUse("model.path", self.model, engine=self.config.rollout, lengths=self.config.data)]

    def resolve_workers(self) -> None:
        num_gpus, num_cores = self.machine.num_gpus, self.machine.num_cores
        self.device, self.rollout = resolve_generation(self.config, num_gpus, num_cores)

    def make_specs(self, folder: Path) -> WorkerSpecs:
        """Describe the rollout workers. folder: for their logs."""
        return make_inference_specs(self.config, self.rollout, self.device, folder)

    def make_engine_spec(self) -> EngineSpec:
        """Return the settings of an engine on this machine. Raises ValueError if the model cannot be read."""
        config = self.config
        return EngineSpec(
            index=0,
            model_path=config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            rollout=self.rollout,
            device=self.device,
            dtype=self.rollout.dtype,
            max_model_len=choose_context_length(config),
            log_path="",
        )

    def make_sampling(self) -> Sampling:
        """Return the configured sampling parameters."""
        rollout, max_tokens = self.config.rollout, self.config.data.max_response_length
        return Sampling(
            max_tokens,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            self.config.trainer.seed,
            stop=rollout.stop_strings,
            includes_stop=rollout.include_stop_str_in_output,
            min_p=rollout.min_p,
        )


class ChatPreparation(InferencePreparation):
    """Checked inputs of `alphaapollo chat RUN`."""

    LEFT_OUT: ClassVar = {
        "fix_template_date": RUN_DECIDED,
        "choose_cpu_threads": "no result is kept that rounding could change",
        "check_config": "its paths are those of data, which is not read",
        "check_trackers": NO_RUN,
        "find_start": NO_RUN,
        "read_data": NO_PROMPTS,
        "check_teachers": "it has no teacher",
        "check_template": RUN_DECIDED,
        "try_rewards": "nothing is graded",
        "try_environment": NO_PROMPTS,
        "plan_memory": "engines take what is free when they start",
        "show_plan": NO_RUN,
    }

    def find_machine(self) -> None:
        if self.config.env.env_name == "agent":
            self.machine = detect_machine()  # the engine runs here, even if RAY_ADDRESS names a cluster
        else:
            super().find_machine()


class ServePreparation(InferencePreparation):
    """Settings of `alphaapollo serve RUN` and of evaluation suites: vLLM's own server checks the rest."""

    LEFT_OUT: ClassVar = ChatPreparation.LEFT_OUT | {
        "load_environment": "clients have their own environments",
        "check_models": "the server checks its model",
        "make_renderer": "the server renders the chats of its clients",
    }

    def find_machine(self) -> None:
        self.machine = detect_machine()  # the server runs here, even if RAY_ADDRESS names a cluster
