"""Read an operator's clone without ever changing it, or running what it could make us run.

Every call names the repository by ``--git-dir``: git then does no discovery and so never says
"dubious ownership" (``safe.directory``, git 2.35.2 and later), and needs no work tree. As root
the clone's owner reads it: hooks, filters and helpers that its configuration names could then
do no more than that account can anyway. Works with git 2.34 (Ubuntu 22.04).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from gpuguard.errors import CommandError, CommandNotFoundError
from gpuguard.host import BuildUser, Completed, Host

_TIMEOUT = 60.0
_ENVIRONMENT = {
    "LC_ALL": "C",
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_TERMINAL_PROMPT": "0",
}
_OPTIONS = (
    "--no-pager",
    "-c", "core.hooksPath=/dev/null",
    "-c", "core.fsmonitor=",
    "-c", "core.attributesFile=/dev/null",
    "-c", "protocol.allow=never",  # a partial clone would fetch what it lacks: no network
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TreeItem:
    """One file of a tree object: mode in octal, size in bytes, path."""

    mode: str
    size: int
    path: str


@dataclass(frozen=True, slots=True)
class Clone:
    """A repository, read as ``owner`` (None: as this process)."""

    host: Host
    git_dir: Path
    owner: BuildUser | None

    def resolve(self, ref: str) -> tuple[str, str] | None:
        """Commit and tree that a ref names, as object ids; None: there is no such ref."""
        if ref.startswith("-"):
            return None
        answer = self._run("rev-parse", f"{ref}^{{commit}}", f"{ref}^{{tree}}", ok=(0, 128))
        if answer.exit_status == 0:
            commit, tree = answer.stdout.split()
            return commit, tree
        if "unknown revision" in answer.stderr:
            return None
        why = answer.stderr.strip().split("\n", 1)[0]
        raise CommandError(f"git{self._who} cannot read {self.git_dir}: {why}")

    def near(self, ref: str, limit: int = 5) -> list[str]:
        """Branches and tags whose names are closest to a ref that does not exist."""
        out = self._git("for-each-ref", "--format=%(refname:short)", "refs/tags", "refs/heads",
                        "refs/remotes")  # fmt: skip
        return difflib.get_close_matches(ref, out.split(), n=limit, cutoff=0.4)

    def items(self, tree: str) -> list[TreeItem]:
        """Every file of a tree; ``ls-tree -l``: mode, type, object, size, TAB, path."""
        found = []
        for line in self._git("ls-tree", "-r", "-l", "-z", tree).split("\0"):
            head, tab, path = line.partition("\t")
            if tab:
                mode, _, _, size = head.split()
                found.append(TreeItem(mode, int(size) if size.isdigit() else 0, path))
        return found

    def text(self, tree: str, path: str) -> str:
        """Content of one small text file of a tree."""
        return self._git("cat-file", "blob", f"{tree}:{path}")

    def archive(self, commit: str, target: Path) -> None:
        """Write a tar of a commit; the file is this process's, whoever reads the clone."""
        self._run("archive", "--format=tar", commit, timeout=600, stdout=target)

    @property
    def _who(self) -> str:
        return f" as {self.owner.name}" if self.owner else ""

    def _git(self, *arguments: str, timeout: float = _TIMEOUT) -> str:
        return self._run(*arguments, timeout=timeout).stdout

    def _run(
        self,
        *arguments: str,
        ok: tuple[int, ...] = (0,),
        timeout: float = _TIMEOUT,
        stdout: Path | None = None,
    ) -> Completed:
        try:
            return self.host.run(
                "git", *_OPTIONS, f"--git-dir={self.git_dir}", *arguments,
                timeout=timeout, env=_ENVIRONMENT, user=self.owner, ok=ok, cwd=Path("/"),
                stdout=stdout,
            )  # fmt: skip
        except CommandNotFoundError:
            raise
        except CommandError as error:
            raise CommandError(
                f"git{self._who} cannot read {self.git_dir}: {error.message}", detail=error.detail
            ) from error
