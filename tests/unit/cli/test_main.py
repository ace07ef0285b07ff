from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import alphaapollo
from alphaapollo.cli import main as cli
from alphaapollo.cli.main import SUBCOMMANDS, main
from alphaapollo.config.keys import COMMANDS, list_keys

ROOT = Path(__file__).resolve().parents[3]


def test_every_verb_leads_to_a_main() -> None:
    for verb in SUBCOMMANDS.values():
        assert callable(pkgutil.resolve_name(f"alphaapollo.{verb.main}"))


def test_keys_that_matter_exist_and_are_five() -> None:
    for verb in SUBCOMMANDS.values():
        if verb.command:
            help_keys = verb.help_keys.split()
            assert len(help_keys) == 5
            shown = {word.split("=")[0] for word in verb.example.split() if "." in word.split("=")[0]}
            assert shown | set(help_keys) <= list_keys(COMMANDS[verb.command]).keys()


def test_help_is_one_screen_and_imports_nothing_heavy() -> None:
    code = """
import sys
from alphaapollo.cli.main import main
assert main(["--help"]) == 0
heavy = {"torch", "ray", "vllm", "transformers", "hydra", "pydantic", "pandas"} & set(sys.modules)
assert not heavy, heavy
assert main(["rl", "--help"]) == 0
assert "torch" not in sys.modules
"""
    environment = os.environ | {"PYTHONPATH": str(Path(alphaapollo.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "alphaapollo SUBCOMMAND [--config FILE]" in done.stdout


@pytest.mark.parametrize("verb", SUBCOMMANDS)
def test_every_verb_has_help_of_one_screen(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main([verb, "--help"])
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    shown = capsys.readouterr().out
    assert 3 <= len(shown.splitlines()) <= 30
    assert all(key in shown for key in SUBCOMMANDS[verb].help_keys.split())


def test_misspelt_subcommand_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quikstart"]) == 2
    error = capsys.readouterr().err
    assert all(fact in error for fact in ("quikstart: ", "Did you mean 'quickstart'?", "Known: quickstart, doctor"))
    assert main([]) == 2


def test_subcommand_calls_its_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.yml").write_text("trainer: {seed: 7}\n")
    with pytest.raises(SystemExit) as ended:
        main(["rl", "--config", str(tmp_path / "own.yml"), "env.rollout.n=3", "--cfg"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "  seed: 7\n" in shown
    assert "    n: 3\n" in shown
    with pytest.raises(SystemExit) as ended:
        main(["sft", "model.pth=x"])
    assert ended.value.code == 2
    assert "Did you mean 'model.path'" in capsys.readouterr().err


def test_subcommand_with_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert SUBCOMMANDS["distill"].make_arguments(["trainer.seed=1"]) == ["algorithm=distill", "trainer.seed=1"]
    assert SUBCOMMANDS["distill"].make_arguments(["algorithm=grpo"]) == ["algorithm=grpo"]
    with pytest.raises(SystemExit):
        main(["distill", "teacher.model.path=t", "--cfg"])
    assert "  adv_estimator: none\n" in capsys.readouterr().out


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "trainer.seed", "actor_rollout_ref.actor.use_dynamic_bsz"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("trainer.seed: accepted (default 0")
    assert "dropped because" in second
    assert main(["explain"]) == 2


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
