import re
from pathlib import Path

import pytest

import alphaapollo
from alphaapollo.algorithms.advantages import estimator_names, get_estimator
from alphaapollo.config.__main__ import explain_key, main
from alphaapollo.config.build import describe_unknown_key, find_similar_keys
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.keys import COMMANDS, list_keys
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config, EngineKwargs
from scripts.config_pages import render_pages

PACKAGE = Path(alphaapollo.__file__).parent


@pytest.mark.parametrize("command", COMMANDS)
def test_every_field_has_a_meaning(command: str):
    assert [key.name for key in list_keys(COMMANDS[command]).values() if not key.meaning] == []


@pytest.mark.parametrize(
    ("key", "facts"),
    [
        ("trainer.nnodes", ["accepted", "default 1"]),
        ("data.max_length", ["accepted", "default 2048 in main_sft"]),
        ("actor_rollout_ref.actor.optim.clip_grad", ["renamed to actor_rollout_ref.actor.grad_clip"]),
        ("actor_rollout_ref.actor.strategy", ["dropped because", "FSDP2"]),
        ("--algo.kl.init_coef", ["an option of OpenRLHF, converted to", "algorithm.kl_ctrl.kl_coef"]),
        ("num_generations", ["an option of TRL, renamed to env.rollout.n"]),
        ("xyzzy", ["unknown (no similar key)"]),
        ("algorithm.gama", ["unknown (", "algorithm.gamma"]),
        ("algorithm.filter_groups", ["accepted", "enable, mode, metric, max_num_gen_batches"]),
        ("reward.components.format", ["accepted", "map reward.components"]),
        ("reward_model.rollout.name", ["not supported ("]),  # a prefix is about all keys below
    ],
)
def test_explain_is_one_line(key: str, facts: list[str]):
    line = explain_key(key)
    assert line.startswith(f"{key.strip('+-').partition('=')[0]}: {facts[0]}") and "\n" not in line
    assert [fact for fact in facts if fact not in line] == [], line


def test_explain_checks_a_value():
    name = "algorithm.adv_estimator"
    assert "unknown advantage estimator" in explain_key(f"{name}=otb") and "lr: expected" in explain_key("optim.lr=7")
    for value in ("grpo", "grpo_vectorized"):  # also verl's name
        assert explain_key(f"{name}={value}").startswith(f"{name}: accepted")


def test_explain_command(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "trainer.seed", "nope"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main([]) == 2


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("trainr.seed", "trainer.seed"),
        ("clip_ratio_d", "actor_rollout_ref.actor.clip_ratio_c"),
        ("trainer.gpus", "trainer.n_gpus_per_node"),  # a word of its name
        ("data.xyzzy", None),
        ("data.columns_of_images", None),
    ],
)
def test_only_similar_keys_are_suggested(name: str, near: str | None):
    found = find_similar_keys(name, list_keys(Config))
    assert near in found if near else found == []


@pytest.mark.parametrize(
    ("command", "name", "facts"),
    [
        ("main_ppo", "trainer.num_generations", "an option of TRL, renamed to env.rollout.n."),
        ("main_ppo", "data.max_length", "a key of main_sft, main_dpo, main_rm, which this command does not have."),
        ("main_sft", "num_generations", "renamed to env.rollout.n in main_ppo. This command has no such key."),
        ("main_generation", "temperature", "unknown key. Did you mean 'rollout.temperature'"),
    ],
)
def test_an_unknown_key_is_answered_by_the_tables_of_other_projects(command: str, name: str, facts: str):
    assert facts in describe_unknown_key(name, COMMANDS[command], 1)


@pytest.mark.parametrize(
    ("option", "facts"),
    [
        (
            "--learning-rate=1",
            "It is an option of TRL, renamed to actor_rollout_ref.actor.optim.lr. Keys are set without",
        ),
        ("--trainer.seed", "It is a key. Keys are set without dashes: KEY=VALUE."),
        ("--nonsense", "Options are --config"),
    ],
)
def test_an_option_that_is_a_key_is_explained(option: str, facts: str):
    with pytest.raises(ConfigError, match=re.escape(facts)):
        load_config(Config, "ppo", [option])


def test_every_key_is_on_one_page():
    """On the page of its command, or below the title of a shared section that this page links to."""
    rows = re.compile(r"^\| `([\w.]+)`", flags=re.MULTILINE)
    found = render_pages()
    shared = {part.partition("\n")[0]: rows.findall(part) for part in found["docs/config/shared.md"].split("\n## ")[1:]}
    for command, schema in COMMANDS.items():
        listed = rows.findall(found[f"docs/config/{command}.md"])
        for part in found[f"docs/config/{command}.md"].split("\n## ")[1:]:
            section = part.partition("\n")[0].replace("top level", "")
            for title in re.findall(r"\[([^\]]+)\]\(shared\.md", part):
                listed += [f"{section}.{name}".removeprefix(".") for name in shared[title]]
        assert set(listed) >= set(list_keys(schema))


def test_every_accepted_key_has_a_reader():
    sources = [file for file in PACKAGE.rglob("*.py") if "config" not in file.relative_to(PACKAGE).parts[:1]]
    sources.append(PACKAGE / "config" / "resolve.py")  # which chooses by keys, once for all
    text = "\n".join(file.read_text(encoding="utf-8") for file in sources)
    schema_files = (PACKAGE / "config/schema").glob("*.py")  # its own properties read keys, too
    of_schema = "\n".join(file.read_text(encoding="utf-8") for file in schema_files)
    read = {*re.findall(r"\.(\w+)", text), *".".join(re.findall(r"\bself\.([\w.]+)", of_schema)).split(".")}
    read |= {name for estimator in map(get_estimator, estimator_names()) for name in estimator.reads or ()}
    read |= EngineKwargs.model_fields.keys()  # by the name of the engine (planning/model_requirements.py)
    for schema in COMMANDS.values():
        assert [key for key in list_keys(schema) if key.rsplit(".", 1)[-1] not in read] == []
