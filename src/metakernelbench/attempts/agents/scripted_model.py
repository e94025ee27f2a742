"""A stand-in for a model provider: an OpenAI-compatible server on the loopback address that replays prepared turns.

It is the provider's side only. The agent that talks to it is the real one, with its prompts, its parser, its retries
and its terminal. What the stand-in "knows" is the agent's last message, so that a turn can wait for something to appear
on the screen. One server serves one attempt, under a path that nobody else on the machine can guess.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import secrets
import shlex
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self

from metakernelbench.attempts.agents.script import Script, Turn

_LOOK_AGAIN_S = 0.5
_LONGEST_LOOK_S = 5.0
_IDLE_S = 2.0
_MARK = "END_OF_FILE"
_UNSAFE_TO_TYPE = re.compile(r"\t|![^ \n=(]|^" + _MARK + "$", re.MULTILINE)
"""What an interactive shell would change while it is typed: tabs complete words, `!x` recalls history."""


@dataclass
class ScriptedModel:
    """Serves the turns of one script, in order, to whoever asks under `api_base`."""

    script: Script
    _turns: list[Turn] = field(init=False)
    _awaited: Turn | None = field(default=None, init=False)
    _awaited_since: float = field(default=0.0, init=False)
    _errors_left: int = field(default=0, init=False)
    _last_prompt_tokens: int = field(default=0, init=False)
    _server: asyncio.Server | None = field(default=None, init=False)
    _secret: str = field(default_factory=lambda: secrets.token_urlsafe(16), init=False)

    def __post_init__(self) -> None:
        self._turns = list(self.script.all_turns())

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**24)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.close()

    @property
    def api_base(self) -> str:
        """The URL to give to an OpenAI client."""
        assert self._server is not None, "used outside of `async with`"
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/{self._secret}/v1"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = re.search(r"(?im)^content-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b"{}"
            status, answer = await self._answer(head.split(" ", 2)[1], json.loads(body))
            data = json.dumps(answer).encode()
            writer.write(
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
                + data
            )
            await writer.drain()
        writer.close()

    async def _answer(self, path: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path != f"/{self._secret}/v1/chat/completions":
            return HTTPStatus.NOT_FOUND, {"error": {"message": f"nothing is served at {path}"}}
        messages = request["messages"]
        turn = self._next_turn(str(messages[-1]["content"]))
        await asyncio.sleep(turn.think)
        if turn.http_error is not None:
            return turn.http_error, {"error": {"message": "prepared failure", "code": turn.http_error}}
        return HTTPStatus.OK, self._completion(request, turn.raw if turn.raw is not None else _reply(turn))

    def _next_turn(self, seen: str) -> Turn:
        """The turn to play now, given what the agent saw last."""
        if self._awaited is not None:
            waited = time.monotonic() - self._awaited_since
            if not _has_come(self._awaited, seen) and waited < self._awaited.within:
                return Turn(say="Wait for it.", wait=min(max(_LOOK_AGAIN_S, waited / 4), _LONGEST_LOOK_S))
            self._awaited = None
        if not self._turns:
            return self._last_turn()
        turn = self._turns[0]
        if turn.times > 1:
            self._turns[0] = turn.model_copy(update={"times": turn.times - 1})
        else:
            self._turns.pop(0)
        if turn.until is not None:
            self._awaited, self._awaited_since = turn, time.monotonic()
        return turn

    def _last_turn(self) -> Turn:
        match self.script.ending:
            case "complete":
                return Turn(raw=_json_reply("The work is done.", [], complete=True))
            case "exit":
                return Turn(say="Leave.", run="exit", wait=0.5)
            case "wait":
                return Turn(say="Wait.", wait=_IDLE_S)

    def _completion(self, request: dict[str, Any], content: str) -> dict[str, Any]:
        prompt_tokens = sum(len(str(message["content"])) for message in request["messages"]) // 4
        cached, self._last_prompt_tokens = min(self._last_prompt_tokens, prompt_tokens), prompt_tokens
        return {
            "id": f"scripted-{secrets.token_hex(6)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.get("model", "scripted"),
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}},
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(content) // 4,
                "total_tokens": prompt_tokens + len(content) // 4,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }


def _has_come(turn: Turn, seen: str) -> bool:
    """Whether what the turn waits for is on the screen. Where the command shows, what stands above it is older."""
    since = seen.rpartition(f"{turn.run}\n")[2] if turn.run else seen
    return re.search(turn.until or "", since, re.MULTILINE) is not None


def _reply(turn: Turn) -> str:
    commands = [(_written(name, text), 0.1) for name, text in turn.write.items()]
    if turn.run is not None:
        commands.append((turn.run + "\n", turn.wait))
    elif not commands:
        commands.append(("", turn.wait))
    return _json_reply(turn.say, commands, complete=False)


def _json_reply(say: str, commands: list[tuple[str, float]], *, complete: bool) -> str:
    reply = {
        "analysis": say,
        "plan": "",
        "commands": [{"keystrokes": keys, "duration": duration} for keys, duration in commands],
        "task_complete": complete,
    }
    return json.dumps(reply, indent=1)


def _written(name: str, text: str) -> str:
    """Keystrokes that write a file with a here-document, as text where a shell types it unchanged, else as base64."""
    if _UNSAFE_TO_TYPE.search(text) or not text.endswith("\n"):
        lines = base64.encodebytes(text.encode()).decode()
        return f"base64 -d > {shlex.quote(name)} <<'{_MARK}'\n{lines}{_MARK}\n"
    return f"cat > {shlex.quote(name)} <<'{_MARK}'\n{text}{_MARK}\n"
