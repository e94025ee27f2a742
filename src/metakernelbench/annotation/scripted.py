"""A stand-in for an annotating model: an OpenAI-compatible server on the loopback address that replies from a file.

It is the provider's side only: instruction, schema, checks, retries and store are the real ones. `scripted/NAME` on the
command line, with a file of replies:

    [[reply]]
    question = "skill"             # only to this question; all three where it is left out
    contains = "Paged decode"      # only where the data holds these words; every request where it is left out
    labels = [{ category = "workload_fact", quote = "The last page is ragged", supported = false }]

    [[reply]]
    question = "uptake"
    uptake = [{ category = "workload_fact", uptake = "followed_fully", evidence = "masked the last page" }]
    propagated = []

    [[reply]]
    question = "cause"
    causes = [{ step = "toolchain_friction", evidence = "does not compile" }]

or, to misbehave, `raw` (a reply sent as it is), `cut = true` (said to have become too long) or `http_error` (a status
code); `times` says how often a reply is given
before the next one that fits is looked for. Where none fits the server answers 404, which ends the run.

An `uptake` entry may leave out `evidence`; an uptake reply is cut down to the categories that are asked for, so that
one reply serves several skills. Everything else is sent as it is written.
"""

from __future__ import annotations

import json
import secrets
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from metakernelbench.annotation.labels import Question
from metakernelbench.errors import SpecError
from metakernelbench.files import read_text, why_unread

if TYPE_CHECKING:
    from aiohttp import web

_HINT = "examples/demo/annotations.toml shows how they are written"


class Reply(BaseModel):
    """One prepared reply."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: Question | None = None
    contains: str = ""
    labels: tuple[dict[str, Any], ...] | None = None
    uptake: tuple[dict[str, Any], ...] | None = None
    propagated: tuple[dict[str, Any], ...] = ()
    causes: tuple[dict[str, Any], ...] | None = None
    raw: str | None = None
    http_error: int | None = Field(default=None, ge=400, le=599)
    cut: bool = False
    times: int | None = Field(default=None, ge=1)

    def fits(self, question: str, data: str) -> bool:
        return self.question in (None, question) and self.contains in data

    def text(self, allowed: dict[str, list[str]]) -> str:
        """What the model says."""
        if self.raw is not None:
            return self.raw
        if self.labels is not None:
            return json.dumps({"labels": self.labels})
        if self.causes is not None:
            return json.dumps({"causes": self.causes})
        asked = allowed.get("category", [])
        uptake = [{"evidence": None} | entry for entry in self.uptake or () if entry.get("category") in asked]
        return json.dumps({"uptake": uptake, "propagated": self.propagated})


class _Replies(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    reply: tuple[Reply, ...]


def read_replies(path: Path) -> tuple[Reply, ...]:
    """The replies in a file. Raises `SpecError`."""
    try:
        return _Replies.model_validate(tomllib.loads(read_text(path))).reply
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SpecError(f"{path}: {where}: {first['msg']}", hint=_HINT) from error
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"cannot read the replies in {path}: {why_unread(error, path)}", hint=_HINT) from error


@dataclass
class ScriptedAnnotator:
    """Serves prepared replies to whoever asks under `api_base`, and remembers what it was sent."""

    replies: tuple[Reply, ...]
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The body of every request, in the order of arrival."""
    api_base: str = ""
    _given: dict[int, int] = field(default_factory=dict[int, int])

    async def answer(self, request: web.Request) -> web.Response:
        from aiohttp import web

        body = await request.json()
        self.requests.append(body)
        schema = body["response_format"]["json_schema"]
        reply = self._next(schema["name"].removesuffix("_labels"), str(body["messages"][1]["content"]))
        if reply is None:
            return web.json_response({"error": {"message": "no prepared reply fits this request"}}, status=404)
        if reply.http_error is not None:
            return web.json_response({"error": {"message": "prepared failure"}}, status=reply.http_error)
        text = reply.text(_allowed(schema["schema"]))
        return web.json_response(_completion(body, text, "length" if reply.cut else "stop"))

    def _next(self, question: str, data: str) -> Reply | None:
        for index, reply in enumerate(self.replies):
            given = self._given.get(index, 0)
            if reply.fits(question, data) and (reply.times is None or given < reply.times):
                self._given[index] = given + 1
                return reply
        return None


def _allowed(schema: dict[str, Any]) -> dict[str, list[str]]:
    """Field → the words that the schema allows for it."""
    return {
        name: entry["enum"]
        for part in schema.get("$defs", {}).values()
        for name, entry in part.get("properties", {}).items()
        if "enum" in entry
    }


def _completion(body: dict[str, Any], text: str, ended: str) -> dict[str, Any]:
    prompt = sum(len(message["content"]) for message in body["messages"]) // 4
    return {
        "id": f"scripted-{secrets.token_hex(6)}",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [{"index": 0, "finish_reason": ended, "message": {"role": "assistant", "content": text}}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": len(text) // 4,
            "total_tokens": prompt + len(text) // 4,
        },
    }


@asynccontextmanager
async def serving(replies: tuple[Reply, ...]) -> AsyncIterator[ScriptedAnnotator]:
    """A running stand-in, under a path that nobody else on the machine can guess."""
    from aiohttp import web

    model, secret = ScriptedAnnotator(replies), secrets.token_urlsafe(16)
    app = web.Application(client_max_size=2**26)
    app.router.add_post(f"/{secret}/v1/chat/completions", model.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        model.api_base = f"http://127.0.0.1:{port}/{secret}/v1"
        yield model
    finally:
        await runner.cleanup()
