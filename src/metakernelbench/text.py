"""Text that others wrote, made harmless to show; pages of which a part is generated."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """`text` without control characters (terminal escapes, bidirectional overrides, lone surrogates); newlines and tabs
    stay."""
    return _CONTROL.sub("�", text)


def replace_generated(page: str, generated: str, begin: str, end: str) -> str:
    """`page` with what stands between its marks replaced. Raises `ValueError` where a mark is missing."""
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page needs the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{generated}\n\n{end}{after}"
