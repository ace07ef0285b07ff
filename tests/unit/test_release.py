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


@pytest.mark.parametrize(("tag", "code"), [(f"v{__version__}", 0), ("v0.0.1", 1)])
def test_the_release_compares_its_tag_with_the_version(tag: str, code: int) -> None:
    """The step of the workflow, as it stands. The other steps are targets of the Makefile, and the check by twine."""
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["build"]["steps"]
    (compare,) = [step["run"] for step in steps if step.get("name", "").startswith("Compare")]
    environment = os.environ | {"GITHUB_REF_NAME": tag}
    done = subprocess.run(["bash", "-e", "-c", compare], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr


def test_the_release_is_described() -> None:
    sections = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert sections[:2] == [("Unreleased", ""), (__version__, citation["date-released"])]
    assert citation["version"] == __version__


def test_the_license_is_apache() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()
