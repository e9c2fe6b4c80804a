#!/bin/bash
# Everything that only real cards can show, in one call; see docs/hardware-runs.md.
#
# Usage: tools/hardware-run.sh FOLDER     (PYTHON names the interpreter)
#
# Changes nothing on the host but FOLDER. Each step's output and exit status go to one file.
set -uo pipefail

readonly out=${1:?folder for the captures}
readonly python=${PYTHON:-python3}
mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1

step() { # step NAME COMMAND...
    local name=$1 began status
    shift
    began=$(date +%s.%N)
    timeout 240 "$@" >"$out/$name" 2>"$out/$name.err"
    status=$?
    printf '%-28s exit %3d  %6.1f s\n' "$name" "$status" \
        "$(echo "$(date +%s.%N) $began" | awk '{ print $1 - $2 }')" | tee -a "$out/steps.txt"
    [[ -s $out/$name.err ]] && head -c 1500 "$out/$name.err"
    [[ -s $out/$name.err ]] || rm -f "$out/$name.err"
}

gpuguard() { step "$1" "$python" -m gpuguard "${@:2}"; }

gpuguard status.txt status
gpuguard status.json --json status
gpuguard verify.txt verify
gpuguard verify.json --json verify
gpuguard verify-deep.txt verify --deep
gpuguard verify-deep.json --json verify --deep
gpuguard doctor.txt doctor
gpuguard doctor.json --json doctor
step topo-m.txt nvidia-smi topo -m
for capability in r w n a p; do
    step "topo-p2p-$capability.txt" nvidia-smi topo -p2p "$capability"
done
step nvlink-s.txt nvidia-smi nvlink -s
step list.txt nvidia-smi -L
step pytest-gpu.txt "$python" -m pytest -q -p no:cacheprovider -m gpu tests/test_deep_gpu.py
step bandwidth.txt "$python" -m benchmarks.p2p_bandwidth
