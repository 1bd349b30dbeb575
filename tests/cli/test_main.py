"""The command line as such: help, version, and how each kind of failure ends."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
import typer

from kvhearth import __version__
from kvhearth.cli import main as cli
from kvhearth.errors import UserError


def kvhearth(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvhearth", *args], capture_output=True, text=True, timeout=60)


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module to put a function ``go`` into, which is then the verb ``go``."""
    module = ModuleType("some_verb")
    monkeypatch.setitem(sys.modules, "some_verb", module)
    monkeypatch.setitem(cli.VERBS, "go", cli.Verb("some_verb:go", "Go.", "all"))
    return module


def test_the_version() -> None:
    done = kvhearth("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvhearth {__version__}\n", "")


def test_the_help_names_every_verb_with_examples_and_no_argument_at_all_shows_it() -> None:
    done = kvhearth()
    assert done.returncode == 0
    assert all(f" {name} " in done.stdout and verb.help in done.stdout for name, verb in cli.VERBS.items())
    assert "kvhearth up examples/local.yaml" in done.stdout
    assert kvhearth("--help").stdout == done.stdout


def test_the_help_imports_no_verb() -> None:
    program = "import sys; from kvhearth.cli.main import run; run(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    loaded = set(done.stdout.rsplit("\n", 2)[-2].split())
    assert loaded.isdisjoint({"pydantic", "yaml", "numpy", "uvloop", "starlette", "matplotlib", "kvhearth.cli.up"})


@pytest.mark.parametrize("name", list(cli.VERBS))
def test_every_verb_loads_and_has_a_help_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([name, "--help"]) == 0
    assert "Usage:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["nope"], "kvhearth: error: No such command 'nope'; see `kvhearth --help`"),
        (["--nope"], "kvhearth: error: No such option: --nope; see `kvhearth --help`"),
        (["up"], "kvhearth: error: Missing argument 'STACK.YAML'; see `kvhearth up --help`"),
        (["up", "--nope", "x"], "kvhearth: error: No such option: --nope; see `kvhearth up --help`"),
        (
            ["up", "/no/file"],
            "kvhearth: error: /no/file: cannot read it: No such file or directory; give the path of a Stack file",
        ),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    args: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(args) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line + "\n")


def test_a_user_error_with_brackets_and_line_breaks_is_shown_as_it_is(
    verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def go() -> None:
        raise UserError("bad\n[red]value[/]", where="pools[0].name", remedy="see [docs]")

    verb.go = go
    assert cli.run(["go"]) == 2
    assert capsys.readouterr().err == "kvhearth: error: pools[0].name: bad [red]value[/]; see [docs]\n"


def test_a_bug_is_one_line_that_says_so_and_debug_shows_where(
    verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def go() -> None:
        raise RuntimeError("wires crossed")

    verb.go = go
    assert cli.run(["go"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "kvhearth: error: this is a bug: RuntimeError: wires crossed; run it again as `kvhearth --debug"
    )
    assert cli.run(["--debug", "go"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130_and_one_word(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def go() -> None:
        raise KeyboardInterrupt

    verb.go = go
    assert cli.run(["go"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_verb_chooses_its_exit_code(verb: ModuleType) -> None:
    def go(code: int) -> None:
        raise typer.Exit(code)

    verb.go = go
    assert cli.run(["go", "3"]) == 3


def test_what_is_not_installed_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.VERBS, "go", cli.Verb("some_verb:go", "Go.", "planner", ("no_such_module",)))
    assert cli.run(["go"]) == 2
    line = (
        "kvhearth: error: `kvhearth go` needs no_such_module, which is not installed; pip install 'kvhearth[planner]'\n"
    )
    assert capsys.readouterr().err == line


def test_an_import_that_fails_inside_a_verb_is_named_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with open(f"{tmp_path}/needy_verb.py", "w") as file:
        file.write("import another_missing_module\n")
    monkeypatch.setitem(cli.VERBS, "go", cli.Verb("needy_verb:go", "Go.", "router"))
    assert cli.run(["go"]) == 2
    assert (
        "needs another_missing_module, which is not installed; pip install 'kvhearth[router]'"
        in capsys.readouterr().err
    )
