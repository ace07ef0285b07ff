#!/usr/bin/env bash
# Makes .venv and installs the pinned requirements and this project into it. Quick when nothing changed.
#
#     scripts/setup.sh          what running needs
#     scripts/setup.sh dev      and what tests and checks need
#
#     PYTHON=python3.12         the Python to build .venv with (3.11 or 3.12; default: the first one found)
#     DEVICE=cpu|gpu            the list to install (default: gpu where nvidia-smi lists a GPU)
#
# pip's settings (index-url, extra-index-url, find-links, cert) are passed on to uv, which does not read them; uv's own
# variables (UV_DEFAULT_INDEX, UV_FIND_LINKS, ...) win.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

UV_VERSION=0.13.8
say() { printf '\033[1m%s\033[0m\n' "setup: $*" >&2; }
fail() {
    printf 'setup: error: %s\n' "$@" >&2
    exit 1
}

suitable() { # a Python that can make a .venv for us
    "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        suitable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or 3.12 with the venv module." \
            "Give another one, or leave PYTHON unset to take the first that fits."
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
        "Install one (Debian and Ubuntu split the venv module off: python3-venv), or give its path: PYTHON=/path/to/python make quickstart"
}

pip_setting() { # what pip is told: by PIP_<NAME>, else by its configuration files
    local variable="PIP_$(tr 'a-z-' 'A-Z_' <<<"$1")"
    if [ -n "${!variable:-}" ]; then
        echo "${!variable}"
    else
        $python -m pip config get "install.$1" 2>/dev/null || $python -m pip config get "global.$1" 2>/dev/null || true
    fi
}

pass_pip_settings_on() {
    local place places=""
    for place in $(pip_setting find-links); do # uv stops at a folder that is not there, pip goes on
        case $place in *://*) ;; *) [ -e "$place" ] || continue ;; esac
        places+="${places:+,}$place"
    done
    export UV_FIND_LINKS="${UV_FIND_LINKS:-$places}"
    if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] && [ -n "$(pip_setting index-url)" ]; then
        UV_DEFAULT_INDEX="$(pip_setting index-url)"
        export UV_DEFAULT_INDEX
    fi
    if [ -z "${UV_INDEX:-}${UV_EXTRA_INDEX_URL:-}" ] && [ -n "$(pip_setting extra-index-url)" ]; then
        UV_INDEX="$(echo $(pip_setting extra-index-url))"
        export UV_INDEX UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" # pip's way: all indexes are equal
    fi
    if [ -z "${SSL_CERT_FILE:-}" ] && [ -n "$(pip_setting cert)" ]; then
        SSL_CERT_FILE="$(pip_setting cert)"
        export SSL_CERT_FILE
    fi
}

device="${DEVICE:-}"
if [ -z "$device" ]; then
    if nvidia-smi -L 2>/dev/null | grep -q GPU; then device=gpu; else device=cpu; fi
fi
[ "$device" = cpu ] || [ "$device" = gpu ] || fail "DEVICE=$device: it must be cpu or gpu."

lists=("requirements/$device.txt")
[ "${1:-}" != dev ] || lists+=(requirements/dev.txt)

python=.venv/bin/python
made_for="$(cat .venv/.device 2>/dev/null || echo "$device")"
if [ -e .venv ] && ! { suitable $python && [ "$made_for" = "$device" ]; }; then
    fail "the .venv that is here does not fit: it needs Python 3.11 or 3.12, made for $device. Remove it and run again: rm -r .venv"
fi
stamp=".venv/.installed-$device${1:+-$1}"
wanted="$(cat "${lists[@]}" pyproject.toml scripts/setup.sh | cksum) $PWD"
if [ -e .venv ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

if [ ! -e .venv ]; then
    found="$(find_python)"
    say "making .venv with $("$found" --version) ($(command -v "$found"))"
    "$found" -m venv .venv
fi
echo "$device" >.venv/.device
[ -w "${XDG_CACHE_HOME:-${HOME:-/nowhere}}" ] || export UV_CACHE_DIR="${UV_CACHE_DIR:-$PWD/.venv/.cache}"

no_index="the package index did not give what is needed (see above). Is there a network? A private index or a proxy is set as for pip \
(pip config set global.index-url ...; HTTPS_PROXY=...). Run the same command again: what was fetched is kept."
if [ "$($python -m uv --version 2>/dev/null | cut -d' ' -f2)" != "$UV_VERSION" ]; then
    say "installing uv"
    $python -m pip --version >/dev/null 2>&1 || $python -m ensurepip >/dev/null
    $python -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION" || fail "$no_index"
fi
pass_pip_settings_on
uv_install() { $python -m uv pip install --python $python --no-deps "$@"; }

# The CPU build of torch: from a place that pip is told about where there is one, else from PyTorch's own index.
backend=()
if [ "$device" = cpu ] && ! uv_install --quiet --dry-run "$(grep '^torch==' requirements/cpu.txt)" 2>/dev/null; then
    backend=(--torch-backend cpu)
fi
requirements=()
for list in "${lists[@]}"; do requirements+=(-r "$list"); done
say "installing ${lists[*]} (the first time: about 2 GB for a CPU, 8 GB for GPUs)"
# Compiled bytecode halves the start-up of every process, and not every machine may write it later.
uv_install --compile-bytecode "${backend[@]}" "${requirements[@]}" || fail "$no_index"
uv_install --quiet -e . || fail "$no_index"

if [ "$device" = gpu ]; then
    $python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
        say "warning: torch sees no CUDA device here. Is the NVIDIA driver new enough? (nvidia-smi; DEVICE=cpu installs the CPU build.)"
else
    $python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        fail "vLLM's CPU build needs the system library libnuma.so.1 (Debian and Ubuntu: apt-get install libnuma1)."
fi
echo "$wanted" >"$stamp"
say "ready"
