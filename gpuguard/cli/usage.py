"""Errors of the command line itself, told as every other one where ``--json`` asks for objects."""

from __future__ import annotations

import typer

from gpuguard.cli.output import Output
from gpuguard.errors import UsageError

#: typer has a copy of click's classes, or click's own: which, depends on its version.
_TYPERS_USAGE_ERROR = typer.BadParameter.__mro__[1]


def call(app: typer.Typer, argv: list[str], output: Output) -> None:
    """Run the command line.

    Raises:
        SystemExit: it has an exit status.
        UsageError: with ``--json``, the words make no command; else typer says so by itself.
    """
    if "--json" not in argv:
        app(args=argv, obj=output)
        return
    try:
        status = app(args=argv, obj=output, standalone_mode=False)
    except typer.Abort:
        raise SystemExit(1) from None
    except Exception as error:
        if not isinstance(error, _TYPERS_USAGE_ERROR):
            raise
        raise _usage(error) from None
    raise SystemExit(status if isinstance(status, int) else 0)


def _usage(error: Exception) -> UsageError:
    place = getattr(getattr(error, "ctx", None), "command_path", "") or "gpuguard"
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is all of the help
        message = f"{place}: a verb is missing"
    else:
        message = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
    return UsageError(message, hint=f"{place} --help")
