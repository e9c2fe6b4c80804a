"""The configuration: what is accepted, and the exact words for everything that is not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuguard.config import Config, SourceConfig
from gpuguard.config_check import leaf_keys
from gpuguard.config_file import InvalidConfigError, load, load_config, read_config
from gpuguard.config_yaml import Document, key_text, parse_document
from gpuguard.errors import ConfigError
from gpuguard.host import LocalHost

MINIMAL = "source:\n  path: /opt/source\n"
ETC = Path("etc/gpuguard")

Write = Callable[..., LocalHost]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the main file (None: none) and drop-ins into a tree; the tree as a host."""

    def write(main: str | bytes | None, dropins: Mapping[str, str] = {}) -> LocalHost:
        (tmp_path / ETC / "gpuguard.d").mkdir(parents=True)
        if main is not None:
            content = main if isinstance(main, bytes) else main.encode()
            (tmp_path / ETC / "gpuguard.yaml").write_bytes(content)
        for name, text in dropins.items():
            (tmp_path / ETC / "gpuguard.d" / name).write_text(text)
        return LocalHost(tmp_path)

    return write


def problems_of(host: LocalHost) -> list[str]:
    """What is wrong with a host's configuration, as the operator reads it."""
    with pytest.raises(ConfigError) as caught:
        load_config(host)
    assert caught.value.exit_status == 78
    assert caught.value.code == "config-invalid"
    return caught.value.detail.splitlines()


# Accepted


def test_one_key_is_enough(write: Write) -> None:
    assert load_config(write(MINIMAL)) == Config(source=SourceConfig(path="/opt/source"))


def test_dropins_merge_mappings_and_replace_lists_and_scalars(write: Write) -> None:
    host = write(
        "source:\n  path: /opt/a\n  patches: [/p/1, /p/2]\nbuild:\n  jobs: 2\n",
        {
            "20-late.yaml": "build:\n  jobs: 4\n",
            "10-early.yaml": "source:\n  patches: [/p/3]\nbuild: {jobs: 3, user: maker}\n",
        },
    )
    config = load_config(host)
    assert config.source == SourceConfig(path="/opt/a", patches=("/p/3",))
    assert (config.build.jobs, config.build.user) == (4, "maker")


def test_order_of_dropins_is_that_of_the_c_locale(write: Write) -> None:
    names = ["a.yaml", "B.yaml", "9.yaml", "10.yaml"]
    host = write(MINIMAL, {name: f"build: {{user: u-{name}}}" for name in names})
    assert load_config(host).build.user == "u-a.yaml"
    assert [path.rsplit("/", 1)[-1] for path in load(host).files] == [
        "gpuguard.yaml", "10.yaml", "9.yaml", "B.yaml", "a.yaml",
    ]  # fmt: skip


def test_a_section_with_every_key_commented_out_says_nothing(write: Write) -> None:
    host = write(
        MINIMAL + "build:\n  # jobs: 3\n", {"1.yaml": "source:\n", "2.yaml": "# nothing\n"}
    )
    assert load_config(host).source.path == "/opt/source"


def test_dropins_alone_are_a_configuration(write: Write) -> None:
    assert load_config(write(None, {"1.yaml": MINIMAL})).source.path == "/opt/source"


def test_hidden_files_and_leftovers_of_editors_are_not_read(write: Write) -> None:
    names = [".1.yaml", "1.yaml~", "1.yaml.dpkg-old", "README"]
    assert load(write(MINIMAL, dict.fromkeys(names, "]broken"))).files == (
        "/etc/gpuguard/gpuguard.yaml",
    )


def test_another_file_brings_its_own_dropins(tmp_path: Path) -> None:
    (tmp_path / "other.d").mkdir()
    (tmp_path / "other.yaml").write_text(MINIMAL)
    (tmp_path / "other.d/1.yaml").write_text("build: {jobs: 7}")
    assert load_config(LocalHost(tmp_path), "/other.yaml").build.jobs == 7


def test_a_byte_order_mark_and_windows_line_ends_are_fine(write: Write) -> None:
    host = write(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load_config(host).source.path == "/opt/source"


def test_aliases_work_within_the_limit(write: Write) -> None:
    host = write("source:\n  path: &here /opt/source\n  patches: [*here]\n")
    assert load_config(host).source.patches == ("/opt/source",)


def test_every_value_names_the_file_it_comes_from(write: Write) -> None:
    host = write(MINIMAL + "build: {jobs: 1}\n", {"1.yaml": "build: {jobs: 2}"})
    origins = load(host).origins
    assert list(origins) == [key_text(path) for path in leaf_keys()]
    assert origins["source.path"] == "gpuguard.yaml"
    assert origins["build.jobs"] == "gpuguard.d/1.yaml"
    assert origins["build.user"] == "default"


# Absent


def test_no_file_is_an_error_for_verbs_and_none_for_status(write: Write) -> None:
    host = write(None)
    assert read_config(host) is None
    with pytest.raises(ConfigError) as caught:
        load_config(host)
    error = caught.value
    assert str(error) == "/etc/gpuguard/gpuguard.yaml: there is no configuration"
    assert (error.code, error.exit_status) == ("config-missing", 78)
    assert error.hint == "write one with: gpuguard config init"


def test_no_etc_at_all_is_no_file(tmp_path: Path) -> None:
    assert read_config(LocalHost(tmp_path)) is None


def test_status_is_told_about_a_wrong_file(write: Write) -> None:
    with pytest.raises(InvalidConfigError):
        read_config(write("nonsense: 1"))


# Wrong values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("build: {jobs: lots}", "build.jobs: must be a whole number (got 'lots')"),
        ("build: {jobs: '4'}", "build.jobs: must be a whole number (got '4')"),
        ("build: {jobs: 1.5}", "build.jobs: must be a whole number (got 1.5)"),
        ("build: {jobs: yes}", "build.jobs: must be a whole number (got yes)"),
        ("build: {jobs: }", "build.jobs: must be a whole number (got nothing)"),
        (
            "build: {jobs: -1}",
            "build.jobs: must be greater than or equal to 0 (got -1)",
        ),
        (
            "build: {timeout_seconds: 0}",
            "build.timeout_seconds: must be greater than 0 (got 0)",
        ),
        ("build: {timeout_seconds: .inf}", "build.timeout_seconds: .inf is not a finite number"),
        (
            "build: {user: root}",
            "build.user: must not be root: compilers run on files that others wrote (got 'root')",
        ),
        (
            "build: {modules: [nvidia, nouveau]}",
            ("build.modules: unknown module nouveau; known are nvidia, nvidia-uvm,"
            " nvidia-modeset, nvidia-drm, nvidia-peermem (got a list)"),
        ),
        ("build: 5", "build: must be a mapping of keys, not 5"),
        ("build: [1]", "build: must be a mapping of keys, not a list"),
        ("kernels: {ignore: '*-rt'}", "kernels.ignore: must be a list (got '*-rt')"),
        (
            "signing: {mode: sometimes}",
            "signing.mode: must be 'auto', 'always' or 'never' (got 'sometimes')",
        ),
        ("signing: {key: mok.key}", "signing.key: must be an absolute path (got 'mok.key')"),
        (
            "driver_version: 580.10",
            "driver_version: must be text (got 580.10; put it in quotes)",
        ),
        (
            "driver_version: latest",
            "driver_version: must match pattern '^\\d+\\.\\d+(\\.\\d+)?$' (got 'latest')",
        ),
        ("source: {patches: [/a, b]}", "source.patches[1]: must be an absolute path (got 'b')"),
        (
            "source: {patches: [/a, 3]}",
            "source.patches[1]: must be text (got 3; put it in quotes)",
        ),
        (
            "source: {ref: {driver_version}}",
            "source.ref: must be text (got a mapping)",
        ),
        (
            "source: {ref: '{kernel}'}",
            ("source.ref: unknown placeholder {kernel};"
            " {driver_version} is the only one (got '{kernel}')"),
        ),
        (
            "source: {ref: '{driver_version'}",
            ("source.ref: a brace without its partner (expected '}' before end of string)"
            " (got '{driver_version')"),
        ),
        ("build: {user: \"a\\nb\"}", "build.user: holds a line break or another control character"),
        ("build: {user: !!int x}", "build.user: 'x' is not a value of type !!int"),
        ("jobs: 3", "jobs: unknown key; did you mean build.jobs?"),
        ("build: {job: 3}", "build.job: unknown key; did you mean build.jobs?"),
        ("sorce: {path: /x}", "sorce: unknown key; did you mean source?"),
        ("backups: {zzz: 3}", "backups.zzz: unknown key; known here: keep"),
        (
            "on: 3",
            ("on: unknown key; known here: source, driver_version, build, signing, backups,"
            " kernels, p2p, holds, automatic, reboot, apt, upgrade, gate, serve,"
            " lanes, lock_timeout_seconds"),
        ),
        ("build: {jobs: 1, jobs: 2}", "build.jobs: given twice, in lines 1 and 1"),
        ("build: {[a]: 1}", "build: line 1: a key must be one word"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_file_and_key(write: Write, text: str, expected: str) -> None:
    host = write(MINIMAL, {"10-x.yaml": text + "\n"})
    assert problems_of(host) == [f"gpuguard.d/10-x.yaml: {expected}"]


def test_all_problems_come_at_once_each_with_its_own_file(write: Write) -> None:
    host = write(
        "bilud: {}\nbackups: {keep: 0}\nbuild:\n  jobs: 1\n  jobs: 2\n",
        {
            "10-a.yaml": "backups: {kep: 3}\np2p: {expected_gpus: four}\n",
            "20-b.yml": "never read",
            "30-c.yaml": "signing: {mode: 1}\n",
        },
    )
    assert problems_of(host) == [
        "gpuguard.yaml: build.jobs: given twice, in lines 4 and 5",
        "gpuguard.d/20-b.yml: is not read: end its name in .yaml",
        "gpuguard.yaml: bilud: unknown key; did you mean build?",
        "gpuguard.d/10-a.yaml: backups.kep: unknown key; did you mean backups.keep?",
        "gpuguard.yaml: source.path: required key is missing",
        "gpuguard.d/30-c.yaml: signing.mode: must be 'auto', 'always' or 'never' (got 1)",
        "gpuguard.yaml: backups.keep: must be greater than or equal to 1 (got 0)",
        "gpuguard.d/10-a.yaml: p2p.expected_gpus: must be a whole number (got 'four')",
    ]


def test_the_message_counts_and_the_problems_can_be_read_one_by_one(write: Write) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(write("a: 1\nb: 2\n"))
    assert str(caught.value) == "/etc/gpuguard/gpuguard.yaml: 3 problems in the configuration"
    assert [problem.key for problem in caught.value.problems] == ["a", "b", "source.path"]


def test_a_value_that_a_dropin_replaces_is_not_judged(write: Write) -> None:
    host = write(MINIMAL + "build: {jobs: lots}\n", {"1.yaml": "build: {jobs: 2}"})
    assert load_config(host).build.jobs == 2


# Wrong files


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n"])
def test_an_empty_file(write: Write, text: str) -> None:
    assert problems_of(write(text)) == [
        "gpuguard.yaml: source.path: required key is missing (the file sets nothing)"
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("- a\n", "gpuguard.yaml: must be a mapping of keys, not a list"),
        ("hello\n", "gpuguard.yaml: must be a mapping of keys, not the single value hello"),
        ("source: {path: /x\n", "gpuguard.yaml:2:1: expected ',' or '}', but got '<stream end>'"),
        ("source:\n path: /x: y\n", "gpuguard.yaml:2:10: mapping values are not allowed here"),
        (
            "source:\n\tpath: /x\n",
            (
                "gpuguard.yaml:2:1: found character '\\t' that cannot start any token"
                " (a tab: indent with spaces)"
            ),
        ),
        (
            "source:\n  ref: {driver_version}-p2p\n",
            (
                "gpuguard.yaml:2:24: expected <block end>, but found '<scalar>'"
                " (a value that begins with { must be in quotes)"
            ),
        ),
        (
            MINIMAL + "---\nbuild: {}\n",
            (
                "gpuguard.yaml:3:1: expected a single document in the stream,"
                " but found another document"
            ),
        ),
        ("a: *nowhere\n", "gpuguard.yaml:1:4: found undefined alias 'nowhere'"),
        (b"\x7fELF\x02\x01\xff", "gpuguard.yaml: is not UTF-8 text (byte 0xff at 6)"),
        (b"a: 1\nb: \x00\n", "gpuguard.yaml:2: not text: character U+0000"),
        ("a: &a [*a]\n", "gpuguard.yaml: nested deeper than 20 levels"),
        ("a: " + "[" * 5000, "gpuguard.yaml: nested deeper than 20 levels"),
        ("#" * (1 << 20) + "\n", "gpuguard.yaml: is larger than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_configuration(write: Write, content: str | bytes, expected: str) -> None:
    assert problems_of(write(content)) == [expected]


def test_an_alias_bomb_is_refused_early(write: Write) -> None:
    layers = "".join(f"k{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
    assert problems_of(write("k0: &a0 [x]\n" + layers)) == [
        "gpuguard.yaml: more than 10000 values, aliases expanded"
    ]


def test_a_python_object_is_not_made(write: Write) -> None:
    host = write(MINIMAL + "driver_version: !!python/object/apply:os.getcwd []\n")
    assert problems_of(host) == [
        "gpuguard.yaml: driver_version: tag !!python/object/apply:os.getcwd is not allowed"
    ]


def test_a_broken_dropin_does_not_make_other_keys_missing(write: Write) -> None:
    assert problems_of(write("", {"1.yaml": "source: [\n"})) == [
        "gpuguard.d/1.yaml:2:1: expected the node content, but found '<stream end>'"
    ]


def test_a_folder_or_a_pipe_in_place_of_a_file(write: Write, tmp_path: Path) -> None:
    host = write(None)
    (tmp_path / ETC / "gpuguard.yaml").mkdir()
    os.mkfifo(tmp_path / ETC / "gpuguard.d/1.yaml")
    assert problems_of(host) == [
        "gpuguard.yaml: is not a regular file",
        "gpuguard.d/1.yaml: is not a regular file",
    ]


def test_a_file_that_cannot_be_read(write: Write, tmp_path: Path) -> None:
    host = write(None)
    (tmp_path / ETC / "gpuguard.yaml").symlink_to("gpuguard.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config(host)
    assert caught.value.code == "config-unreadable"
    assert str(caught.value) == (
        "/etc/gpuguard/gpuguard.yaml: cannot be read: Too many levels of symbolic links"
    )


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_no_text_makes_the_reader_stumble(text: str) -> None:
    document = parse_document(text, "x.yaml")
    assert isinstance(document, Document)
    assert document.data is None or isinstance(document.data, dict)


@pytest.mark.parametrize(
    ("p2p", "problem"),
    [
        ("{gpus: [GPU0]}", "p2p.gpus[0]: must be a UUID (GPU-...) or a PCI bus id"),
        ("{exclude: [card 1]}", "p2p.exclude[0]: must be a PCI bus id"),
        ("{gpus: ['01:00.0', '0000:01:00.0']}", "p2p: 0000:01:00.0 is named twice"),
        ("{gpus: ['01:00.0'], expected_gpus: 2}", "p2p: expected_gpus is 2, gpus has 1"),
        ("{groups: [['01:00.0']]}", "p2p.groups[0]: "),
        ("{groups: [['01:00.0', '02:00.0'], ['02:00.0', '03:00.0']]}", "is named twice"),
        ("{gpus: ['01:00.0'], exclude: ['01:00.0']}", "is expected and excluded"),
    ],
)
def test_expected_cards_that_make_no_sense(tmp_path: Path, p2p: str, problem: str) -> None:
    (tmp_path / "c.yaml").write_text(f"source: {{path: /x}}\np2p: {p2p}\n")
    with pytest.raises(InvalidConfigError) as caught:
        load(LocalHost(tmp_path), "/c.yaml")
    assert problem in caught.value.detail
