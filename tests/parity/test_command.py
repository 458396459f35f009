"""`vitx parity` of any pair: what is written, how many images, the report, the served path."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bundle_fixture import write_bundle, write_image_folder
from cli_fixture import Vitx
from server_process import HANG
from vitx.core.bundle import CERTIFICATE, Bundle
from vitx.core.run import RunFolder
from vitx.parity.served import serving


def test_two_bundles_are_compared_and_nothing_is_written(
    uncertified_bundle: Bundle, colours_folder: Path, tmp_path: Path, vitx: Vitx
) -> None:
    """A rebuilt graph against the one before it: any pair of bundles."""
    rebuilt = write_bundle(tmp_path / "rebuilt.vitx", data=str(colours_folder))
    code, out, err = vitx("parity", uncertified_bundle.path, rebuilt.path, "--device", "cpu", "--json")
    assert code == 0, err
    printed = json.loads(out)
    assert printed["written"] is False
    # The same graph at the same batch size; at another one sums are in another order.
    assert printed["max_logit_error_by_batch_size"]["32"] == 0
    assert printed["max_logit_error"] < 1e-5
    assert printed["min_cosine"] == pytest.approx(1)
    assert not (rebuilt.path / CERTIFICATE).exists()


def test_a_run_is_compared_with_a_run(tiny_run: RunFolder, vitx: Vitx) -> None:
    code, out, err = vitx("parity", tiny_run.path, tiny_run.path, "--device", "cpu", "--json")
    assert code == 0, err
    printed = json.loads(out)
    assert (printed["runtime"]["runtime"], printed["written"]) == ("torch", False)
    assert printed["ece_reference"] == printed["ece_candidate"] > 0


def test_a_bundle_is_compared_with_a_run(tiny_run: RunFolder, uncertified_bundle: Bundle, vitx: Vitx) -> None:
    code, out, err = vitx("parity", uncertified_bundle.path, tiny_run.path, "--device", "cpu", "--json")
    assert code == 0, err
    assert json.loads(out)["candidate"] == "colours, checkpoint best"


def test_what_comes_next_is_not_to_serve_a_bundle_that_would_be_refused(
    tiny_run: RunFolder, uncertified_bundle: Bundle, vitx: Vitx
) -> None:
    """What passes on some images, or in another runtime, is not what the certificate in the bundle says."""
    path = uncertified_bundle.path
    pair = ("parity", tiny_run.path, path, "--device", "cpu")
    _, _, said = vitx(*pair, "--images", "320")
    assert f"parity: vitx serve would refuse it: bundle '{path}' has no certificate: run `vitx parity RUN" in said
    assert f"next: vitx serve {path}\n" in vitx(*pair)[2]
    file = path / CERTIFICATE
    file.write_bytes(file.read_bytes().replace(b'"images": 360', b'"images": 999'))
    code, _, said = vitx(*pair, "--runtime", "onnxruntime")
    assert (code, "next:" in said) == (0, False)
    assert f"vitx serve would refuse it: {file} was changed after it was written" in said
    file.write_bytes(b"{")  # nor is what passed void where nothing can be read of it
    code, _, said = vitx(*pair, "--runtime", "onnxruntime")
    assert (code, "next:" in said) == (0, False)
    assert f"vitx serve would refuse it: {file} is not a valid Certificate" in said


@pytest.mark.parametrize(("rate", "bound"), [("0", "greater than 0"), ("1", "less than 1"), ("-0.1", "greater than 0")])
def test_the_ends_of_the_flip_rate_are_refused_with_its_name(vitx: Vitx, rate: str, bound: str) -> None:
    """No number of images proves a rate of 0, and none is needed for 1; the help says so."""
    for verb in ("parity", "export"):
        code, _, err = vitx(verb, "runs/none", f"--max-flip-rate={rate}")
        assert (code, err) == (2, f"error: --max-flip-rate {float(rate)}: Input should be {bound}\n")
        described = " ".join(vitx(verb, "--help")[1].split())
        assert "above 0 and below 1." in described
        assert "0.0<=x<=1.0" not in described


@pytest.mark.parametrize(("asked", "count"), [("enough", 299), ("320", 320), ("9999", 360)])
def test_enough_images_for_the_rate(
    tiny_run: RunFolder, uncertified_bundle: Bundle, vitx: Vitx, asked: str, count: int
) -> None:
    code, out, err = vitx("parity", tiny_run.path, uncertified_bundle.path, "--images", asked, "--json")
    assert code == 0, err
    printed = json.loads(out)
    assert printed["images"] == count
    # A certificate is of the whole split.
    assert printed["written"] is (uncertified_bundle.path / CERTIFICATE).exists() is (count == 360)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--images", "some"], "--images some: expected all, enough or a number"),
        (["--batch-sizes", "5,60000"], "--batch-sizes 60000: expected at most the 360 images"),
        (["--verify", "--served"], "--served has no effect with --verify: leave it out"),
        (["--batch-sizes", "1,b"], "--batch-sizes 1,b: expected batch sizes such as 1,8,32"),
        (["--runtime", "tensorflow"], "unknown runtime"),
        (["--reference-runtime", "onnxruntime"], "a run's checkpoint runs in torch"),
    ],
)
def test_impossible_requests_are_refused(
    tiny_run: RunFolder, uncertified_bundle: Bundle, vitx: Vitx, arguments: list[str], text: str
) -> None:
    code, _, err = vitx("parity", tiny_run.path, uncertified_bundle.path, *arguments)
    assert code == 2
    assert text in err


def test_one_side_alone_is_refused(tiny_run: RunFolder, vitx: Vitx) -> None:
    code, _, err = vitx("parity", tiny_run.path)
    assert code == 2
    assert "expected one, or a reference and a candidate" in err


@pytest.mark.parametrize(
    "option",
    [("--served",), ("--trace",), ("--data", "digits"), ("--images", "5"), ("--report", "x.html"), ("--skip-bad",)],
)
def test_an_option_that_a_bundle_alone_has_no_use_for_is_refused(
    uncertified_bundle: Bundle, vitx: Vitx, option: tuple[str, ...]
) -> None:
    code, _, err = vitx("parity", uncertified_bundle.path, *option)
    assert code == 2
    path = uncertified_bundle.path
    expected = f"{option[0]} has no effect on '{path}' alone: leave it out, or give a reference and a candidate"
    assert expected in err


def failing_report(colours_folder: Path, tmp_path: Path, vitx: Vitx) -> str:
    from run_fixture import write_run

    other = write_run(tmp_path / "other", str(colours_folder), bias_change=3.0)
    bundle = write_bundle(tmp_path / "tiny.vitx", data=str(colours_folder))
    page = tmp_path / "report.html"
    code, _, err = vitx("parity", other.path, bundle.path, "--device", "cpu", "--quiet", "--report", page)
    assert code == 1, err
    return page.read_text()


def test_the_report_shows_flips_and_loads_nothing(colours_folder: Path, tmp_path: Path, vitx: Vitx) -> None:
    page = failing_report(colours_folder, tmp_path, vitx)
    assert '<p class="finding fail">verdict: <strong>fail' in page
    assert page.count('src="data:image/png;base64,') == page.count("<img ") > 0
    assert "bias of the classifier dropped or changed: class 0" in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<script" not in page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_the_report_opens_in_a_browser(colours_folder: Path, tmp_path: Path, vitx: Vitx) -> None:
    failing_report(colours_folder, tmp_path, vitx)
    arguments = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    finished = subprocess.run(
        [*arguments, "--dump-dom", f"file://{tmp_path / 'report.html'}"],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "flips, the clearest" in finished.stdout


def test_the_served_path_gives_the_reference_s_classes(
    tiny_run: RunFolder, uncertified_bundle: Bundle, tmp_path: Path, vitx: Vitx
) -> None:
    code, out, err = vitx("parity", tiny_run.path, uncertified_bundle.path, "--device", "cpu", "--json", "--served")
    assert code == 0, err
    served = json.loads(out)["served"]
    assert (served["images"], served["flips"]) == (360, [])
    assert 0 < served["max_error"] <= served["max_error_allowed"] == 2e-4


def test_another_class_over_http_fails(colours_folder: Path, tmp_path: Path) -> None:
    from bundle_fixture import PREPROCESSING, NumpySession
    from server_process import running_server
    from vitx.data.open import open_images
    from vitx.parity.served import compare_served

    bundle = write_bundle(tmp_path / "tiny.vitx", fault="class_off_by_one", data=str(colours_folder))
    images = open_images(str(write_image_folder(tmp_path / "few", 40)), "val")
    with running_server(bundle.path, "--allow-uncertified", "--device", "cpu") as server:
        found = compare_served(
            f"http://{server.url}", NumpySession(), images, PREPROCESSING, max_logit_error=1e-4, quiet=True
        )
    assert len(found.flips) == 40
    assert found.failures(0.01)[0].startswith("over HTTP 40 of 40 images get another class")
    assert "a log probability differs" in found.failures(0.01)[1]


def test_a_served_model_is_compared_with_its_run(
    tiny_run: RunFolder, uncertified_bundle: Bundle, tmp_path: Path, vitx: Vitx
) -> None:
    """By a real server of its bundle."""
    report = tmp_path / "report.html"
    with serving(uncertified_bundle.path, device="cpu", allow_uncertified=True) as address:
        url = f"{address}/v2/models/{uncertified_bundle.manifest.name}"
        code, out, err = vitx("parity", tiny_run.path, url, "--json", "--report", report)
        assert code == 0, err
        printed = json.loads(out)
        assert (printed["verdict"], printed["written"], printed["candidate"]) == ("pass", False, url)
        assert printed["runtime"] == {"runtime": "vitx", "version": "0.1.0", "url": url}
        assert printed["batch_sizes"] == [1, 2, 7, 32]
        assert 0 < printed["max_logit_error"] < 1e-4
    assert f"<h1>Parity of {url} with" in report.read_text(encoding="utf-8")


def test_a_served_model_with_a_common_mistake_is_told_which(
    tiny_run: RunFolder, tmp_path: Path, colours_folder: Path, vitx: Vitx
) -> None:
    other = write_bundle(tmp_path / "other.vitx", fault="bgr", data=str(colours_folder))
    with serving(other.path, device="cpu", allow_uncertified=True) as address:
        url = f"{address}/v2/models/{other.manifest.name}"
        code, _, err = vitx("parity", tiny_run.path, url)
    assert code == 1
    assert f"error: '{url}' is not the checkpoint's equal: " in err
    assert "BGR: the candidate reads the colour channels in reverse" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("RUN", "http://127.0.0.1:9/v2/models/m", "--trace"), "--trace has no effect on a served model: leave it out"),
        (("RUN", "http://127.0.0.1:9/v2/models/m", "--runtime", "torch"), "--runtime has no effect on a served model"),
        (("RUN", "RUN", "--precision", "fp16"), "--precision has no effect without the URL of a served model"),
        (("RUN", "RUN", "--token-file", "t"), "--token-file has no effect without the URL of a served model"),
        (("http://127.0.0.1:9/v2/models/m", "RUN"), "expected a run or a bundle; a served model is the candidate"),
        (
            ("RUN", "ftp://x/v2/models/m"),
            "'ftp://x/v2/models/m' is not the URL of a served model: expected http://HOST",
        ),
    ],
)
def test_what_a_served_model_takes(tiny_run: RunFolder, vitx: Vitx, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = vitx("parity", *(tiny_run.path if each == "RUN" else each for each in arguments))
    assert (code, words in err) == (2, True), err
