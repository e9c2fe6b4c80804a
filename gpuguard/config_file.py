"""Load the configuration: read, merge, validate; all problems at once.

The main file is read first, then ``<name>.d/*.yaml`` beside it in C-locale order. Mappings
merge, lists and single values replace. Every problem is charged to the file whose value it
is; a missing required key to the main file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpuguard import state
from gpuguard.config import Config
from gpuguard.config_check import leaf_keys, merged_origins, validate
from gpuguard.config_yaml import Document, Problem, key_text, parse_document
from gpuguard.errors import ConfigError
from gpuguard.host import Host
from gpuguard.host.files import writable_by_others

DEFAULT = "default"  # origin of a value that no file sets
_MAX_BYTES = 1 << 20
_SUFFIX = ".yaml"


class InvalidConfigError(ConfigError):
    """The configuration was read and is wrong; ``problems`` has every reason."""

    code = "config-invalid"

    def __init__(self, file: str, problems: Sequence[Problem]) -> None:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        super().__init__(
            f"{file}: {count} in the configuration",
            detail="\n".join(map(str, problems)),
            hint="correct the file, then run: gpuguard config validate",
        )
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A valid configuration, the files it came from, and which file set which key.

    ``origins`` has every key (``build.jobs``); the value is a file's short name, or "default".
    """

    config: Config
    files: tuple[str, ...]
    origins: Mapping[str, str]


def load_config(host: Host, file: str = state.CONFIG_FILE) -> Config:
    """The configuration of a host.

    Raises:
        ConfigError: no file (``config-missing``), not to be trusted (``config-untrusted``),
            unreadable (``config-unreadable``), or wrong (``InvalidConfigError``).
    """
    return load(host, file).config


def read_config(host: Host, file: str = state.CONFIG_FILE) -> Config | None:
    """Like ``load_config``, but None where there is no file: ``status`` needs none."""
    try:
        return load(host, file).config
    except ConfigError as error:
        if error.code == "config-missing":
            return None
        raise


def load(host: Host, file: str = state.CONFIG_FILE) -> LoadedConfig:
    """The configuration with its origins; raises as ``load_config`` does."""
    paths = _present(host, file)
    if not paths:
        raise ConfigError(
            f"{file}: there is no configuration",
            code="config-missing",
            hint="write one with: gpuguard config init",
        )
    _refuse_untrusted(host, paths)
    documents = [_read(host, path, _short_name(file, path)) for path in paths]
    problems = [problem for document in documents for problem in document.problems]
    problems += _misnamed(host, file)
    config, more = validate(documents, _short_name(file, file))
    problems += more
    if config is None or problems:
        raise InvalidConfigError(file, problems)
    origins = merged_origins(documents)
    return LoadedConfig(
        config,
        tuple(paths),
        {key_text(key): origins[key].file if key in origins else DEFAULT for key in leaf_keys()},
    )


def _dropin_dir(file: str) -> str:
    return str(PurePosixPath(file).with_suffix(".d"))


def _short_name(file: str, path: str) -> str:
    return str(PurePosixPath(path).relative_to(PurePosixPath(file).parent))


def _dropin_names(host: Host, file: str) -> list[str]:
    directory = _dropin_dir(file)
    try:
        names = os.listdir(host.path(directory))  # noqa: PTH208 - names, in no Path's order
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(directory, error) from error
    return sorted((name for name in names if not name.startswith(".")), key=os.fsencode)


def _present(host: Host, file: str) -> list[str]:
    """The files that make up the configuration, in the order in which they apply."""
    try:
        # a link to nothing is not "no configuration": somebody meant it to lead somewhere
        host.path(file, follow=False).lstat()
        main = [file]
    except (FileNotFoundError, NotADirectoryError):
        main = []
    except OSError as error:
        raise _unreadable(file, error) from error
    names = _dropin_names(host, file)
    return main + [f"{_dropin_dir(file)}/{name}" for name in names if name.endswith(_SUFFIX)]


def _misnamed(host: Host, file: str) -> list[Problem]:
    return [
        Problem(
            f"{_short_name(file, _dropin_dir(file))}/{name}",
            "",
            "is not read: end its name in .yaml",
        )
        for name in _dropin_names(host, file)
        if name.endswith(".yml")
    ]


def _read(host: Host, absolute: str, name: str) -> Document:
    document = Document(name)
    try:
        path = host.path(absolute)
        if not path.exists():
            document.problems.append(Problem(name, "", "is a symbolic link to nothing"))
            return document
        if not path.is_file():  # opening a FIFO would wait for ever
            document.problems.append(Problem(name, "", "is not a regular file"))
            return document
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(absolute, error) from error
    if len(content) > _MAX_BYTES:
        document.problems.append(Problem(name, "", f"is larger than {_MAX_BYTES} bytes"))
        return document
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        document.problems.append(
            Problem(
                name, "", f"is not UTF-8 text (byte 0x{content[error.start]:02x} at {error.start})"
            )
        )
        return document
    return parse_document(text, name)


def _unreadable(absolute: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{absolute}: cannot be read: {error.strerror}",
        code="config-unreadable",
        hint="run as root, or make it readable: it holds no secrets",
    )


def _refuse_untrusted(host: Host, paths: Sequence[str]) -> None:
    """As root, refuse files that others can write: they name what root compiles and loads."""
    if os.geteuid() != 0:
        return
    reasons = {path: reason for path in paths if (reason := _untrusted(host, path))}
    if reasons:
        remedies = dict.fromkeys(_remedy(why) for why in reasons.values())
        raise ConfigError(
            f"{next(iter(reasons))}: others than root can change it, so root must not follow it",
            code="config-untrusted",
            detail="\n".join(f"{path}: {reason}" for path, reason in reasons.items()),
            hint="\n".join(remedies),
        )


def _untrusted(host: Host, path: str) -> str | None:
    try:
        # missing_ok: what a link to nothing names is for whoever may create it
        return writable_by_others(host.root / path.lstrip("/"), root=host.root, missing_ok=True)
    except OSError as error:
        raise _unreadable(path, error) from error


def _remedy(reason: str) -> str:
    culprit = reason.partition(" is owned by ")[0].partition(" is writable by ")[0]
    if " is owned by " not in reason:
        return f"chmod go-w {culprit}"
    if Path(culprit).is_symlink():
        return f"chown --no-dereference root:root {culprit}"
    return f"chown root:root {culprit} && chmod go-w {culprit}"
