"""The model repository of a worker: a client's load or unload is repeated in all workers."""

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from vitx.serve.errors import RequestError, unavailable
from vitx.serve.models.repository import Repository
from vitx.serve.process.siblings import Handler, Siblings

Work = Callable[[Repository, str], Awaitable[None]]  # Repository.load or .unload
_LOAD_SECONDS = 600.0  # for another worker to load a model; if it dies, the wait ends
_NOTIFY_SECONDS = 5.0  # for another worker to note a refusal


class SharedRepository(Repository):
    """A Repository whose `load` and `unload` apply to every worker, as docs/serving.md says (Management)."""

    def __init__(self, siblings: Siblings, *given: Any) -> None:
        """`siblings` reaches the other workers; `given`: as for `Repository`."""
        super().__init__(*given)
        self._siblings = siblings

    def handlers(self) -> dict[str, Handler]:
        """Answers to the questions that other workers ask this one."""
        asked = {"load": partial(self._answer, Repository.load), "unload": partial(self._answer, Repository.unload)}
        return {**asked, "refused": self._answer_refused}

    async def load(self, name: str) -> None:
        """Raises what `Repository.load` raises, and 503 if another worker refuses what this one has loaded."""
        await self._everywhere(Repository.load, name)

    async def unload(self, name: str) -> None:
        await self._everywhere(Repository.unload, name)

    async def _everywhere(self, work: Work, name: str) -> None:
        """Do it in this worker, then in the others."""
        async with self._siblings.exclusive():
            before, refused = [*self._models], None
            try:
                await work(self, name)
            except RequestError as refusal_here:
                refused = refusal_here
                for refusal in [[*key, text] for key, text in self._refusals.items() if key[0] == name]:
                    await self._siblings.ask_others("refused", json.dumps(refusal), seconds=_NOTIFY_SECONDS)
                if [*self._models] == before:
                    raise
            self._siblings.note_unloaded(name, is_unloaded=work is Repository.unload)
            for index, data in (await self._siblings.ask_others(work.__name__, name, seconds=_LOAD_SECONDS)).items():
                if refused is None and (error := json.loads(data)["error"]):
                    others = f"other workers did {work.__name__} '{name[:80]}': ask again"
                    raise unavailable(f"worker {index}: {error}; {others}", "load_refused")
            if refused is not None:
                raise refused

    async def _load_one(self, *bundle: Any) -> None:
        await super()._load_one(*bundle)  # also by `watch`
        self._siblings.note_loaded(*bundle[0])

    async def _answer_refused(self, refusal: str) -> bytes:
        name, version, text = json.loads(refusal)
        self._refusals[name, version] = text
        return b"{}"

    async def _answer(self, work: Work, name: str) -> bytes:
        """Return the error, or null, as JSON. A worker that drains or does not serve the model has no error."""
        error = None
        try:
            await work(self, name)
        except RequestError as refusal:
            error = None if refusal.reason in ("draining", "unknown_model") else str(refusal)
        return json.dumps({"error": error}).encode()
