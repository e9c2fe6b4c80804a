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

# Runs a command; its peak memory (of any one process) and its time go to descriptor 3.
readonly measured='
import os, resource, subprocess, sys, time
began = time.monotonic()
status = subprocess.run(sys.argv[1:], check=False).returncode
seconds = time.monotonic() - began
mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
os.write(3, f"exit {status:3d}  {seconds:6.2f} s  {mib:5.0f} MiB".encode())
'

step() { # step NAME COMMAND...
    local name=$1
    shift
    timeout -k 5 200 "$python" -c "$measured" "$@" \
        >"$out/$name" 2>"$out/$name.err" 3>"$out/.figures"
    printf '%-22s %s\n' "$name" "$(<"$out/.figures")" | tee -a "$out/steps.txt"
    rm "$out/.figures"
    if [[ -s $out/$name.err ]]; then head -c 1500 "$out/$name.err"; else rm "$out/$name.err"; fi
}

gpuguard() { step "$1" "$python" -m gpuguard "${@:2}"; }
child() { step "$1" "$python" -m gpuguard.deep.child "$2"; }

gpuguard status.txt status
gpuguard status.json --json status
gpuguard verify.txt verify
gpuguard verify.json --json verify
gpuguard verify-deep.txt verify --deep
gpuguard verify-deep.json --json verify --deep
gpuguard verify-deep-one.txt verify --deep --gpu 0
gpuguard verify-deep-one.json --json verify --deep --gpu 0
gpuguard doctor.txt doctor
gpuguard doctor.json --json doctor
child look.jsonl '{"mode":"look"}'
child pairs.jsonl '{"mode":"pairs","pairs":null,"only":[],"spans":[{"offset":0,"length":8388608}]}'
cards=$(nvidia-smi -L | sed -En 's/.*UUID: (GPU-[^)]+).*/"\1"/p' | paste -sd,)
for mode in NCCL_P2P_DISABLE=1 NCCL_P2P_LEVEL=SYS; do
    step "collective-${mode%=*}.jsonl" env "$mode" NCCL_DEBUG=INFO NCCL_NVLS_ENABLE=0 \
        "$python" -m gpuguard.deep.child \
        "{\"mode\":\"collective\",\"cards\":[$cards],\"length\":33554432}"
done
step nvidia-smi.txt nvidia-smi
step topo-m.txt nvidia-smi topo -m
for capability in r w n a p; do
    step "topo-p2p-$capability.txt" nvidia-smi topo -p2p "$capability"
done
step nvlink-s.txt nvidia-smi nvlink -s
step list.txt nvidia-smi -L
step pytest-gpu.txt "$python" -m pytest -q -p no:cacheprovider -m gpu tests/test_deep_gpu.py
step bandwidth.txt "$python" -m benchmarks.p2p_bandwidth
