"""What the daemon has done in processes of their own: read the configuration, look at the host.

The request comes through a descriptor, the answer is one JSON object on standard output. The
configuration is handed on as it was when it was read, so that a broken file changes nothing.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from gpuguard import __version__
from gpuguard.errors import ConfigError, GpuguardError
from gpuguard.host import LocalHost


def main() -> None:
    """Answer the request of the descriptor named by the first argument."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        request = json.load(file)
    # Nobody else's plugins; looking for them costs 15 ms.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    host = LocalHost(request["root"])
    answers = {"settings": _settings, "observe": _observe}
    try:
        answer = answers[request["do"]](host, request)
    except GpuguardError as error:
        answer = {
            "error": {
                "code": error.code,
                "message": error.message,
                "hint": error.hint,
                "detail": error.detail,
                "exit_status": error.exit_status,
            }
        }
    answer["version"] = __version__
    json.dump(answer, sys.stdout)


def _settings(host: LocalHost, request: dict[str, Any]) -> dict[str, Any]:
    from gpuguard.config import ServeConfig
    from gpuguard.config_file import read_config
    from gpuguard.daemon.webconfig import read_web_config

    config = read_config(host, request["config_file"])
    serve = config.serve if config is not None else ServeConfig()
    web = read_web_config(host, serve.web_config_file) if serve.web_config_file else None
    return {
        "config": None if config is None else asdict(config),
        "listen": serve.listen,
        "interval": serve.interval_seconds,
        "web": web,
    }


def _observe(host: LocalHost, request: dict[str, Any]) -> dict[str, Any]:
    from pydantic import TypeAdapter, ValidationError

    from gpuguard.config import Config
    from gpuguard.core.observation import encode
    from gpuguard.verbs.observe import observe

    config = None
    if request["config"] is not None:
        try:
            config = TypeAdapter(Config).validate_python(request["config"])
        except ValidationError as error:  # of another version than this one, upgraded meanwhile
            raise ConfigError(f"the daemon's configuration cannot be used: {error}") from error
    return encode(observe(host, config))
