"""`vitx parity`: is the bundle the same classifier as the checkpoint?"""

from vitx.cli.options import (
    BundleArgument,
    Data,
    DeviceOption,
    Json,
    MaxFlipRate,
    Quiet,
    RunArgument,
    SkipBad,
    Which,
)


def command(
    run: RunArgument,
    bundle: BundleArgument,
    data: Data = None,
    max_flip_rate: MaxFlipRate = 0.01,
    checkpoint: Which = "best",
    device: DeviceOption = "auto",
    skip_bad: SkipBad = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare a bundle with the checkpoint on the whole evaluation split, and write its certificate.

    Exit code 1 when the verdict is fail; the certificate is written all the same and says why.
    """
    from vitx.core.bundle import Bundle
    from vitx.core.console import print_fields, print_json, print_table
    from vitx.core.errors import CheckFailed
    from vitx.core.run import RunFolder
    from vitx.serve.parity import certify_bundle

    certificate = certify_bundle(
        RunFolder.open(run),
        Bundle.open(bundle),
        data=data,
        max_flip_rate=max_flip_rate,
        which=checkpoint,
        device=device,
        skip_bad=skip_bad,
        quiet=quiet,
    )
    if as_json:
        print_json(certificate.model_dump(mode="json"))
    else:
        print_fields(
            f"parity of {bundle}",
            {
                "verdict": certificate.verdict,
                "images": f"{certificate.images} of {certificate.data}",
                "batch sizes": ", ".join(map(str, certificate.batch_sizes)),
                "top-1 of the checkpoint": certificate.accuracy_reference,
                "top-1 of the bundle": certificate.accuracy_candidate,
                "flips": len(certificate.flips),
                "flip rate at most (95 %)": certificate.flip_rate_bound,
                "McNemar p": certificate.mcnemar_p,
                "largest logit error": certificate.max_logit_error,
                "mean logit error": certificate.mean_logit_error,
                "largest change by neighbours": certificate.max_neighbour_error,
            },
        )
        if certificate.flips:
            clearest = sorted(certificate.flips, key=lambda flip: flip.reference_margin, reverse=True)[:10]
            print_table(
                f"the clearest of {len(certificate.flips)} flips",
                ("image", "label", "checkpoint", "bundle", "margin", "batch size"),
                [(f.key, f.label, f.reference, f.candidate, f.reference_margin, f.batch_size) for f in clearest],
            )
    if certificate.verdict != "pass":
        raise CheckFailed(f"'{bundle}' is not the checkpoint's equal: {'; '.join(certificate.reasons)}")
