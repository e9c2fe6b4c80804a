#!/bin/bash
# Make a virtual environment with this project, editable, and its development tools.
#
# Usage: tools/make-venv.sh PYTHON FOLDER
set -euo pipefail

readonly python=$1 folder=$2

die() {
    printf 'venv: %s\n' "$@" >&2
    exit 69
}

command -v "$python" >/dev/null ||
    die "$python: not found" "install Python 3.11 or newer, or name one: make venv PYTHON=python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$("$python" --version) is too old: Python 3.11 or newer is needed" \
        "name another one: make venv PYTHON=python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python cannot make virtual environments" \
        "run: make setup (it installs python3-venv), or: apt-get install python3-venv"

# A half-made environment would look finished to the next run.
trap '[[ $? -eq 0 ]] || rm -rf "$folder"' EXIT
"$python" -m venv --clear "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[dev,deep,ansible]' ||
    die "pip could not install the project; its own message is above" \
        "it needs a Python package index: set PIP_INDEX_URL if yours is not the default"
