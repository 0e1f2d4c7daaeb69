"""The page: its files, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import served
import tiny_folder
from served import Running, httpx, running

from foveakv.serving.choice import Policy
from foveakv.serving.page import FILES

POLICY = Policy("snapkv", {"budget": 0.5, **served.SMALL})


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(policy=POLICY) as found:
        yield found


def test_files_need_nothing_from_outside(server: Running) -> None:
    for name in FILES:
        answer = httpx.get(f"{server.url}/page/{name}")
        assert answer.status_code == 200
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert not re.search(r"https?://|@import|eval\(|innerHTML", answer.text)
    page = httpx.get(server.url).text
    assert page == httpx.get(f"{server.url}/page/index.html").text
    assert set(re.findall(r'(?:src|href)="page/([\w.]+)"', page)) <= set(FILES)
    ids = set(re.findall(r'id="([\w-]+)"', page))
    assert set(re.findall(r'<label for="([\w-]+)"', page)) <= ids
    script = httpx.get(f"{server.url}/page/page.js").text
    assert set(re.findall(r'byId\("([\w-]+)"\)', script)) <= ids


def test_what_the_page_is_told(server: Running) -> None:
    info = httpx.get(f"{server.url}/page/info.json").json()
    assert info["model"] == served.MODEL
    assert {"name": "full", "budget": False} in info["methods"]
    served.error_of(httpx.get(f"{server.url}/page/sample.json"), 404)


@pytest.mark.demo
def test_the_sample_prompt() -> None:
    from foveakv.serving.page import SAMPLES, _sample

    found = _sample()
    assert found["text"].count("<image>") == len(found["images"]) == SAMPLES


DRIVE = """
(async () => {
  const wait = async (what, text) => {
    for (let i = 0; i < 3000; i += 1) { if (what()) return; await new Promise((go) => setTimeout(go, 20)); }
    throw new Error(`timeout: ${text}: ${document.getElementById("status").textContent}`);
  };
  const id = (name) => document.getElementById(name);
  const pixels = (key) => [...document.querySelectorAll(`#result-${key} canvas`)]
    .map((canvas) => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data)
    .map((data) => data.reduce((a, b) => a + b, 0));
  const done = () => id("status").textContent === "Done.";
  await wait(() => document.body?.dataset.ready, "start");
  const canvas = Object.assign(document.createElement("canvas"), { width: 70, height: 60 });
  canvas.getContext("2d").fillStyle = "orange";
  canvas.getContext("2d").fillRect(0, 0, 70, 60);
  const blob = await new Promise((go) => canvas.toBlob(go));
  const files = new DataTransfer();
  files.items.add(new File([blob], "one.png", { type: "image/png" }));
  files.items.add(new File([blob], "two.png", { type: "image/png" }));
  document.dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true }));
  await wait(() => document.querySelectorAll("#thumbs img").length === 2, "thumbs");
  id("second").value = "streaming";
  id("question").value = "What is <image> and <image>?";
  id("tokens").value = 6;
  id("go").click();
  await wait(done, "answers");
  const before = { full: pixels("full"), first: pixels("first"), second: pixels("second") };
  id("budget").value = 90;
  id("budget").dispatchEvent(new Event("input"));
  id("budget").dispatchEvent(new Event("change"));
  await wait(() => !done(), "again");
  await wait(done, "answers again");
  const after = { full: pixels("full"), first: pixels("first"), second: pixels("second") };
  id("layer").value = "1";
  id("layer").dispatchEvent(new Event("change"));
  const layer = pixels("first");
  const boxes = [...document.querySelectorAll("button, select, input, textarea")]
    .filter((each) => each.offsetParent && each.id !== "" && each.getBoundingClientRect().height < 43)
    .map((each) => each.id);
  return JSON.stringify({
    before, after, layer, boxes,
    percent: id("percent").value,
    hidden: [id("key-field"), id("sample")].map((each) => each.offsetParent === null),
    layers: id("layer").options.length,
    answers: [...document.querySelectorAll(".answer")].map((each) => each.textContent.length),
    bad: document.querySelectorAll(".bad").length,
    titles: [...document.querySelectorAll("h2")].map((each) => each.textContent),
    rows: [...document.querySelectorAll("#result-first dt")].map((each) => each.textContent),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    width: document.documentElement.clientWidth,
  });
})()
"""


def browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.mark.browser
@pytest.mark.skipif(
    browser() is None, reason="no Chromium or Chrome on this machine (Debian: apt-get install chromium)"
)
@pytest.mark.parametrize("width", [1280, 390])
def test_page_in_a_browser(server: Running, tmp_path: Path, width: int) -> None:
    with Chromium(tmp_path, width) as chromium:
        chromium.open(server.url)
        found = json.loads(chromium.run(DRIVE))
        assert chromium.complaints() == []
    assert found["bad"] == 0
    assert all(length > 0 for length in found["answers"])
    assert found["titles"] == ["Full cache", "snapkv, 90%", "streaming, 90%"]
    assert found["rows"][0] == "stored"
    assert found["percent"] == "90%"
    assert found["hidden"] == [True, True]  # no key is needed, and there are no sample cards
    assert found["layers"] == 5
    assert found["before"]["full"] == found["after"]["full"]
    for key in ("first", "second"):
        assert sum(found["before"][key]) < sum(found["after"][key]) < sum(found["after"]["full"])  # brighter with more
    assert found["layer"] != found["after"]["first"]
    assert found["boxes"] == []  # large enough for fingers
    assert found["overflow"] <= 0
    assert found["width"] <= width


class Chromium:
    """Headless Chromium, driven through its DevTools protocol over a pipe."""

    def __init__(self, folder: Path, width: int) -> None:
        self.folder, self.width = folder, width
        self.messages: list[dict[str, Any]] = []
        self.number = 0

    def __enter__(self) -> Chromium:
        import os

        to_read, self.write = os.pipe()
        self.read, to_write = os.pipe()

        def descriptors() -> None:  # Chromium expects 3 and 4
            a, b = os.dup(to_read), os.dup(to_write)
            os.dup2(a, 3)
            os.dup2(b, 4)

        command = [
            str(browser()), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={self.folder / 'profile'}",
            "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, preexec_fn=descriptors, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self.buffer = b""
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in pages if each["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Runtime.enable", "Log.enable", "Page.enable"):
            self.call(name, self.session)
        size = {"width": self.width, "height": 900, "deviceScaleFactor": 1, "mobile": self.width < 500}
        self.call("Emulation.setDeviceMetricsOverride", self.session, **size)
        return self

    def __exit__(self, *unused: object) -> None:
        import os

        os.close(self.write)
        os.close(self.read)
        self.process.kill()
        self.process.wait(30)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        import os

        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                piece = os.read(self.read, 1 << 20)
                assert piece, "Chromium has ended"
                self.buffer += piece
            raw, _, self.buffer = self.buffer.partition(b"\0")
            found = json.loads(raw)
            if found.get("id") == self.number:
                assert "error" not in found, found
                result: dict[str, Any] = found["result"]
                return result
            self.messages.append(found)

    def open(self, url: str) -> None:
        self.call("Page.navigate", self.session, url=url)

    def run(self, script: str) -> str:
        found = self.call("Runtime.evaluate", self.session, expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return str(found["result"]["value"])

    def picture(self, path: Path) -> None:
        import base64

        found = self.call("Page.captureScreenshot", self.session, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[str]:
        """What the page wrote to the console, and its uncaught errors."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        found = [each["params"] for each in self.messages if each.get("method") in kinds]
        # Chromium's advice on pages is no error; nor is its advice on how this test reads canvases.
        return [json.dumps(each)[:300] for each in found if each.get("entry", each).get("level") != "verbose"
                and "willReadFrequently" not in json.dumps(each)]  # fmt: skip


def test_pictures_are_read_as_the_page_sends_them(server: Running) -> None:
    url = served.data_url(tiny_folder.picture(), "webp")
    assert server.chat([served.part(url), served.text("what?")]).usage.completion_tokens == 6
