"""A record as it lies in the database: JSON in which every large text is a reference to an artifact.

A reference is the object `{"$artifact": digest}`; a trajectory, which is JSON itself, is `{"$artifact_json": digest}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from metakernelbench.attempts.record import AttemptRecord
from metakernelbench.store.artifacts import Artifacts, digest_of

_LARGE = 2000
"""Characters above which a text moves into an artifact."""
_TEXT, _JSON = "$artifact", "$artifact_json"


def pack(record: AttemptRecord, put: Callable[[str], str]) -> str:
    """The JSON of a record, its large texts handed to `put`, which gives their digests."""
    data = record.model_dump(mode="json")
    if record.trajectory is not None:
        data["trajectory"] = {_JSON: put(json.dumps(data["trajectory"]))}
    return json.dumps(_without_large_texts(data, put))


def unpack(text: str, artifacts: Artifacts) -> AttemptRecord:
    """The inverse of `pack`."""
    return AttemptRecord.model_validate(_with_large_texts(json.loads(text), artifacts))


def outline(text: str) -> AttemptRecord:
    """A record without its large texts: each is replaced by its digest, so that equal ones stay equal, and there is no
    trajectory. Reads no artifact."""
    data = json.loads(text) | {"trajectory": None}
    return AttemptRecord.model_validate(_with_digests(data))


def _with_digests(value: Any) -> Any:
    match value:
        case {"$artifact": str(digest), **rest} if not rest:
            return digest
        case dict():
            return {key: _with_digests(item) for key, item in value.items()}
        case list() if value and isinstance(value[0], dict):
            return [_with_digests(item) for item in value]
    return value


def digest_of_part(packed: str, name: str) -> str | None:
    """Digest of one of a packed record's texts, None where it has none. Reads no artifact."""
    match json.loads(packed)[name]:
        case {"$artifact": str(digest)} | {"$artifact_json": str(digest)}:
            return digest
        case str(text):
            return digest_of(text)
    return None


def part(packed: str, name: str, artifacts: Artifacts) -> str | None:
    """One of a packed record's texts, a trajectory as JSON; None where it has none."""
    match json.loads(packed)[name]:
        case {"$artifact": str(digest)} | {"$artifact_json": str(digest)}:
            return artifacts.get(digest)
        case str(text):
            return text
    return None


def _without_large_texts(value: Any, put: Callable[[str], str]) -> Any:
    match value:
        case str() if len(value) > _LARGE:
            return {_TEXT: put(value)}
        case dict():
            return {key: _without_large_texts(item, put) for key, item in value.items()}
        case list():
            return [_without_large_texts(item, put) for item in value]
    return value


def _with_large_texts(value: Any, artifacts: Artifacts) -> Any:
    match value:
        case {"$artifact": str(digest), **rest} if not rest:
            return artifacts.get(digest)
        case {"$artifact_json": str(digest), **rest} if not rest:
            return json.loads(artifacts.get(digest))
        case dict():
            return {key: _with_large_texts(item, artifacts) for key, item in value.items()}
        case list():
            return [_with_large_texts(item, artifacts) for item in value]
    return value
