from __future__ import annotations

from pathlib import Path

import pytest

from alphaapollo.cli import main as cli
from alphaapollo.cli.main import SUBCOMMANDS, main
from alphaapollo.config.keys import COMMANDS, list_keys
from alphaapollo.processes.network import find_free_port

ROOT = Path(__file__).resolve().parents[3]


def test_every_verb_leads_to_a_main() -> None:
    for verb in SUBCOMMANDS.values():
        assert callable(verb.load())


def test_keys_that_matter_exist_and_are_five() -> None:
    for verb in SUBCOMMANDS.values():
        if verb.command:
            help_keys = verb.help_keys.split()
            assert len(help_keys) == 5
            shown = {word.split("=")[0] for word in verb.example.split() if "." in word.split("=")[0]}
            assert shown | set(help_keys) <= list_keys(COMMANDS[verb.command]).keys()


def run(words: str) -> object:
    try:
        return main(words.split())
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("verb", SUBCOMMANDS)
def test_every_verb_has_help_of_one_screen(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{verb} --help") == 0
    shown = capsys.readouterr().out
    assert 3 <= len(shown.splitlines()) <= 30
    assert all(key in shown for key in SUBCOMMANDS[verb].help_keys.split())


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("--help", ["alphaapollo SUBCOMMAND [--config FILE]"]),
        ("rl --config own.yml env.rollout.n=3 --cfg", ["  seed: 7\n", "    n: 3\n"]),
        ("distill teacher.model.path=t --cfg", ["  adv_estimator: none\n"]),
        ("explain trainer.seed data.x", ["trainer.seed: accepted (default 0", "\ndata.x: unknown ("]),
    ],
)
def test_subcommand_calls_its_main(
    words: str, facts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yml").write_text("trainer: {seed: 7}\n")
    assert run(words) == 0
    shown = capsys.readouterr().out
    assert [fact for fact in facts if fact not in shown] == []


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("", []),
        ("quikstart", ["quikstart: ", "Did you mean 'quickstart'?", "Known: quickstart, rl"]),
        ("sft model.pth=x", ["Did you mean 'model.path'"]),
        ("explain", []),
        ("serve .", ["has no model and no complete checkpoint yet", "Resume this run"]),
        ("serve no_run --port PORT rollout.name=hf", ["rollout.name=hf: this command uses vLLM"]),
    ],
)
def test_command_that_cannot_run_is_an_error(
    words: str, facts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words.replace("PORT", str(find_free_port()))) == 2
    error = capsys.readouterr().err
    assert [fact for fact in facts if fact not in error] == [], error


def test_preset_of_a_subcommand_can_be_replaced() -> None:
    assert SUBCOMMANDS["distill"].make_arguments(["trainer.seed=1"]) == ["algorithm=distill", "trainer.seed=1"]
    assert SUBCOMMANDS["distill"].make_arguments(["algorithm=grpo"]) == ["algorithm=grpo"]


def test_quickstart_needs_the_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(cli.os, "execvpe", lambda _file, command, _environment: commands.append(command))
    monkeypatch.chdir(tmp_path)
    cli.run_quickstart([])
    assert commands[0][1] == str(ROOT / "examples/quickstart/run.sh")  # found beside the package
    monkeypatch.setattr(cli, "QUICKSTART", Path("gone.sh"))
    assert cli.run_quickstart([]) == 2
    assert "quickstart needs gone.sh" in (said := capsys.readouterr().err) and "Run it in a clone" in said
