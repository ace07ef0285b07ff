"""Keys of `evolve`: errors, keys without effect, what a resumed run may change, and their YAML files."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from alphaapollo.cli.main import main
from alphaapollo.config.check import check_config_and_get_notices, list_model_paths
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.load import load_config
from alphaapollo.observability.console import Console
from alphaapollo.planning import template
from alphaapollo.plugins.evolving.run import EvolutionPreparation
from alphaapollo.plugins.evolving.settings import EvolvingConfig
from alphaapollo.runs.input_digests import compute_input_digests
from alphaapollo.runs.newest_model import resolve_model_paths
from tests.unit.config.overrides import from_overrides
from tests.unit.config.test_changes import keys_with
from tests.unit.launch.test_prepare import test_each_step_is_done_or_left_out_with_a_reason as check_steps

REQUIRED = "data.path=train.jsonl models.policy.path=some/model"
ERRORS = {  # words that are an error, and what the error contains: the keys, their values, and values that work
    "env.context=memory": 'env.context: append "memory".',
    "env.action_format=chat_template": 'env.action_format: tags "chat_template".',
    "models.policy.base_url=x models.policy.name=y": "models.policy.path base_url both",
    "evolving.branches=[polcy]": "evolving.branches[0]=polcy models policy.",
    "roles.verifier.plugin=''": "evolving.votes=3 roles.verifier.plugin evolving.votes=0",
    "budget.money=1": "budget.money=1 price_in price_out",
    "models.policy.path=/gone": "models.policy.path: folder: /gone",
    "trainer.device=cuda": "trainer.device=cuda GPU",
}


def check(words: str, num_gpus: int = 0) -> list[str]:
    """Warnings about a configuration with the required keys and `words`."""
    config = from_overrides(EvolvingConfig, *REQUIRED.split(), *words.split())
    return check_config_and_get_notices(config, num_gpus, 8)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").touch()


@pytest.mark.parametrize(("words", "facts"), ERRORS.items())
def test_an_error_names_the_keys_and_values(words: str, facts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(words)
    (text,) = caught.value.errors
    assert text.endswith(".") and [fact for fact in facts.split() if fact not in text] == [], text


def test_what_works_has_no_warning() -> None:
    assert check("") == check("", 8) == []
    assert check("models.judge.path=some/b rollout.gpu_memory_utilization=0.5", 1) == []
    (line,) = check("rollout.top_p=0.5")
    assert "roles.ROLE" in line
    with pytest.raises(ConfigError) as caught:
        check_config_and_get_notices(EvolvingConfig())
    assert [re.split(" is required|=", text)[0] for text in caught.value.errors] == ["data.path", "models"]


def test_what_determines_requests_must_not_change() -> None:
    applied = "evolving.rounds budget.money models rollout.num_engines reward.timeout"
    refused = "data.path evolving.votes roles.proposer.temperature rollout.name trainer.seed"
    assert {*applied.split()} <= keys_with(EvolvingConfig, "applied")
    assert {*refused.split()} <= keys_with(EvolvingConfig, "refused")


def test_the_shipped_file_and_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.yaml").write_text("defaults: [evolving]\nevolving: {rounds: 7}\n")
    for words in (["--config-dir", str(tmp_path), "--config-name", "own"], ["--config", "own.yaml"]):
        assert load_config(EvolvingConfig, "evolving", words).evolving.rounds == 7
    assert load_config(EvolvingConfig, "evolving", []) == EvolvingConfig()
    assert main(["evolve", "--help"]) == 0
    assert "budget.tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        load_config(EvolvingConfig, "evolving", ["--help"])
    assert "usage: python -m alphaapollo.evolving.main" in capsys.readouterr().out
    assert main(["explain", "evolving.rounds"]) == 0
    assert capsys.readouterr().out.startswith("evolving.rounds: accepted (default 4 in evolving")


def test_models_have_digests_and_may_be_runs(tmp_path: Path) -> None:
    exported = tmp_path / "run/exported/step_000002"
    for path in (tmp_path / "model", exported):
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"")
    models = {"first": {"path": str(tmp_path / "model")}, "second": {"path": str(tmp_path / "missing")}}
    digests = compute_input_digests(EvolvingConfig(data={"path": "train.jsonl"}, models=models))
    assert "data.path" in digests and {Path(path).parent for path, _ in digests["models"]} == {tmp_path / "model"}
    config = resolve_model_paths(EvolvingConfig(models={"policy": {"path": str(exported)}}))
    assert dict(list_model_paths(config))["models.policy.path"] == str(exported)


def test_steps_of_the_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_steps(EvolutionPreparation)
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d') }}")
    monkeypatch.setattr(template, "date", SimpleNamespace(today=lambda: "2026-07-26"))
    prepared = EvolutionPreparation(EvolvingConfig(models={"policy": {"path": str(tmp_path)}}), Console())
    prepared.fix_template_date()
    assert prepared.config.data.apply_chat_template_kwargs == {"strftime_now": "2026-07-26"}
