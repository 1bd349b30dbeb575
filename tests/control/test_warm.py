"""Prompts are prefilled and pinned: read from a file, sent once to each address, faults told and survived."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhearth.control.warm import Prompt, Target, check_url, read_prompts, warm
from kvhearth.errors import UserError


class Server:
    """Answers as vLLM does and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        asked = self.asked

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, {"object": "list", "data": [{"id": "first"}, {"id": "second"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append((self.path, body, self.headers["Authorization"]))
                if body["model"] == "gone":
                    self._answer(404, {"error": {"message": "The model `gone` does not exist."}})
                elif body["model"] == "bare":
                    self._answer(200, {"choices": []})
                else:
                    usage = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
                    self._answer(200, {"choices": [], "usage": usage})

            def _answer(self, status: int, value: dict[str, Any]) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def prompts(folder: Path, text: str) -> list[Prompt]:
    (folder / "p.yaml").write_text(text)
    return read_prompts(folder / "p.yaml")


def test_each_prompt_is_prefilled_and_pinned_at_each_address(server: Server, tmp_path: Path) -> None:
    read = prompts(
        tmp_path,
        """
- {name: support, prompt: "You are"}
- {messages: [{role: system, content: hi}], cache_salt: a, pin: false}
""",
    )
    told: list[str] = []
    results = warm(read, [Target(server.url), Target(server.url, "second", "key")], lambda done: told.append(done.name))
    assert [done.name for done in results] == ["support", "prompt 2"] * 2 == ["support", "prompt 2"] * 2
    assert sorted(told) == ["prompt 2", "prompt 2", "support", "support"]
    assert all((done.error, done.prompt_tokens, done.cached_tokens) == (None, 7, 3) for done in results)
    first = [(path, body) for path, body, key in server.asked if key is None]
    common = {"model": "first", "max_tokens": 1, "temperature": 0}
    assert first == [
        ("/v1/completions", common | {"prompt": "You are", "kv_transfer_params": {"kvhearth": {"pin": True}}}),
        ("/v1/chat/completions", common | {"messages": [{"role": "system", "content": "hi"}], "cache_salt": "a"}),
    ]
    assert [body["model"] for _, body, key in server.asked if key == "Bearer key"] == ["second", "second"]


def test_a_fault_is_told_and_the_others_go_on(server: Server) -> None:
    one = [Prompt(name="a", prompt="x")]
    gone, nobody, bare = warm(
        one, [Target(server.url, "gone"), Target("http://127.0.0.1:9", timeout_seconds=5), Target(server.url, "bare")]
    )
    assert gone.error == "HTTP 404: The model `gone` does not exist."
    assert nobody.error is not None
    assert nobody.error.startswith(f"no answer at {nobody.url} (")
    assert (bare.error, bare.prompt_tokens, bare.cached_tokens) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "not a list of 1 to 10000 prompts; write entries such as"),
        ("{a: 1}", "not a list of"),
        ("- {", "not valid YAML"),
        ("- {prompt: x}\n- {name: n}", r"\[1\]: want prompt or messages, one of the two; an entry has"),
        ("- {prompt: x, messages: [{role: user}]}", r"\[0\]: want prompt or messages"),
        ("- {prompt: ''}", r"\[0\]: the prompt is empty"),
        ("- {prompt: x, pim: true}", r"\[0\]\.pim: Unexpected keyword argument"),
        ("- {prompt: 5}", r"\[0\]\.prompt: Input should be a valid string"),
        ("- text", r"\[0\]: Input should be"),
    ],
)
def test_a_file_that_is_wrong_is_told_by_entry_and_field(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"p\.yaml: {line}"):
        prompts(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: cannot read it: No such file or directory; give a file"):
        read_prompts(tmp_path / "none.yaml")


def test_the_example_reads() -> None:
    read = read_prompts(Path(__file__).parents[2] / "examples" / "warm" / "prompts.yaml")
    assert [prompt.name for prompt in read] == ["support", "summaries", "tenant-a"]


def test_addresses_are_base_urls() -> None:
    assert check_url("http://127.0.0.1:8000/") == check_url("http://127.0.0.1:8000/v1") == "http://127.0.0.1:8000"
    assert check_url("https://router/team-a") == "https://router/team-a"
    for wrong in ("127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://u:p@a", "http://a?x=1"):
        with pytest.raises(UserError, match=r"--url: .*; give http://host:port"):
            check_url(wrong)
