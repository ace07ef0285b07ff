"""List known vulnerabilities of the pinned packages: `make audit`.

Runs pip-audit, installed or fetched by uv, which queries an advisory index. Exit status: 0, no known vulnerabilities;
1, vulnerabilities were found; 2, the index could not be reached, so nothing was checked.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = ("cpu.txt", "gpu.txt", "dev.txt", "suites.txt")
PIP_AUDIT = "pip-audit==2.10.1"  # its own requirements are not pinned
TIME_LIMIT = 600  # seconds per requirements file


def command(requirements: Path) -> list[str]:
    """pip-audit command line for one file. The files are complete, so nothing is resolved or installed."""
    own = importlib.util.find_spec("pip_audit") is not None
    program = [sys.executable, "-m", "pip_audit"] if own else [sys.executable, "-m", "uv", "tool", "run", PIP_AUDIT]
    return [*program, "-r", str(requirements), "--no-deps", "--disable-pip", "--format=json", "--progress-spinner=off"]


def look_up(requirements: Path) -> tuple[dict[str, list[str]], list[str]] | str:
    """Query the advisory index.

    Returns ({package==version: advisories with their fix versions}, packages the index does not have), or the reason
    why the index could not be queried.
    """
    try:
        done = subprocess.run(command(requirements), capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return f"no response within {TIME_LIMIT} s"
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"pip-audit exited with status {done.returncode}"
    unknown = [one["name"] for one in packages if "skip_reason" in one]
    if len(unknown) == len(packages):  # an index of packages without advisories, or none
        return packages[0]["skip_reason"] if packages else "no package was checked"
    known = {
        f"{one['name']}=={one['version']}": [
            f"{advisory['id']} (fixed in {', '.join(advisory['fix_versions']) or 'no version'})"
            for advisory in one["vulns"]
        ]
        for one in packages
        if one.get("vulns")
    }
    return known, unknown


def exact(lines: list[str]) -> list[str]:
    """Pinned packages without markers and local versions (+cpu), which advisories do not have."""
    plain = [line.partition(" --hash")[0].partition(";")[0].strip() for line in lines]
    pins = [line for line in plain if "==" in line and not line.startswith("#")]
    return list(dict.fromkeys(pin.split("+")[0] for pin in pins))


def main() -> int:
    found, not_asked = False, False
    with tempfile.TemporaryDirectory() as folder:
        for name in LISTS:
            pins = exact((ROOT / "requirements" / name).read_text().splitlines())
            plain = Path(folder, name)
            plain.write_text("\n".join(pins) + "\n")
            answer = look_up(plain)
            if isinstance(answer, str):
                not_asked = True
                print(f"requirements/{name}: NOT checked because the advisory index is unavailable: {answer}")
                continue
            known, unknown = answer
            found |= bool(known)
            missing = f"; not in the index: {', '.join(unknown)}" if unknown else ""
            print(f"requirements/{name}: {len(pins)} packages, {len(known)} with known vulnerabilities{missing}")
            for package, advisories in known.items():
                print(f"  {package}: {'; '.join(advisories)}")
    return 1 if found else 2 if not_asked else 0


if __name__ == "__main__":
    sys.exit(main())
