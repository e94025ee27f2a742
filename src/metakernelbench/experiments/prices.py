"""What a model's tokens cost, from the price table that LiteLLM brings along.

The table is read as a file: importing LiteLLM takes seconds, and a look at the plan should not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_TABLE = "model_prices_and_context_window_backup.json"


@dataclass(frozen=True, kw_only=True)
class Price:
    """US dollars a token."""

    input: float
    cached: float
    """For input that is read from the provider's cache; as `input` where the table does not say."""
    output: float
    name: str
    """The table's entry, or `model_info` where the experiment itself gives the price."""

    def usd(self, input_tokens: float, cached_tokens: float, output_tokens: float) -> float:
        """The price of so many tokens; `input_tokens` include `cached_tokens`."""
        return (input_tokens - cached_tokens) * self.input + cached_tokens * self.cached + output_tokens * self.output


def price_of(model: str, model_info: Mapping[str, Any] | None = None) -> Price | None:
    """The price of a model, None where nobody states it. `model_info` is what the experiment says of its model.

    A model behind a gateway has its vendor's price: of `gateway/vendor/model`, the first of `gateway/vendor/model`,
    `vendor/model` and `model` that the table has.
    """
    if (stated := _price("model_info", model_info)) is not None:
        return stated
    parts = model.split("/")
    names = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((price for name in names if (price := _price(name, _table().get(name))) is not None), None)


def _price(name: str, entry: Mapping[str, Any] | None) -> Price | None:
    if entry is None:
        return None
    match entry:
        case {"input_cost_per_token": int() | float() as input, "output_cost_per_token": int() | float() as output}:
            cached = entry.get("cache_read_input_token_cost")
            read = cached if isinstance(cached, int | float) else input
            return Price(input=input, cached=read, output=output, name=name)
    return None


@cache
def _table() -> dict[str, dict[str, Any]]:
    """The table; empty where LiteLLM is not installed or keeps it elsewhere."""
    found = find_spec("litellm")
    if found is None or found.origin is None:
        return {}
    try:
        table: dict[str, dict[str, Any]] = json.loads((Path(found.origin).parent / _TABLE).read_text())
    except (OSError, ValueError):
        return {}
    return table
