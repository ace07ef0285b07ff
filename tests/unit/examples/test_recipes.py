"""examples/recipes: recipes fit their GPUs, dry runs accept them, and docs/recipes.md has their numbers and data."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from alphaapollo.trainer.main_ppo import main as train
from alphaapollo.utils.plugins import is_available
from examples.agents.make_task import make_agent_tokenizer
from examples.data_preprocess import common
from examples.quickstart.make_task import make_model
from scripts.recipes import PAGE, RECIPES, ROW, SIZES, find_published_config, load_recipe, page
from tests.unit.data.images import make_test_image
from tests.vision.models import make as make_vision_model

TASKS = sorted(path.name for path in RECIPES.iterdir() if path.is_dir())
PUBLISHED = find_published_config("qwen2.5-7b").parent
ALL = [(task, size) for task in TASKS for size in SIZES]
HAS_SEARCH = is_available("tools", "local_rag")
DRY_RUNS = [task for task in TASKS if task != "search" or HAS_SEARCH]
MATHS = [{"problem": f"{number}+1?", "solution": rf"\boxed{{{number + 1}}}"} for number in range(4)]
DOUBLE = {"prompt": "def double(x):\n", "test": "def check(f):\n    assert f(2) == 4\n", "entry_point": "double"}
PASSAGES = {"title": ["Tea", "Milk"], "sentences": [["Tea is ", "brown."], ["Milk is white."]]}
TEA = {"question": "What is brown?", "answer": "tea", "context": PASSAGES}
FIGURE = {"problem": "<image>Find x.", "answer": "3", "images": [{"bytes": make_test_image(80, 60), "path": None}]}
HUB: dict[str, dict[str, list[dict[str, Any]]]] = {  # rows in the columns of each data set
    "openai/gsm8k": dict.fromkeys(("train", "test"), [{"question": "1+1?", "answer": "<<1+1=2>>2\n#### 2"}] * 4),
    "DigitalLearningGmbH/MATH-lighteval": {"train": MATHS},
    "HuggingFaceH4/MATH-500": {"test": MATHS},
    "math-ai/aime24": {"test": MATHS},
    "math-ai/aime25": {"test": MATHS},
    "open-r1/DAPO-Math-17k-Processed": {"train": [{"prompt": "1+1?", "solution": "2", "data_source": "math_dapo"}] * 4},
    "hotpotqa/hotpot_qa": dict.fromkeys(("train", "validation"), [TEA] * 4),
    "TIGER-Lab/AceCode-87K": {"train": [{"question": "Double.", "test_cases": ["assert double(2) == 4"]}] * 4},
    "openai/openai_humaneval": {"test": [{**DOUBLE, "canonical_solution": "    return 2 * x\n"}]},
    "google-research-datasets/mbpp": {"test": [{"text": "Double.", "test_list": ["assert double(2) == 4"]}]},
    "hiyouga/geometry3k": dict.fromkeys(("train", "test"), [FIGURE] * 4),
    "bigcode/humanevalpack": {"test": [{**DOUBLE, "buggy_solution": "    return x\n"}]},
}


def read_hub(source: str, splits: Sequence[str], config_name: str | None) -> dict[str, list[dict[str, Any]]]:
    return {split: rows for split, rows in HUB[source].items() if split in splits}


def run_preparation_commands(text: str) -> None:
    """Run the commands of the page that prepare data, in the working folder."""
    commands = re.findall(
        r"^    (?:python -m|alphaapollo) (examples\.data_preprocess.*|search-index.*)$", text, re.MULTILINE
    )
    for command in dict.fromkeys(commands):
        name, *words = shlex.split(command)
        module = {"search-index": "alphaapollo.tools.retrieval"}.get(name, name)
        if not HAS_SEARCH and module == "alphaapollo.tools.retrieval":
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [module, *words])
            assert not importlib.import_module(module).main()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a small model, and with data that the commands of the page have prepared from a few rows."""
    folder = tmp_path_factory.mktemp("recipes")
    make_agent_tokenizer(folder / "model")
    make_model(folder / "model", seed=0)
    make_vision_model("qwen2_5_vl", folder / "vision_model")
    for config in (folder / "model" / "config.json", folder / "vision_model" / "config.json"):
        text = re.sub(r'("max_position_embeddings": )\d+', r"\g<1>32768", config.read_text())
        config.write_text(text)
    for published in PUBLISHED.iterdir():  # configurations without weights
        tiny = folder / ("vision_model" if "-vl-" in published.name else "model")
        shutil.copytree(tiny, folder / published.name, ignore=shutil.ignore_patterns("*.safetensors"))
        ids = {key: value for key, value in json.loads((tiny / "config.json").read_text()).items() if "token_id" in key}
        values = json.loads((published / "config.json").read_text())
        (folder / published.name / "config.json").write_text(json.dumps(values | ids))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(common, "_read_hub", read_hub)
        run_preparation_commands(PAGE.read_text())
    return folder


def test_the_page_has_the_planned_numbers_of_all_recipes():
    text = PAGE.read_text()
    assert sorted((row[2], row[3]) for row in ROW.finditer(text)) == sorted(ALL)
    assert page(text) == text, "run python -m scripts.recipes"


@pytest.mark.parametrize(("task", "size"), [(task, size) for task in DRY_RUNS for size in SIZES])
def test_a_dry_run_plans_a_recipe_for_its_gpus(
    task: str, size: str, prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(prepared)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # it is not contacted
    monkeypatch.setenv("COLUMNS", "200")
    model = find_published_config(load_recipe(task, size).actor_rollout_ref.model.path).name
    recipe = ["--config-dir", str(RECIPES / task), "--config-name", size, f"actor_rollout_ref.model.path={model}"]
    code = train([*recipe, "trainer.dry_run=True", "trainer.planned_device=h100"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "dry run: the configuration is valid" in printed.out and "warning" not in printed.out
    assert "planned for" in printed.out and "GiB on a GPU of 80 GiB at its peak" in printed.out
    assert "memory: about" not in printed.out, "it may not fit"
    assert re.search(r"^generate +7\d\.\d .*kv cache", printed.out, re.MULTILINE)
    assert ("GB per micro-batch" in printed.out) == (size != "one_gpu")
