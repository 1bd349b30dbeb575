"""Runs a Stack on this machine: child processes, their ports, logs, restarts and orderly end."""

from kvhearth.control.backoff import RestartPolicy
from kvhearth.control.local import LocalStack
from kvhearth.control.supervisor import ChildView, Event, State

__all__ = ["ChildView", "Event", "LocalStack", "RestartPolicy", "State"]
