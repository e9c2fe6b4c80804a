"""Real keys, the kernel's real sign-file; a signature that is not there is an error."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gpuguard.build.sign import Signer, plan
from gpuguard.config import SigningConfig
from gpuguard.core.facts import KernelFacts, SecureBootFacts, SecureBootState
from gpuguard.errors import BuildError
from gpuguard.host import LocalHost
from gpuguard.host.elf import read_module
from tests.building import RealBuild, Workplace, a_kernel

KEYS = SecureBootFacts(state=SecureBootState.ON, key="/srv/mok.key", certificate="/srv/mok.der")


def make_key(folder: Path, name: str = "mok", form: str = "DER") -> tuple[Path, Path]:
    key, certificate = folder / f"{name}.key", folder / f"{name}.{form.lower()}"
    subprocess.run(
        ["openssl", "req", "-new", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=gpuguard test/", "-addext", "extendedKeyUsage=codeSigning",
         "-outform", form, "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    key.chmod(0o600)
    return key, certificate


@pytest.fixture
def module(real_build: RealBuild, tmp_path: Path) -> Path:
    return Path(shutil.copy(real_build.modules / "nvidia.ko", tmp_path))


@pytest.fixture
def signer(real_tree: Workplace, real_build: RealBuild, tmp_path: Path) -> Signer:
    """The signer that would be used for a real kernel, with a fresh key."""
    make_key(real_tree.root / "srv")
    chosen = plan(real_tree.host, SigningConfig(), real_build.kernel, KEYS).signer
    assert chosen is not None
    return chosen


def is_signed(path: Path) -> bool:
    with path.open("rb") as file:
        return read_module(file).signed


@pytest.mark.parametrize("form", ["DER", "PEM"])
def test_signs_with_the_kernels_own_tool(
    signer: Signer, module: Path, tmp_path: Path, form: str
) -> None:
    assert signer.tool.endswith("/scripts/sign-file")
    key, certificate = make_key(tmp_path, "other", form)
    assert not is_signed(module)
    Signer(signer.tool, signer.algorithm, str(key), str(certificate)).sign(LocalHost(), module)
    assert is_signed(module)
    said = subprocess.run(["modinfo", module], capture_output=True, text=True, check=True).stdout
    assert "signer:         gpuguard test" in said
    assert f"sig_hashalgo:   {signer.algorithm}" in said


def test_a_key_and_certificate_that_do_not_belong_together(
    signer: Signer, module: Path, tmp_path: Path
) -> None:
    key, _ = make_key(tmp_path, "one")
    _, certificate = make_key(tmp_path, "two")
    with pytest.raises(BuildError) as caught:
        Signer(signer.tool, "sha256", str(key), str(certificate)).sign(LocalHost(), module)
    assert caught.value.code == "signing-failed"
    assert caught.value.detail


def test_a_tool_that_only_says_that_it_signed(module: Path, tmp_path: Path) -> None:
    tool = tmp_path / "kmodsign"
    tool.write_text("#!/bin/sh\nexit 0\n")
    tool.chmod(0o755)
    with pytest.raises(BuildError) as caught:
        Signer(str(tool), "sha512", "key", "certificate").sign(LocalHost(), module)
    assert caught.value.code == "signing-failed"
    assert "without a signature" in caught.value.message


def kernel(*, signing: bool = True, algorithm: str = "sha512") -> KernelFacts:
    return a_kernel(headers={"module_signing": signing, "signature_hash": algorithm})


def put_tool(place: Workplace, name: str) -> Path:
    tool = place.root / name
    tool.parent.mkdir(parents=True, exist_ok=True)
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    return tool


def put_keys(place: Workplace) -> None:
    for name in ("mok.key", "mok.der"):
        (place.root / "srv" / name).write_text(name)


def test_debian_and_the_headers_have_the_tool_in_different_places(workplace: Workplace) -> None:
    put_keys(workplace)
    headers = put_tool(workplace, "usr/src/linux-headers-6.1.0-50-amd64/scripts/sign-file")
    chosen = plan(workplace.host, SigningConfig(), kernel(), KEYS).signer
    assert chosen is not None
    assert chosen.tool == str(headers)
    assert chosen.algorithm == "sha512"
    assert chosen.key == str(workplace.root / "srv/mok.key")
    kbuild = put_tool(workplace, "usr/lib/linux-kbuild-6.1/scripts/sign-file")
    chosen = plan(workplace.host, SigningConfig(), kernel(), KEYS).signer
    assert chosen is not None
    assert chosen.tool == str(kbuild)


def test_ubuntus_kmodsign(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_keys(workplace)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool = tmp_path / "kmodsign"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    chosen = plan(workplace.host, SigningConfig(), kernel(), KEYS).signer
    assert chosen is not None
    assert chosen.tool == "kmodsign"


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user trusts their own files")
def test_a_tool_that_others_can_write_is_not_run_as_root(workplace: Workplace) -> None:
    put_keys(workplace)
    put_tool(workplace, "usr/lib/linux-kbuild-6.1/scripts/sign-file").chmod(0o777)
    found = plan(workplace.host, SigningConfig(), kernel(), KEYS)
    assert found.signer is None
    assert found.blocker is not None
    assert found.blocker.code == "signing-tool-missing"


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user trusts their own files")
@pytest.mark.parametrize("name", ["mok.key", "mok.der"])
def test_a_key_that_others_can_write_is_not_used_by_root(workplace: Workplace, name: str) -> None:
    put_keys(workplace)
    put_tool(workplace, "usr/lib/linux-kbuild-6.1/scripts/sign-file")
    (workplace.root / "srv" / name).chmod(0o666)
    found = plan(workplace.host, SigningConfig(), kernel(), KEYS)
    assert found.blocker is not None
    assert found.blocker.code == "signing-key-untrusted"
    off = replace(KEYS, state=SecureBootState.OFF)
    found = plan(workplace.host, SigningConfig(), kernel(), off)
    assert (found.signer, found.blocker) == (None, None)
    assert f"/srv/{name}" in found.reason


def test_the_configurations_key_comes_first(workplace: Workplace) -> None:
    put_keys(workplace)
    put_tool(workplace, "usr/lib/linux-kbuild-6.1/scripts/sign-file")
    (workplace.root / "srv/own.key").write_text("own")
    config = SigningConfig(key="/srv/own.key", certificate="pkcs11:token=x")
    chosen = plan(workplace.host, config, kernel(), KEYS).signer
    assert chosen is not None
    assert chosen.key == str(workplace.root / "srv/own.key")
    assert chosen.certificate == "pkcs11:token=x"


def test_auto_without_a_need_says_why_not(workplace: Workplace) -> None:
    off = SecureBootFacts(state=SecureBootState.OFF)
    found = plan(workplace.host, SigningConfig(), kernel(signing=False), off)
    assert (found.signer, found.blocker) == (None, None)
    assert found.reason == "the kernel has no module signatures"
    assert plan(workplace.host, SigningConfig(), kernel(), off).reason
    assert plan(workplace.host, SigningConfig(mode="never"), kernel(), off).reason
