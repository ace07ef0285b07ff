"""The engines that a run starts for models of its own: vLLM's, Hugging Face's or the fake one, in this process (vLLM's
core is a process of its own, as always)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from alphaapollo.config.resolve import engine_threads, resolve_device, resolve_rollout
from alphaapollo.config.schema import EvolvingConfig, Model
from alphaapollo.controller.worker_counts import detect_machine
from alphaapollo.data.rendering import Renderer, load_tokenizer
from alphaapollo.engines.factory import make_engine
from alphaapollo.engines.spec import EngineSpec
from alphaapollo.engines.vllm.user_arguments import check_engine_kwargs
from alphaapollo.evolving.engine_client import EngineClient
from alphaapollo.launch.input_checks import check_engine_split, check_lengths
from alphaapollo.models.folder_check import check_vocabulary, check_weights
from alphaapollo.utils.heartbeat import HEARTBEAT


def check_own_models(config: EvolvingConfig) -> dict[str, Renderer]:
    """What would be refused once an engine starts, refused now (ValueError). Their tokenizers, by the models' names."""
    check_engine_kwargs(config.rollout, "rollout")
    renderers = {}
    for name, served in config.models.items():
        if served.path:
            key = f"models.{name}.path"
            model = Model(path=served.path, trust_remote_code=served.trust_remote_code)
            check_weights(model, key)
            check_lengths(model, config.rollout, config.data)
            check_engine_split(model, config.rollout, "rollout")
            tokenizer = load_tokenizer(served.tokenizer_path or served.path, served.trust_remote_code)
            check_vocabulary(model, tokenizer, key)
            renderers[name] = Renderer(tokenizer, config.data.apply_chat_template_kwargs)
    return renderers


def watch_engines(clients: Mapping[str, EngineClient]) -> None:
    """What these engines do is this process's pulse, and nothing goes on without theirs."""

    def helpers() -> dict[int, str]:
        pids = ((name, client.engine.pids()) for name, client in clients.items())
        return {
            pid: f"the engine {'worker' if number else 'core'} of models.{name}"
            for name, own in pids
            for number, pid in enumerate(own)
        }

    HEARTBEAT.watch(lambda: sum(client.engine.progress() for client in clients.values()), helpers)


def make_engine_clients(
    config: EvolvingConfig, renderers: Mapping[str, Renderer], folder: Path
) -> dict[str, EngineClient]:
    """One a model of `renderers`, still to be started; they share the machine's cores, or its GPU."""
    machine, data = detect_machine(), config.data
    device = resolve_device(config.trainer.device, machine.num_gpus)
    rollout = resolve_rollout(config.rollout.model_copy(update={"num_engines": len(renderers)}), Model(), device, 1)
    alone = {
        "cpu_threads": engine_threads(rollout, machine.num_cores, 1, own_cores=False),
        "colocate": False,  # nobody trains beside it
        "free_cache_engine": False,
        "router_replay": False,
    }
    rollout = rollout.model_copy(update=alone)
    clients = {}
    for index, (name, renderer) in enumerate(renderers.items()):
        spec = EngineSpec(
            index=index,
            model_path=config.models[name].path,
            trust_remote_code=config.models[name].trust_remote_code,
            rollout=rollout,
            device=device,
            dtype=rollout.dtype,
            max_model_len=data.max_prompt_length + data.max_response_length,
            log_path=str(folder.resolve() / "logs" / f"engine_{name}.log"),
        )
        clients[name] = EngineClient(make_engine(spec), renderer, data.max_prompt_length, data.truncation)
    return clients
