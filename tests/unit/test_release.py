"""The files of a release agree: version, license, changelog, citation, and the workflows in .github/."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from alphaapollo import __version__

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = {  # names of check-jsonschema
    "vendor.github-workflows": ".github/workflows/*.yml",
    "custom.github-workflows-require-timeout": ".github/workflows/*.yml",
    "vendor.github-actions": ".github/actions/*/action.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.citation-file-format": "CITATION.cff",
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_follow_their_schema(schema: str) -> None:
    files = sorted(ROOT.glob(SCHEMAS[schema]))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert files and done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="needs actionlint")
def test_actionlint_has_no_findings() -> None:
    done = subprocess.run(["actionlint"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_workflows_run_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {path.name: set(re.findall(r"\bmake ([a-z-]+)", path.read_text())) for path in ROOT.glob(".github/**/*.yml")}
    assert {"check", "test", "test-all", "test-gpu", "gpu-check", "docs-site", "wheel"} <= set.union(*used.values())
    assert {name: missing for name, names in used.items() if (missing := names - targets)} == {}


SECTION = "## [Unreleased]\n{}\n## [9.1.0] - 2026-12-01\n\n- An entry.\n"


@pytest.mark.parametrize(
    ("version", "changes", "tag", "code"),
    [
        ("9.1.0", SECTION.format(""), "v9.1.0", 0),
        ("9.1.0", SECTION.format(""), "v9.0.0", 1),
        ("9.1.0", SECTION.format("\n### Added\n\n- Another one.\n"), "v9.1.0", 1),
        ("9.2.0.dev0", SECTION.format(""), "v9.2.0.dev0", 1),
    ],
)
def test_a_release_needs_its_version_and_all_entries(
    tmp_path: Path, version: str, changes: str, tag: str, code: int
) -> None:
    """The step of the workflow, as it stands. The other steps are targets of the Makefile, and the check by twine."""
    (tmp_path / "alphaapollo").mkdir()
    (tmp_path / "alphaapollo" / "_version.py").write_text(f'__version__ = "{version}"\n')
    (tmp_path / "CHANGELOG.md").write_text(changes)
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["build"]["steps"]
    (compare,) = [step["run"] for step in steps if step.get("name", "").startswith("Compare")]
    environment = os.environ | {"GITHUB_REF_NAME": tag}
    done = subprocess.run(["bash", "-e", "-c", compare], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr


def test_the_release_is_described() -> None:
    sections = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert sections[:2] == [("Unreleased", ""), (citation["version"], citation["date-released"])]
    is_new = __version__.endswith(".dev0") and Version(__version__) > Version(citation["version"])
    assert is_new or __version__ == citation["version"]


def test_the_license_is_apache() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()
