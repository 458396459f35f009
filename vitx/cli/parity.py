"""`vitx parity`: are two of runs and bundles the same classifier?"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitx.cli.options import Json, Quiet, from_records, not_empty, require_effect
from vitx.core.console import log, log_next, print_fields, print_json, print_table
from vitx.core.errors import InputError, VitxError
from vitx.parity.options import ParityOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vitx.core.certificate import Flip, Verdict
    from vitx.parity.check import ParityResult
    from vitx.parity.divergence import LayerError
    from vitx.parity.replay import Replay


_DEFAULTS = ParityOptions()


@from_records("parity")
def command(
    reference: Annotated[
        Path, typer.Argument(metavar="REFERENCE", help="A run folder or a bundle; alone or with --verify, a bundle.")
    ],
    candidate: Annotated[
        str | None,
        typer.Argument(
            metavar="CANDIDATE",
            help="A bundle, a run folder or the URL of a served model; with --verify, its run.",
            callback=not_empty,
        ),
    ] = None,
    options: ParityOptions = _DEFAULTS,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two of runs and bundles on real images; a bundle compared with a run gets its certificate.

    A bundle alone is judged by its witness set: is what runs it here the checkpoint's equal? Of a model that Triton,
    KServe or vitx serve already serves, give the URL: http://HOST:PORT/v2/models/NAME.

    Exit code 1 when the verdict is fail; the certificate is written all the same and says why.
    """
    from vitx.core.bundle import MANIFEST, url_of
    from vitx.core.urls import without_password
    from vitx.parity.check import check_parity
    from vitx.parity.executables.first_load import certify_here, require_passing
    from vitx.parity.replay import verify_certificate

    named = url_of(reference)  # with both slashes, which a path of it has not
    shown = without_password(named) if named else str(reference)
    if options.verify:
        applied = {"verify", "data", "device", "skip_bad", *(("checkpoint",) if candidate else ())}
        require_effect(options, applied, "with --verify" + ("" if candidate else " and no run") + ": leave it out")
        replay = verify_certificate(reference, Path(candidate) if candidate else None, options, quiet=quiet)
        _print_replay(replay, as_json=as_json)
        replay.require_agreement()
        _log_next(replay.bundle.path, str(replay.bundle.path), quiet=quiet)
        return
    if candidate is None:
        applied = {"runtime", "max_flip_rate", "device"}
        require_effect(options, applied, f"on '{shown}' alone: leave it out, or give a reference and a candidate")
        verdicts = certify_here(reference, options, quiet=quiet)
        _print_verdicts(shown, verdicts, as_json=as_json)
        for verdict in verdicts:
            require_passing(shown, verdict)
        _log_next(reference, shown, quiet=quiet)
        return
    if shown.startswith(("http://", "https://")):
        raise InputError(f"the reference is '{shown}': expected a run or a bundle; a served model is the candidate")
    if "://" in candidate:
        applied = {*ParityOptions.model_fields} - {"runtime", "served", "trace"}
        require_effect(options, applied, "on a served model: leave it out")
    else:
        applied = {*ParityOptions.model_fields} - {"precision", "token_file"}
        require_effect(options, applied, "without the URL of a served model: leave it out")
    result = check_parity(reference, candidate, options, quiet=quiet)
    _print_result(result, candidate, as_json=as_json)
    result.require_pass(reference, candidate)
    if (Path(candidate) / MANIFEST).is_file():
        _log_next(Path(candidate), candidate, quiet=quiet)


def _log_next(path: Path, shown: str, *, quiet: bool) -> None:
    """The command that serves a bundle, or why none would: what passed here need not be what its certificate says."""
    from vitx.core.bundle import Bundle, local_bundle, read_manifest

    try:
        folder = local_bundle(path)  # of a URL, or of a volume that Kubernetes mounts
        Bundle(folder, read_manifest(folder)).require_certificate()
    except VitxError as refusal:
        log(f"parity: vitx serve would refuse it: {refusal}", quiet=quiet)
    else:
        log_next("vitx", "serve", shown, quiet=quiet)


def _print_replay(replay: "Replay", *, as_json: bool) -> None:
    path = str(replay.bundle.path)
    if as_json:
        numbers = [asdict(number) for number in replay.numbers]
        listed = [verdict.model_dump(mode="json") for verdict in replay.executables]
        print_json({"bundle": path, "numbers": numbers, "executables": listed})
        return
    rows = [(n.name, n.certified, n.seen, "agrees" if n.agrees else "DIFFERS") for n in replay.numbers]
    print_table(f"certificate of {path}, replayed", ("", "certified", "measured now", ""), rows)
    _print_verdicts(path, replay.executables, as_json=False)


def _print_verdicts(path: str, verdicts: "Sequence[Verdict]", *, as_json: bool) -> None:
    if as_json:
        listed = [verdict.model_dump(mode="json") for verdict in verdicts]
        print_json({"bundle": path, "executables": listed})
        return
    rows = [
        (
            *(v.executable.runtime, v.executable.version, v.executable.precision),
            *(", ".join(("logits", *v.outputs)), v.verdict, v.images, v.flip_rate_bound, v.max_logit_error),
        )
        for v in verdicts
    ]
    columns = ("runtime", "version", "precision", "gives", "verdict", "images", "bound", "logit error")
    print_table(f"executables of {path}", columns, rows)
    vectors = [
        (v.executable.runtime, name, one.verdict, one.worst_distance, one.mean_distance, one.allowed_distance)
        for v in verdicts
        for name, one in v.outputs.items()
    ]
    if vectors:
        heads = ("runtime", "output", "verdict", "largest distance", "mean", "allowed")
        print_table("cosine distance of further outputs from the checkpoint's", heads, vectors)


def _print_result(result: "ParityResult", candidate: str, *, as_json: bool) -> None:
    from vitx.parity.html_report import summary

    if as_json:
        print_json(result.as_json())
        return
    fields = {"verdict": "fail" if result.failures else "pass", **summary(result.certificate)}
    if result.served is not None:
        bound = f"{result.served.flip_rate_bound:.5f} (95 %)"
        fields["flips over HTTP"] = f"{len(result.served.flips)}, rate at most {bound}"
        fields["largest error over HTTP"] = result.served.max_error
    print_fields(f"parity of {candidate} with {result.certificate.reference}", fields)
    if result.certificate.flips:
        _print_flips(result.certificate.flips)
    if result.trace is not None and result.trace.layers is not None:
        _print_layers(result.trace.layers.layers)
    if not result.failures:  # otherwise the notes end the error message
        for note in result.notes:
            log(note)


def _print_flips(flips: "tuple[Flip, ...]") -> None:
    """The ten of largest margin: they are the furthest from rounding."""
    clearest = sorted(flips, key=lambda flip: flip.reference_margin, reverse=True)[:10]
    print_table(
        f"the clearest of {len(flips)} flips",
        ("image", "label", "reference", "candidate", "margin", "batch size"),
        [(f.key, f.label, f.reference, f.candidate, f.reference_margin, f.batch_size) for f in clearest],
    )


def _print_layers(layers: "tuple[LayerError, ...]") -> None:
    rows = [(x.name, x.error, x.own, x.similarity_reference, x.similarity_candidate) for x in layers]
    print_table(
        "error by layer, relative",
        ("layer", "error", "own", "CosSim before", "after"),
        [tuple("" if value is None else value for value in row) for row in rows],
    )
