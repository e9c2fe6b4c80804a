"""Where gpuguard keeps what it must remember, inside the host.

Only intent (configuration), history, and what *we* changed is stored; what dpkg, DKMS
and modprobe know is asked again each time.
"""

from __future__ import annotations

CONFIG_FILE = "/etc/gpuguard/gpuguard.yaml"
CONFIG_DROPINS = "/etc/gpuguard/gpuguard.d"
STATE_DIR = "/var/lib/gpuguard"
BUILDS_DIR = f"{STATE_DIR}/builds"  # <release>/<created>.json, one record per build
FAILURES_DIR = f"{STATE_DIR}/failures"  # <release>.json
BACKUPS_DIR = f"{STATE_DIR}/backups"  # <id>.json, and objects/<sha256>
JOURNAL_FILE = f"{STATE_DIR}/journal.jsonl"  # undo of the change under way
LOCK_FILE = f"{STATE_DIR}/lock"
ACCEPTED_FILE = f"{STATE_DIR}/p2p-accepted.json"  # what gpuguard verify --accept kept
QUEUE_FILE = f"{STATE_DIR}/rebuild-wanted"  # there: the path unit starts an automatic run
LAST_RUN_FILE = f"{STATE_DIR}/last-run.json"  # what the last automatic run found and did
HOLDS_FILE = f"{STATE_DIR}/holds.json"  # ledger: which holds are ours
WITHHELD_FILE = f"{STATE_DIR}/withheld.json"  # upgrades that they keep away, first seen when
SETUP_FILE = f"{STATE_DIR}/setup.json"  # what `gpuguard setup` installed
WINDOW_FILE = f"{STATE_DIR}/window.json"  # the maintenance window that is open or waits for a boot
WINDOWS_DIR = f"{STATE_DIR}/windows"  # <id>.json, those that are closed
LEFT_ALONE_DIR = f"{STATE_DIR}/left-alone"  # <release>.json: rolled back by the operator
TALLY_FILE = f"{STATE_DIR}/rebuilds.json"  # how many builds ended how, for the metrics
DEEP_FILE = f"{STATE_DIR}/p2p-deep.json"  # what the last verify --deep of all cards found
LANES_DIR = "/etc/gpuguard/lanes"  # <name>.yaml
SECRETS_DIR = "/etc/gpuguard/secrets"  # <lane>.env, for engines that compose runs
LANE_STATE_DIR = f"{STATE_DIR}/lanes"
LANE_RENDERED_DIR = f"{LANE_STATE_DIR}/rendered"  # files that units of lanes name
LANE_RUN_DIR = "/run/gpuguard/lanes"  # <name>.env, written before each start
LANE_CACHE_DIR = "/var/cache/gpuguard/lanes"  # <lane id>/: compiled kernels
FRONT_FILE = "/etc/gpuguard/front.cfg"  # configuration of the proxy before the lanes
FRONT_SOCKET = "/run/gpuguard-front/admin.sock"
LOGS_DIR = "/var/log/gpuguard"  # build logs, whole
CACHE_DIR = "/var/cache/gpuguard"
CORE_CACHE_DIR = f"{CACHE_DIR}/core"  # <key>/nv-kernel.o, nv-modeset-kernel.o, meta.json
STAGING_DIR = f"{CACHE_DIR}/staging"  # one folder per build, removed afterwards
MODULE_CACHE_FILE = f"{CACHE_DIR}/modules.json"  # (path, size, mtime, inode) -> what the file is
PREBUILT_DIR = f"{CACHE_DIR}/prebuilt"  # <release>/: built before its kernel was installed
RUN_DIR = "/run/gpuguard"  # who asks the driver just now; gone with a reboot
PROOF_FILE = f"{RUN_DIR}/proof.json"  # what the gate proved since this boot
DEEP_PROOF_FILE = f"{RUN_DIR}/proof-deep.json"  # what verify --deep found since this boot
GATE_FILE = f"{RUN_DIR}/gate.json"  # what the gate said, open or shut, since this boot
DEPMOD_DIR = "/etc/depmod.d"
MODULES_SUBDIR = "updates/gpuguard"  # below /lib/modules/<release>/


def depmod_file(release: str) -> str:
    """Our depmod configuration for one release; the file that sorts last wins."""
    return f"{DEPMOD_DIR}/zz-gpuguard-{release}.conf"


def module_tree(release: str) -> str:
    """``/lib/modules/<release>``."""
    return f"/lib/modules/{release}"
