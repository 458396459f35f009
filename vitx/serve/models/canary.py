"""The canary: a few fixed images, run when a model is loaded and again while it serves, to see if its logits change."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vitx.core.bundle import Bundle
from vitx.core.certificate import Certificate, Verdict
from vitx.core.console import log
from vitx.core.errors import CheckFailed
from vitx.core.preprocess import UInt8Array
from vitx.core.tolerance import SHARE_OF_STD
from vitx.runtimes.session import Session, SessionClosed, image_shape

if TYPE_CHECKING:  # prometheus_client is no package of the base, where `vitx bench` runs
    from vitx.serve.observe.metrics import Metrics

Judged = Certificate | Verdict | None
IMAGES = 4
_PATCHES = 4  # along each side: an image is a blurred grid of random colours; noise is nothing models were made for
_SHARE_OF_STD = 1e-3  # allowed error in standard deviations of the logits, for float32 without a certificate


def canary_images(shape: Sequence[int], count: int = IMAGES) -> UInt8Array:
    """Return uint8 (count, *shape), the same on every machine; `shape` is (height, width, 3)."""
    colours = np.random.default_rng(0).integers(0, 256, (count, _PATCHES, _PATCHES, 3), dtype=np.uint8)
    size, kind = (shape[1], shape[0]), Image.Resampling.BILINEAR
    return np.stack([np.asarray(Image.fromarray(image).resize(size, kind)) for image in colours])


class Canary:
    """The logits of a session for the canary images when its bundle was first loaded, and what runs it."""

    def __init__(
        self, bundle: Bundle, judged: Judged, session: Session, max_batch: int, known: "Canary | None" = None
    ) -> None:
        """Run the session; raise CheckFailed if its logits are not finite, depend on the batch size, or changed.

        judged: how far logits may be off; the verdict of what runs, which may be coarser than the bundle's graph.
        known: of the same bundle as it serves; its logits are the measure, or a load would make drifted ones right.
        """
        self._sessions = dict.fromkeys((session.under_load, session))
        self._images = canary_images(image_shape(bundle), min(IMAGES, max_batch))
        self._runtime = session.describe()
        self._logits = session.infer(self._images)
        if not np.isfinite(self._logits).all():
            raise CheckFailed(f"the canary batch of {bundle.path} has logits that are not finite")
        usual = SHARE_OF_STD.get(bundle.manifest.precision, _SHARE_OF_STD) * float(self._logits.std())
        self._allowed = usual if judged is None else judged.max_logit_error_allowed
        alone = session.infer(self._images[:1])
        # Either of the two may be off by what is allowed; alone it may be NaN too.
        if not (moved := float(np.abs(alone - self._logits[:1]).max())) <= 2 * self._allowed:
            found = f"logits that move by {moved:.3g} with its neighbours in the batch"
            allowed = f"at most {2 * self._allowed:.3g} is allowed"
            raise CheckFailed(f"the canary image of {bundle.path} has {found}: {allowed}")
        if known is not None and known._runtime == self._runtime:
            self._logits = known._logits
        if (fault := self.fault()) is not None:
            raise CheckFailed(f"{bundle.path}: {fault}")

    def fault(self) -> str | None:
        """Run the images again, alone and as under load; return what changed, None if nothing did."""
        return next(filter(None, map(self._fault_of, self._sessions)), None)

    def _fault_of(self, session: Session) -> str | None:
        try:
            logits = session.infer(self._images)
            provider = session.describe()["provider"]
        except SessionClosed:  # unloaded meanwhile
            return None
        except Exception as error:  # noqa: BLE001 - whatever the runtime raises is reported
            return f"the canary batch failed: {error}"
        if provider != (was := self._runtime["provider"]):
            return f"the provider is {provider} and was {was}"
        drift = float(np.abs(logits - self._logits).max())
        moved = f"logits of the canary batch moved by {drift:.3g}: at most {self._allowed:.3g} is allowed"
        return None if drift <= self._allowed else moved


async def replay_once(models: Iterable[Any], metrics: "Metrics") -> None:
    """Run the canary of every ServedModel, one after another; set its `fault`, count and log changes."""
    for model in list(models):
        fault = await asyncio.to_thread(model.canary.fault)
        metrics.canaries.labels(*model.key, "pass" if fault is None else "fail").inc()
        was, model.fault = model.fault, fault
        if (fault is None) is not (was is None):
            found = "ready again" if fault is None else f"not ready: {fault}"
            log(f"vitx: model '{model.key[0]}' version {model.key[1]} is {found}")
            if model.cache is not None:
                await model.cache.forget()  # before the fault was noticed answers may have been wrong
