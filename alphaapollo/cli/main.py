"""`alphaapollo SUBCOMMAND ...`: call the function of the subcommand. This module imports no large packages."""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import NoReturn

from alphaapollo._version import __version__
from alphaapollo.processes.entry_point import MainFunction, name_user, run_program
from alphaapollo.utils.hub import expand_home
from alphaapollo.utils.plugins import describe_package, find_plugins, load_plugin
from alphaapollo.utils.registry import suggest_similar

HELP = ("-h", "--help", "help")
REFUSED = 2
QUICKSTART = Path("examples") / "quickstart" / "run.sh"
OVERVIEW = """alphaapollo: post-training of language models with reinforcement learning

  alphaapollo SUBCOMMAND [--config FILE] [KEY=VALUE ...]

{subcommands}

  alphaapollo SUBCOMMAND --help  its most important keys
  alphaapollo explain KEY        any key
  alphaapollo --version
"""
HELP_OF_KEYS = """alphaapollo {name}: {summary}

  alphaapollo {name} [--config FILE] [KEY=VALUE ...]
  alphaapollo {name} {example}

Most important keys:
{keys}

  --config FILE    your own YAML file, applied over the defaults; later keys override it
  --cfg            print the full configuration without starting

All {count} keys: docs/config.md, or alphaapollo explain KEY. All options and presets:
  python -m alphaapollo.{module} --help
"""


@dataclass(frozen=True)
class Subcommand:
    """Subcommand of `alphaapollo`, which accepts either the configuration keys of a `command` or other arguments."""

    summary: str
    main: str  # function of alphaapollo, called with the arguments, e.g. cli.doctor:main
    command: str = ""  # command whose keys it accepts, e.g. main_ppo (config/keys.py)
    help_keys: str = ""  # most important keys, for --help
    example: str = ""  # arguments, for --help
    first_argument: str = ""  # e.g. a preset GROUP=NAME, which is omitted if the user sets a preset of the group

    def make_arguments(self, user_arguments: Sequence[str]) -> list[str]:
        """Return the arguments of the function: first_argument (unless the user sets it), user_arguments."""
        group = self.first_argument.partition("=")[0]
        is_set = any(word.partition("=")[0] == group for word in user_arguments)
        return [*([self.first_argument] if self.first_argument and not is_set else []), *user_arguments]


MODEL = "model.path=Qwen/Qwen3-0.6B"
SUBCOMMANDS = {  # in the order of --help
    "quickstart": Subcommand(
        "train a small model with RL until it visibly learns: minutes, no GPU", "cli.main:run_quickstart"
    ),
    "doctor": Subcommand("check this machine: what is missing and how to fix it", "cli.doctor:main"),
    "rl": Subcommand(
        "train with reinforcement learning",
        "trainer.main_ppo:main",
        "main_ppo",
        "actor_rollout_ref.model.path data.train_files custom_reward_function.path env.rollout.n "
        "trainer.experiment_name",
        f"algorithm=grpo actor_rollout_ref.{MODEL} data.train_files=train.parquet",
    ),
    "sft": Subcommand(
        "supervised fine-tuning",
        "trainer.main_sft:main",
        "main_sft",
        "model.path data.train_files optim.lr trainer.total_epochs trainer.experiment_name",
        f"{MODEL} data.train_files=chats.parquet",
    ),
    "dpo": Subcommand(
        "train on preferences: DPO and related losses",
        "trainer.main_dpo:main",
        "main_dpo",
        "model.path data.train_files preference.loss preference.beta optim.lr",
        f"{MODEL} data.train_files=pairs.parquet preference.loss=sigmoid",
    ),
    "rm": Subcommand(
        "train a reward model on preferences",
        "trainer.main_rm:main",
        "main_rm",
        "model.path data.train_files data.margin_key bradley_terry.centring_coef optim.lr",
        f"{MODEL} data.train_files=pairs.parquet",
    ),
    "distill": Subcommand(
        "on-policy distillation from a teacher",
        "trainer.main_ppo:main",
        "main_ppo",
        "actor_rollout_ref.model.path teacher.model.path teacher.divergence data.train_files trainer.experiment_name",
        f"actor_rollout_ref.{MODEL} teacher.model.path=Qwen/Qwen3-8B data.train_files=a.parquet",
        "algorithm=distill",
    ),
    "sweep": Subcommand("train with all combinations of several values, and compare the runs", "cli.sweep:main"),
    "generate": Subcommand(
        "sample and score answers: avg@n, pass@k, intervals",
        "trainer.main_generation:main",
        "main_generation",
        "model.path data.path data.n_samples rollout.temperature trainer.experiment_name",
        f"{MODEL} data.path=test.parquet data.n_samples=8",
    ),
    "evolve": Subcommand(
        "self-improvement at inference time: solve, verify, remember, repeat",
        "evolving.main:main",
        "evolving",
        "models data.path evolving.rounds evolving.votes budget.tokens",
        "'models={policy:{path:outputs/model}}' data.path=problems.parquet",
    ),
    "eval": Subcommand(
        "score existing responses; with --suite, run lm-eval or inspect-ai on a run's newest model",
        "cli.serve:evaluate",
        "main_eval",
        "data.path data.response_key custom_reward_function.path reward.num_workers trainer.experiment_name",
        "data.path=outputs.jsonl",
    ),
    "export": Subcommand("export a checkpoint as a verified Hugging Face folder or GGUF file", "cli.main:export"),
    "import-gguf": Subcommand(
        "convert a GGUF file to a Hugging Face folder, to train its model", "cli.main:import_gguf"
    ),
    "serve": Subcommand("vLLM's OpenAI server on a run's newest model", "cli.serve:main"),
    "tinker": Subcommand("serve a base model to clients of tinker, which train adapters", "tinker_server.main:main"),
    "view": Subcommand("show runs in the browser: curves, samples, tokens; live", "cli.show:view"),
    "report": Subcommand("write a report of runs into one HTML file", "cli.show:report"),
    "samples": Subcommand("print a run's samples side by side, with their rewards", "cli.samples:print_samples"),
    "audit": Subcommand("find what a policy exploits in its reward, from a run's samples", "cli.audit_run:main"),
    "chat": Subcommand("chat with a run's model, with its environment and tools", "cli.chat:main"),
    "replay": Subcommand("recompute a recorded iteration and compare", "trainer.replay.__main__:main"),
    "verify": Subcommand("check a run's update against an independent reference", "cli.verify:main"),
    "tasks": Subcommand("check task folders: solution 1, nothing 0, cheating 0", "cli.tasks:main"),
    "port": Subcommand(
        "convert a script of verl, TRL, OpenRLHF or ms-swift", "config.__main__:main", first_argument="port"
    ),
    "explain": Subcommand("explain a key, also of these projects", "config.__main__:main", first_argument="explain"),
}


def run() -> NoReturn:
    """Call `main` as the program `alphaapollo`."""
    run_program(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns its exit code: 0 done, 1 failed, 2 invalid arguments or settings, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--version"]:
        print(__version__)
        return 0
    try:
        plugins = find_plugins("commands", SUBCOMMANDS)
    except ValueError as error:
        print(f"error: alphaapollo: {error}", file=sys.stderr)
        return REFUSED
    if not words or words[0] in HELP:
        summaries = {name: subcommand.summary for name, subcommand in SUBCOMMANDS.items()}
        summaries |= {name: describe_package(entry) for name, entry in plugins.items()}
        width = max(map(len, summaries))
        lines = [f"  {name:<{width}}  {summary}" for name, summary in summaries.items()]
        print(OVERVIEW.format(subcommands="\n".join(lines)), end="")
        return 0 if words else REFUSED
    name, *rest = words
    try:
        plugin_main: MainFunction | None = load_plugin("commands", name)
    except ValueError as error:
        print(f"error: alphaapollo {name}: {error}", file=sys.stderr)
        return REFUSED
    if plugin_main is not None:
        name_user()
        return plugin_main(rest)
    if name not in SUBCOMMANDS:
        known = [*SUBCOMMANDS, *plugins]
        hint = f"{suggest_similar(name, known)} Known: {', '.join(known)}."
        print(f"error: alphaapollo {name}: unknown subcommand.{hint}", file=sys.stderr)
        return REFUSED
    subcommand = SUBCOMMANDS[name]
    name_user()
    if subcommand.command and any(word in HELP[:2] for word in rest):
        print(format_subcommand_help(name, subcommand), end="")
        return 0
    run: MainFunction = pkgutil.resolve_name(f"alphaapollo.{subcommand.main}")
    return run(subcommand.make_arguments(rest))


def report_refusals(main: Callable[[Sequence[str]], int]) -> MainFunction:
    """Decorate the function of a subcommand: ValueError and OSError are reported, with exit code 2."""

    @wraps(main)
    def run_and_report(argv: Sequence[str] | None = None) -> int:
        from alphaapollo.config.errors import report_error

        try:
            return main(argv or [])
        except (ValueError, OSError) as error:
            return report_error(error, REFUSED)

    return run_and_report


def format_subcommand_help(name: str, subcommand: Subcommand) -> str:
    """Format the --help text of a subcommand, with meaning and default of its most important keys."""
    from alphaapollo.config.keys import COMMANDS, format_value, list_keys

    keys = list_keys(COMMANDS[subcommand.command])
    shown: list[str] = []
    for key in subcommand.help_keys.split():
        default = "" if keys[key].default == "" else f" Default {format_value(keys[key].default)}."
        shown += [f"  {key}", f"      {keys[key].meaning}{default}"]
    text, module = "\n".join(shown), subcommand.main.partition(":")[0]
    fields = {"name": name, "summary": subcommand.summary, "example": subcommand.example, "keys": text}
    return HELP_OF_KEYS.format(**fields, count=len(keys), module=module)


@report_refusals
def run_quickstart(argv: Sequence[str]) -> int:
    """Replace this process with the script of the example, as `make quickstart` does after the installation."""
    parser = argparse.ArgumentParser(
        prog="alphaapollo quickstart",
        description="Build a task and a tiny model, warm it up with SFT and train it with RL until it visibly learns.",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument(
        "--out", type=expand_home, default="outputs/quickstart", help="folder to write (default outputs/quickstart)"
    )
    options = parser.parse_args(argv)
    folders = (Path.cwd(), Path(__file__).resolve().parents[2])
    script = next((folder / QUICKSTART for folder in folders if (folder / QUICKSTART).is_file()), None)
    if script is None:  # an installed package does not contain examples
        fix = "Run it in a clone of the repository, or train on your own data: alphaapollo rl --help."
        raise ValueError(f"quickstart needs {QUICKSTART}, which is not in {folders[0]}. {fix}")
    command = ["bash", str(script), str(options.seed), str(options.out.resolve())]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.execvpe(command[0], command, os.environ | {"PATH": path})


def export(argv: Sequence[str]) -> int:
    """`alphaapollo export RUN [OUT] [--gguf [TYPE]]`: run main_export with `checkpoint=RUN output=OUT`."""
    parser = argparse.ArgumentParser(
        prog="alphaapollo export",
        usage="alphaapollo export RUN [OUT] [--gguf [TYPE]] [KEY=VALUE ...]",
        description="Export a checkpoint as a folder for transformers and vLLM, with a model card, or as a GGUF file "
        "for llama.cpp, Ollama and LM Studio. Verifies that transformers computes the same outputs with it. Needs no "
        "GPU.",
        epilog="keys: role=policy|critic, dtype=float32|bfloat16, export_lora=merged|adapter, model_path=FOLDER, "
        "the current location of the run's initial model (docs/checkpoints.md)",
    )
    parser.add_argument("run", metavar="RUN", help="a run, a checkpoint, an adapter, or the folder of verl's shards")
    parser.add_argument(
        "out", metavar="OUT", nargs="*", help="folder or .gguf file to write (default <RUN>/exported/<checkpoint>)"
    )
    parser.add_argument(
        "--gguf",
        nargs="?",
        const="q8_0",
        choices=("q8_0", "f16", "bf16", "f32"),
        help="write a GGUF file with weights of this type (default q8_0), also of a model's folder",
    )
    options = parser.parse_intermixed_args(argv)
    from alphaapollo.config.keys import format_override

    words = [f"gguf={options.gguf}"] if options.gguf else []
    words += [options.run if options.run.startswith("checkpoint=") else format_override("checkpoint", options.run)]
    words += [word if "=" in word else format_override("output", word) for word in options.out]
    run: MainFunction = pkgutil.resolve_name("alphaapollo.trainer.main_export:main")
    return run(words)


@report_refusals
def import_gguf(argv: Sequence[str]) -> int:
    """`alphaapollo import-gguf FILE OUT`: convert a GGUF file. Returns exit code 2 if it cannot be converted."""
    description = "Convert a GGUF file to a Hugging Face folder with weights in float32. Needs the package gguf."
    parser = argparse.ArgumentParser(prog="alphaapollo import-gguf", description=description)
    parser.add_argument("file", metavar="FILE", type=expand_home, help="GGUF file of a language model")
    parser.add_argument("out", metavar="OUT", type=expand_home, help="folder to write, for model.path=OUT")
    options = parser.parse_args(argv)
    convert = pkgutil.resolve_name("alphaapollo.models.gguf_import:import_gguf")
    print(f"{convert(options.file, options.out):,} parameters written to {options.out}")
    return 0


if __name__ == "__main__":
    run()
