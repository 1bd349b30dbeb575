"""Writes the reference pages from the code: `make docs`. With --check it only says which pages are out of date."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

import kvhearth.metrics
from kvhearth.metrics import all_metrics
from kvhearth.router.reload import NEEDS_RESTART
from kvhearth.router.settings import PANELS, TABLE
from kvhearth.settings import markdown_table
from kvhearth.stack import stack_schema
from kvhearth.store.server.commands import COMMANDS
from kvhearth.store.server.settings import SETTINGS

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Written by `make docs`; edit the code instead. -->\n"


def metrics_page() -> str:
    """Every metric, room by room."""
    for module in pkgutil.iter_modules(kvhearth.metrics.__path__):
        importlib.import_module(f"kvhearth.metrics.{module.name}")
    lines = [NOTE, "# Metrics\n", "| name | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in all_metrics():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.exposed_name}` | {metric.kind.value} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"


def stack_page() -> str:
    """Every field of a Stack file."""
    schema = stack_schema()
    lines = [
        NOTE,
        "# The Stack file\n",
        "Fields without a default must be given. Sizes take `4GiB`, `512MiB` or bytes.\n",
    ]
    sections = {"Stack": schema, **schema.get("$defs", {})}
    for name, section in sections.items():
        if "properties" not in section:
            continue
        lines += [f"## {name}\n", section.get("description", ""), "", "| field | type | default | meaning |"]
        lines.append("| --- | --- | --- | --- |")
        for field, spec in section["properties"].items():
            lines.append(f"| `{field}` | {_type(spec)} | {_default(spec)} | {spec.get('description', '')} |")
        lines.append("")
    return "\n".join(lines)


def store_page() -> str:
    """Every setting of `kvhearth store serve`, and every command that the store answers."""
    lines = [NOTE, "# The store: settings and commands\n", "## Settings\n", markdown_table(SETTINGS), "## Commands\n"]
    lines += ["| command | arguments | right | what it does |", "| --- | --- | --- | --- |"]
    for command in sorted(COMMANDS.values(), key=lambda command: command.name):
        least = abs(command.arity) - 1
        arguments = f"{least}" if command.arity >= 0 else f"{least} or more"
        lines.append(f"| `{command.name.upper()}` | {arguments} | {command.right or 'any'} | {command.summary} |")
    return "\n".join(lines) + "\n"


def router_page() -> str:
    """Every setting of `kvhearth router serve`, group by group."""
    lines = [
        NOTE,
        "# The router: settings\n",
        "A flag wins over the environment, and that over the YAML file of `--config` or "
        f"`{TABLE.config_variable}`. `group.name` is `name` below `group` in the file. `kvhearth router check` prints "
        "what is in force. The file is read again when it changes, and on SIGHUP; a change of a setting marked "
        "*restart* is refused until the router is started again.\n",
        "Several values are a list in the file, a repeated flag, or texts with commas between them in the environment. "
        "What is said of an engine is in the file said with it: "
        "`engines: [{name: a, url: http://host:8000, role: prefill, data_parallel: 8, kv_events: tcp://host:5557, "
        "kv_replay: tcp://host:5558, kv_snapshot: host:9100}]`, or just `engines: [http://host:8000]`.\n",
    ]
    for group, title in PANELS.items():
        settings = [
            setting._replace(help=f"{setting.help} *restart*")
            if {setting.name, setting.name.removesuffix("_file")} & NEEDS_RESTART
            else setting
            for setting in TABLE.settings
            if setting.group == group
        ]
        lines += [f"## {title}\n", markdown_table(settings)]
    return "\n".join(lines)


def _type(spec: dict[str, Any]) -> str:
    if "$ref" in spec:
        return f"[{spec['$ref'].rsplit('/', 1)[-1]}](#{spec['$ref'].rsplit('/', 1)[-1].lower()})"
    if "enum" in spec or "const" in spec:
        return " \\| ".join(f"`{value}`" for value in spec.get("enum", [spec.get("const")]))
    if "anyOf" in spec:
        return " or ".join(dict.fromkeys(_type(option) for option in spec["anyOf"]))
    if spec.get("type") == "array":
        return f"list of {_type(spec.get('items', {}))}"
    return str(spec.get("type", "any"))


def _default(spec: dict[str, Any]) -> str:
    if "default" not in spec:
        return ""
    default = spec["default"]
    return "see its section" if isinstance(default, dict) else f"`{default}`"


PAGES = {"metrics.md": metrics_page, "router.md": router_page, "stack.md": stack_page, "store.md": store_page}


def main() -> int:
    """Write the pages, or with ``--check`` compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is out of date")
    check = parser.parse_args().check
    FOLDER.mkdir(exist_ok=True)
    stale = [name for name, page in PAGES.items() if not _same(FOLDER / name, page())]
    for name in stale:
        if check:
            print(f"docs/reference/{name} is out of date: run `make docs`", file=sys.stderr)
        else:
            (FOLDER / name).write_text(PAGES[name](), encoding="utf-8")
            print(f"wrote docs/reference/{name}")
    return 1 if check and stale else 0


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
