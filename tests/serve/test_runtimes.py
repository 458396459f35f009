import numpy as np
from bundle_fixture import NumpySession

from vitx.core.bundle import Bundle
from vitx.core.images import ImageSet
from vitx.serve.runtimes import load_session


def test_graph_equals_the_independent_function(tiny_bundle: Bundle, colours: ImageSet, reference: NumpySession) -> None:
    session = load_session(tiny_bundle, device="cpu", threads=1)
    images = next(colours.batches(tiny_bundle.manifest.preprocessing, 64))
    np.testing.assert_allclose(session.infer(images), reference.infer(images), atol=1e-5)
    assert tiny_bundle.require_certificate().verdict == "pass"
