"""Settings of any server: layers, groups, secrets, and what each mistake is answered with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as over
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.settings import (
    Given,
    Setting,
    Table,
    default_text,
    markdown_table,
    read,
    read_pairs,
    read_secret_file,
    read_texts,
    read_yaml,
)

TABLE = Table(
    [
        Setting("name", "text", "", "A name.", flag="--name", variable="OVEN_NAME"),
        Setting("key", "text", "", "A key.", variable="OVEN_KEY", secret=True),
        Setting("key_file", "path", "none", "Its file.", flag="--key-file", variable="OVEN_KEY_FILE"),
        Setting("heat.max_bytes", "size", "1MiB", "Heat.", False, flag="--max-heat", variable="OVEN_HEAT_MAX_BYTES"),
        Setting("heat.up_seconds", "seconds", "1", "Up.", False, flag="--up", variable="OVEN_HEAT_UP_SECONDS"),
        Setting("trays", "pairs", "", "Trays.", False, flag="--tray", variable="OVEN_TRAYS", instead="trays elsewhere"),
    ],
    prefix="OVEN_",
    command="oven bake",
    example="'name: x'",
)


def found(flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, file: Path | None = None) -> Any:
    return TABLE.merged(TABLE.layers(flags or {}, environ or {}, file))


def refusal(*arguments: Any) -> str:
    with pytest.raises(UserError) as refused:
        found(*arguments)
    return str(refused.value)


@pytest.fixture
def oven(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "oven.yaml"
        path.write_text(text)
        return path

    return write


class TestWhereSettingsComeFrom:
    def test_flags_win_over_the_environment_and_that_over_the_file(self, oven: Any) -> None:
        path = oven("name: file\nheat: {max_bytes: 1, up_seconds: 1}\n")
        environ = {"OVEN_HEAT_MAX_BYTES": "2", "OVEN_HEAT_UP_SECONDS": "2", "OVEN_NAME": "", "PATH": "/bin"}
        given = found({"heat.max_bytes": "3", "heat.up_seconds": None, "trays": []}, environ, path)
        assert {name: (one.value, one.where) for name, one in given.items()} == {
            "name": ("file", f"{path}: name"),
            "heat.up_seconds": ("2", "OVEN_HEAT_UP_SECONDS"),
            "heat.max_bytes": ("3", "--max-heat"),
        }

    def test_the_file_can_be_named_in_the_environment(self, oven: Any) -> None:
        path = oven("name: x")
        assert found({}, {"OVEN_CONFIG": str(path)})["name"].value == "x"
        assert TABLE.file({"OVEN_CONFIG": "far"}, path) == path
        assert TABLE.file({}, None) is None

    def test_a_group_without_anything_in_it_is_no_mistake(self, oven: Any) -> None:
        assert found({}, {}, oven("heat:\n")) == {}

    def test_a_relative_path_starts_from_the_folder_of_the_file_also_where_that_is_a_link(
        self, oven: Any, tmp_path: Path
    ) -> None:
        (tmp_path / "mount").mkdir()
        link = tmp_path / "mount" / "oven.yaml"
        link.symlink_to(oven("key_file: k"))
        assert read(TABLE.by_name["key_file"], found({}, {}, link)["key_file"]) == tmp_path / "mount" / "k"

    def test_a_secret_comes_from_the_environment_or_a_file_and_the_nearer_wins(self, oven: Any) -> None:
        path = oven("key_file: far")
        assert set(found({}, {"OVEN_KEY": "near"}, path)) == {"key"}
        assert set(found({"key_file": "nearest"}, {"OVEN_KEY": "near"}, path)) == {"key_file"}

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("nam: x", "oven.yaml: 'nam' is not a setting; did you mean name?"),
            ("heet: {}", "oven.yaml: 'heet' is not a setting; did you mean heat?"),
            ("up_seconds: 1", "oven.yaml: 'up_seconds' is not a setting; did you mean heat.up_seconds?"),
            ("heat: {max: 1}", "oven.yaml: heat: 'max' is not a setting; did you mean max_bytes?"),
            ("heat: {Up-Seconds: 1}", "oven.yaml: heat: 'Up-Seconds' is not a setting; did you mean up_seconds?"),
            ("heat: {name: 1}", "oven.yaml: heat: 'name' is not a setting; see 'oven bake --help' for the settings"),
            ("heat: 3", "oven.yaml: heat: 3 is not a mapping; write its settings below heat, indented"),
            (
                "heat.up_seconds: 3",
                "oven.yaml: 'heat.up_seconds' is not a setting; write up_seconds below heat, indented",
            ),
            ("trays: {a: b}", "oven.yaml: trays: not a setting of a file; write trays elsewhere"),
            ("- name", "oven.yaml: a list, not a mapping; write 'name: x'"),
        ],
    )
    def test_what_is_no_setting_of_a_file_is_named_with_what_to_write(
        self, oven: Any, text: str, complaint: str
    ) -> None:
        assert complaint in refusal({}, {}, oven(text))

    def test_a_secret_in_a_file_is_refused_and_not_repeated(self, oven: Any) -> None:
        said = refusal({}, {}, oven("key: hush"))
        assert "oven.yaml: key: a key has no place in a file of settings; put it into a file of its own" in said
        assert "name that as key_file, or set OVEN_KEY" in said
        assert "hush" not in said

    def test_a_secret_twice_in_the_environment_is_refused_and_not_repeated(self) -> None:
        said = refusal({}, {"OVEN_KEY": "hush", "OVEN_KEY_FILE": "/k"})
        assert said == "OVEN_KEY_FILE: the key is given twice; unset OVEN_KEY or OVEN_KEY_FILE"

    def test_a_misspelt_variable_is_named_and_a_strange_one_is_not(self) -> None:
        said = refusal({}, {"OVEN_HEAT_UP_SECOND": "1"})
        assert said == "OVEN_HEAT_UP_SECOND: not a setting; did you mean OVEN_HEAT_UP_SECONDS?"
        assert found({}, {"OVEN_SERVICE_HOST": "10.0.0.1", "OVEN_PORT_80_TCP": "x"}) == {}

    def test_a_flag_that_is_no_setting_is_refused(self) -> None:
        assert refusal({"nope": "x"}).startswith("flags: 'nope' is not a setting")


class TestValues:
    @pytest.mark.parametrize(
        ("kind", "value", "wanted"),
        [
            ("size", "2KiB", 2048),
            ("size", 7, 7),
            ("count", "12", 12),
            ("number", "0.25", 0.25),
            ("number", 3, 3.0),
            ("seconds", 1.5, 1.5),
            ("switch", "Off", False),
            ("switch", True, True),
            ("text", "x", "x"),
            ("path", "p", Path("/etc/p")),
            ("texts", ["a,b", "c"], ["a,b", "c"]),
            ("texts", "a, b,,c", ["a", "b", "c"]),
            ("pairs", {"a": "b"}, {"a": "b"}),
            ("pairs", "a=b=c, d=e", {"a": "b=c", "d": "e"}),
        ],
    )
    def test_each_kind_is_read_from_text_and_from_yaml(self, kind: str, value: Any, wanted: Any) -> None:
        assert read(Setting("x", kind, "", ""), Given(value, "here", Path("/etc"))) == wanted

    @pytest.mark.parametrize(
        ("kind", "value", "complaint"),
        [
            ("size", True, "here: True is not a size; write bytes or a number with a unit"),
            ("count", 1.0, "here: 1.0 is not a whole number; write digits only"),
            ("number", "few", "here: 'few' is not a number; write a number, such as 0.5"),
            ("number", False, "here: False is not a number;"),
            ("seconds", [1], "here: [1] is not a number of seconds;"),
            ("switch", 2, "here: 2 is not a yes or a no; write true or false"),
            ("text", 3, "here: 3 is not text; write a text"),
            ("path", 3, "here: 3 is not a path"),
            ("texts", [1], "here: [1] is not a list of texts"),
            ("texts", None, "here: None is not a list of texts"),
            ("pairs", {"a": 1}, "here: 'a': 1 is not a name and a text; put both in quotes"),
            ("pairs", "a", "here: 'a' is not name=value; give name=value"),
            ("pairs", ["a=1", "a=2"], "here: 'a' is there twice; give it once"),
            ("text", 10**99, f"here: {str(10**99)[:60]}… is not text"),
        ],
    )
    def test_what_is_not_of_its_kind_is_named_with_its_place(self, kind: str, value: Any, complaint: str) -> None:
        with pytest.raises(UserError) as refused:
            read(Setting("x", kind, "", "", optional=False), Given(value, "here"))
        assert str(refused.value).startswith(complaint)

    def test_none_may_be_said_where_it_means_something(self) -> None:
        for word in ("none", "None", "", None):
            assert read(Setting("x", "count", "", ""), Given(word, "here")) is None
        assert read(Setting("x", "text", "", "", optional=False), Given("none", "here")) == "none"
        assert read(Setting("x", "text", "", "", secret=True), Given("none", "here")) == "none"

    @over(st.dictionaries(st.text("abc.-", min_size=1), st.text("xyz=:/", min_size=1)))
    def test_pairs_as_texts_mean_the_mapping(self, pairs: dict[str, str]) -> None:
        texts = [f"{name}={value}" for name, value in pairs.items()]
        assert read_pairs(Given(texts, "--x")) == read_pairs(Given(pairs, "f: x")) == pairs
        assert read_pairs(Given(",".join(texts), "X")) == pairs

    @over(st.lists(st.text("abc /", min_size=1).map(str.strip).filter(bool)))
    def test_texts_with_commas_mean_the_list(self, texts: list[str]) -> None:
        assert read_texts(Given(",".join(texts), "X")) == read_texts(Given(texts, "--x")) == texts


class TestFiles:
    def test_a_secret_is_what_is_in_its_file_without_white_space(self, tmp_path: Path) -> None:
        (tmp_path / "k").write_text("  hush\n")
        assert read_secret_file(tmp_path / "k", where="x") == "hush"

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (None, "No such file or directory; give a readable text file"),
            (b" \n", "is empty; put the secret into it"),
            (b"\xff\xfe", "is no text; give a text file in UTF-8"),
            (b"x" * (2**16 + 1), "is longer than 64 KiB; give a file with the secret alone"),
        ],
    )
    def test_a_file_that_can_hold_no_secret_is_named(
        self, tmp_path: Path, content: bytes | None, complaint: str
    ) -> None:
        if content is not None:
            (tmp_path / "k").write_bytes(content)
        with pytest.raises(UserError) as refused:
            read_secret_file(tmp_path / "k", where="--key-file")
        assert str(refused.value).startswith("--key-file: ")
        assert complaint in str(refused.value)

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (b"a: 1\na: 2\n", "f:2: not valid YAML: key 'a' twice; correct that line"),
            (b"a: [", "not valid YAML"),
            (b"\xff\xfe\xff", "f: not valid YAML"),
            (b"[" * 5000, "not valid YAML"),
            (b"!!python/object/apply:os.system [ls]", "not valid YAML: could not determine a constructor"),
            (b"#" * (2**20 + 1), "f: more than 1 MiB"),
        ],
    )
    def test_what_is_no_yaml_is_named_with_its_line(self, tmp_path: Path, content: bytes, complaint: str) -> None:
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(UserError) as refused:
            read_yaml(tmp_path / "f")
        assert complaint in str(refused.value)


def test_the_table_shows_where_each_setting_can_be_given() -> None:
    table = markdown_table(TABLE.settings)
    assert "| `heat.max_bytes` | `--max-heat` | `OVEN_HEAT_MAX_BYTES` | `1MiB` | Heat. |" in table
    assert "|  |  | `OVEN_KEY` |  | A key. |" in table
    assert "|  | `--tray` | `OVEN_TRAYS` |  | Trays. |" in table


def test_a_default_is_shown_as_one_would_write_it() -> None:
    values = [(None, "path"), (2**20, "size"), (0, "size"), (True, "switch"), (2.0, "seconds"), (0.5, "number")]
    assert [default_text(*value) for value in values] == ["none", "1MiB", "0", "true", "2", "0.5"]
