"""The web page where something changes under it: models, files, the window, the server."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from browser import PROGRAM, Browser, running_browser
from bundle_fixture import colour_image, png, with_attention, write_bundle
from page_actions import classes, give
from server_process import ServerProcess, free_port, running_server

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")

TOKEN, MANAGERS = "0123456789abcdef", "fedcba9876543210"
TEXT = "document.getElementById('{}').textContent"
CHOOSE = "(() => {{ const s = document.getElementById('model'); s.value = '{}'; s.onchange({{target: s}}); }})()"
PLACES = """['.preview img', '.preview canvas'].map((one) => {
  const {left, top, width, height} = document.querySelector(one).getBoundingClientRect();
  return [left, top, width, height];
})"""


# Of two `--port`, of which `running_server` gives the second, the first.
ON_THAT_PORT = "import sys; del sys.argv[-2:]; from vitx.cli import main; main()"
NEXT, IMAGE = "next: curl", "--data-binary @IMAGE"


def next_line(server: ServerProcess) -> str:
    """The command that a server shows when it is ready."""
    assert server.process.stderr is not None
    return next(line.strip() for line in server.process.stderr if line.startswith("next:"))


def unload(server: ServerProcess, model: str) -> None:
    headers = {"Authorization": f"Bearer {MANAGERS}", "Content-Type": "application/json"}
    assert server.request("POST", f"/v2/repository/models/{model}/unload", b"{}", headers)[0] == 200


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny.vitx, and other.vitx, which gives attention; the token and the managers' in files."""
    made = tmp_path_factory.mktemp("page")
    write_bundle(made / "tiny.vitx")
    with_attention(write_bundle(made / "other.vitx", name="other"))
    for name, token in (("token", TOKEN), ("managers", MANAGERS)):
        (made / name).write_text(token)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with running_server(folder / "tiny.vitx", folder / "other.vitx", "--allow-uncertified") as started:
        yield started


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Browser:
    """The page, ready, with other chosen."""
    browser.open(f"http://{server.url}/")
    browser.wait(f"{TEXT.format('state')} === 'ready'")
    browser.run(CHOOSE.format("other"))
    browser.wait("!document.getElementById('attention').hidden")
    return browser


def test_the_model_that_was_chosen_last_is_shown_whichever_answer_comes_last(page: Browser) -> None:
    page.run(
        """(() => {
          const real = fetch;
          window.fetch = async (path, options) => {
            const late = path === 'v2/models/other';
            if (late) await new Promise((done) => setTimeout(done, 700));
            const reply = await real(path, options);
            if (late) setTimeout(() => window.shown = true, 300);
            return reply;
          };
        })()"""
    )
    page.run(CHOOSE.format("other"))
    page.run(CHOOSE.format("tiny"))
    page.wait(f"window.shown && {TEXT.format('model-name')} === 'tiny'")
    assert "model=tiny'" in page.run(TEXT.format("curl"))
    give(page, "drop", png(colour_image(3, np.random.default_rng(3))))
    page.wait("document.querySelectorAll('.predictions li').length === 4")


@pytest.mark.parametrize("how", ["the statistics no longer have the other one", "it was chosen"])
def test_a_card_that_is_refused_once_is_asked_for_again(page: Browser, how: str) -> None:
    """Else for ten seconds what stands there, the calls to copy too, is of a model that is not asked."""
    give(page, "drop", png(colour_image(3, np.random.default_rng(3))))
    page.wait("document.querySelectorAll('.preview canvas').length === 1")
    gone = json.dumps(how != "it was chosen")
    page.run(
        f"""(() => {{
          const real = fetch;
          let refused = false;
          window.fetch = async (path, options) => {{
            const stats = {gone} && path === 'v1/stats' && await (await real(path, options)).json();
            if (stats) stats.models = stats.models.filter((one) => one.name === 'tiny');
            if (stats) return new Response(JSON.stringify(stats));
            if (path !== 'v2/models/tiny' || refused) return real(path, options);
            refused = true;
            return new Response('{{"error": "more than 1000 connections"}}', {{status: 503}});
          }};
        }})()"""
    )
    if how == "it was chosen":
        page.run(CHOOSE.format("tiny"))
    page.wait(f"{TEXT.format('model-name')} === 'tiny'", 6)
    page.wait("document.querySelectorAll('.preview canvas').length === 0", 6)  # tiny gives no map
    page.wait("document.querySelectorAll('.predictions li').length === 4")


def test_the_map_follows_the_image_when_the_window_changes(page: Browser) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=False)
    give(page, "drop", png(np.full((400, 800, 3), 200, np.uint8)))
    page.wait("document.querySelectorAll('.preview canvas').length === 1")
    page.call("Emulation.setDeviceMetricsOverride", width=1200, height=700, deviceScaleFactor=1, mobile=False)
    page.wait("document.querySelector('.preview img').getBoundingClientRect().width <= 150")
    page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    (left, top, width, height), over = page.run(PLACES)
    side = min(width / 2, height)
    assert over == pytest.approx([left + (width - side) / 2, top + (height - side) / 2, side, side], abs=1.5)


XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="%d"/></rdf:RDF></x:xmpmeta>'
)


def test_an_image_that_the_browser_may_show_turned_has_no_map(page: Browser, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = {"exif": exif.tobytes()}
    cases: list[tuple[str, dict[str, Any], int]] = [("webp", {}, 1), ("webp", turned, 0), ("jpeg", turned, 1)]
    cases += [(kind, {"xmp": XMP % way}, int(way == 1)) for kind in ("webp", "jpeg") for way in (1, 6)]
    for kind, found, maps in cases:
        Image.new("RGB", (80, 40), "red").save(tmp_path / f"red.{kind}", **found)
        give(page, "drop", (tmp_path / f"red.{kind}").read_bytes(), name=f"red.{kind}", kind=f"image/{kind}")
        page.wait(f"{TEXT.format('status')} !== ''")
        page.run("new Promise((done) => setTimeout(done, 200))")
        page.wait(f"document.querySelectorAll('.preview canvas').length === {maps}")


def test_a_file_that_went_and_the_same_one_chosen_again(page: Browser, tmp_path: Path) -> None:
    file = tmp_path / "blue.png"

    def choose(label: int) -> None:
        file.write_bytes(png(colour_image(label, np.random.default_rng(label))))
        root = page.call("DOM.getDocument")["root"]["nodeId"]
        control = page.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        page.call("DOM.setFileInputFiles", nodeId=control, files=[str(file)])
        page.wait("document.querySelectorAll('.predictions li').length === 4")

    choose(0)
    assert page.run("document.getElementById('file').value") == ""
    assert classes(page)[0] == "blue"
    file.unlink()
    page.run(CHOOSE.format("tiny"))
    page.wait("document.querySelector('#results .error')?.textContent === 'the file cannot be read: choose it again'")
    assert page.run(TEXT.format("state")) == "ready"


def test_a_token_that_no_header_can_carry(browser: Browser, folder: Path) -> None:
    with running_server(folder / "tiny.vitx", "--allow-uncertified", "--token-file", folder / "token") as server:
        assert next_line(server) == f"{NEXT} -H 'Authorization: Bearer TOKEN' {IMAGE} http://{server.url}/v1/classify"
        browser.open(f"http://{server.url}/")
        browser.wait("!document.getElementById('locked').hidden")
        for token in (f"“{TOKEN}”", "токен"):
            browser.run(
                f"document.getElementById('token').value = {json.dumps(token)};"
                "document.getElementById('token-form').requestSubmit()"
            )
            browser.wait(f"{TEXT.format('locked-error')}.startsWith('A token is visible ASCII characters alone')")
            assert not browser.run("document.getElementById('locked-error').hidden")
            assert browser.run(TEXT.format("state")) == "locked"


@pytest.mark.parametrize(
    ("options", "token", "shown"),
    [((), "", True), (("--metrics", "off"), "", False), (("--metrics-token-file", "managers"), "", False)],
)
def test_the_link_to_the_metrics_is_there_if_it_leads_there(
    browser: Browser, folder: Path, options: tuple[str, ...], token: str, shown: bool
) -> None:
    given = [folder / option if option == "managers" else option for option in options]
    with running_server(folder / "tiny.vitx", "--allow-uncertified", *given) as server:
        browser.open(f"http://{server.url}/")
        browser.wait("!document.getElementById('use').hidden")
        assert browser.run("!document.getElementById('metrics').hidden") is shown
        assert (server.request("GET", "/metrics")[0] == 200) is shown


def test_nothing_of_a_model_is_left_when_the_last_is_unloaded(browser: Browser, folder: Path) -> None:
    managed = ("--management", "--management-token-file", folder / "managers")
    with running_server(folder / "tiny.vitx", "--allow-uncertified", *managed) as server:
        browser.open(f"http://{server.url}/")
        browser.wait(f"{TEXT.format('model-name')} === 'tiny'")
        unload(server, "tiny")
        browser.wait(f"{TEXT.format('model-name')} === 'No model is loaded'")
        assert browser.run("document.getElementById('use').hidden")
        assert browser.run("document.title") == "vitx"
        assert (browser.run(TEXT.format("card")), browser.run(TEXT.format("verdict"))) == ("", "")


def test_the_images_are_classified_again_by_the_model_that_takes_the_place_of_an_unloaded_one(
    browser: Browser, folder: Path
) -> None:
    given = ("--allow-uncertified", "--management", "--management-token-file", folder / "managers")
    with running_server(folder / "tiny.vitx", folder / "other.vitx", *given) as server:
        browser.open(f"http://{server.url}/")
        browser.wait(f"{TEXT.format('state')} === 'ready'")
        browser.run(CHOOSE.format("other"))
        browser.wait("!document.getElementById('attention').hidden")
        give(browser, "drop", png(colour_image(3, np.random.default_rng(3))))
        browser.wait("document.querySelectorAll('.preview canvas').length === 1")
        unload(server, "other")
        browser.wait("document.querySelectorAll('.preview canvas').length === 0")  # tiny gives no map
        browser.wait("document.querySelectorAll('.predictions li').length === 4")
        assert browser.run(TEXT.format("model-name")) == "tiny"


def test_a_server_that_ends_and_comes_back_with_another_model_of_the_name(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    """Its card is asked for at once: what the model before had, an attention map, this one would refuse to give."""
    port = str(free_port())
    seeing = with_attention(write_bundle(tmp_path / "tiny.vitx")).path
    with running_server(seeing, "--allow-uncertified", "--port", port, program=ON_THAT_PORT) as server:
        browser.open(f"http://{server.url}/")
        browser.wait("!document.getElementById('attention').hidden")
        browser.wait("polls % CARD_EVERY === 1")
    browser.wait(f"{TEXT.format('state')} === 'the server does not answer'")
    with running_server(folder / "tiny.vitx", "--allow-uncertified", "--port", port, program=ON_THAT_PORT):
        browser.wait(f"{TEXT.format('state')} === 'ready'")
        give(browser, "drop", png(colour_image(3, np.random.default_rng(3))))
        browser.wait("document.querySelectorAll('.predictions li').length === 4")


def test_a_server_that_hangs_is_not_ready_and_leaves_a_gap_in_the_charts(browser: Browser, folder: Path) -> None:
    with running_server(folder / "tiny.vitx", "--allow-uncertified") as server:
        browser.open(f"http://{server.url}/")
        browser.wait(f"{TEXT.format('state')} === 'ready'")
        points = "document.querySelector('#queue-plot polyline').getAttribute('points').split(' ').length"
        before = browser.run(points)
        server.process.send_signal(signal.SIGSTOP)
        try:
            browser.wait(f"{TEXT.format('state')} === 'the server does not answer'")
        finally:
            server.process.send_signal(signal.SIGCONT)
        browser.wait(f"{TEXT.format('state')} === 'ready'")
        assert browser.run(points) >= before + 5  # a point a second


def test_a_long_name_of_a_model_fits_a_narrow_screen(browser: Browser, folder: Path, tmp_path: Path) -> None:
    long = write_bundle(tmp_path / "long.vitx", name="vit_base_patch16_clip_224.openai_ft_in12k_in1k")
    with running_server(folder / "tiny.vitx", long.path, "--allow-uncertified") as server:
        assert next_line(server) == f"{NEXT} {IMAGE} 'http://{server.url}/v1/classify?model=tiny'"
        for place in ("", "docs"):
            browser.open(f"http://{server.url}/{place}", width=320)
            browser.wait("document.querySelector('#model option, details') !== null")
            browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            assert browser.run("document.documentElement.scrollWidth") <= 320


def test_a_long_class_and_a_long_fault_fit_a_narrow_screen(page: Browser) -> None:
    """The class is a folder's name of iNaturalist 2021; the fault, what a runtime may say."""
    label = "00000_Animalia_Annelida_Clitellata_Haplotaxida_Lumbricidae_Lumbricus_terrestris"
    fault = "the canary batch failed: [ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned by a node"
    page.run(
        f"""(() => {{
          const real = fetch;
          window.fetch = async (path, options) => {{
            const reply = await real(path, options), answer = await reply.json();
            if (answer.vitx) answer.vitx.fault = {json.dumps(fault)};
            for (const one of answer.predictions ?? []) one.label = {json.dumps(label)};
            return Response.json(answer);
          }};
        }})()"""
    )
    page.call("Emulation.setDeviceMetricsOverride", width=320, height=844, deviceScaleFactor=1, mobile=False)
    page.run(CHOOSE.format("tiny"))
    page.wait(f"{TEXT.format('verdict')} === {json.dumps(fault)}")
    assert page.run("document.documentElement.scrollWidth") <= 320
    give(page, "drop", png(colour_image(3, np.random.default_rng(3))))
    page.wait(f"{TEXT.format('status')}.startsWith('00000_')")
    assert page.run("document.documentElement.scrollWidth") <= 320


def test_a_class_that_a_browser_takes_a_minute_to_lay_out_is_cut(page: Browser) -> None:
    """Chromium's time grows with the square of a word's length."""
    page.run(
        """(() => {
          const real = fetch;
          window.fetch = async (path, options) => {
            const reply = await real(path, options), answer = await reply.json();
            for (const one of answer.predictions ?? []) one.label = 'a'.repeat(65536);
            return Response.json(answer);
          };
        })()"""
    )
    give(page, "drop", png(colour_image(3, np.random.default_rng(3))))
    page.wait(f"{TEXT.format('status')} !== ''")
    assert classes(page) == ["a" * 300 + "…"] * 4
    assert page.run(TEXT.format("status")).startswith("a" * 300 + "…, ")
