"""``kvhearth engine-args``: prints how to start the real engines of a Stack. The commands are made in `control`."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvhearth.cli import console
from kvhearth.control.engine_args import pool_commands
from kvhearth.stack import Stack


class Form(Enum):
    """How commands are printed."""

    SHELL = "shell"
    JSON = "json"


def engine_args(
    file: Annotated[Path, typer.Argument(metavar="STACK.YAML", help="The Stack file, such as examples/vllm.yaml.")],
    pool: Annotated[str | None, typer.Option(help="Only this pool; by default every one with engine: vllm.")] = None,
    form: Annotated[Form, typer.Option("--format", help="A command for a shell, or JSON for programs.")] = Form.SHELL,
) -> None:
    """Print the exact vLLM command of each pool with engine: vllm, for its offload mode; nothing is started.

    `kvhearth up` runs the same, at ports that it chooses. Passwords are never part of a command.

    **Examples**

    - `kvhearth engine-args examples/vllm.yaml`

    - `kvhearth engine-args examples/vllm.yaml --pool chat --format json`
    """
    stack = Stack.from_yaml(file)
    for warning in stack.warnings():
        console.warn(f"{file}: {warning}")
    commands = pool_commands(stack, where=str(file), pool=pool)
    if form is Form.JSON:
        json.dump([command.as_json() for command in commands], sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stdout.write("\n\n".join(command.as_shell() for command in commands) + "\n")
