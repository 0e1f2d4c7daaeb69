"""Replicas with Ray Serve on loopback: both answer, streams work, and a killed replica loses only its own requests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import served
import tiny_folder

pytest.importorskip("ray.serve", reason="Ray Serve is missing: pip install 'foveakv[ray]'")

from foveakv.errors import FoveaKVError
from foveakv.serving.ray_app import Replica, ReplicaSettings, application, build, services


def test_settings_are_read_from_text() -> None:
    settings = ReplicaSettings.read({"model": "m", "replicas": "2", "gpus": "0.5", "method": "snapkv", "budget": "0.1"})
    assert (settings.replicas, settings.gpus) == (2, 0.5)
    assert settings.policy().default().method.budget == 0.1  # type: ignore[attr-defined]
    assert build({"replicas": "2", "max_replicas": "4"})


@pytest.mark.parametrize(
    "wrong", [{"replica": 1}, {"replicas": "two"}, {"method": "nothing"}, {"method": "full", "budget": 0.1}], ids=str
)
def test_mistakes_in_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(FoveaKVError):
        build(wrong)


def test_the_application_of_a_replica(tmp_path: Path) -> None:
    """Without Ray: what a replica builds answers requests, and its health follows its engine."""
    folder = tiny_folder.save(tmp_path / "model", chat=True)
    given = {"model": str(folder), "name": served.MODEL, "method": "snapkv", "options": {"window": 4}, "budget": "50%"}
    app = application(ReplicaSettings.read(given))

    async def ask() -> Any:
        body = {"model": served.MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        transport = served.httpx.ASGITransport(app=app)
        async with served.httpx.AsyncClient(transport=transport, base_url="http://replica", timeout=60) as client:
            return await client.post("/v1/chat/completions", json=body)

    answer = asyncio.run(ask())
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    Replica().check_health()
    services.pop().engine.close()
    Replica().check_health()  # of a process whose model is not loaded yet


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import ray
    from ray import serve

    # On a busy machine Ray's own processes take minutes to start; it would replace them again and again.
    for name in ("READY_CHECK_TIMEOUT_S", "HEALTH_CHECK_TIMEOUT_S"):
        monkeypatch.setenv(f"RAY_SERVE_PROXY_{name}", "200")
    monkeypatch.setattr("ray.serve._private.api.HTTP_PROXY_TIMEOUT", 300, raising=False)

    paths = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=4, object_store_memory=200 * 2**20, log_to_driver=False,
        include_dashboard=True,  # it answers `list_actors`
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    try:
        with served.connect_free() as port:
            pass
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_replicas(cluster: str, tmp_path: Path) -> None:
    import openai
    import ray
    from ray import serve

    folder = tiny_folder.save(tmp_path / "model", chat=True)
    settings = {"model": str(folder), "name": served.MODEL, "method": "snapkv", "options": {"window": 4}, "budget": 0.5}
    serve.run(build({**settings, "replicas": 2, "cpus": 0.5}), name="foveakv")
    client = openai.OpenAI(base_url=f"{cluster}/v1", api_key="none", max_retries=0, timeout=120)
    content: Any = [served.picture_part(), served.text("what?")]

    def start(tokens: int, stream: bool) -> Any:
        return client.chat.completions.create(
            model=served.MODEL, messages=[{"role": "user", "content": content}], max_tokens=tokens, temperature=0,
            stream=stream,
        )  # fmt: skip

    def text_of(chunks: Any) -> str | None:
        """The whole answer; None if it ends with an error."""
        try:
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        except (openai.APIError, served.httpx.HTTPError):
            return None

    answer = start(8, stream=False).choices[0].message.content
    assert {text_of(start(8, stream=True)) for _ in range(6)} == {answer}
    long_answer = text_of(start(300, stream=True))

    pids = {actor["pid"] for actor in replicas(ray)}
    assert len(pids) == 2
    streams = [start(300, stream=True) for _ in range(6)]
    os.kill(pids.pop(), signal.SIGKILL)
    found = [text_of(each) for each in streams]
    assert set(found) <= {long_answer, None}  # those of the killed replica end with an error
    assert long_answer in found
    lost = 0
    for _ in range(12):
        try:
            assert start(8, stream=False).choices[0].message.content == answer
        except openai.APIError:
            lost += 1
    assert lost <= 1
    assert served.eventually(lambda: len({actor["pid"] for actor in replicas(ray)}) == 2, 120)
    assert text_of(start(8, stream=True)) == answer


def replicas(ray: Any) -> list[Any]:
    from ray.util.state import list_actors

    return [
        vars(actor) for actor in list_actors(filters=[("state", "=", "ALIVE")]) if "ServeReplica" in actor.class_name
    ]
