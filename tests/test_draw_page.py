"""The interactive page: safe as text, and in a real headless browser when there is one."""

from __future__ import annotations

import contextlib
import html.parser
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import graphattn as ga
from graphattn.draw import to_html
from tests.test_draw_labels import HOSTILE

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def softmax_rows(graph: ga.Graph, heads: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    row, _ = graph.edges()
    x = torch.randn(heads, graph.num_edges, generator=generator).exp()
    return x / torch.zeros(heads, graph.rows).index_add_(1, row, x)[:, row]


class Parser(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, str] = {}
        self._in: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = dict(attrs).get("id") if tag == "script" else tag

    def handle_data(self, data: str) -> None:
        if self._in:
            self.data[self._in] = self.data.get(self._in, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._in = None


def parse(text: str) -> tuple[Parser, dict[str, Any]]:
    p = Parser()
    p.feed(text)
    return p, json.loads(p.data["data"])


def test_page_holds_graphs_layers_heads_and_rounded_weights() -> None:
    g = ga.window(5, 2)
    w = softmax_rows(g, 3)
    _, data = parse(to_html({"a": [g, g], "b": ga.bipartite(2, 3)}, {"a": [w, w[0]]}, labels="hello"))
    a, b = data["graphs"]
    assert [layer["t"] for layer in a["layers"]] == [5, 5] and b["layers"][0]["s"] == 3
    first = a["layers"][0]
    assert first["sets"] == [{"ptr": [0, 1, 3, 5, 7, 9], "source": [0, 0, 1, 1, 2, 2, 3, 3, 4]}]
    assert len(first["heads"]) == 3 and len(a["layers"][1]["heads"]) == 1
    torch.testing.assert_close(torch.tensor(first["heads"][2]["weight"]), w[2], rtol=5e-4, atol=1e-6)
    assert first["targets"][0] == list("hello") and b["layers"][0]["targets"] is None


def test_page_of_a_graph_that_owns_its_heads() -> None:
    g = ga.stack([ga.causal(3), ga.self_loops(3)], axis="head")
    _, data = parse(to_html(g, torch.arange(9.0)))
    layer = data["graphs"][0]["layers"][0]
    assert [s["source"] for s in layer["sets"]] == [[0, 0, 1, 0, 1, 2], [0, 1, 2]]
    assert [h["weight"] for h in layer["heads"]] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]


def test_page_fetches_nothing_and_names_its_own_script_by_hash() -> None:
    text = to_html(ga.causal(3), labels=["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "&"])
    p, data = parse(text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not any(
        set(attrs) & {"src", "href", "data", "action"} or tag in ("img", "link", "iframe") for tag, attrs in p.tags
    )
    assert [tag for tag, _ in p.tags].count("script") == 2
    policy = next(a["content"] for t, a in p.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy and "default-src 'none'" in policy and "unsafe" not in policy
    assert data["graphs"][0]["layers"][0]["targets"][1][0] == "</script><script>alert(1)</script>"


def test_page_refuses_what_no_browser_would_show() -> None:
    with pytest.raises(ValueError, match="1024 nodes"):
        to_html(ga.causal(1025))
    g = ga.causal(1000)
    with pytest.raises(ValueError, match="500,500 edges|1,001,000 numbers"):
        to_html(g, torch.zeros(1, g.num_edges))
    with pytest.raises(ValueError, match="labels has 2 entries"):
        to_html(ga.causal(3), labels="ab")
    with pytest.raises(ValueError, match="batch"):
        to_html(ga.padding([1, 2], 3))


# ---------------------------------------------------------------------- a real browser


class Browser:
    """The few calls of the W3C WebDriver protocol that the tests need."""

    def __init__(self, port: int, profile: Path) -> None:
        self.base = f"http://127.0.0.1:{port}"
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        flags += " --disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1100,800"
        options = {"binary": CHROMIUM, "args": [*flags.split(), f"--user-data-dir={profile}"]}
        caps = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.id = self.call("POST", "/session", {"capabilities": {"alwaysMatch": caps}})["sessionId"]

    def call(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())["value"]

    def go(self, method: str, path: str, body: object = None) -> Any:
        return self.call(method, f"/session/{self.id}{path}", body)

    def open(self, page: Path) -> None:
        self.go("POST", "/url", {"url": page.as_uri()})

    def js(self, script: str, *args: object) -> Any:
        return self.go("POST", "/execute/sync", {"script": script, "args": list(args)})

    def move_to(self, css: str, dx: int = 0, dy: int = 0) -> None:
        element = self.go("POST", "/element", {"using": "css selector", "value": css})
        move = {"type": "pointerMove", "origin": element, "x": dx, "y": dy, "duration": 0}
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}
        self.go("POST", "/actions", {"actions": [mouse]})

    def click(self, css: str) -> None:
        element = self.go("POST", "/element", {"using": "css selector", "value": css})
        self.go("POST", f"/element/{next(iter(element.values()))}/click", {})

    def messages(self) -> list[str]:
        return [m["message"] for m in self.go("POST", "/se/log", {"type": "browser"})]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver on the PATH (Debian: apt-get install chromium chromium-driver)")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    made = None
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5):
                break
            time.sleep(0.1)
        made = Browser(port, tmp_path_factory.mktemp("chromium"))
        yield made
    finally:
        if made is not None:
            with contextlib.suppress(OSError):
                made.go("DELETE", "")
        driver.terminate()
        driver.wait(10)


def test_hovering_stepping_and_switching_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    g = ga.window(6, 3)
    w = [softmax_rows(g, 3, seed) for seed in (1, 2)]
    page = tmp_path / "page.html"
    page.write_text(
        to_html({"window": [g, g], "cross": ga.bipartite(2, 5)}, {"window": w}, {"window": "abcdef"}), "utf-8"
    )
    browser.open(page)
    info = "return document.getElementById('info').textContent"
    count = "return document.querySelectorAll(arguments[0]).length"
    assert browser.js(count, ".item.source") == 6 and browser.js(count, ".base path[data-edge]") == 15

    browser.move_to(".item.target[data-index='4'] circle")
    assert "target 4 e reads 3 of 6 sources" in browser.js(info)
    assert browser.js(count, ".overlay path[data-edge]") == 3
    lit = "return [...document.querySelectorAll('.item.source.on')].map(g => g.dataset.index).join()"
    assert browser.js(lit) == "2,3,4"
    weights = re.findall(r"\((\d)\) ([\d.e-]+)", browser.js(info))
    first = int(g.edge_ptr()[4])
    expect = {str(2 + k): float(w[0][0, first + k]) for k in range(3)}
    assert {n: float(x) for n, x in weights} == pytest.approx(expect, rel=6e-3)

    browser.move_to(".item.source[data-index='0'] circle")
    assert "is read by 3 of 6 targets" in browser.js(info)

    browser.click("#head-up")
    assert browser.js("return document.getElementById('head').value") == "1"
    browser.move_to(".item.target[data-index='4'] circle")
    weights = re.findall(r"\((\d)\) ([\d.e-]+)", browser.js(info))
    assert {n: float(x) for n, x in weights} == pytest.approx(
        {str(2 + k): float(w[0][1, first + k]) for k in range(3)}, rel=6e-3
    )

    browser.click("#layer-up")
    browser.move_to(".item.target[data-index='5'] circle")
    assert "through layers 1 to 2 it can be influenced by 5 of 6 inputs" in browser.js(info)

    browser.move_to("#canvas", 5, 5)  # from its middle, the corner of four cells, into row 3, column 3
    assert "target d reads source d" in browser.js(info)

    browser.js("const s = document.getElementById('graph'); s.value = '1'; s.dispatchEvent(new Event('change'))")
    assert browser.js(count, ".item.source") == 5 and browser.js(count, ".item.target") == 2
    browser.move_to(".item.target[data-index='1'] circle")
    assert "target 1 reads 5 of 5 sources" in browser.js(info)

    browser.js("document.querySelector('.item.target').focus()")
    assert "target 0 reads" in browser.js(info)
    assert browser.messages() == []


def test_hostile_labels_run_nothing_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    g = ga.causal(len(HOSTILE))
    page = tmp_path / "hostile.html"
    page.write_text(to_html(g, labels=HOSTILE, title=HOSTILE[0]), "utf-8")
    browser.open(page)
    assert browser.js("return document.querySelectorAll('.item.target').length") == len(HOSTILE)
    assert browser.js("return window.hacked === undefined")
    assert browser.js("return document.querySelectorAll('img, iframe, script[src], b').length") == 0
    assert browser.js("return performance.getEntriesByType('resource').length") == 0
    for i in (*range(8), *range(8, len(HOSTILE), 7)):
        browser.move_to(f".item.target[data-index='{i}'] circle")
        assert f"target {i}" in browser.js("return document.getElementById('info').textContent")
        assert browser.js("return document.querySelectorAll('#info :not(div, span), b, img').length") == 0
    assert browser.js("return window.hacked === undefined")
    assert browser.messages() == []
