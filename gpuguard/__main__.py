"""Entry point: signals, one call, errors turned into exit statuses."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from types import FrameType

from gpuguard.errors import GpuguardError, InternalError, Interrupted, unwritable


def main() -> None:
    """Run the command line; the only place that turns an error into an exit status."""
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, or a script's &
            signal.signal(signum, _interrupt)
    # Nobody else's plugins in root's process; looking for them costs 15 ms.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    try:
        sys.exit(_run())
    except Interrupted as error:
        print(  # noqa: T201 - typer may not be there yet
            f"gpuguard: stopped by {signal.Signals(error.signum).name}; "
            "what was begun is undone, or was already complete",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(128 + error.signum)


def _run() -> int:
    # typer and what it brings cost 0.1 s: after the signals are in order
    import typer

    from gpuguard.cli.app import app
    from gpuguard.cli.output import Output
    from gpuguard.cli.usage import call as _call

    output = Output()
    output.take_over()
    try:
        _call(app, _json_first(sys.argv[1:]), output)
    except GpuguardError as error:
        _report(error, typer.echo)
        return output.conclude(error.exit_status)
    except SystemExit as error:
        return output.conclude(error.code if isinstance(error.code, int) else 0)
    except Exception as error:  # noqa: BLE001 - whatever it is, 1 would mean something else
        traceback.print_exc()
        failure = _unforeseen(error)
        _report(failure, typer.echo)
        return output.conclude(failure.exit_status)
    return output.conclude(0)


def _json_first(argv: list[str]) -> list[str]:
    """``--json`` may stand anywhere: people type it last, the option belongs first."""
    if "--json" not in argv:
        return argv
    return ["--json", *(word for word in argv if word != "--json")]


def _interrupt(signum: int, _frame: FrameType | None) -> None:
    raise Interrupted(signum)


def _unforeseen(error: Exception) -> GpuguardError:
    if isinstance(error, OSError):
        return unwritable(error)
    return InternalError(
        f"an error that gpuguard does not know: {type(error).__name__}: {error}",
        hint="please report it with the lines above; gpuguard status says what is to do",
    )


def _report(error: GpuguardError, echo: object) -> None:
    assert callable(echo)  # noqa: S101 - typing only
    if "--json" in sys.argv:
        document = {
            "error": {
                "code": error.code,
                "message": error.message,
                "hint": error.hint,
                "detail": error.detail,
                "exit_status": error.exit_status,
            }
        }
        echo(json.dumps(document, ensure_ascii=False))
        return
    echo(f"gpuguard: {error.message} [{error.code}]", err=True)
    for line in error.detail.splitlines():
        echo(f"  | {line}", err=True)
    for line in error.hint.splitlines():
        echo(f"  -> {line}", err=True)


if __name__ == "__main__":
    main()
