"""Download the wheels that gpu-check needs on a machine with torch and transformers alone (about 12 MB):

    make gpu-check-wheels                                   # or: python -m scripts.gpu_check.wheels FOLDER

Versions are those of requirements/gpu.txt. antlr4 has no wheel on the package index, so its wheel is built here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

from scripts.checks import ROOT

BUILT = ["antlr4-python3-runtime"]  # pure Python
PINNED = [
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),  # configuration
    *("hydra-core", "omegaconf", "filelock"),
    *("jsonschema", "jsonschema-specifications", "attrs", "referencing", "rpds-py"),  # tools
    *("aiohttp", "aiohappyeyeballs", "aiosignal", "frozenlist", "multidict", "propcache", "yarl"),  # environments
    *("psutil", "msgspec", "setproctitle"),
    *("peft", "accelerate"),  # LoRA
]
UNPINNED = ["liger-kernel>=0.8"]  # optional (pyproject.toml)
PLATFORMS = [f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_17", "2014", "_2_12", "2010", "_2_5", "1")]


def find_pins(names: list[str]) -> list[str]:
    """Return the lines NAME==VERSION of requirements/gpu.txt. Raises ValueError if a package has none."""
    lines = (ROOT / "requirements" / "gpu.txt").read_text().splitlines()
    pins = {line.partition("==")[0]: line.partition(";")[0].split()[0] for line in lines if "==" in line}
    if missing := [name for name in names if name not in pins]:
        raise ValueError(f"requirements/gpu.txt does not pin {', '.join(missing)}. Update the list in {__file__}.")
    return [pins[name] for name in names]


def download_wheels(folder: Path, python_version: str) -> None:
    """Download wheels for Linux on x86-64 from the sources in pip's configuration."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python_version}"]
    target += [f"--platform={platform}" for platform in PLATFORMS]
    wheels = [*find_pins(PINNED), *UNPINNED]
    subprocess.run([*pip, "download", "--no-deps", *target, f"--dest={folder}", *wheels], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", f"--wheel-dir={folder}", *find_pins(BUILT)], check=True)


def unpack_wheels(folder: Path, site: Path) -> Path:
    """Unpack all wheels in `folder` into `site`, for PYTHONPATH. pip is not needed."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ValueError(
            f"--wheels={folder} has no wheels. Run python -m scripts.gpu_check.wheels {folder} with an index."
        )
    site.mkdir(parents=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return site


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "outputs" / "gpu_check_wheels")
    parser.add_argument("--python-version", default="3.12", help="Python of the GPU machine (default: 3.12)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    download_wheels(args.folder, args.python_version)
    print(f"{len(list(args.folder.glob('*.whl')))} wheels in {args.folder}")


if __name__ == "__main__":
    main()
