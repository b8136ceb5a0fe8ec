"""Who may ask, how much and how long; and that no request reaches the files of the machine that answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

from meshwright.cli.run import run
from meshwright.web import security, serve
from meshwright.web.app import Settings, create_app
from meshwright.web.cache import LRUCache, Reply
from meshwright.web.dispatcher import Dispatcher
from meshwright.web.security import HEADERS

ASK = {"model": "llama3-8b", "gpus": "8xH100", "goal": "sft"}
ESTIMATE = {"target": "llama3-8b", "gpus": "8xH100"}
RECIPE = """model = "{model}"
goal = "sft"
cluster = "{cluster}"
"""


def at(host: str, **settings: Any) -> TestClient:
    """A browser that calls the server by this name."""
    return TestClient(create_app(Settings(workers=0, **settings)), base_url=f"http://{host}")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8765", "localhost", "LOCALHOST:80", "[::1]:8765"])
def test_loopback_names_are_accepted(host: str) -> None:
    assert at(host).get("/api/health").status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "0.0.0.0"])
def test_other_names_are_rejected_with_a_fix(host: str) -> None:
    answer = at(host).get("/api/health")
    assert answer.status_code == 421
    assert answer.json()["error"]["fix"] == [f"meshwright web --allow-host {host.partition(':')[0]}"]


def test_a_name_can_be_allowed() -> None:
    assert at("gpu-box.example", allow_hosts=("GPU-box.example",)).get("/api/health").status_code == 200
    assert at("other.example", allow_hosts=("gpu-box.example",)).get("/api/health").status_code == 421


def test_another_sites_page_may_not_ask(client: TestClient) -> None:
    asks = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert client.get("/api/gpus", headers=asks).status_code == 403
    assert client.get("/api/gpus", headers={**asks, "sec-fetch-mode": "navigate"}).status_code == 200  # a link


@pytest.mark.parametrize("address", ["/", "/api/gpus", "/api/nothing", "/api/recommend", "/static/none.js"])
def test_every_answer_binds_the_browser_and_sets_no_cookie(address: str, client: TestClient) -> None:
    answer = client.get(address)
    assert HEADERS.items() <= dict(answer.headers).items()
    assert "set-cookie" not in answer.headers
    assert "access-control-allow-origin" not in answer.headers
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "http:" not in policy
    assert "frame-ancestors 'none'" in policy


def test_refusals_bind_the_browser_too() -> None:
    assert HEADERS.items() <= dict(at("evil.example").get("/").headers).items()


def test_a_body_declared_too_large_is_not_read(client: TestClient) -> None:
    answer = client.post("/api/check", json={"text": "x" * 3_000_000})
    assert answer.status_code == 413
    assert answer.json()["error"]["field"] == "body"


def test_a_body_that_grows_too_large_is_cut_off(client: TestClient) -> None:
    taken = 0

    def parts() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(40):
            taken += 1
            yield b"x" * 100_000

    answer = client.post("/api/check", content=parts(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_body_that_comes_drop_by_drop_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "BODY_S", 0.2)
    sent: list[Any] = []

    async def drop() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def note(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"host", b"localhost")]}
    asyncio.run(asyncio.wait_for(create_app(Settings(workers=0))(scope, drop, note), 5))
    assert sent[0]["status"] == 408


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET"])
def test_a_connection_that_asks_nothing_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fine(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(serve, "IDLE_S", 0.15)
    opened = serve.listening("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(fine, http=serve.Connection, lifespan="off", log_level="error"))
    running = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    running.start()
    try:
        with socket.create_connection(opened.getsockname(), timeout=5) as client_socket:
            client_socket.sendall(sent)
            while client_socket.recv(1000):
                pass
    finally:
        server.should_exit = True
        running.join()


def test_a_request_without_clients_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    async def slow(worker: Any, question: Any, seconds: float, *_: Any) -> Reply:
        begun.append(question[1]["model"])
        await asyncio.sleep(0.1)
        return Reply(200, b"{}", cacheable=True)

    async def scene() -> None:
        app = create_app(Settings(workers=1))
        monkeypatch.setattr("meshwright.web.dispatcher.Worker.answer", slow)

        async def get(model: str, leaves_s: float | None) -> None:
            parts = [{"type": "http.request", "body": b""}]

            async def receive() -> dict[str, Any]:
                if not parts:
                    await asyncio.sleep(leaves_s if leaves_s is not None else 60)
                return parts.pop() if parts else {"type": "http.disconnect"}

            query = f"model={model}&goal=sft&gpu=H100".encode()
            scope = {"type": "http", "method": "GET", "path": "/api/size", "query_string": query}
            await app({**scope, "headers": [(b"host", b"localhost")]}, receive, _nothing)

        await asyncio.wait_for(asyncio.gather(get("a", None), get("b", 0.02), get("c", None), get("b", 0.03)), 10)
        assert app.state.dispatcher.pending == {}

    asyncio.run(scene())
    assert begun == ["a", "c"]


async def _nothing(message: Any) -> None:
    pass


def test_an_address_that_is_too_long_is_refused(client: TestClient) -> None:
    assert client.get("/api/gpus?x=" + "y" * 33_000).status_code == 414
    assert client.get("/api/models/" + "y" * 600).status_code == 414


def test_words_and_lists_have_limits(client: TestClient) -> None:
    assert client.get("/api/recommend", params={**ASK, "model": "y" * 300}).status_code == 422
    assert client.get("/api/recommend", params={**ASK, "overrides": ["layout.tp=1"] * 61}).status_code == 422
    assert client.get("/api/recommend", params={**ASK, "model": "llama3\x00-8b"}).status_code == 422


@pytest.fixture
def there(tmp_path: Path) -> dict[str, str]:
    """Files that are on this machine, each of which would be an answer if it were opened."""
    from meshwright.models import config_of

    texts = {
        "config.json": json.dumps(config_of("llama3_8b")),
        "cluster.toml": 'gpu = "H100"\nnodes = 1\n',
        "recipe.toml": RECIPE.format(model="llama3_8b", cluster="8xH100"),
        "more.sh": "export TP=3\n",
        "automodel.yaml": "model: 1\n",
        "ds.json": '{"train_batch_size": 8}',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in texts} | {"folder": str(tmp_path)}


def questions(there: dict[str, str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every question with every file in every place that a name may stand in."""
    for path in (*there.values(), "../../etc/passwd", "~/.bashrc", "/etc/passwd", "file:///etc/passwd", "\\\\host\\x"):
        yield "get", "recommend", {**ASK, "model": path}
        yield "get", "recommend", {**ASK, "gpus": path}
        yield "get", "estimate", {**ESTIMATE, "overrides": f"data.dataset={path}"}
        yield "get", "estimate", {**ESTIMATE, "overrides": f"checkpoint.pretrained={path}"}
        yield "get", "plan", {"target": path, "gpus": "8xH100", "goal": "sft"}
        yield "get", "estimate", {"target": path, "gpus": "8xH100"}
        yield "get", "estimate", {**ESTIMATE, "overrides": f"model.name={path}"}
        yield "get", "size", {"model": path, "goal": "sft", "gpu": "H100"}
        yield "get", "size", {"model": "llama3-8b", "goal": "sft", "gpu": path, "seq": path}
        yield "get", "scale", {"model": path, "goal": "sft", "gpu": path}
        yield "get", "schedule", {"target": path, "gpus": path}
        yield "get", "check", {"target": path, "gpus": "8xH100"}
        yield "get", "check", {"target": "llama3_8b_sft_config", "gpus": path}
        yield "get", "export", {"target": path, "to": "torchtitan", "gpus": path}
        yield "get", "recipes", {"query": path}
        yield "get", f"recipes/{path}", {}
        yield "get", f"models/{path}", {}
        yield "get", "models", {"query": path}
        yield "get", "rules", {"query": path}
        yield "get", "complete", {"kind": "models", "query": path}
        yield "post", "check", {"text": RECIPE.format(model=path, cluster="8xH100"), "name": "mine.toml"}
        yield "post", "check", {"text": RECIPE.format(model="llama3_8b", cluster=path), "name": "mine.toml"}
        yield "post", "check", {"text": f'base = "{path}"\n', "name": "mine.toml"}
        yield "post", "check", {"text": f"source {path}\ntorchrun pretrain_gpt.py --tensor-model-parallel-size $TP"}
        yield "post", "check", {"text": f"automodel finetune llm -c {path}"}
        yield "post", "check", {"text": f"torchrun -m torchtitan.train --job.config_file {path}"}
        yield "post", "check", {"text": f"deepspeed train.py --deepspeed {path}"}
        yield "post", "check", {"text": f"accelerate launch --config_file {path} train.py --model_name_or_path {path}"}
        yield "post", "check", {"text": f"uv run python train.py {path}", "framework": "kempnerforge"}
        yield "post", "check", {"text": f"model:\n  pretrained_model_name_or_path: {path}\n", "name": "x.yaml"}
        yield "post", "check", {"text": "{}", "name": "ds.json", "framework": "deepspeed", "model": path, "gpus": path}
        yield "post", "export", {"recipe": RECIPE.format(model=path, cluster=path), "to": "automodel"}


def test_no_path_in_a_request_is_opened_or_even_looked_for(
    client: TestClient, there: dict[str, str], opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    for name in ("stat", "lstat"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda path, *a, _real=real, **k: (looked.append(str(path)), _real(path, *a, **k))[1]
        )
    library = str(Path(os.__file__).parent), str(Path(__file__).parents[2] / "src"), sys.prefix
    for method, path, asked in questions(there):
        said = {"params": asked} if method == "get" else {"json": asked}
        with opened:
            answer = client.request(method, f"/api/{path}", **said)
        assert answer.status_code in (200, 404, 422), (path, asked, answer.text)
        assert [one for one in opened.paths if not one.startswith(library)] == [], (path, asked)
        assert not [one for one in looked if any(one.startswith(file) for file in there.values())], (path, asked)


@pytest.mark.parametrize("name", ["../x.sh", "/x.sh", "a/b.sh", ".x", "a\\b.sh", "", "x" * 200, "a\nb.sh"])
def test_a_text_is_sent_under_a_plain_name(name: str, client: TestClient) -> None:
    assert client.post("/api/check", json={"text": "torchrun x.py", "name": name}).status_code == 422


def test_whether_a_file_exists_does_not_show(client: TestClient, there: dict[str, str]) -> None:
    for key in ("model", "gpus"):
        result = [
            client.get("/api/recommend", params={**ASK, key: path}).json()
            for path in (there["config.json"], there["config.json"].replace("config", "nothing"))
        ]
        assert result[0]["error"]["message"] == result[1]["error"]["message"]


def test_assets_are_names_not_paths(client: TestClient) -> None:
    for name in ("../app.py", "%2e%2e/app.py", "..%2fapp.py", "/etc/passwd", "vendor/../../app.py", "%00"):
        assert client.get(f"/static/{name}").status_code == 404


WATCHED = """
import sys
from meshwright.web.worker import reply, restrict_process
restrict_process()
print(reply("recommend", {"model": "qwen3_8b", "gpus": "8xH100", "goal": "sft"}, {})[0])
for attempt in (
    lambda: open("/etc/hostname"), lambda: open("/dev/null", "w"), lambda: __import__("os").system("true"),
    lambda: __import__("subprocess").run(["true"]), lambda: __import__("socket").create_connection(("127.0.0.1", 9)),
    lambda: __import__("os").mkdir("x"),
):
    try:
        attempt()
        print("done")
    except PermissionError:
        print("refused")
"""


def test_a_worker_opens_starts_and_reaches_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["200", *["refused"] * 6], done.stderr


def test_a_search_that_takes_too_long_is_ended_and_the_next_is_answered() -> None:
    async def scene() -> list[Reply]:
        dispatcher = Dispatcher(Settings(workers=1, time_limit_s=0.05))
        try:
            first = await dispatcher.ask("gpus", {})
            long = await dispatcher.ask("size", {"model": "deepseek-v3", "goal": "pretrain", "gpu": "H100"})
            return [first, long, await dispatcher.ask("complete", {"kind": "goals", "query": "s"})]
        finally:
            await dispatcher.close()

    first, long, after = asyncio.run(scene())
    assert (first.status, long.status, after.status) == (200, 422, 200)
    assert long.data["error"]["kind"] == "TooLong"
    assert long.data["error"]["fix"]


def test_a_worker_that_dies_is_replaced_and_nothing_is_cached() -> None:
    async def scene() -> list[Reply]:
        dispatcher = Dispatcher(Settings(workers=1))
        try:
            await dispatcher.ask("gpus", {})
            process = dispatcher.workers[0].process
            assert process is not None
            asked = asyncio.create_task(
                dispatcher.ask("size", {"model": "deepseek-v3", "goal": "pretrain", "gpu": "H100"})
            )
            await asyncio.sleep(0.1)
            process.kill()
            return [await asked, await dispatcher.ask("complete", {"kind": "goals", "query": "s"})]
        finally:
            await dispatcher.close()

    died, after = asyncio.run(scene())
    assert (died.status, died.data["error"]["kind"], after.status) == (422, "TooMuch", 200)


def test_more_questions_than_may_wait_are_rejected_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> tuple[list[Reply], int]:
        asked: list[Any] = []
        dispatcher = Dispatcher(Settings(workers=0, max_pending=3))

        async def slow(question: Any, *_: Any) -> Reply:
            asked.append(question)
            await asyncio.sleep(0.05)
            return Reply(200, b"{}", cacheable=True)

        monkeypatch.setattr(dispatcher, "_here", slow)
        replies = await asyncio.gather(*(dispatcher.ask("model", {"name": f"m{n % 5}"}) for n in range(20)))
        return replies, len(asked)

    replies, asked = asyncio.run(scene())
    assert [one.status for one in replies] == [200, 200, 200, 429, 429] * 4
    assert asked == 3  # equal questions are asked once


def test_the_response_says_when_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = at("127.0.0.1", max_pending=0).get("/api/gpus")
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0


def test_the_cache_is_bounded() -> None:
    kept = LRUCache(max_entries=3, max_bytes=100)
    for number in range(5):
        kept.put(bytes([number]), Reply(200, b"x" * 10))
    assert list(kept.entries) == [b"\x02", b"\x03", b"\x04"]
    kept.put(b"large", Reply(200, b"x" * 95))
    assert (list(kept.entries), kept.bytes) == ([b"large"], 95)


def test_equal_questions_in_other_words_are_one() -> None:
    async def scene() -> int:
        dispatcher = Dispatcher(Settings(workers=0))
        for goal, extra in (("sft", {}), (" SFT ", {"seq": ""}), ("sft", {"overrides": []})):
            await dispatcher.ask("estimate", {"target": "llama3_8b_sft_config", "goal": goal, **extra})
        return len(dispatcher.cache.entries)

    assert asyncio.run(scene()) == 1


def _served(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", "web", *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_serves_this_machine_only_and_ends_cleanly(capsys: pytest.CaptureFixture[str]) -> None:
    process = _served("--port", "0", "--workers", "1")
    assert process.stdout is not None
    try:
        address = json.loads(process.stdout.readline())["address"]
        port = int(address.rstrip("/").rpartition(":")[2])
        assert address == f"http://127.0.0.1:{port}/"
        with pytest.raises(SystemExit) as ended:
            run(["web", "--port", str(port), "--json"])
        result = json.loads(capsys.readouterr().out)["error"]
        assert (ended.value.code, result["field"], result["value"]) == (2, "port", str(port))
        assert result["fix"][0].startswith("--port ")
        with socket.socket() as other:
            other.settimeout(2)
            assert other.connect_ex((_own_address(), port)) != 0
        assert _get(port) == 200
        children = _children(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err.strip()) == (0, "", "stopped")
        assert not [child for child in children if Path(f"/proc/{child}").exists()]
    finally:
        process.kill()


def _get(port: int) -> int:
    import http.client
    import time

    for _ in range(100):
        try:
            asked = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            asked.request("GET", "/api/gpus")
            return asked.getresponse().status
        except ConnectionError:
            time.sleep(0.1)
    return 0


def _own_address() -> str:
    """An address of this machine that is not its loopback; one that nobody has where there is none."""
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        found = "127.0.0.1"
    return "192.0.2.1" if found.startswith("127.") else found


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def test_without_the_extra_the_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    monkeypatch.setattr("meshwright.extras.find_spec", lambda name: None if name != "pip" else name)
    assert cli("web")["error"]["fix"][0].endswith('pip install "meshwright[web]"')
