"""The parts of docs/grading.md that repeat facts from the code, made from the code.

    python -m metakernelbench.grading.page          # write them into the page

A part lies between `<!-- NAME: ... -->` and `<!-- end of NAME -->`. What is between is replaced, the rest is written by
hand. Sentences about fields come from the text under the field.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from metakernelbench.grading import codes, redteam, threats
from metakernelbench.grading.contract import CONTRACT, Contract
from metakernelbench.grading.isolation import LIMITS, Limits
from metakernelbench.grading.verdict import Stage

PAGE = Path(__file__).parents[3] / "docs" / "grading.md"
_PART = re.compile(r"(<!-- (\w+): made by [^\n]* -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def rendered(page: str) -> str:
    """The page with every generated part as it should be now."""
    makers = {"contract": contract, "stages": stages, "limits": limits, "codes": code_tables, "threats": threat_tables}
    found = [name for _, name, _ in _PART.findall(page)]
    if sorted(found) != sorted(makers):
        raise ValueError(f"the page has the parts {found}; it should have {list(makers)}")
    return _PART.sub(lambda part: f"{part[1]}\n" + "\n".join(makers[part[2]]()) + f"\n\n{part[3]}", page)


def contract() -> Iterator[str]:
    """The contract's numbers."""
    yield from _table_head("value", "name", "what")
    told = documentation(Contract)
    for name, value in dataclasses.asdict(CONTRACT).items():
        yield f"| {value:,g} | `{name}` | {told[name]} |" if value < 1e5 else f"| {value:,} | `{name}` | {told[name]} |"


def stages() -> Iterator[str]:
    """The stages in order."""
    yield from _table_head("stage", "what happens")
    told = documentation(Stage)
    for stage in Stage:
        yield f"| `{stage}` | {told[stage.name]} |"


def limits() -> Iterator[str]:
    """What protects the machine."""
    yield from _table_head("limit", "of what")
    told = documentation(Limits)
    for name, value in dataclasses.asdict(LIMITS).items():
        yield f"| {_amount(name, value)} | {told[name]} |"


def code_tables() -> Iterator[str]:
    """Every code with its sentence, by what finds it."""
    yield from _table_head("code", "meaning")
    for code, sentence in codes.CODES.items():
        yield f"| `{code}` | {sentence} |"


def threat_tables() -> Iterator[str]:
    """Every family with its exploits and the codes that meet them, or why there are none."""
    exploits: dict[str, list[str]] = defaultdict(list)
    for path in sorted(redteam.EXPLOITS.glob("*.py")):
        sample = redteam.read(path)
        where = "" if "cpu" in sample.devices else ", on a GPU"
        exploits[sample.family].append(f"`{path.name}` ({' '.join(sample.expected)}{where})")
    for group, title in threats.GROUPS.items():
        yield f"**{group}: {title}**"
        yield ""
        yield from _table_head(
            "family", "what is tried", "exploits and the codes that meet them, or why there are none"
        )
        for family, tried in threats.FAMILIES.items():
            if family[0] == group:
                yield f"| {family} | {tried} | {', '.join(exploits[family]) or threats.WITHOUT_EXPLOIT[family]} |"
        yield ""


def documentation(described: type) -> dict[str, str]:
    """Field or member → the text under it in the source of the class, on one line and fit for a table."""
    told: dict[str, str] = {}
    body = ast.parse(inspect.getsource(described)).body[0]
    assert isinstance(body, ast.ClassDef)
    name = ""
    for statement in body.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                told[name] = " ".join(text.split()).replace("|", "\\|")  # a bar would end a table's cell
    return told


def _amount(name: str, value: int) -> str:
    if "bytes" not in name:
        return str(value)
    return f"{value >> 30} GB" if value >= 1 << 30 else f"{value >> 20} MB"


def _table_head(*titles: str) -> Iterator[str]:
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
