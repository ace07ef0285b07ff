#!/usr/bin/env bash
# Create .venv and install the pinned requirements and this project. Fast if nothing changed.
#
#     scripts/setup.sh          runtime requirements
#     scripts/setup.sh suites   runtime requirements, and those of evaluation suites in .venv/suites
#     scripts/setup.sh sglang   runtime requirements, and those of SGLang in .venv/sglang
#     scripts/setup.sh dev      runtime requirements, those of evaluation suites and, without a GPU, of SGLang, and test
#                               and check requirements
#
#     PYTHON=python3.12         the Python to build .venv with (3.11 or 3.12; default: the first one found)
#     DEVICE=cpu|gpu            the list to install (default: gpu where nvidia-smi lists a GPU)
#
# Packages come from the sources in pip's configuration (see scripts/pip_settings.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[1m%s\033[0m\n' "setup: $*" >&2; }
fail() {
    printf 'setup: error: %s\n' "$@" >&2
    exit 1
}

suitable() { # whether this Python can create .venv
    "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        suitable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or 3.12 with the venv module." \
            "Set another one, or unset PYTHON to use the first suitable one."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11 python; do
        if suitable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 with the venv module among python3, python3.12, python3.11, python." \
        "Install one (Debian and Ubuntu: with the package python3-venv), or set its path: PYTHON=/path/to/python make quickstart"
}

device="${DEVICE:-}"
if [ -z "$device" ]; then
    if nvidia-smi -L 2>/dev/null | grep -q GPU; then device=gpu; else device=cpu; fi
fi
[ "$device" = cpu ] || [ "$device" = gpu ] || fail "DEVICE=$device: it must be cpu or gpu."

lists=("requirements/$device.txt")
[ "${1:-}" != dev ] || lists+=(requirements/dev.txt)
[ "${1:-}" != suites ] && [ "${1:-}" != dev ] || lists+=(requirements/suites.txt)
[ "${1:-}" != sglang ] && [ "${1:-} $device" != "dev cpu" ] || lists+=("requirements/sglang_$device.txt")

python=.venv/bin/python
made_for="$(cat .venv/.device 2>/dev/null || echo "$device")"
if [ -e .venv ] && ! { suitable $python && [ "$made_for" = "$device" ]; }; then
    fail ".venv was not created with Python 3.11 or 3.12 for $device. Remove it and run again: rm -r .venv"
fi
if [ -e .venv ] && [ -n "${PYTHON:-}" ] && [ "$($python --version)" != "$("$PYTHON" --version 2>/dev/null)" ]; then
    fail ".venv has $($python --version), not that of PYTHON=$PYTHON. Remove .venv, or unset PYTHON."
fi

stamp() { echo ".venv/.installed-$(basename "$1" .txt)"; }
contents() { echo "$(cat "$1" requirements/uv.txt scripts/setup.sh scripts/torchvision_cpu.py | cksum) $PWD"; }
stale=()
for list in "${lists[@]}"; do
    [ "$(cat "$(stamp "$list")" 2>/dev/null)" = "$(contents "$list")" ] || stale+=("$list")
done
[ "${#stale[@]}" -gt 0 ] || exit 0

if [ ! -e .venv ]; then
    found="$(find_python)"
    say "creating .venv with $("$found" --version) ($(command -v "$found"))"
    "$found" -m venv .venv
fi
echo "$device" >.venv/.device
if [ "$device" = cpu ] && ! $python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
    fail "vLLM's CPU build needs the system library libnuma.so.1 (Debian and Ubuntu: apt-get install libnuma1)."
fi
[ -w "${XDG_CACHE_HOME:-${HOME:-/nowhere}}" ] || export UV_CACHE_DIR="${UV_CACHE_DIR:-$PWD/.venv/.cache}"

no_index="packages could not be downloaded (see above). Check the network. Configure a private index or a proxy as for pip \
(pip config set global.index-url ...; HTTPS_PROXY=...), then run the same command again; finished downloads are kept."
uv_version="$(sed -n 's/^uv==\([^ ]*\).*/\1/p' requirements/uv.txt)"
if [ "$($python -m uv --version 2>/dev/null | cut -d' ' -f2)" != "$uv_version" ]; then
    say "installing uv"
    $python -m pip --version >/dev/null 2>&1 || $python -m ensurepip >/dev/null
    $python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements/uv.txt || fail "$no_index"
fi
source scripts/pip_settings.sh
uv_install() { $python -m uv pip install --python $python --no-deps "$@"; }

# The CPU build of torch: from a location in pip's configuration if there is one, otherwise from PyTorch's index.
if [ "$device" = cpu ]; then
    torch="$(grep '^torch==' requirements/cpu.txt)"
    uv_install --quiet --dry-run "$torch" 2>/dev/null || uv_install --torch-backend cpu "$torch" ||
        fail "the CPU build $torch for $($python --version) is in no source that pip is configured for, and could not be \
downloaded from PyTorch's index (see above)." \
            "Configure a source that has its wheel (pip config set global.find-links FOLDER_OR_URL, or global.extra-index-url), \
or use the other Python version: rm -r .venv, then the same command with PYTHON=python3.11 (or python3.12)."
fi
requirements=()
for list in "${stale[@]}"; do
    case $list in requirements/suites.txt | requirements/sglang_*.txt) ;; *) requirements+=(-r "$list") ;; esac
done
say "installing ${stale[*]} (the first download is about 1 GB for a CPU, several GB for GPUs)"
# Compiled bytecode halves the start time of a process. It is written now because .venv may be read-only later.
install_lists() { [ "${#requirements[@]}" -eq 0 ] || uv_install --compile-bytecode "${requirements[@]}"; }
install_suites() {
    [ -e .venv/suites ] || $python -m uv venv --quiet --python $python .venv/suites || return
    $python -m uv pip install --quiet --python .venv/suites/bin/python --no-deps -r requirements/suites.txt
}
find_packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
install_sglang() { # on a CPU, the packages of cpu.txt are used where they are
    [ -e .venv/sglang ] || $python -m uv venv --quiet --python $python .venv/sglang || return
    $python -m uv pip install --quiet --compile-bytecode --python .venv/sglang/bin/python --no-deps \
        -r "requirements/sglang_$device.txt" || return
    [ "$device" = gpu ] || echo "import site; site.addsitedir('$(find_packages $python)')" \
        >"$(find_packages .venv/sglang/bin/python)/default_environment.pth"
}
fix_torchvision() { # a CUDA build of torchvision needs an import hook beside the CPU build of torch
    packages="$(find_packages "$1")"
    cp scripts/torchvision_cpu.py "$packages/"
    echo "import torchvision_cpu" >"$packages/torchvision_cpu.pth"
}
if [ -t 2 ]; then # uv shows progress bars; without a terminal it prints one line per package, which is dropped
    install_lists || fail "$no_index"
else
    install_lists 2>&1 | sed -E '/^ ([-+~]|Downloaded) /d' >&2 || fail "$no_index"
fi
uv_install --quiet -e . || fail "$no_index"
if [[ " ${stale[*]} " == *" requirements/suites.txt "* ]] && ! install_suites; then
    [ "$1" = dev ] || fail "$no_index"
    say "warning: the packages of evaluation suites could not be installed (see above). Their tests are skipped."
    stale=("${stale[@]/requirements\/suites.txt/}")
fi
if [[ " ${stale[*]} " == *" requirements/sglang_$device.txt "* ]] && ! install_sglang; then
    [ "$1" = dev ] || fail "$no_index"
    say "warning: the packages of SGLang could not be installed (see above). Its tests are skipped."
    stale=("${stale[@]/requirements\/sglang_$device.txt/}")
fi
[ "$device" != cpu ] || fix_torchvision $python

if [ "$device" = gpu ] && ! $python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    say "warning: torch sees no CUDA device. Is the NVIDIA driver new enough (nvidia-smi)? DEVICE=cpu installs the CPU build."
fi
for list in "${stale[@]}"; do [ -z "$list" ] || contents "$list" >"$(stamp "$list")"; done
say "ready"
