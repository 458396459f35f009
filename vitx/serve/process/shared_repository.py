"""A worker's model repository: what a client asks of one worker happens in all of them."""

import asyncio
import json
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from vitx.serve.errors import RequestError
from vitx.serve.models.loading import Loader
from vitx.serve.models.repository import Repository
from vitx.serve.models.served_model import ModelSet
from vitx.serve.observe.metrics import Metrics
from vitx.serve.process.siblings import Answer, Siblings, note_unloaded

_SECONDS = 600.0  # for a sibling to load a model; one that dies meanwhile ends the wait
_TELL_SECONDS = 5.0  # for one to hear of a refusal


class SharedRepository(Repository):
    """A Repository whose `load` and `unload` are of every worker.

    The asked worker goes first, alone: what it refuses changes nothing anywhere. Then the others follow, one after
    another. Workers that start later leave out what was unloaded. What one refuses is in the index of all.
    """

    def __init__(self, models: ModelSet, loader: Loader, metrics: Metrics, *, siblings: Siblings, **given: Any) -> None:
        """As `Repository`, and the worker's way to the others."""
        super().__init__(models, loader, metrics, **given)
        self._siblings = siblings
        self._under_way: set[asyncio.Task[None]] = set()

    def answers(self) -> dict[str, Answer]:
        """What other workers may ask of this one: the same, here."""
        return {"load": self._answer_load, "unload": self._answer_unload, "refused": self._answer_refused}

    async def load(self, name: str) -> None:
        """Raises what `Repository.load` does; 503 when another worker refuses what this one has loaded."""
        await self._everywhere("load", super().load(name), name)

    async def unload(self, name: str) -> None:
        await self._everywhere("unload", super().unload(name), name)

    async def _everywhere(self, what: str, here: Coroutine[Any, Any, None], name: str) -> None:
        """Do it here, then in the others; to its end, also when the client that asked is gone."""

        async def work() -> None:
            async with self._siblings.alone():
                try:
                    await here
                except RequestError:
                    await self._tell_refusals(name)
                    raise
                note_unloaded(self._siblings.folder, name, is_unloaded=what == "unload")
                await self._repeat(what, name)

        task = asyncio.create_task(work())
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        await asyncio.shield(task)

    async def load_all(self) -> None:
        """As `Repository.load_all`, in this worker: the signal for it goes to each."""
        for name in self._models.names:
            with suppress(RequestError):
                await super().load(name)

    async def _repeat(self, what: str, name: str) -> None:
        for index, data in (await self._siblings.ask_others(what, name, seconds=_SECONDS)).items():
            if error := json.loads(data)["error"]:
                raise RequestError(
                    f"worker {index}: {error}; other workers did {what} '{name[:80]}': ask again",
                    status=503,
                    reason="load_refused",
                    retry_after=1,
                )

    async def _tell_refusals(self, name: str) -> None:
        told = [[*key, text] for key, text in self._refusals.items() if key[0] == name]
        for refusal in told:
            await self._siblings.ask_others("refused", json.dumps(refusal), seconds=_TELL_SECONDS)

    async def _answer_refused(self, told: str) -> bytes:
        name, version, text = json.loads(told)
        self._refusals[name, version] = text
        return b"{}"

    async def _answer_load(self, name: str) -> bytes:
        return await _outcome(super().load(name))

    async def _answer_unload(self, name: str) -> bytes:
        return await _outcome(super().unload(name))


async def _outcome(work: Coroutine[Any, Any, None]) -> bytes:
    """What became of it, for the worker that asked; one that leaves, or does not serve the model, has done its part."""
    try:
        await work
    except RequestError as error:
        settled = error.reason in ("draining", "unknown_model")
        return json.dumps({"error": None if settled else str(error)}).encode()
    return json.dumps({"error": None}).encode()
