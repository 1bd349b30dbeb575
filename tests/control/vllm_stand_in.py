"""An environment with a stand-in for vLLM: its metadata, and a server's module that takes vLLM's flags, starts a
process of its own, and answers as much of the API as a router asks for. It says what it was told at ``/told``."""

from __future__ import annotations

import sys
from pathlib import Path

_SERVER = """
import http.server, json, os, signal, subprocess, sys
args = sys.argv[1:]
flag = lambda name: args[args.index(name) + 1] if name in args else None
if flag("--max-model-len") == "13":
    print("(EngineCore pid=1) ValueError: 13 is unlucky", flush=True)
    sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
core = subprocess.Popen(["sleep", "600"])
def end(*_):
    core.kill()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
prompts = []
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, value):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/told":
            names = ("PYTHONHASHSEED", "VLLM_API_KEY", "CUDA_VISIBLE_DEVICES", "KVHEARTH_STORE_PASSWORD")
            self.answer({"args": args, "env": {name: os.environ.get(name) for name in names}})
        elif self.path == "/metrics":
            name, count = "vllm:prompt_tokens_by_source", 3 * len(prompts)
            self.answer(f'# TYPE {name} counter\\n{name}_total{{source="local_compute"}} {count}\\n'.encode())
        else:
            self.answer({"object": "list", "data": [{"id": flag("--served-model-name"), "object": "model"}]})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompts.append(body["prompt"])
        usage = {"prompt_tokens": 3, "completion_tokens": body["max_tokens"], "total_tokens": 4,
                 "prompt_tokens_details": {"cached_tokens": 2}}
        if body.get("stream"):
            pieces = [{"choices": [{"text": "hi"}]}] * body["max_tokens"] + [{"choices": [], "usage": usage}]
            events = [json.dumps(piece) for piece in pieces] + ["[DONE]"]
            self.answer("".join(f"data: {event}\\n\\n" for event in events).encode())
            return
        self.answer({"object": "text_completion", "choices": [{"index": 0, "text": "hi", "finish_reason": "length"}],
                     "usage": usage})
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer((flag("--host"), int(flag("--port"))), Handler).serve_forever()
"""


def environment(
    folder: Path, version: str | None = "0.32.0+cpu", *, package: str = "vllm", lmcache: bool = False
) -> Path:
    """Make one and return its interpreter.

    Args:
        version: of vLLM; None = it has none.
        package: the name in the metadata.
        lmcache: whether it has LMCache.
    """
    site = folder / "site"
    server = site / "vllm" / "entrypoints" / "openai"
    server.mkdir(parents=True)
    (server / "api_server.py").write_text(_SERVER)
    if version is not None:
        info = site / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    if lmcache:
        (site / "lmcache.py").touch()
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python
