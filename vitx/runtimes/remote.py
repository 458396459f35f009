"""A served model, asked over HTTP by the Open Inference Protocol v2 with Triton's binary tensors.

Protocol: github.com/triton-inference-server/server, docs/protocol/extension_binary_data.md.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, NonNegativeInt, ValidationError

from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError, VitxError, first_line
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.urls import http_opener, is_http, whole_body, without_password
from vitx.runtimes.session import LOGITS, Float32Array, Session, check_images

_DTYPES = {"FP16": "<f2", "FP32": "<f4"}
_JSON_LENGTH = "Inference-Header-Content-Length"
_TIMEOUT_SECONDS, _MOST_BYTES = 120.0, 2**28


class _Tensor(BaseModel):
    name: str
    datatype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.datatype} {list(self.shape)}"


class _Server(BaseModel):
    name: str
    version: str


class _Model(BaseModel):
    inputs: tuple[_Tensor, ...]
    outputs: tuple[_Tensor, ...]


class _Config(BaseModel):
    max_batch_size: NonNegativeInt = 0


class _Output(_Tensor):
    data: Any = None  # where the model's code answers in JSON, as most of KServe do; otherwise bytes follow


class _Reply(BaseModel):
    outputs: tuple[_Output, ...]


_ModelT = TypeVar("_ModelT", bound=BaseModel)


class RemoteSession(Session):
    """The model at a URL such as http://127.0.0.1:8000/v2/models/vit, of Triton, KServe or `vitx serve`.

    It takes images as a bundle does, uint8 (N, S, S, 3), or FP32 or FP16 (N, 3, S, S), for which they are normalised
    here. Its logits (N, classes), FP32 or FP16, are its only output, or the one called "logits".
    """

    artefacts = ()

    def __init__(self, url: str, preprocessing: Preprocessing, classes: int, token: bytes | None = None) -> None:
        """`token`: the bearer token that the server asks for, if any.

        Raises InputError for the URL of no model and for a model of other tensors, EnvironmentMissing where nothing
        answers, or something else.
        """
        super().__init__()
        address = re.fullmatch(r"(https?://[^@?#]+)/v2/models/[^/@?#]+(/versions/\d+)?/?", url)
        if address is None or not is_http(url):
            expected = "expected http://HOST:PORT/v2/models/NAME, or …/NAME/versions/N"
            raise InputError(f"'{without_password(url)}' is not the URL of a served model: {expected}")
        self.url, self._preprocessing, self._classes = url.rstrip("/"), preprocessing, classes
        self._opener, self._token = http_opener(), token
        self._server = self._read(_Server, f"{address[1]}/v2")
        model = self._read(_Model, self.url)
        self._input, self._output = self._image_tensor(model), self._logits_tensor(model)
        with suppress(InputError):  # an extension that not every server has
            self.max_batch = self._read(_Config, f"{self.url}/config").max_batch_size or None

    def describe(self) -> dict[str, Any]:
        return {"runtime": self._server.name, "version": self._server.version, "url": self.url}

    def _infer(self, images: UInt8Array) -> Float32Array:
        size = self._preprocessing.image_size
        check_images(images, (size, size, 3))
        tensor = self._tensor(images)
        given = {"name": self._input.name, "datatype": self._input.datatype, "shape": tensor.shape}
        sent = {"inputs": [{**given, "parameters": {"binary_data_size": tensor.nbytes}}]}
        wanted = {"outputs": [{"name": self._output.name, "parameters": {"binary_data": True}}]}
        header = json.dumps(sent | wanted).encode()
        about = {_JSON_LENGTH: str(len(header)), "Content-Type": "application/octet-stream"}
        reply, length = self._ask(f"{self.url}/infer", header + tensor.tobytes(), about)
        try:
            (output,) = _Reply.model_validate_json(reply[:length]).outputs
            binary = np.frombuffer(reply[length:], _DTYPES[output.datatype])
            with np.errstate(over="ignore"):  # what float32 cannot hold is infinite
                logits = np.asarray(binary if output.data is None else output.data, np.float32).reshape(output.shape)
            if logits.shape != (len(images), self._classes):
                raise ValueError(f"it is {output}")
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else first_line(error)
            what = f"no logits of {self._classes} classes for {len(images)} images ({why})"
            raise CheckFailed(f"the answer of {self.url} has {what}") from None
        return logits

    def _tensor(self, images: UInt8Array) -> npt.NDArray[Any]:
        """The images as the server takes them."""
        if self._input.datatype == "UINT8":
            return images
        mean, std = (np.array(triple, np.float32) for triple in (self._preprocessing.mean, self._preprocessing.std))
        normalised = (images.astype(np.float32) / 255 - mean) / std
        return normalised.transpose(0, 3, 1, 2).astype(_DTYPES[self._input.datatype])

    def _image_tensor(self, model: _Model) -> _Tensor:
        """Its input, if that takes any number of images of the reference's size."""
        size = self._preprocessing.image_size
        planar = (-1, 3, size, size)
        shapes = {"UINT8": (-1, size, size, 3), "FP32": planar, "FP16": planar}
        if len(model.inputs) == 1:
            given, shape = model.inputs[0], shapes.get(model.inputs[0].datatype, ())
            alike = [has in (-1, wants) for has, wants in zip(given.shape, shape, strict=False)]
            if [len(given.shape), len(shape)] == [4, 4] and all(alike):
                return given
        found = ", ".join(map(str, model.inputs)) or "nothing"
        kinds = f"UINT8 [-1, {size}, {size}, 3], FP32 or FP16 [-1, 3, {size}, {size}]"
        raise InputError(f"{self.url} takes {found}: expected the reference's images, {kinds}")

    def _logits_tensor(self, model: _Model) -> _Tensor:
        """Its output, if that can be logits."""
        found = [each for each in model.outputs if len(model.outputs) == 1 or each.name == LOGITS]
        numbers = (*found[0].shape, found[0].datatype) if found else ()
        if len(numbers) != 3 or numbers[1] not in (-1, self._classes) or numbers[2] not in _DTYPES:
            gives = ", ".join(map(str, model.outputs)) or "nothing"
            raise InputError(f"{self.url} gives {gives}: expected logits, FP32 or FP16 [-1, {self._classes}]")
        return found[0]

    def _read(self, kind: type[_ModelT], url: str) -> _ModelT:
        """What the server tells of itself or of a model."""
        try:
            reply, _ = self._ask(url)
            return kind.model_validate_json(reply)
        except CheckFailed as error:
            raise InputError(str(error)) from None
        except ValidationError as error:
            found = f"{reply[:80]!r}, in which {error.errors()[0]['msg']}"
            raise EnvironmentMissing(f"what answers at {url} speaks no Open Inference Protocol v2: {found}") from None

    def _ask(self, url: str, body: bytes | None = None, headers: Mapping[str, str] = {}) -> tuple[bytes, int]:
        """The reply to a GET, or to a POST of `body`, and how many bytes of it are JSON."""
        bearer = {"Authorization": f"Bearer {self._token.decode()}"} if self._token else {}
        try:
            # Names may have spaces, or letters of any script; what is percent-encoded already stays.
            request = Request(quote(url, safe="%:/?#[]@!$&'()*+,;="), body, {**headers, **bearer})
            try:
                with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
                    if len(reply := whole_body(answer, _MOST_BYTES)) > _MOST_BYTES:
                        raise CheckFailed(f"the answer of {url} is longer than {_MOST_BYTES} bytes")
                    return reply, int(answer.headers.get(_JSON_LENGTH, len(reply)))
            except HTTPError as error:
                with error:
                    words = error.read(1000).decode(errors="replace").strip()
                if error.code in (401, 403):
                    raise InputError(f"{url} asks for a token, or another one: give it with --token-file") from None
                raise CheckFailed(f"{url} answers {error.code}: {words:.300}") from None
        except VitxError:  # which may be a ValueError too
            raise
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise EnvironmentMissing(f"no whole HTTP answer from {url}: {reason}") from None
