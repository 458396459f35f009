"""How strong each corruption is at severities 1 to 5: its authors' constants, for the image sizes they published.

Hendrycks & Dietterich (arXiv 1903.12261) published CIFAR-C (32 px), Tiny-ImageNet-C (64 px) and ImageNet-C (224 px),
each with its own constants. An image of another size takes the constants of the nearest, and lengths in pixels are
scaled with its side. Below 32 px they are not scaled: a blur narrower than a pixel would have no effect.
"""

Strength = tuple[float, ...]
PUBLISHED_SIZES = (32, 64, 224)  # pixels

# Published size → images smaller than this take its constants.
_USED_BELOW = {32: 48, 64: 128}

# Severities 1 to 5, for 32, 64 and 224 px.
_CONSTANTS: dict[str, tuple[tuple[Strength, ...], ...]] = {
    "gaussian_noise": (  # standard deviation, of the range 0 to 1
        ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)),
        ((0.04,), (0.08,), (0.12,), (0.15,), (0.18,)),
        ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
    ),
    "shot_noise": (  # photons of a white pixel
        ((500,), (250,), (100,), (75,), (50,)),
        ((250,), (100,), (50,), (30,), (15,)),
        ((60,), (25,), (12,), (5,), (3,)),
    ),
    "impulse_noise": (  # share of the values
        ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
        ((0.01,), (0.02,), (0.05,), (0.08,), (0.14,)),
        ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
    ),
    "defocus_blur": (  # radius of the disk in pixels; sigma that smooths its edge, not scaled
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    ),
    "glass_blur": (  # sigma in pixels; farthest jump in pixels; rounds
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    ),
    "motion_blur": (  # radius and sigma in pixels
        ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    ),
    "zoom_blur": (  # number of zooms (numpy rounds some of the authors' ranges up by one), step between them, from 1
        ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
        ((7, 0.01), (12, 0.01), (16, 0.01), (21, 0.01), (26, 0.01)),
        ((12, 0.01), (16, 0.01), (11, 0.02), (13, 0.02), (11, 0.03)),
    ),
    "snow": (  # flakes: mean, deviation, size in pixels, threshold; radius and sigma of their fall; weight of the image
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    "frost": (  # weights of the image and of the frost
        ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        ((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)),
        ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    ),
    "fog": (  # thickness; how fast its detail fades from octave to octave
        ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    ),
    "brightness": (  # added to the value of HSV
        ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)),
        ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
        ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,)),
    ),
    "contrast": (  # what is left of it
        ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)),
        ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
        ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,)),
    ),
    "elastic_transform": (  # of the side: displacement, sigma that smooths it, shift of the affine map's three points
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
        ((0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)),
        # The authors multiply by 244, where the side is 224.
        tuple(
            tuple(share * 244 / 224 for share in shares)
            for shares in ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
        ),
    ),
    "pixelate": (  # share of the side that is kept
        ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)),
        ((0.9,), (0.8,), (0.7,), (0.6,), (0.5,)),
        ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,)),
    ),
    "jpeg_compression": (  # quality
        ((80,), (65,), (58,), (50,), (40,)),
        ((65,), (58,), (50,), (40,), (25,)),
        ((25,), (18,), (15,), (10,), (7,)),
    ),
}
CORRUPTIONS = tuple(_CONSTANTS)


def strength(corruption: str, severity: int, side: int) -> tuple[Strength, float]:
    """(constants, scale) of a corruption at severity 1 to 5, side in pixels; `scale` multiplies lengths in pixels."""
    published = next((size for size in PUBLISHED_SIZES[:-1] if side < _USED_BELOW[size]), PUBLISHED_SIZES[-1])
    constants = _CONSTANTS[corruption][PUBLISHED_SIZES.index(published)][severity - 1]
    return constants, max(side, PUBLISHED_SIZES[0]) / published
