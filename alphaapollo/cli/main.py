"""`alphaapollo SUBCOMMAND ...`: call the function of the subcommand. This module imports no large packages."""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from alphaapollo._version import __version__
from alphaapollo.cli.subcommand import REFUSED, Subcommand, format_subcommand_help, report_refusals
from alphaapollo.processes.entry_point import MainFunction, run_program, set_user_variables
from alphaapollo.utils.hub import expand_home
from alphaapollo.utils.plugins import Plugin, find_plugins, load_plugin
from alphaapollo.utils.registry import suggest_similar

HELP = ("-h", "--help", "help")
QUICKSTART = Path("examples") / "quickstart" / "run.sh"
OVERVIEW = """alphaapollo: post-training of language models with reinforcement learning

  alphaapollo SUBCOMMAND [--config FILE] [KEY=VALUE ...]

{subcommands}

  alphaapollo SUBCOMMAND --help  its most important keys
  alphaapollo explain KEY        any key, or a metric
  alphaapollo --version
"""


MODEL = "model.path=Qwen/Qwen3-0.6B"
SUBCOMMANDS = {  # in the order of --help
    "quickstart": Subcommand(
        "train a small model with RL until it visibly learns: minutes, no GPU", "alphaapollo.cli.main:run_quickstart"
    ),
    "rl": Subcommand(
        "train with reinforcement learning",
        "alphaapollo.trainer.main_ppo:main",
        "main_ppo",
        "actor_rollout_ref.model.path data.train_files custom_reward_function.path env.rollout.n "
        "trainer.experiment_name",
        f"algorithm=grpo actor_rollout_ref.{MODEL} data.train_files=train.parquet",
    ),
    "sft": Subcommand(
        "supervised fine-tuning",
        "alphaapollo.trainer.main_sft:main",
        "main_sft",
        "model.path data.train_files optim.lr trainer.total_epochs trainer.experiment_name",
        f"{MODEL} data.train_files=chats.parquet",
    ),
    "dpo": Subcommand(
        "train on preferences: DPO and related losses",
        "alphaapollo.trainer.main_dpo:main",
        "main_dpo",
        "model.path data.train_files preference.loss preference.beta optim.lr",
        f"{MODEL} data.train_files=pairs.parquet preference.loss=sigmoid",
    ),
    "rm": Subcommand(
        "train a reward model on preferences",
        "alphaapollo.trainer.main_rm:main",
        "main_rm",
        "model.path data.train_files data.margin_key bradley_terry.centring_coef optim.lr",
        f"{MODEL} data.train_files=pairs.parquet",
    ),
    "distill": Subcommand(
        "on-policy distillation from a teacher",
        "alphaapollo.trainer.main_ppo:main",
        "main_ppo",
        "actor_rollout_ref.model.path teacher.model.path teacher.divergence data.train_files trainer.experiment_name",
        f"actor_rollout_ref.{MODEL} teacher.model.path=Qwen/Qwen3-8B data.train_files=a.parquet",
        "algorithm=distill",
    ),
    "generate": Subcommand(
        "sample and score answers: avg@n, pass@k, intervals",
        "alphaapollo.trainer.main_generation:main",
        "main_generation",
        "model.path data.path data.n_samples rollout.temperature trainer.experiment_name",
        f"{MODEL} data.path=test.parquet data.n_samples=8",
    ),
    "eval": Subcommand(
        "score existing responses; with --suite, run lm-eval or inspect-ai on a run's newest model",
        "alphaapollo.cli.serve:evaluate",
        "main_eval",
        "data.path data.response_key custom_reward_function.path reward.num_workers trainer.experiment_name",
        "data.path=outputs.jsonl",
    ),
    "export": Subcommand(
        "export a checkpoint as a verified Hugging Face folder or GGUF file", "alphaapollo.cli.main:export"
    ),
    "serve": Subcommand("run vLLM's OpenAI server on a run's newest model", "alphaapollo.cli.serve:main"),
    "explain": Subcommand(
        "explain a key (also of verl, TRL, OpenRLHF and ms-swift), or a metric",
        "alphaapollo.config.__main__:main",
        first_argument="explain",
    ),
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
    name, *rest = words or [""]
    try:
        plugins = find_plugins("commands", SUBCOMMANDS)
        if not name or name in HELP:
            print(format_overview(plugins), end="")
            return 0 if name else REFUSED
        subcommand = SUBCOMMANDS.get(name) or load_plugin("commands", name)
    except ValueError as error:
        print(f"error: alphaapollo{f' {name}' if name else ''}: {error}", file=sys.stderr)
        return REFUSED
    if subcommand is None:
        known = [*SUBCOMMANDS, *plugins]
        hint = f"{suggest_similar(name, known)} Known: {', '.join(known)}."
        print(f"error: alphaapollo {name}: unknown subcommand.{hint}", file=sys.stderr)
        return REFUSED
    set_user_variables()
    if not isinstance(subcommand, Subcommand):
        run: MainFunction = subcommand
        return run(rest)
    if subcommand.command and {"-h", "--help"} & {*rest}:
        print(format_subcommand_help(name, subcommand), end="")
        return 0
    return subcommand.load()(subcommand.make_arguments(rest))


def format_overview(plugins: Mapping[str, Plugin]) -> str:
    """Format the text of `alphaapollo --help`: the commands of the core, of its plug-ins and of installed packages."""
    groups = {"": {name: subcommand.summary for name, subcommand in SUBCOMMANDS.items()}}
    for name, plugin in plugins.items():
        heading = "plug-ins" if plugin.folder else "installed packages"
        groups.setdefault(heading, {})[name] = describe_command(plugin)
    width = max(len(name) for group in groups.values() for name in group)
    lines = list[str]()
    for heading, summaries in groups.items():
        if heading:
            lines.append(f"\n{heading}:")
        lines += [f"  {name:<{width}}  {summary}" for name, summary in summaries.items()]
    return OVERVIEW.format(subcommands="\n".join(lines))


def describe_command(plugin: Plugin) -> str:
    """Return a line about the command of a plug-in or package: its summary, or why it cannot be used."""
    if plugin.is_missing:
        return f"({plugin.owner} is missing)"
    try:
        loaded = None if plugin.summary else plugin.load()
    except ValueError:
        return f"({plugin.owner}, which cannot be imported)"
    return plugin.summary or getattr(loaded, "summary", plugin.owner)


def make_parser(name: str, **settings: Any) -> argparse.ArgumentParser:
    """Return a parser of a subcommand's arguments, with its summary. settings: other arguments of ArgumentParser."""
    command = SUBCOMMANDS.get(name)
    summary = command.summary if command else describe_command(find_plugins("commands")[name])
    description = f"{summary[:1].upper()}{summary[1:]}."
    return argparse.ArgumentParser(prog=f"alphaapollo {name}", description=description, **settings)


@report_refusals
def run_quickstart(argv: Sequence[str]) -> int:
    """Replace this process with the script of the example, as `make quickstart` does after the installation."""
    parser = make_parser("quickstart")
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


@report_refusals
def export(argv: Sequence[str]) -> int:
    """`alphaapollo export RUN [OUT] [--FORMAT [TYPE]]`: run main_export with `checkpoint=RUN output=OUT`."""
    formats = find_plugins("export_formats")
    options_of_formats = "".join(f"[--{name} [TYPE]] " for name in formats)
    parser = make_parser(
        "export",
        usage=f"alphaapollo export RUN [OUT] {options_of_formats}[KEY=VALUE ...]",
        epilog="keys: role=policy|critic, dtype=float32|bfloat16, export_lora=merged|adapter, model_path=FOLDER, "
        "the current location of the run's initial model (docs/checkpoints.md)",
    )
    parser.add_argument("run", metavar="RUN", help="a run, a checkpoint, an adapter, or the folder of verl's shards")
    parser.add_argument(
        "out", metavar="OUT", nargs="*", help="folder or .gguf file to write (default <RUN>/exported/<checkpoint>)"
    )
    for name, plugin in formats.items():
        loaded = None if plugin.is_missing else plugin.load()
        types, text = (loaded.types, loaded.help) if loaded else (None, f"({plugin.owner} is missing)")
        default = types[0] if types else " "  # type of an option without a value; not empty, so that it counts as given
        parser.add_argument(f"--{name}", dest=name, nargs="?", const=default, choices=types, help=text)
    options = parser.parse_intermixed_args(argv)
    from alphaapollo.config.keys import format_override

    words = [f"{name}={kind}" for name in formats if (kind := getattr(options, name)) and formats[name].load()]
    words += [options.run if options.run.startswith("checkpoint=") else format_override("checkpoint", options.run)]
    words += [word if "=" in word else format_override("output", word) for word in options.out]
    run: MainFunction = pkgutil.resolve_name("alphaapollo.trainer.main_export:main")
    return run(words)


if __name__ == "__main__":
    run()
