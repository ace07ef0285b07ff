"""Import layers (docs/architecture.md): imports run downward only, and each large dependency has one owner."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

PLUGIN = "alphaapollo.plugins."
PACKAGE = Path(__file__).resolve().parents[2] / "alphaapollo"

# Lowest first. A package imports packages of lower layers, and itself.
LAYERS = [
    ["_version", "types", "utils", "processes"],
    ["config"],
    ["algorithms", "data", "tools"],
    ["runs", "user_objects", "testing"],
    ["rewards", "batching"],
    ["observability"],
    ["models", "environments", "engines"],
    ["rollout", "workers"],
    ["controller"],
    ["planning"],
    ["launch", "run_process"],
    ["session"],
    ["finetuning", "trainer", "cli", "results", "evolving", "__main__"],
    ["api", "own_loop"],
    ["plugins"],
]
SAME_LAYER_ALLOWED = {("types", "utils"), ("processes", "utils")}
PLUGIN_IMPORTS_ALLOWED = {("sweeps", "viewer")}

# Library -> the modules that may import it, as patterns of names under alphaapollo.
OWNERS = {
    "ray": ["controller.*"],
    "vllm": ["engines.vllm.*", "engines.weight_sync.vllm_*"],
    "sglang": ["plugins.sglang.*"],
    "hydra": ["config.load", "trainer.main_*"],
    "peft": ["models.lora", "plugins.verify.reference.*"],
    "transformers": ["models.*", "data.*", "engines.hf", "plugins.verify.reference.*", "plugins.gguf.*"],
    "torch.distributed": ["models.*", "workers.*", "plugins.sglang.transfer"],
    **{tracker: ["plugins.trackers.*"] for tracker in ("wandb", "mlflow", "trackio", "swanlab", "tensorboard")},
    "torch.utils.tensorboard": ["plugins.trackers.*"],
}
NO_TORCH = {*LAYERS[0], "config", "data", "batching", "tools", "rewards", "environments"}
INSIDE_FUNCTIONS_ONLY = ["transformers", "peft"]  # importing a module of the project stays cheap


class Import(NamedTuple):
    module: str  # the importer, without the package: "rollout.group"
    line: int
    target: str  # what it imports, in full: "alphaapollo.types.Prompt"
    inside_function: bool

    def of(self, library: str) -> bool:
        return self.target == library or self.target.startswith(library + ".")


def imports_of(package: Path) -> Iterator[Import]:
    """Every import statement, also inside functions and under TYPE_CHECKING."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        local = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: relative import; write it in full"
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                yield Import(module, node.lineno, target, id(node) in local)


def type_checking_only(package: Path) -> set[tuple[str, int]]:
    """(module, line) of the imports under TYPE_CHECKING."""
    found = set()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                found |= {(".".join(parts), inner.lineno) for inner in node.body}
    return found


def plugin_violations(root: Path) -> list[str]:
    """Texts of the core that name a module of a plug-in, and imports from one plug-in to another."""
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if parts[0] != "plugins":
            texts = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if is_text(node)]
            found += [f"{'/'.join(parts)}:{node.lineno} names a plug-in" for node in texts if PLUGIN in node.value]
    for item in imports_of(root):
        plugin, other = item.module.split(".")[1:2], item.target.removeprefix(PLUGIN).split(".")[0]
        is_plugin = item.module.startswith("plugins.") and item.target.startswith(PLUGIN)
        if is_plugin and plugin != [other] and (*plugin, other) not in PLUGIN_IMPORTS_ALLOWED:
            found.append(f"{item.module}:{item.line} imports the plug-in {other}")
    return found


def find_tests_with_plugins(repository: Path) -> list[str]:
    """Tests of the core that import a plug-in, also through another test, a script or an example."""
    targets: dict[str, set[str]] = {}
    for folder in ("tests", "scripts", "examples"):
        for item in imports_of(repository / folder):
            if not item.inside_function:
                targets.setdefault(f"{folder}.{item.module}", set()).add(item.target)
    found = {module for module, names in targets.items() if any(name.startswith(PLUGIN) for name in names)}
    while more := {
        module
        for module, names in targets.items()
        if module not in found and any(name in found or name.rpartition(".")[0] in found for name in names)
    }:
        found |= more
    return sorted(one for one in found if one.startswith("tests.") and not one.startswith("tests.plugins."))


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_owner(module: str, owners: list[str]) -> bool:
    return any(fnmatch(module, owner) or fnmatch(module + ".", owner) for owner in owners)


def violations(root: Path) -> list[str]:
    layer_of = {name: layer for layer, names in enumerate(LAYERS) for name in names}
    only_types = type_checking_only(root)
    found = []
    for item in imports_of(root):
        where = f"{item.module}:{item.line} imports {item.target}"
        package = item.module.split(".")[0]
        if package and package not in layer_of:
            found.append(f"{where}: the package {package} has no layer")
            continue
        if item.target.startswith("alphaapollo.") and package:
            other = item.target.split(".")[1]
            up = layer_of.get(other, -1) > layer_of[package]
            aside = other != package and layer_of.get(other, -1) == layer_of[package]
            allowed = (package, other) in SAME_LAYER_ALLOWED
            if up or (aside and not allowed):
                found.append(f"{where}: {other} is not below {package}")
        for library, owners in OWNERS.items():
            if item.of(library) and not is_owner(item.module, owners):
                found.append(f"{where}: the owner of {library} is {', '.join(owners)}")
        if item.of("torch") and package in NO_TORCH:
            found.append(f"{where}: no torch in {package}")
        lazy = any(item.of(library) for library in INSIDE_FUNCTIONS_ONLY)
        if lazy and not item.inside_function and (item.module, item.line) not in only_types:
            found.append(f"{where}: import it inside the function that needs it")
    return found


def import_cycle(package: Path) -> list[str]:
    """Modules of an import cycle, without imports under TYPE_CHECKING."""
    paths = {".".join(path.relative_to(package).with_suffix("").parts): path for path in package.rglob("*.py")}
    modules = {name.removesuffix(".__init__") for name in paths}
    only_types = type_checking_only(package)
    imports: dict[str, set[str]] = {module: set() for module in modules}
    for item in imports_of(package):
        target = item.target.removeprefix("alphaapollo.")
        target = target if target in modules else target.rpartition(".")[0]
        if target in modules and target != item.module and (item.module, item.line) not in only_types:
            imports.setdefault(item.module, set()).add(target)
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_cycle(tmp_path: Path) -> None:
    assert import_cycle(PACKAGE) == []
    for name, other in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.py").write_text(f"def f():\n    from alphaapollo.{other} import g\n")
    assert set(import_cycle(tmp_path)) == {"a", "b", "c"}


def test_imports_run_downward_and_dependencies_have_one_owner() -> None:
    assert not (found := violations(PACKAGE)), "\n" + "\n".join(found)


def test_the_core_names_no_plugin_and_plugins_do_not_import_each_other(tmp_path: Path) -> None:
    assert not (found := plugin_violations(PACKAGE)), "\n" + "\n".join(found)
    for path, text in {
        "cli/main.py": "VIEW = 'alphaapollo.plugins.viewer.command:view'\n",
        "plugins/sweeps/a.py": "from alphaapollo.plugins.viewer.curves import average\n",
        "plugins/viewer/a.py": "import alphaapollo.plugins.viewer.b\nimport alphaapollo.plugins.sweeps.a\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert plugin_violations(tmp_path) == [
        "cli/main.py:1 names a plug-in",
        "plugins.viewer.a:2 imports the plug-in sweeps",
    ]


def test_every_plugin_is_listed_and_described() -> None:
    folders = {path.parent.name for path in (PACKAGE / "plugins").glob("*/__init__.py")}
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = page.partition("| plug-in |")[2].partition("\n\n")[0]
    assert not folders or folders == {*tomllib.loads((PACKAGE / "plugins.toml").read_text())}
    assert [name for name in sorted(folders) if f"\n| `{name}` |" not in rows] == []


def test_the_check_can_fail(tmp_path: Path) -> None:
    for path, text in {
        "batching/packing.py": "from alphaapollo.trainer import loop\n",
        "rollout/group.py": "def f():\n    from alphaapollo.workers.policy import PolicyWorker\n    import vllm\n",
        "engines/vllm/engine.py": "import vllm\nfrom alphaapollo.config.schema import Rollout\n",
        "rewards/code.py": "from alphaapollo.tools.base import Tool\nimport torch.nn\n",
        "trainer/loop.py": "import ray.util\nimport torch.distributed as dist\n",
        "models/load.py": "from transformers import AutoConfig\nfrom alphaapollo.types import Prompt\n",
        "models/ok.py": "def f():\n    import transformers\n",
        "attic/old.py": "import os\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert [line.split(" imports")[0] for line in violations(tmp_path)] == [
        "attic.old:1",  # a package without a layer
        "batching.packing:1",  # upward
        "models.load:1",  # transformers at the top of a file
        "rewards.code:2",  # torch
        "rollout.group:2",  # sideways
        "rollout.group:3",  # vllm outside its owner
        "trainer.loop:1",  # ray
        "trainer.loop:2",  # torch.distributed
    ]


def test_tests_of_the_core_need_no_plugin(tmp_path: Path):
    assert not find_tests_with_plugins(PACKAGE.parent)
    for name, text in {
        "tests/unit/test_a.py": "from scripts.table import draw\n",
        "tests/unit/test_b.py": "def test():\n    from scripts.table import draw\n",
        "tests/plugins/test_c.py": f"import {PLUGIN}viewer\n",
        "scripts/table.py": "from examples import curves\n",
        "examples/curves.py": f"from {PLUGIN}viewer import curves\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert find_tests_with_plugins(tmp_path) == ["tests.unit.test_a"]
