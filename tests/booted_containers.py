"""Booted systems that run containers: Debian 13 with Podman (Quadlet), Docker, compose, HAProxy.

``with container_machine(folder) as system`` gives a ``Machine`` of ``booted.py`` that is up, with
gpuguard as pip installs it; Docker and a registry are installed, and at rest.
``image(system, "a")`` makes a small image whose entry point is ``vllm serve`` (the stub) in
Podman's store and returns its name by digest; other words make other images. ``docker_image`` has
Docker pull one.

Containers have cgroups and a network of their own, as on a host. What this machine cannot give (a
limit of the number of processes) is said in its ``containers.conf``, in nothing that gpuguard
writes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.booted import Machine, machine
from tests.booted_roots import (
    RELEASES,
    Base,
    build_wheel,
    get_base,
    install_gpuguard,
    overlay,
    with_layer,
)
from tests.realroot import REPO, Lab, cache_dir, chroot, mounted

DEBIAN = RELEASES[1]  # the first one whose Podman knows Quadlet
MODEL = "/srv/model"
_PACKAGES = (
    "podman", "crun", "netavark", "nftables", "docker.io", "docker-cli", "docker-compose",
    "docker-registry", "haproxy",
)  # fmt: skip
#: Engines and keyrings need what nspawn forbids. Their layers are on a real file system.
_OPTIONS = ("--capability=all", "--system-call-filter=bpf keyctl add_key", "--bind=/dev/fuse")
_AT_REST = ("containerd", "docker", "haproxy", "podman")
_STORES = ("/var/lib/containers", "/var/lib/docker")
_REGISTRY = "127.0.0.1:5000"
_FILES = {
    # nspawn mounts it read-only; the network is the machine's own
    "etc/systemd/system/lab-network.service": """\
[Unit]
DefaultDependencies=no
Before=sysinit.target

[Install]
WantedBy=sysinit.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=mount -t proc proc /mnt
ExecStart=mount --bind /mnt/sys/net /proc/sys/net
ExecStart=umount /mnt
""",
    # no controller can be delegated: the machine below has those of the old hierarchy
    "etc/containers/containers.conf": "[containers]\npids_limit = 0\n",
    "etc/docker/registry/config.yml": "version: 0.1\n"
    "storage: {filesystem: {rootdirectory: /var/lib/docker-registry}}\n"
    f"http: {{addr: {_REGISTRY}}}\n",
}
#: Python, what it loads, and a shell: 40 MB
_ROOTFS = r"""
set -e
python=$(readlink -f /usr/bin/python3)
library=/usr/lib/${python##*/}
{
    echo $python; echo /usr/bin/python3; echo /usr/bin/sh
    for file in $python /usr/bin/sh $library/lib-dynload/*.so; do
        ldd $file | grep -o '/[^ ]*' || true
    done
    find $library -type f ! -name '*.pyc'
} | sort -u >/srv/rootfs.list
tar -chf /srv/rootfs.tar -T /srv/rootfs.list 2>/dev/null
"""


_IMPORT = """
cd /srv && cp rootfs.tar image.tar && tar --append -f image.tar -C /srv/image .
podman import -q --change 'ENTRYPOINT ["/usr/local/bin/vllm","serve"]' {1} \
    image.tar localhost/vllm:{0}
rm -r image image.tar
"""


@contextmanager
def container_machine(folder: Path) -> Iterator[Machine]:
    """A machine that is up; whatever was started in it ends with the block."""
    below = get_base(DEBIAN)
    key = (*_PACKAGES, *_FILES, *_FILES.values())
    base = with_layer(below, "containers", key, lambda layer: _add_engines(below, layer))
    with overlay(base.layers, folder) as root:
        install_gpuguard(root, build_wheel(folder))
        model = root / MODEL.lstrip("/")
        model.mkdir()
        (model / "weights.safetensors").write_bytes(b"weights")
        binds = []
        for store in map(Path, _STORES):
            (folder / store.name).mkdir()
            binds.append(f"--bind={folder / store.name}:{store}")
        with machine(root, base, folder, *_OPTIONS, *binds) as system:
            system.boot(base.old)
            try:
                yield system
            finally:
                system.cut_power()  # it would give each container its time to end


def _add_engines(base: Base, folder: Path) -> None:
    """Packages, at rest: a story starts what it wants."""
    lab = Lab(cache_dir() / f"apt-{base.debian.suite}", release=base.debian.suite)
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".work-") as work,
        overlay(base.layers, Path(work), upper=folder) as root,
    ):
        debs = root / "srv/debs"
        debs.mkdir()
        for file in lab.with_needs(root, *_PACKAGES):
            shutil.copy(file, debs)
        for name, text in _FILES.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        with mounted(root):
            chroot(root, "sh", "-c", "dpkg --force-confold -i /srv/debs/*.deb")
            chroot(root, "systemctl", "-q", "enable", "lab-network.service")
        shutil.rmtree(debs)
        for link in (root / "etc/systemd/system").glob("*.wants/*"):
            if link.name.startswith(_AT_REST):
                link.unlink()


def image(system: Machine, version: str, user: str = "") -> str:
    """An image of the stub in Podman's store, by digest; each version has another content."""
    if not system.path("/srv/rootfs.tar").exists():
        system.run("sh", "-c", _ROOTFS)
    top = system.live_path("/srv/image")
    program = top / "usr/local/bin/vllm"
    for folder in (program.parent / "golden", top / "models", top / "cache", top / "tmp"):
        folder.mkdir(parents=True)
    stub = (REPO / "tests/stub_vllm.py").read_text()
    program.write_text(f"#!/usr/bin/python3\n# {version}\n{stub}")
    program.chmod(0o755)
    shutil.copy(REPO / "tests/golden/vllm-0.32.0-metrics.txt", program.parent / "golden")
    as_user = f"--change 'USER {user}'" if user else ""
    system.run("sh", "-ec", _IMPORT.format(version, as_user), timeout=120)
    said = system.run("podman", "image", "inspect", "--format={{.Digest}}", f"vllm:{version}")
    return f"localhost/vllm@{said.stdout.strip()}"


def docker_image(system: Machine, version: str) -> str:
    """As ``image``; pulled by Docker from a registry of the machine's own."""
    image(system, version)
    system.systemctl("start", "docker-registry.service", "docker.service")
    name = f"{_REGISTRY}/vllm:{version}"
    port_opens = "until ss -ltnH sport = :5000 | grep -q .; do sleep 0.1; done"
    system.run("sh", "-c", port_opens)
    system.run("podman", "push", "-q", "--tls-verify=false", f"localhost/vllm:{version}", name)
    system.run("docker", "pull", "-q", name, timeout=120)
    return system.run(
        "docker", "image", "inspect", "--format={{index .RepoDigests 0}}", name
    ).stdout.strip()
