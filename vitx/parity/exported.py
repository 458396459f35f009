"""The certificate that every export ends with, and the images it will stand on."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitx.core.bundle import Bundle
    from vitx.export import SamplingPlan, Source, SourceRequest
    from vitx.parity.compared import Side


def sampling_plan(request: "SourceRequest", data: str | None, max_flip_rate: float) -> "SamplingPlan":
    """How many images the certificate will look at, and how many of them may flip."""
    from vitx.core.run import RunFolder
    from vitx.data.open import open_images
    from vitx.export import SamplingPlan
    from vitx.parity import check_image_count
    from vitx.parity.statistics import flips_allowed

    request.require_known()
    count = len(open_images(data or RunFolder.open(request.target).info.data, "val"))
    check_image_count(count, max_flip_rate)
    return SamplingPlan(count, flips_allowed(count, max_flip_rate))


def certify_export(
    bundle: "Bundle", request: "SourceRequest", data: str | None, *, max_flip_rate: float, device: str, quiet: bool
) -> None:
    from functools import partial

    from vitx.core.console import log
    from vitx.core.errors import CheckFailed
    from vitx.data.open import open_images
    from vitx.parity import certify_sides
    from vitx.parity.compared import bundle_side
    from vitx.parity.cpu_twin import cpu_stand_in
    from vitx.parity.trace import failure_notes, token_similarity

    log("export: certifying the graph against the checkpoint", quiet=quiet)
    before = source_side(request.load(), device)
    after = bundle_side(bundle, device=device, stand_in=partial(cpu_stand_in, device=device))
    images = open_images(data or before.data, "val")
    tokens = partial(token_similarity, before, after, images, quiet=quiet)
    certificate = certify_sides(
        before,
        after,
        images,
        device=device,
        max_flip_rate=max_flip_rate,
        # Rounding alone may collapse tokens.
        token_similarity=tokens if bundle.manifest.precision != "fp32" else lambda: None,
        write=True,
        quiet=quiet,
    )
    if certificate.verdict != "pass":
        notes = failure_notes(before, after, images, certificate, request, quiet=quiet)
        found = "; ".join((*certificate.reasons, *notes))
        raise CheckFailed(f"the graph is not the checkpoint's equal, no bundle written: {found}")


def source_side(source: "Source", device: str) -> "Side":
    """What is exported, in torch, as the reference of its own bundle."""
    from vitx.parity.compared import Side
    from vitx.runtimes.session import device_name
    from vitx.runtimes.torch import TorchSession

    session = TorchSession(source.model, source.preprocessing, device=device_name(device))
    return Side(
        name=f"{source.name}, checkpoint {source.checkpoint}",
        session=session,
        preprocessing=source.preprocessing,
        labels=source.class_names,
        data=source.data,
        sha256=source.checkpoint_sha256,
        network=session.network,
        renormalized=session.with_normalization,
    )
