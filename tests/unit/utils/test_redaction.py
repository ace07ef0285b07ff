"""Secrets of the environment never reach configurations, messages and logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.config.errors import ConfigError, exit_on_config_error, report_error
from alphaapollo.config.load import load_config
from alphaapollo.config.schema import Config
from alphaapollo.utils.redaction import find_secret_keys_and_reasons, find_secret_variables, redact, redact_values

CANARY = "canary-7f3a91c2d4"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SOME_API_KEY", CANARY)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path))
    monkeypatch.setenv("ANOTHER_TOKEN", f"{CANARY}-and-more")
    monkeypatch.setenv("SHORT_TOKEN", "true")


def test_which_variables_are_secrets(tmp_path: Path) -> None:
    found = find_secret_variables()
    assert CANARY in found and "true" not in found and str(tmp_path) not in found
    assert redact(f"401: {CANARY}-and-more {CANARY} is no key") == "401: $ANOTHER_TOKEN $SOME_API_KEY is no key"


@pytest.mark.parametrize(
    "word",
    [
        "trainer.experiment_name=${oc.env:SOME_API_KEY}",
        "trainer.seed=${oc.env:SOME_API_KEY}",  # of a wrong type, too
        f"env.tool_settings={{search: {{header: 'Bearer {CANARY}'}}}}",
        "env.tool_settings={search: {api_key: something}}",
        "reward.judge.base_url='http://me:something@localhost/v1'",
        f"env.mcp_servers={{files: {{command: [server, '--token={CANARY}']}}}}",
    ],
)
def test_configuration_with_a_secret_is_refused_without_showing_it(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit), exit_on_config_error():
        load_config(Config, "ppo", [word])
    said = capsys.readouterr().err
    assert word.split("=")[0] in said and "configurations are saved to config.yaml" in said
    assert CANARY not in said and "something" not in said


def test_names_and_other_keys_pass() -> None:
    values = {"reward": {"judge": {"api_key_env": "SOME_API_KEY"}}, "data": {"prompt_key": "prompt"}}
    template = {"data": {"apply_chat_template_kwargs": {"eos_token": "<end>", "api_key": ""}}}
    assert [*find_secret_keys_and_reasons(values), *find_secret_keys_and_reasons(template)] == []
    assert load_config(Config, "ppo", ["reward.judge.api_key_env=SOME_API_KEY"]).reward.judge.api_key_env


def test_errors_are_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    report_error(ValueError(f"the server says: {CANARY}"), 1)
    with pytest.raises(SystemExit), exit_on_config_error():
        raise ConfigError(f"{CANARY}: not of the form KEY=VALUE")
    said = capsys.readouterr().err
    assert CANARY not in said and said.count("$SOME_API_KEY") == 2


SECRETS = ["PGPASSWORD", "GITHUB_PAT", "HFTOKEN", "OPENAI_KEY2", "MYSQL_PWD", "DB_PASS", "AWS_SECRET_ACCESS_KEY"]


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "/wJalrXUtnFEMI/K7MDENG")  # only existing paths are no secrets
    assert redact("/wJalrXUtnFEMI/K7MDENG") == f"${name}"


@pytest.mark.parametrize("name", ["MAX_TOKENS", "TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "PATTERN"])
def test_names_of_other_variables(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "an ordinary value")
    assert "an ordinary value" not in find_secret_variables()


def test_passwords_in_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:a@b@proxy:3128")
    assert redact("cannot reach http://me:a@b@proxy:3128, a") == "cannot reach http://$HTTPS_PROXY@proxy:3128, a"
    monkeypatch.setenv("PACKAGES", "https://abcdefghijkl@host/simple")
    assert redact("https://abcdefghijkl@host/simple") == "https://$PACKAGES@host/simple"


def test_nested_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVATE_KEY", secret := 'BEGIN "KEY"\nabcdef')
    values = {secret: [1, (f"is {secret}", None)], "x": 0.5}
    assert redact_values(values, find_secret_variables()) == {"$PRIVATE_KEY": [1, ("is $PRIVATE_KEY", None)], "x": 0.5}
