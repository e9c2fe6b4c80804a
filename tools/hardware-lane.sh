#!/bin/bash
# Lanes that want P2P proven by bytes, on two real cards; see docs/hardware-runs.md.
#
# Usage: tools/hardware-lane.sh FOLDER     (PYTHON names the interpreter, with PyTorch and NCCL)
#
# For a machine that is thrown away afterwards: writes to /etc, /opt, /run, /srv and /var. systemd is the
# stand-in of the tests. The engine answers as the tests' stub does, and in front of it two processes
# really make an all-reduce over the cards, which is what NCCL's lines are about.
set -uo pipefail

readonly out=${1:?folder for the captures}
python=$(command -v "${PYTHON:-python3}")
repository=$(cd "$(dirname "$0")/.." && pwd)
readonly python repository
mkdir -p "$out" /opt/gpuguard/bin /opt/tools /opt/vllm/bin /srv/model /etc/gpuguard/lanes

program() { # program PATH LINES: a Python script that finds what this one finds
    printf '#!%s\nimport sys\nsys.path[:0] = "%s".split(":")\n%s\n' \
        "$python" "$repository${PYTHONPATH:+:$PYTHONPATH}" "$2" >"$1"
    chmod 755 "$1"
}

program /opt/gpuguard/bin/gpuguard $'from gpuguard.__main__ import main\nmain()'
for tool in systemctl journalctl; do
    program /opt/tools/$tool $'from tests.standin_systemd import main\nmain()'
done
program /opt/vllm/bin/vllm "
import os, runpy, subprocess, time
from pathlib import Path
WORK = '''
import os, time, torch, torch.distributed as group
rank = int(os.environ['RANK'])
torch.cuda.set_device(rank)
group.init_process_group('nccl')
sums = torch.ones(1 << 20, device='cuda')
group.all_reduce(sums)
assert sums.min().item() == sums.max().item() == 2
open('/run/rank%d' % rank, 'w').close()
time.sleep(1 << 20)
'''
marks = [Path(f'/run/rank{rank}') for rank in range(2)]
for mark in marks:
    mark.unlink(missing_ok=True)
common = {**os.environ, 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '29511'}
for rank in range(2):
    subprocess.Popen([sys.executable, '-c', WORK], env={**common, 'RANK': str(rank)})
while not all(mark.exists() for mark in marks):
    time.sleep(0.1)
runpy.run_path('$repository/tests/stub_vllm.py', run_name='__main__')"
printf weights >/srv/model/weights.safetensors
export PATH=/opt/tools:/opt/gpuguard/bin:$PATH

lane() { # lane NAME REQUIRES ENV
    cat >"/etc/gpuguard/lanes/$1.yaml" <<LANE
name: $1
engine: {backend: venv, venv: /opt/vllm, user: root}
model: {path: /srv/model, served_name: tiny}
args: {tensor-parallel-size: 2, disable-custom-all-reduce: true, max-model-len: 2048, shutdown-timeout: 5}
env: {VLLM_ENGINE_READY_TIMEOUT_S: 60, STUB_NCCL_VIA: "-", HOME: /root, NCCL_NVLS_ENABLE: 0$3}
requires: {$2}
timeouts: {first_start: 90, start: 90, stop: 20, drain: 5}
LANE
}

step() { # step NAME COMMAND...
    local began=$EPOCHREALTIME status
    timeout -k 5 150 "${@:2}" >"$out/$1" 2>"$out/$1.err"
    status=$?
    printf '%-22s exit %3d  %6.2f s\n' "$1" "$status" \
        "$("$python" -c "print($EPOCHREALTIME - $began)")" | tee -a "$out/steps.txt"
    tail -n 4 "$out/$1.err" | cut -c 1-400
    cat "$out/$1.err" >>"$out/errors.txt"
}

forget() { rm -f /run/gpuguard/proof-deep.json; }

lane cards 'p2p: required' ''
lane nop2p 'p2p: required' ', NCCL_P2P_LEVEL: LOC'
lane soft 'p2p: preferred' ', NCCL_P2P_LEVEL: LOC'
step gate.txt gpuguard verify --gate
step deep.txt gpuguard verify --deep
cp /run/gpuguard/proof-deep.json "$out/proof.json"
cat "$out/proof.json"
forget
step plan.txt gpuguard lane switch cards -n
step switch.txt gpuguard lane switch cards
cat "$out/switch.txt" "$out/plan.txt"
step status.txt gpuguard lane status
cat "$out/status.txt"
grep -h ' via ' /var/cache/gpuguard/lanes/cards-*/nccl.*.log | head -n 4
step transport.txt gpuguard lane switch nop2p
step preferred.txt gpuguard lane switch soft
step back.txt gpuguard lane switch cards
gpuguard lane history | tail -n 12
systemctl stop lane-cards.service
step prepare-known.txt gpuguard --json lane prepare cards
forget
step prepare-proves.txt gpuguard --json lane prepare cards
cat "$out/prepare-proves.txt" /run/gpuguard/proof-deep.json
forget
"$python" -c "
import torch, time
held = [torch.zeros(1 << 28, device=f'cuda:{card}') for card in range(2)]
open('/run/held', 'w').close()
time.sleep(1 << 20)" &
readonly holder=$!
while [[ ! -e /run/held ]]; do sleep 0.1; done
step prepare-busy.txt gpuguard lane prepare cards
kill $holder
wait $holder 2>/dev/null
step prepare-again.txt gpuguard lane prepare cards
