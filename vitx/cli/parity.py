"""`vitx parity`: are two of runs and bundles the same classifier?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitx.cli.options import Data, DeviceOption, Json, MaxFlipRate, Quiet, SkipBad, Which
from vitx.cli.options import batch_sizes as parse_batch_sizes

if TYPE_CHECKING:
    from vitx.data.image_set import ImageSet
    from vitx.parity.compared import Side
    from vitx.parity.pair import PairOptions, PairOutcome


def command(
    reference: Annotated[
        Path, typer.Argument(metavar="REFERENCE", help="A run folder or a bundle; with --verify, the bundle.")
    ],
    candidate: Annotated[
        Path | None, typer.Argument(metavar="[CANDIDATE]", help="A bundle or a run folder; with --verify, its run.")
    ] = None,
    data: Data = None,
    images: Annotated[
        str,
        typer.Option("--images", help="all; enough (for the flip rate, if none flips); or a number: evenly spaced."),
    ] = "all",
    max_flip_rate: MaxFlipRate = 0.01,
    reference_runtime: Annotated[str | None, typer.Option("--reference-runtime", help="See vitx bench.")] = None,
    runtime: Annotated[
        str | None, typer.Option("--runtime", help="Of the candidate. Default: torch for a run, else ONNX Runtime.")
    ] = None,
    batch_sizes: Annotated[
        str | None, typer.Option("--batch-sizes", help="Default: 1,2,7,32 and the ends of each plan's profiles.")
    ] = None,
    served: Annotated[bool, typer.Option("--served", help="Also send the images' bytes through vitx serve.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Which layer diverges first, and what repairs it.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Replay the certificate that a bundle carries.")] = False,
    report: Annotated[Path | None, typer.Option("--report", metavar="FILE.html", help="Write one HTML file.")] = None,
    checkpoint: Which = "best",
    device: DeviceOption = "auto",
    skip_bad: SkipBad = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare two of runs and bundles on real images; a bundle compared with a run gets its certificate.

    Exit code 1 when the verdict is fail; the certificate is written all the same and says why.
    """
    from functools import partial

    from vitx.core.errors import CheckFailed, InputError
    from vitx.data.open import open_images
    from vitx.parity.compared import open_side
    from vitx.parity.cpu_twin import cpu_stand_in
    from vitx.parity.pair import PairOptions, chosen_images, measure_pair

    asked = parse_batch_sizes("--batch-sizes", batch_sizes) if batch_sizes else None
    options = PairOptions(checkpoint, device, max_flip_rate, asked, quiet)
    if verify:
        _verify(reference, candidate, data, options, as_json=as_json)
        return
    if candidate is None:
        raise InputError(f"'{reference}' alone: expected a reference and a candidate, or --verify with one bundle")
    opened = partial(open_side, which=checkpoint, device=device, stand_in=partial(cpu_stand_in, device=device))
    before, after = opened(reference, runtime=reference_runtime), opened(candidate, runtime=runtime)
    whole = open_images(data or before.data or after.data, "val", skip_bad=skip_bad)
    chosen = chosen_images(whole, images, max_flip_rate)
    write = before.run is not None and after.bundle is not None and runtime is None and len(chosen) == len(whole)
    found = measure_pair(before, after, chosen, options, write=write, served=served, trace=trace)
    if report is not None:
        _write_report(report, f"Parity of {candidate} with {reference}", found, before, chosen)
    _print(found, candidate, as_json=as_json)
    if found.failures:
        whose = "the checkpoint's equal" if before.run else f"the equal of '{reference}'"
        raise CheckFailed(f"'{candidate}' is not {whose}: {'; '.join((*found.failures, *found.notes))}")


def _verify(
    reference: Path, candidate: Path | None, data: str | None, options: "PairOptions", *, as_json: bool
) -> None:
    """Replay the certificate of the one bundle among the two paths."""
    from dataclasses import asdict
    from functools import partial

    from vitx.core.bundle import MANIFEST, Bundle
    from vitx.core.console import log, print_json, print_table
    from vitx.parity import check_provider
    from vitx.parity.compared import bundle_side
    from vitx.parity.cpu_twin import cpu_stand_in
    from vitx.parity.pair import certified_reference
    from vitx.parity.replay import certified_images, replay, require_agreement, verify_files

    swapped = candidate is not None and not (reference / MANIFEST).is_file()
    path, run = (candidate or reference, reference) if swapped else (reference, candidate)
    bundle = Bundle.open(path)
    certificate = verify_files(bundle)
    images = certified_images(certificate, data)
    side = certified_reference(bundle, certificate, run, options)
    log("verify: " + ("against " + side.name if side else "no run at hand: the candidate alone"), quiet=options.quiet)
    own = bundle_side(bundle, device=options.device, stand_in=partial(cpu_stand_in, device=options.device))
    check_provider(own, options.device)
    numbers = replay(
        bundle,
        certificate,
        images,
        own.session,
        reference=(side.session, side.preprocessing) if side else None,
        quiet=options.quiet,
    )
    if as_json:
        print_json({"bundle": str(path), "numbers": [asdict(number) for number in numbers]})
    else:
        rows = [(n.name, n.certified, n.seen, "agrees" if n.agrees else "DIFFERS") for n in numbers]
        print_table(f"certificate of {path}, replayed", ("", "certified", "seen now", ""), rows)
    require_agreement(bundle, numbers)


def _write_report(path: Path, title: str, found: "PairOutcome", before: "Side", images: "ImageSet") -> None:
    from vitx.core.files import write_bytes
    from vitx.parity.report import Report, render

    tables: dict[str, dict[str, object]] = {}
    if found.served is not None:
        rows = found.served.model_dump(exclude={"flips"})
        tables["Over HTTP"] = {name.replace("_", " "): value for name, value in rows.items()}
    if found.trace is not None and found.trace.nodes:
        tables["Nodes that add most error"] = {f"{n.name} ({n.tensor})": n.growth for n in found.trace.nodes}
    report = Report(
        title=title,
        certificate=found.certificate,
        labels=images.class_names,
        notes=(*found.failures[len(found.certificate.reasons) :], *found.notes),
        plots=found.trace.plots() if found.trace else (),
        tables=tables,
    )
    write_bytes(path, render(report, images, before.preprocessing).encode())


def _print(found: "PairOutcome", candidate: Path, *, as_json: bool) -> None:
    from vitx.core.console import log, print_fields, print_json, print_table
    from vitx.parity.report import summary

    certificate = found.certificate
    if as_json:
        extra = {
            "written": found.written,
            "notes": list(found.notes),
            "served": found.served and found.served.model_dump(mode="json"),
            "trace": found.trace and found.trace.as_json(),
        }
        print_json({**certificate.model_dump(mode="json"), **extra})
        return
    fields = summary(certificate)
    if found.served is not None:
        fields["flips over HTTP"] = f"{len(found.served.flips)}, rate at most {found.served.flip_rate_bound:.5f} (95 %)"
        fields["largest error over HTTP"] = found.served.max_error
    print_fields(f"parity of {candidate} with {certificate.reference}", fields)
    if certificate.flips:
        clearest = sorted(certificate.flips, key=lambda flip: flip.reference_margin, reverse=True)[:10]
        print_table(
            f"the clearest of {len(certificate.flips)} flips",
            ("image", "label", "reference", "candidate", "margin", "batch size"),
            [(f.key, f.label, f.reference, f.candidate, f.reference_margin, f.batch_size) for f in clearest],
        )
    if found.trace is not None and found.trace.layers is not None:
        print_table(
            "error by layer, relative",
            ("layer", "error", "own", "CosSim before", "after"),
            [
                tuple("" if value is None else value for value in row)
                for row in (
                    (x.name, x.error, x.own, x.similarity_reference, x.similarity_candidate)
                    for x in found.trace.layers.layers
                )
            ],
        )
    if not found.failures:  # they end the error otherwise
        for note in found.notes:
            log(note)
