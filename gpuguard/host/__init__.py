"""The one port to a machine: run a program, read a file, replace a file."""

from gpuguard.host.local import LocalHost
from gpuguard.host.port import BuildUser, Completed, Deadline, Host

__all__ = ["BuildUser", "Completed", "Deadline", "Host", "LocalHost"]
