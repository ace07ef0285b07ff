"""Known vulnerabilities of the pinned packages: `make audit`.

Asks pip-audit, which asks an index of advisories: its own installation, or uv fetches one for the moment. Ends with 0:
none is known; 1: some are, in a table; 2: nothing could be looked up (no index within reach), which says nothing about
the packages.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = ("cpu.txt", "gpu.txt", "dev.txt")
TIME_LIMIT = 600  # seconds for a list


def command(requirements: Path) -> list[str]:
    """The lists are complete: nothing is resolved or installed."""
    own = importlib.util.find_spec("pip_audit") is not None
    program = [sys.executable, "-m", "pip_audit"] if own else [sys.executable, "-m", "uv", "tool", "run", "pip-audit"]
    return [*program, "-r", str(requirements), "--no-deps", "--disable-pip", "--format=json", "--progress-spinner=off"]


def look_up(requirements: Path) -> tuple[dict[str, list[str]], list[str]] | str:
    """package==version -> what is known of it, with the versions that mend it; and the packages of which the index
    knows nothing. Or why nothing could be looked up."""
    try:
        done = subprocess.run(command(requirements), capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {TIME_LIMIT} s"
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"it ended with {done.returncode}"
    unknown = [one["name"] for one in packages if "skip_reason" in one]
    if len(unknown) == len(packages):  # an index of packages without advisories, or none
        return packages[0]["skip_reason"] if packages else "it was asked of no package"
    known = {
        f"{one['name']}=={one['version']}": [
            f"{advisory['id']} (mended in {', '.join(advisory['fix_versions']) or 'no version'})"
            for advisory in one["vulns"]
        ]
        for one in packages
        if one.get("vulns")
    }
    return known, unknown


def exact(lines: list[str]) -> list[str]:
    """The pinned packages without their markers and builds (+cpu), which advisories do not know."""
    pins = [line.split(";")[0].strip() for line in lines if "==" in line and not line.startswith("#")]
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
                print(f"requirements/{name}: NOT looked up, for no index of advisories could be asked: {answer}")
                continue
            known, unknown = answer
            found |= bool(known)
            missing = f"; nothing is known of {', '.join(unknown)}" if unknown else ""
            print(f"requirements/{name}: {len(pins)} packages, {len(known)} with known vulnerabilities{missing}")
            for package, advisories in known.items():
                print(f"  {package}: {'; '.join(advisories)}")
    return 1 if found else 2 if not_asked else 0


if __name__ == "__main__":
    sys.exit(main())
