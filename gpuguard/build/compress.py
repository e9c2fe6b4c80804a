"""Compress a finished module as the kernel's own modules are; after signing, never before."""

from __future__ import annotations

from pathlib import Path

from gpuguard.host import Host

_TIMEOUT = 900.0
#: The kernel's own decompressor knows CRC32 only and a small dictionary (Documentation/staging/
#: xz.rst). zstd as dkms 3.0.10 does it: for nvidia.ko (11 MB) 3 s and 11 % smaller than level 3.
_COMPRESS = {
    ".xz": ("xz", "--force", "--check=crc32", "--lzma2=dict=1MiB"),
    ".zst": ("zstd", "--quiet", "--force", "--rm", "-T0", "-20", "--ultra"),
    ".gz": ("gzip", "--force", "--best", "--no-name"),
}


def needed_program(suffix: str) -> str | None:
    """The program that a suffix takes; None for uncompressed modules.

    Raises:
        KeyError: a suffix that no kernel of these distributions has.
    """
    return _COMPRESS[suffix][0] if suffix else None


def compress(host: Host, file: Path, suffix: str) -> Path:
    """Replace ``file`` by its compressed form and test that; the suffix may be empty.

    Raises:
        CommandError: the program is missing, or it failed, or its test did.
    """
    program = needed_program(suffix)
    if program is None:
        return file
    host.run(*_COMPRESS[suffix], str(file), timeout=_TIMEOUT)
    result = file.with_name(f"{file.name}{suffix}")
    host.run(program, "--test", str(result), timeout=_TIMEOUT)
    return result
