"""Modules built before their kernel is installed are used if they fit, and only then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpuguard.build.inputs import InputsProbe
from gpuguard.build.prebuilt import build_ahead, fitting, keep_only
from gpuguard.build.progress import Silent
from gpuguard.config_file import load_config
from gpuguard.host import LocalHost
from gpuguard.state import CONFIG_FILE
from gpuguard.verbs.inspect import look
from tests import toys
from tests.box import K2, LIBRARY, PATCH, Box, add_headers, build_id_of
from tests.building import needs_root

STORE = "/var/cache/gpuguard/prebuilt"


def ahead(box: Box, release: str = K2) -> float | None:
    """What a window's preflight does for one kernel."""
    host = LocalHost(box.root)
    config = load_config(host, CONFIG_FILE)
    facts = look(host, config, with_p2p=False)
    kernel = replace(next(k for k in facts.kernels if k.release == release), suffix="")
    inputs = InputsProbe(host, config, facts.driver.userland, facts.secure_boot).for_kernel(kernel)
    assert inputs.blockers == ()
    seconds = build_ahead(host, config, kernel, inputs, facts.secure_boot, Silent())
    assert fitting(host, release, inputs) is not None
    return seconds


def logs(box: Box) -> int:
    """How often something was compiled for K2."""
    return len(list(box.path("/var/log/gpuguard").glob(f"build-{K2}-*")))


def test_what_was_built_is_installed(box: Box) -> None:
    assert ahead(box) is not None
    assert ahead(box) is None  # it is there
    box.compile_to(K2, seed="another")  # would be made now; that it is not, shows
    box.rebuilt("--kernel", K2)
    assert logs(box) == 1
    assert box.kernel(K2)["ready"]
    expected = toys.toy_module(box.root / "t/nvidia.ko", release=K2, seed="patched nvidia")
    assert build_id_of(box.path(box.winner(K2))) == build_id_of(expected)
    assert not list(box.path(STORE).iterdir())


@pytest.mark.parametrize("suffix", [".xz", ".zst"])
def test_they_are_compressed_as_that_kernel_needs(box: Box, suffix: str) -> None:
    ahead(box)
    kernels_own = box.tree(K2) / "kernel/net"
    shutil.rmtree(kernels_own)
    toys.toy_module(kernels_own / f"dummy.ko{suffix}", name="dummy", release=K2)
    toys.depmod(box.root, K2)
    box.rebuilt("--kernel", K2)
    assert logs(box) == 1
    assert box.winner(K2).endswith(f"updates/gpuguard/nvidia.ko{suffix}")


def test_they_are_signed_when_they_are_installed(box: Box, tmp_path: Path) -> None:
    add_headers(box.root, K2, CONFIG_MODULE_SIG="y")
    ahead(box)
    key, certificate = box.root / "etc/mok.key", box.root / "etc/mok.der"
    subprocess.run(
        ["openssl", "req", "-new", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "36500",
         "-subj", "/CN=test/", "-keyout", key, "-outform", "DER", "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    tool = tmp_path / "kmodsign"
    tool.write_text('#!/bin/sh\nprintf "signature~Module signature appended~\\n" >>"$4"\n')
    tool.chmod(0o755)
    box.configure(signing={"key": "/etc/mok.key", "certificate": "/etc/mok.der"})
    answer = box.run("rebuild", "--kernel", K2, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert answer.status in (0, 1), answer.err
    assert logs(box) == 1
    assert b"~Module signature appended~" in box.path(box.winner(K2)).read_bytes()[-40:]


def another_patch(box: Box) -> None:
    with (box.root / PATCH).open("a") as file:
        file.write("\n")


def another_source(box: Box) -> None:
    (box.root / "srv/nvidia/source/README.md").write_text("changed\n")


def other_headers(box: Box) -> None:
    (box.root / f"usr/src/linux-headers-{K2}/Module.symvers").write_text("0x02\tother\n")


def other_modules(box: Box) -> None:
    box.configure(build={"user": "nobody", "modules": ["nvidia", "nvidia-uvm"]})


def other_release(box: Box) -> None:
    """A manifest that was copied to another kernel."""
    file = box.path(f"{STORE}/{K2}/manifest.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "release": "6.8.0-1-generic"}))


def damaged(box: Box) -> None:
    with box.path(f"{STORE}/{K2}/nvidia-uvm.ko").open("ab") as file:
        file.write(b"x")


def incomplete(box: Box) -> None:
    box.path(f"{STORE}/{K2}/nvidia-uvm.ko").unlink()


def no_manifest(box: Box) -> None:
    box.path(f"{STORE}/{K2}/manifest.json").unlink()


def broken_manifest(box: Box) -> None:
    box.path(f"{STORE}/{K2}/manifest.json").write_text('{"schema": 1')


def out_of_the_folder(box: Box) -> None:
    file = box.path(f"{STORE}/{K2}/manifest.json")
    document = json.loads(file.read_text())
    document["modules"]["../../x"] = document["modules"].pop("nvidia")
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "change",
    [
        another_patch, another_source, other_headers, other_modules, other_release, damaged,
        incomplete, no_manifest, broken_manifest, out_of_the_folder,
    ],
)  # fmt: skip
def test_what_does_not_fit_is_built_anew(box: Box, change: Callable[[Box], None]) -> None:
    ahead(box)
    change(box)
    box.rebuilt("--kernel", K2)
    assert logs(box) == 2
    assert box.kernel(K2)["ready"]
    assert box.leftovers() == []


def world_writable_file(box: Box) -> None:
    box.path(f"{STORE}/{K2}/nvidia.ko").chmod(0o666)


def world_writable_folder(box: Box) -> None:
    box.path(f"{STORE}/{K2}").chmod(0o777)


def somebody_elses(box: Box) -> None:
    os.chown(box.path(f"{STORE}/{K2}/manifest.json"), 1, 1)


@needs_root
@pytest.mark.parametrize("change", [world_writable_file, world_writable_folder, somebody_elses])
def test_what_root_cannot_trust_is_built_anew(box: Box, change: Callable[[Box], None]) -> None:
    ahead(box)
    change(box)
    box.rebuilt("--kernel", K2)
    assert logs(box) == 2


def test_another_driver_version_is_another_build(box: Box) -> None:
    ahead(box)
    for file in ("version.mk", "kernel-open/Kbuild"):
        path = box.root / "srv/nvidia/source" / file
        path.write_text(path.read_text().replace(toys.VERSION, "999.20.01"))
    link = box.root / f"{LIBRARY}.1"
    link.unlink()
    (box.root / f"{LIBRARY}.{toys.VERSION}").unlink()
    (box.root / f"{LIBRARY}.999.20.01").touch()
    link.symlink_to("libnvidia-ml.so.999.20.01")
    box.compile_to(K2, version="999.20.01")
    box.rebuilt("--kernel", K2)
    assert logs(box) == 2


def test_what_nobody_is_going_to_install_goes(box: Box) -> None:
    ahead(box)
    keep_only(LocalHost(box.root), ["6.8.0-1-generic"])
    assert not list(box.path(STORE).iterdir())
