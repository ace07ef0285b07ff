"""Entry points of installed packages: sections that are checked like ours, lazy imports, one error for each mistake."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import alphaapollo
from alphaapollo.cli import main as cli
from alphaapollo.config.__main__ import explain_key
from alphaapollo.config.changes import find_changes
from alphaapollo.config.check import check_config_and_get_notices
from alphaapollo.config.errors import ConfigError
from alphaapollo.config.load import SavedConfig, dump_yaml, load_config, read_user_yaml
from alphaapollo.config.schema import Config, Env, Rollout
from alphaapollo.config.schema.model import ENGINES
from alphaapollo.data.files import read_rows
from alphaapollo.engines import factory
from alphaapollo.environments import base
from alphaapollo.environments.base import BUILT_IN, check_environment, get_environment_spec
from alphaapollo.environments.environment_tools import open_toolbox
from alphaapollo.rewards.registry import check_prompts_are_gradable, load_grader
from alphaapollo.tools.base import Session, make_tools
from alphaapollo.types import Prompt
from alphaapollo.utils import plugins
from tests.maze_lab.install import SOURCE, add_dist_info, install_maze_lab

ROOT = Path(__file__).parents[3]
MAZE = ["env.env_name=maze", "actor_rollout_ref.rollout.name=walk"]
BAD_TEXT = "raise RuntimeError('no licence')\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of installed packages, with maze-lab."""

    def forget() -> None:
        plugins._read_entry_points.cache_clear()
        plugins._list_plugins.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] in ("maze_lab", "bad_lab")]:
            del sys.modules[name]

    forget()
    monkeypatch.setattr(base._ENVIRONMENTS, "_entries", dict(base._ENVIRONMENTS._entries))
    monkeypatch.syspath_prepend(install_maze_lab(tmp_path / "site"))
    yield tmp_path / "site"
    forget()


def load(*words: str) -> Config:
    return load_config(Config, "ppo", [*MAZE, *words])


def notices(config: Config) -> str:
    return " ".join(check_config_and_get_notices(config, optional_paths={"data.train_files", PATH}))


PATH, ROLLOUT = "actor_rollout_ref.model.path", "actor_rollout_ref.rollout"


def test_sections_are_checked_saved_and_explained(site: Path, tmp_path: Path) -> None:
    config = load("env.plugins.maze.size=7", "reward.plugins.short_path.base=0.5")
    assert config.env.plugins["maze"].size == 7 and config.actor_rollout_ref.rollout.plugins["walk"].stride == 1
    (tmp_path / "saved.yaml").write_text(dump_yaml(config))
    assert load_config(Config, "ppo", ["--config", str(tmp_path / "saved.yaml")]) == config
    saved = SavedConfig(tmp_path, read_user_yaml(str(tmp_path / "saved.yaml"), Config))
    assert load_config(Config, "ppo", [], saved) == config
    (change,) = find_changes(
        config.model_dump(mode="json"), load("env.plugins.maze.size=8", "reward.plugins.short_path.base=0.5")
    )
    assert (change.key, change.verdict) == ("env.plugins.maze.size", "refused")
    assert "no effect: doors is open" in notices(load("env.plugins.maze.doors_seed=2")).replace("env.plugins.maze.", "")
    assert "default 0.0, Reward of a text" in explain_key("reward.plugins.short_path.base")
    with pytest.raises(ConfigError) as refused:
        load("env.plugins.maze.size=0", "env.plugins.maze.dors=open", "reward.plugins.other.x=1")
    unknown, size, other = sorted(refused.value.errors)[0], *sorted(refused.value.errors)[1:]
    assert unknown.startswith("env.plugins.maze.dors") and "Did you mean 'doors'" in unknown
    assert size.startswith("env.plugins.maze.size: expected integer > 0, got 0")
    assert other.startswith("reward.plugins.other: no installed package has the section reward.other")
    assert "maze" in notices(load("env.env_name=single_turn", "env.plugins.maze.size=2"))


def test_a_command_has_keys_and_the_python_api_a_name(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["maze-draw"]) == cli.main(["maze-draw", "maze.size=7"]) == 0
    assert capsys.readouterr().out == "...\n.......\n"
    assert cli.main(["maze-draw", "--help"]) == cli.main(["explain", "maze.size"]) == 0
    assert "Default 5." in (shown := capsys.readouterr().out) and "accepted (default 5 in maze-draw" in shown
    with pytest.raises(ConfigError, match=r"maze\.sze .*Did you mean 'maze\.size'"):
        cli.main(["maze-draw", "maze.sze=7"])
    assert alphaapollo.score_path(Prompt(0, "short_path", "?", "4"), ">", SimpleNamespace(base=0.0)) == 0.25


def test_sections_need_no_plugins(site: Path, tmp_path: Path) -> None:
    """env.maze is env.plugins.maze; the last one of both counts."""
    (tmp_path / "maze.yaml").write_text("env: {env_name: maze, maze: {size: 3, turns: 4}}\n")
    file = ["--config", str(tmp_path / "maze.yaml")]
    for words in (["env.plugins.maze.size=7"], ["env.plugins.maze={size:2}", "env.maze.size=7"]):
        config = load_config(Config, "ppo", [*file, *words])
        assert (config.env.plugins["maze"].size, config.env.plugins["maze"].turns) == (7, 4)
    assert load("reward.short_path.base=0.5").reward.plugins["short_path"].base == 0.5
    assert explain_key("env.maze.size") == explain_key("env.plugins.maze.size")
    with pytest.raises(ConfigError, match=r"env\.plugins\.maze\.size: expected integer > 0, got 0"):
        load("env.maze.size=0")
    with pytest.raises(ConfigError, match=r"env\.labyrinth\.size .got 1.: unknown key"):
        load("env.labyrinth.size=1")


def test_folders_of_a_package_are_data(site: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "maze.txt").write_text("....")
    rows = read_rows(tmp_path)
    assert [row["ground_truth"] for row in rows] == ["4", "4"] and rows.locations == [str(tmp_path / x) for x in "ab"]
    assert rows.source.files == (tmp_path / "a/maze.txt", tmp_path / "b/maze.txt")
    with pytest.raises(ValueError, match="a folder of mazes has no splits"):
        read_rows(f"{tmp_path}#train")


def test_only_what_is_used_is_imported(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_config(Config, "ppo", ["env.env_name=informal_math", "actor_rollout_ref.rollout.name=hf"])
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "installed packages:" in shown and "maze-baseline  train in the maze" in shown
    assert {name for name in sys.modules if name.startswith("maze_lab.")} == {"maze_lab.command"}
    assert cli.main(["maze-baseline", "--help"]) == 0
    assert "  env.plugins" not in (shown := capsys.readouterr().out) and "trainer.seed" in shown
    del sys.modules["maze_lab.command"]
    load()
    assert {name for name in sys.modules if name.startswith("maze_lab.")} == {"maze_lab.settings"}
    prompt = Prompt(0, "short_path/easy", "?", "4")
    check_prompts_are_gradable([prompt])
    config = load("reward.plugins.short_path.base=0.5")
    assert load_grader("short_path", config.reward)(prompt, ">>>") == 0.75
    assert check_environment(load().env).is_graded(Env())
    assert "maze_lab.engine" not in sys.modules


def test_a_section_opens_tools(site: Path) -> None:
    config = load(
        "env.env_name=informal_math", "env.maze_signs.text=Turn.", "env.informal_math.enable_python_code=False"
    )
    assert "maze_signs" not in notices(config)

    async def read() -> str:
        box = await open_toolbox(config.env)
        assert box is not None and box.names == ["read_sign"]
        return (await box.call("read_sign", "{}", Session())).text

    assert asyncio.run(read()) == "Turn."


def test_rows_of_an_engine_are_checked(site: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        notices(load(f"{ROLLOUT}.top_p=0.5"))
    shown = f"{ROLLOUT}.name=walk, {ROLLOUT}.top_p=0.5: a walk has no probabilities. Set top_p=1."
    assert shown in refused.value.errors


@pytest.mark.parametrize("group", ["commands", "engines", "environments", "rewards"])
def test_names_of_ours_and_of_two_packages_are_refused(site: Path, group: str) -> None:
    name = {"commands": "rl", "engines": "hf", "environments": "agent", "rewards": "gsm8k"}[group]
    add_dist_info(site, "bad-lab", "2", {f"alphaapollo.{group}": {name: "bad_lab:f"}})
    with pytest.raises(ValueError, match=f"bad-lab 2 adds {name}"):
        match group:
            case "commands":
                raise ValueError(_error_of_a_command("rl"))
            case "engines":
                Rollout(name="walk")
            case "environments":
                get_environment_spec("single_turn")
            case "rewards":
                check_prompts_are_gradable([Prompt(0, "short_path", "?", "4")])


def _error_of_a_command(name: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda text, **options: lines.append(text))
        assert cli.main([name, "--help"]) == cli.REFUSED
    return lines[0]


def test_a_package_that_cannot_be_imported_is_named(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "bad_lab.py").write_text(BAD_TEXT)
    groups = {f"alphaapollo.{group}": {"bad": "bad_lab:f"} for group in ("commands", "environments")}
    add_dist_info(site, "bad-lab", "2", groups)
    with pytest.raises(ValueError) as refused:
        check_environment(Env(env_name="bad"))
    assert "package bad-lab 2" in str(refused.value) and "no licence" in str(refused.value)
    assert cli.main(["bad"]) == cli.REFUSED and "package bad-lab 2" in capsys.readouterr().err


def test_a_missing_plugin_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "saved.yaml").write_text("env: {harbour: {backend: docker}}\n")
    gone = plugins.Plugin("env.harbour", "x:y", "the plug-in harbour", folder=tmp_path / "gone")
    environment = plugins.Plugin("harbour", "x:y", "the plug-in harbour", folder=tmp_path / "gone")
    monkeypatch.setitem(plugins._read_list()["sections"], "env.harbour", gone)
    monkeypatch.setitem(plugins._read_list()["environments"], "harbour", environment)
    for group in ("tools", "rewards", "configs"):
        monkeypatch.setitem(plugins._read_list()[group], "harbour", environment)
    plugins._list_plugins.cache_clear()
    with pytest.raises(ConfigError, match=r"env\.harbour\.backend .*belongs to the plug-in harbour"):
        load_config(Config, "ppo", ["env.harbour.backend=docker"])
    assert "belongs to the plug-in harbour" in explain_key("env.harbour.backend")
    assert "belongs to the plug-in harbour" in explain_key("harbour.rounds")
    with pytest.raises(ValueError, match="harbour belongs to the plug-in harbour"):
        check_prompts_are_gradable([Prompt(0, "harbour/boats", "?", "7")])
    assert read_user_yaml(str(tmp_path / "saved.yaml"), Config) == {"env": {}}
    with pytest.raises(ValueError, match="harbour belongs to the plug-in harbour"):
        get_environment_spec("harbour")
    with pytest.raises(ValueError, match="harbour belongs to the plug-in harbour"):
        make_tools(["harbour"], {})
    plugins._list_plugins.cache_clear()


def test_the_page_shows_or_links_each_file_of_the_package() -> None:
    page = (ROOT / "docs/plugins.md").read_text()
    files = [SOURCE / "pyproject.toml", *(SOURCE / "maze_lab").glob("[a-z]*.py")]
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    blocks = set(re.findall(r"^```(?:python|toml)\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert blocks <= set(texts.values())
    assert [name for name, text in texts.items() if text not in blocks and f"](../{name})" not in page] == []


def test_built_in_names() -> None:
    """The names that packages cannot use are those of our environments and engines."""
    makers = {name: get_environment_spec(name).factory for name in base._ENVIRONMENTS.names()}
    ours = [name for name, make in makers.items() if make.__module__.startswith("alphaapollo.environments.")]
    assert ours == sorted(BUILT_IN) and {*ENGINES} == factory.ENGINES.keys()
