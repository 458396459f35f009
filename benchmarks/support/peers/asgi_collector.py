"""The smallest server that batches: fifty lines of ASGI that answer what server.py asks, and check nothing.

MODEL=model.onnx uvicorn asgi_collector:app --lifespan off
"""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnxruntime

INSTANCES, MAX_BATCH, MAX_DELAY = 2, 32, 0.002
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = onnxruntime.InferenceSession(os.environ["MODEL"], options, providers=["CPUExecutionProvider"])
shape = (1, *session.get_inputs()[0].shape[1:])
threads = ThreadPoolExecutor(INSTANCES)
queue: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
collectors: list[asyncio.Task[None]] = []
NAMES = ((b"content-type", b"application/octet-stream"),)


async def collect() -> None:
    loop = asyncio.get_running_loop()
    while True:
        batch = [await queue.get()]
        end = loop.time() + MAX_DELAY
        try:
            while len(batch) < MAX_BATCH:
                waits = queue.empty()
                batch.append(await asyncio.wait_for(queue.get(), end - loop.time()) if waits else queue.get_nowait())
        except TimeoutError:
            pass
        images = np.concatenate([image for image, _ in batch])
        logits = (await loop.run_in_executor(threads, session.run, None, {"images": images}))[0]
        for (_, reply), row in zip(batch, logits, strict=True):
            reply.set_result(row)


async def app(scope: Any, receive: Any, send: Any) -> None:
    if not collectors:
        collectors.extend(asyncio.create_task(collect()) for _ in range(INSTANCES))
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message.get("more_body", False)
    if not body:  # are you there?
        return await reply_with(send, b"", 0)
    start = int(dict(scope["headers"])[b"inference-header-content-length"])
    reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    queue.put_nowait((np.frombuffer(body, np.uint8, offset=start).reshape(shape), reply))
    data = (await reply).tobytes()
    head = b'{"outputs":[{"name":"logits","parameters":{"binary_data_size":%d}}]}' % len(data)
    return await reply_with(send, head + data, len(head))


async def reply_with(send: Any, body: bytes, head: int) -> None:
    lengths = ((b"content-length", b"%d" % len(body)), (b"inference-header-content-length", b"%d" % head))
    await send({"type": "http.response.start", "status": 200, "headers": [*NAMES, *lengths]})
    await send({"type": "http.response.body", "body": body})
