"""The web page in a headless Chromium: images, the model's card, charts, errors, tokens, narrow screens."""

import contextlib
import functools
import http.server
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from browser import PROGRAM, Browser, running_browser
from bundle_fixture import LABELS, colour_image, png, with_attention, write_bundle
from page_actions import classes, give
from server_process import HANG, ServerProcess, running_server
from vitx.core.bundle import Bundle

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def server(certified_original: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serves tiny, certified, and other, which is not and gives attention; images have at most 100,000 pixels."""
    other = with_attention(write_bundle(tmp_path_factory.mktemp("page") / "other.vitx", name="other"))
    arguments = ("--allow-uncertified", "--max-pixels", "100000")
    with running_server(certified_original.path, other.path, *arguments) as started:
        yield started


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Browser:
    """The page, ready, with the card of tiny."""
    browser.complaints.clear()
    browser.open(f"http://{server.url}/")
    browser.wait("document.getElementById('state').textContent === 'ready'")
    browser.wait("document.getElementById('model-name').textContent === 'tiny'")
    return browser


def colour(label: int) -> bytes:
    return png(colour_image(label, np.random.default_rng(label)))


@pytest.mark.parametrize(("event", "label"), [("drop", 3), ("paste", 1)])
def test_an_image_gets_its_classes(page: Browser, event: str, label: int) -> None:
    give(page, event, colour(label))
    page.wait("document.querySelectorAll('.predictions li').length === 4")
    assert classes(page)[0] == LABELS[label]
    assert page.run("document.getElementById('status').textContent").startswith(LABELS[label])
    widths = page.run(
        "[...document.querySelectorAll('.predictions .fill')].map((one) => one.getBoundingClientRect().width)"
    )
    assert widths == sorted(widths, reverse=True)
    assert page.run("document.querySelector('.preview img').naturalWidth") == 16
    assert page.complaints == []


def test_the_attention_map_lies_over_the_image(page: Browser) -> None:
    """`other` attends to bright pixels; of a wide image the map covers the middle that the model is given."""
    assert page.run("document.getElementById('attention').hidden")
    give(page, "drop", colour(3))
    page.wait("document.querySelectorAll('.predictions li').length === 4")
    assert page.run("document.querySelectorAll('.preview canvas').length") == 0  # tiny has none
    page.run("(() => { const s = document.getElementById('model'); s.value = 'other'; s.onchange({target: s}); })()")
    page.wait("document.getElementById('model-name').textContent === 'other'")
    page.wait("document.querySelectorAll('.preview canvas').length === 1")
    image = np.zeros((100, 200, 3), np.uint8)
    image[:50, 100:150] = 255  # the upper right quarter of the middle square
    give(page, "drop", png(image))
    page.wait("document.querySelector('.preview img').naturalWidth === 200")
    page.wait("document.querySelectorAll('.preview canvas').length === 1")
    darkness = page.run(
        """(() => {
          const map = document.querySelector('.preview canvas');
          const data = map.getContext('2d').getImageData(0, 0, map.width, map.height).data;
          const places = [[4, 2], [12, 2], [4, 12], [12, 12]];
          return [map.width, map.height, ...places.map(([x, y]) => data[4 * (16 * y + x) + 3])];
        })()"""
    )
    assert darkness[:2] == [16, 16]
    assert darkness[3] < 5  # what is attended to stays as bright as it is
    assert min(darkness[2], *darkness[4:]) > 200
    places = page.run(
        """['.preview img', '.preview canvas'].map((one) => {
          const {left, top, width, height} = document.querySelector(one).getBoundingClientRect();
          return [left, top, width, height];
        })"""
    )
    (left, top, width, height), over = places
    side = min(width / 2, height) if width / 2 < height else height
    assert over == pytest.approx([left + (width - side) / 2, top + (height - side) / 2, side, side], abs=1.5)
    page.run("document.getElementById('show-attention').click()")
    assert page.run("getComputedStyle(document.querySelector('.preview canvas')).display") == "none"
    page.run("document.getElementById('show-attention').click()")
    assert page.complaints == []


def test_several_images_each_with_its_classes_and_map(page: Browser) -> None:
    page.run("(() => { const s = document.getElementById('model'); s.value = 'other'; s.onchange({target: s}); })()")
    page.wait("!document.getElementById('attention').hidden")
    give(page, "drop", *(colour(label) for label in (3, 0)), b"no image", colour(1))
    page.wait("document.getElementById('status').textContent.startsWith('3 of 4 images, answered in ')")
    page.wait("document.querySelectorAll('.preview canvas').length === 3")
    rows = page.run(
        """[...document.querySelectorAll('#results > li')].map((row) => [
          row.querySelector('.label')?.textContent ?? row.querySelector('.error').textContent.slice(0, 12),
          row.querySelectorAll('canvas').length])"""
    )
    assert rows == [[LABELS[3], 1], [LABELS[0], 1], ["not an image", 0], [LABELS[1], 1]]
    give(page, "drop", *[colour(2)] * 33)
    page.wait("document.getElementById('status').textContent.startsWith('32 of 32 images')")
    assert page.run("document.getElementById('error').textContent").startswith("The first 32 of 33 images")


def test_the_examples_are_drawn_and_classified(page: Browser) -> None:
    names = page.run("[...document.querySelectorAll('#examples button')].map((one) => one.ariaLabel)")
    assert len(names) == 3
    for place, name in enumerate(names):
        page.run(f"document.querySelectorAll('#examples button')[{place}].click()")
        page.wait(f"document.querySelector('.preview img')?.alt === 'Your image, {name}.png'")
        page.wait("document.querySelectorAll('.predictions li').length === 4")
        assert page.run("document.querySelector('.preview img').naturalWidth") == 256
    assert page.complaints == []


def test_the_calls_that_the_page_shows_work(page: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "image.png").write_bytes(colour(3))
    shown = {name: page.run(f"document.getElementById('{name}').textContent") for name in ("curl", "python", "triton")}
    with contextlib.chdir(tmp_path):
        exec(shown["python"], {})
        assert capsys.readouterr().out.startswith("[{'label': 'red'")
        exec(shown["triton"], {})
        assert capsys.readouterr().out.startswith("[[")
        if shutil.which("curl"):
            said = subprocess.run(["bash", "-c", shown["curl"]], capture_output=True, check=True).stdout
            assert json.loads(said)["predictions"][0]["label"] == "red"


def test_the_description_can_try_a_call(page: Browser, server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(colour(3))
    page.open(f"http://{server.url}/docs")
    page.wait("document.querySelectorAll('form').length > 5")
    page.run(
        "window.form = (path) => [...document.querySelectorAll('details')].find((one) => one.open = "
        "one.querySelectorAll('code')[1].textContent === path).querySelector('form')"
    )
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    control = page.call("DOM.querySelector", nodeId=root, selector="input[type=file]")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=control, files=[str(tmp_path / "red.png")])
    tried = {"/v1/classify": {"model": "tiny", "top_k": "1"}, "/v2/models/{model}": {"model": "a/b"}, "/": {}}
    said = {}
    for path, values in tried.items():
        form = f"form({json.dumps(path)})"
        for name, value in values.items():
            page.run(
                f"[...{form}.querySelectorAll('label')].find((one) => one.textContent === '{name} ')"
                f".querySelector('input').value = {json.dumps(value)}"
            )
        page.run(f"{form}.requestSubmit()")
        page.wait(f"{form}.querySelector('pre').textContent")
        said[path] = page.run(f"{form}.querySelector('pre').textContent")
    assert said["/v1/classify"].startswith('200 OK\n{"model"')
    assert "<title>vitx</title>" in said["/"]
    assert '"label":"red"' in said["/v1/classify"].replace(" ", "")
    assert said["/v2/models/{model}"].startswith("404 Not Found")
    assert page.run("document.querySelectorAll('details').length - document.querySelectorAll('form').length") == 13


def test_a_file_chosen_with_the_keyboard_s_control(page: Browser, tmp_path: Path) -> None:
    (tmp_path / "blue.png").write_bytes(colour(0))
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    control = page.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
    page.call("DOM.setFileInputFiles", nodeId=control, files=[str(tmp_path / "blue.png")])
    page.wait("document.querySelectorAll('.predictions li').length === 4")
    assert classes(page)[0] == "blue"


def test_a_refused_image_shows_the_server_s_words(page: Browser) -> None:
    give(page, "drop", colour(3))
    page.wait("document.querySelectorAll('.predictions li').length === 4")
    give(page, "drop", png(np.zeros((400, 400, 3), dtype=np.uint8)))
    page.wait("document.querySelector('#results [role=alert]') !== null")
    assert page.run("document.querySelector('#results [role=alert]').textContent") == (
        "image of 400×400 pixels: more than the 100,000 allowed"
    )
    assert classes(page) == []
    give(page, "drop", b"no image", name="notes.txt", kind="text/plain")
    page.wait("document.querySelector('.preview').textContent === 'notes.txt'")
    page.wait("document.querySelector('#results .error')?.textContent.startsWith('not an image')")


def test_the_card_shows_the_certificate_of_the_chosen_model(page: Browser) -> None:
    card = page.run("document.getElementById('card').innerText").replace("\xa0", " ")
    assert page.run("document.getElementById('verdict').textContent") == "certified: pass"
    assert "at most 0.83 % with 95 % confidence; allowed 1.00 %" in card
    assert "0 of 360 images" in card
    assert "CPUExecutionProvider" in card
    assert page.run("!document.getElementById('models').hidden")
    page.run(
        "document.getElementById('model').value = 'other';"
        "document.getElementById('model').dispatchEvent(new Event('change'))"
    )
    page.wait("document.getElementById('verdict').textContent === 'not certified'")
    assert page.run("document.getElementById('model-name').textContent") == "other"
    give(page, "drop", colour(0))
    page.wait("document.querySelectorAll('.predictions li').length === 4")
    assert classes(page)[0] == "blue"


def test_the_charts_move(page: Browser, server: ServerProcess) -> None:
    points = "document.querySelector('#throughput-plot polyline').getAttribute('points')"
    before = page.run(points)
    for _ in range(20):
        assert server.request("POST", "/v1/classify?model=tiny", colour(1), {"Content-Type": "image/png"})[0] == 200
    page.wait(f"{points} !== {json.dumps(before)}")
    axis = "[...document.querySelectorAll('#throughput-plot .y span')].map((one) => parseFloat(one.textContent))"
    highest = "parseFloat(document.querySelector('#throughput-plot svg').ariaLabel.split('minutes ')[1])"
    page.wait(f"{highest} > 0")
    top, middle, bottom = page.run(axis)
    assert (bottom, middle) == (0, top / 2)
    assert top >= page.run(highest)
    assert page.run("document.querySelector('#throughput-plot .x').innerText") == "2 minutes ago\n1\nnow"
    page.wait("/^[\\d.,]+ \\/ [\\d.,]+ ms$/.test(document.getElementById('latency').textContent)")
    assert page.complaints == []


@pytest.mark.parametrize(("width", "dark"), [(360, False), (1200, True)])
def test_it_fits_the_screen_and_every_control_has_a_name(
    browser: Browser, server: ServerProcess, width: int, dark: bool
) -> None:
    browser.open(f"http://{server.url}/", width=width, dark=dark)
    browser.wait("document.getElementById('state').textContent === 'ready'")
    give(browser, "drop", colour(1), b"no image")
    browser.wait("document.querySelectorAll('#results .predictions, #results .error').length === 2")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("[...document.querySelectorAll('input, select')].every((one) => one.labels.length === 1)")
    assert browser.run("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    assert browser.run(_LOWEST_CONTRAST) >= 4.5  # WCAG 2.2 AA


# Of all text that can be seen against the nearest background behind it.
_LOWEST_CONTRAST = """(() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = (text) => {
    const [r, g, b] = channels(text).map((c) => (c /= 255, c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if ((channels(colour)[3] ?? 1) > 0) return colour;
    }
  };
  const ratios = [...document.querySelectorAll('body *')]
    .filter((node) => node.offsetParent && [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim()))
    .map((node) => [luminance(getComputedStyle(node).color), luminance(behind(node))].sort((a, b) => b - a))
    .map(([light, dark]) => (light + .05) / (dark + .05));
  return Math.min(...ratios);
})()"""


def test_the_page_says_when_the_server_has_ended(browser: Browser, certified_original: Bundle) -> None:
    with running_server(certified_original.path) as server:
        browser.open(f"http://{server.url}/")
        browser.wait("document.getElementById('state').textContent === 'ready'")
    browser.wait("document.getElementById('state').textContent === 'the server does not answer'")
    give(browser, "drop", colour(1))
    browser.wait("document.querySelector('#results .error')?.textContent === 'the server does not answer'")


def test_a_page_of_another_site_learns_nothing_and_changes_nothing(
    browser: Browser, certified_original: Bundle, tmp_path: Path
) -> None:
    """Its scripts ask as a browser lets them, it frames the page, and its name is made to resolve to this machine."""
    (tmp_path / "index.html").write_text("<title>hostile</title><iframe></iframe>")
    with running_server(certified_original.path, "--shared-memory") as server, _site(tmp_path) as port:
        browser.complaints.clear()
        browser.open(f"http://site.example:{port}/")
        url, register = f"http://{server.url}", "/v2/systemsharedmemory/region/theirs/register"
        for method, path in (("GET", "/v1/stats"), ("POST", "/v1/classify?model=tiny"), ("POST", register)):
            for mode in ("cors", "no-cors"):
                options = {"method": method, "mode": mode} | ({"body": "x"} if method == "POST" else {})
                said = browser.run(
                    f"fetch({json.dumps(url + path)}, {json.dumps(options)})"
                    ".then((reply) => [reply.type, reply.status], () => 'refused')"
                )
                assert said == ("refused" if mode == "cors" else ["opaque", 0])
        # A GET that asks for no answer brings no Origin.
        assert server.metric('vitx_rejections_total{reason="origin"}') == 5
        assert server.metric("vitx_images_total") == 0
        browser.run(f"document.querySelector('iframe').src = {json.dumps(url + '/')}")
        end = time.monotonic() + HANG
        while not any("frame-ancestors" in complaint for complaint in browser.complaints):
            assert time.monotonic() < end, browser.complaints
            browser.run("new Promise((done) => setTimeout(done, 10))")
        browser.open(f"http://rebound.example:{server.port}/")
        assert "Host 'rebound.example:" in browser.run("document.body.innerText")


def test_the_pages_work_below_a_path_of_a_proxy(browser: Browser, server: ServerProcess) -> None:
    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            inside = self.path.removeprefix("/models")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = (
                server.request(self.command, inside, body, dict(self.headers))
                if inside != self.path
                else (404, b"", {})
            )
            self.send_response(asked[0])
            self.send_header("Content-Type", asked[2].get("content-type", ""))
            self.end_headers()
            self.wfile.write(asked[1])

        do_POST = do_GET

        def log_message(self, format: str, *values: object) -> None:
            pass

    with _listening(Proxy) as port:
        browser.open(f"http://localhost:{port}/models/")
        browser.wait("document.getElementById('model-name').textContent === 'tiny'")
        give(browser, "drop", colour(3))
        browser.wait("document.querySelectorAll('.predictions li').length === 4")
        assert classes(browser)[0] == "red"
        for call in ("curl", "python", "triton"):
            assert f"localhost:{port}/models" in browser.run(f"document.getElementById('{call}').textContent")
        browser.run("document.querySelector('a').click()")
        browser.wait("document.querySelectorAll('form').length > 5")
        form = "[...document.querySelectorAll('details')].find((one) => /\\/v1\\/stats/.test(one.textContent))"
        browser.run(f"{form}.querySelector('form').requestSubmit()")
        browser.wait(f"{form}.querySelector('form pre').textContent.startsWith('200 OK')")


@contextlib.contextmanager
def _site(folder: Path) -> Iterator[int]:
    """The port where the files of a folder are served."""

    class Files(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *values: object) -> None:
            pass

    with _listening(functools.partial(Files, directory=str(folder))) as port:
        yield port


@contextlib.contextmanager
def _listening(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_a_token_is_asked_for_and_used(browser: Browser, certified_original: Bundle, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    with running_server(certified_original.path, "--token-file", tmp_path / "token") as server:
        browser.open(f"http://{server.url}/")
        browser.wait("!document.getElementById('locked').hidden")
        for token in ("wrong-but-long-enough", TOKEN):
            browser.run(
                f"document.getElementById('token').value = {json.dumps(token)};"
                "document.getElementById('token-form').requestSubmit()"
            )
            if token != TOKEN:
                browser.wait("document.getElementById('locked-error').textContent.startsWith('the token is not valid')")
        browser.wait("document.getElementById('state').textContent === 'ready'")
        assert browser.run("document.getElementById('locked').hidden")
        give(browser, "drop", colour(3))
        browser.wait("document.querySelectorAll('.predictions li').length === 4")
        assert classes(browser)[0] == "red"
