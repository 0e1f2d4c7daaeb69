"""Fifty clients at once for two minutes on a server in a process of its own.

`pytest -m slow -s tests/serving/test_long_load.py` prints what came out; FOVEAKV_LOAD_SECONDS changes the time.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import served
import tiny_folder
from served import MODEL, httpx, openai, picture_part, text
from test_serve_command import start, stop

CLIENTS = 50
SECONDS = float(os.environ.get("FOVEAKV_LOAD_SECONDS", "120"))
BROKEN: list[dict[str, Any]] = [
    {"seed": 2**63},
    {"seed": -(10**30)},
    {"max_tokens": 0},
    {"temperature": -1},
    {"messages": []},
    {"foveakv": {"method": "nothing"}},
    {"messages": [{"role": "user", "content": [served.part("data:image/png;base64,AAAA")]}]},
]


class Client:
    """One client: answers, streams, disconnects and mistakes, drawn by a seed."""

    def __init__(self, address: str, number: int) -> None:
        self.address, self.draw = address, random.Random(number)
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
        self.found: collections.Counter[str] = collections.Counter()
        self.content = [picture_part(number % 8), text("what?")]

    def run(self, end: float) -> collections.Counter[str]:
        while time.monotonic() < end:
            kind = self.draw.choices(["answer", "stream", "leave", "mistake"], [4, 4, 2, 2])[0]
            try:
                getattr(self, kind)()
                self.found[kind] += 1
            except openai.APIStatusError as error:
                served.error_of(error.response, error.status_code)  # JSON, as OpenAI's
                self.found[f"status {error.status_code}"] += 1
                time.sleep(self.draw.random() / 5)
        return self.found

    def ask(self, **more: Any) -> Any:
        given = {
            "max_tokens": self.draw.randint(1, 30),
            "temperature": 1,
            "seed": self.draw.randint(-(2**63), 2**63 - 1),
        }
        messages: Any = [{"role": "user", "content": self.content}]
        return self.client.chat.completions.create(model=MODEL, messages=messages, **{**given, **more})

    def answer(self) -> None:
        assert self.ask(n=self.draw.randint(1, 2)).usage.completion_tokens > 0

    def stream(self) -> None:
        assert list(self.ask(stream=True))[-1].choices[0].finish_reason in ("length", "stop")

    def leave(self) -> None:
        with self.ask(stream=True, max_tokens=400) as chunks:
            for _ in range(self.draw.randint(1, 5)):
                next(iter(chunks), None)

    def mistake(self) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **self.draw.choice(BROKEN)}
        reply = httpx.post(f"{self.address}/v1/chat/completions", json=body, timeout=120)
        assert reply.status_code in (400, 429), reply.text
        assert reply.json()["error"]["message"]


def metrics(address: str) -> dict[str, float]:
    lines = httpx.get(f"{address}/metrics", timeout=60).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))}


def resident(process: Any) -> int:
    """Resident bytes of a process; 0 where /proc does not say."""
    status = Path(f"/proc/{process.pid}/status")
    found = re.search(r"VmRSS:\s+(\d+)", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_clients(tmp_path: Path) -> None:
    folder = tiny_folder.save(tmp_path / "model", chat=True)
    arguments = [str(folder), "--port", "0", "--method", "snapkv", "--set", "window=4", "--budget", "50%"]
    process, address = start([*arguments, "--served-model-name", MODEL, "--max-running", "8", "--max-queue", "32"])
    try:
        Client(address, 0).run(time.monotonic() + 5)  # memory that stays: modules, threads, buffers
        assert served.eventually(lambda: metrics(address)["foveakv_running_answers"] == 0)
        before, memory = metrics(address), resident(process)
        end = time.monotonic() + SECONDS
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(Client(address, number).run, end) for number in range(CLIENTS)]
            found = sum((each.result() for each in running), collections.Counter())
        idle = ("foveakv_running_answers", "foveakv_queue_requests", "foveakv_kv_stored_bytes")
        assert served.eventually(lambda: all(metrics(address)[name] == before[name] == 0 for name in idle))
        print(f"\n{CLIENTS} clients, {SECONDS:.0f} s: {dict(sorted(found.items()))}")
        print(f"resident memory before {memory / 2**20:.0f} MiB, after {resident(process) / 2**20:.0f} MiB")
        assert process.poll() is None
        assert found["answer"]
        assert found["stream"]
        assert not [name for name in found if name.startswith("status 5")]
        assert Client(address, 1).ask().usage.completion_tokens > 0
    finally:
        stop(process)
