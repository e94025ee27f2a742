"""Whether a skill keeps the form that the instruction asks for: prose, without code, commands, or instructions for a
programming interface; where a structured skill is asked for, also its sections and items. Counted by rule; no model is
asked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from metakernelbench.annotation.statements import Part, parts

_SPAN = re.compile(r"(?<!`)(`{1,2})(?!`)(.+?)\1(?!`)")
_CODE_LINE = re.compile(
    r"^(?:(?:async\s+)?def \w+\(|class \w+[(:]|import \w+(?:[. ,]|$)|from [\w.]+ import |@\w+(?:\.\w+)+|"
    r"(?:for|while|if|elif|with)\b.*:\s*$|return [\w(\[]|#include\b|[\w.\[\], ]+ [-+*/|&]?= ?\w[\w.]*[(\[]|.*[;{]\s*$)"
)
_COMMAND = re.compile(
    r"^(?:\$ |% |> |# )?(?:sudo |env )?"
    r"(?:task (?:submit|status)|mkb |python3? |pip |uv |git |cat |ls |cd |grep |sed |nvcc|nsys|ncu|nvidia-smi|"
    r"export \w+=|pytest|make |bash |sh |\./\w)"
)
_API = re.compile(
    r"(?<![\w./])@?(?:torch|triton|tl|cute|cutlass|T|tirx|tir|tvm|nvgpu|cuda|cooperative_groups)(?:\.\w+)+(?!\.\w)"
)
_FILE = re.compile(r"\.(?:py|md|txt|toml|json|so|cu|sh)$")


SECTIONS = ("Findings", "Division of work", "What failed", "Where it applies", "Open questions")
"""The headings of a structured skill, in their order."""
_ITEM = re.compile(r"^[ ]{0,3}[-*+] +(.*(?:\n(?![ ]{0,3}[-*+#]|\s*\n).*)*)", re.MULTILINE)
_ENDS_WITH_EVIDENCE = re.compile(r"\([^()]*(?:\([^()]*\)[^()]*)*\)[.!]?\s*$")
_NOTHING = re.compile(r"[\"“']?nothing[\"”']?[.!]?\s*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class FormatCheck:
    """What of the requested form a skill keeps, and how long it is."""

    words: int
    headings: int
    statements: int
    """Sentences, items and table rows."""
    code_lines: int
    """Lines in code blocks, and lines outside of them that read as code."""
    commands: int
    """Command lines, in code blocks, in code spans or on lines of their own."""
    api_names: tuple[str, ...]
    """Names of a programming interface that are mentioned, each once: `tl.load`, `T.alloc_buffer`."""

    @property
    def kept(self) -> bool:
        """Whether it holds no code, no command and no name of a programming interface."""
        return not (self.code_lines or self.commands or self.api_names)


def check_format(skill: str) -> FormatCheck:
    """Count what the requested form leaves out."""
    found = parts(skill)
    prose = [part for part in found if part.kind != "code"]
    blocks = [line for part in found if part.kind == "code" for line in _inside(part, skill)]
    lines = [line.strip() for part in prose for line in part.of(skill).splitlines()]
    spans = [span[2].strip() for part in prose for span in _SPAN.finditer(part.of(skill))]
    commands = [text for text in (*blocks, *lines, *spans) if _COMMAND.match(text)]
    code = [line for line in blocks if not _COMMAND.match(line)]
    code += [line for line in lines if _CODE_LINE.match(line) and not _is_prose(line)]
    return FormatCheck(
        words=len(skill.split()),
        headings=sum(part.kind == "heading" for part in found),
        statements=sum(part.kind in ("sentence", "row") for part in found),
        code_lines=len(code),
        commands=len(commands),
        api_names=tuple(sorted({name for name in _API.findall(skill) if not _FILE.search(name)})),
    )


@dataclass(frozen=True, kw_only=True)
class StructureCheck:
    """What of the structured form a skill keeps."""

    sections: int
    """Of the five headings, those that are there."""
    in_order: bool
    """Whether the headings of this level are these five, in their order."""
    items: int
    """List items, those that say `nothing` left out."""
    with_evidence: int
    """Items that end with something in parentheses."""

    @property
    def kept(self) -> bool:
        return self.in_order and self.with_evidence == self.items


def check_structure(skill: str) -> StructureCheck:
    """Hold a skill to the structured form."""
    found = [part.of(skill) for part in parts(skill) if part.kind == "heading"]
    headings = [text.lstrip("#").strip().rstrip("#").strip() for text in found if re.match(r"##(?!#)", text)]
    items = [item for item in _ITEM.findall(skill) if not _NOTHING.fullmatch(item)]
    return StructureCheck(
        sections=len(set(SECTIONS) & set(headings)),
        in_order=tuple(headings) == SECTIONS,
        items=len(items),
        with_evidence=sum(bool(_ENDS_WITH_EVIDENCE.search(item)) for item in items),
    )


def _inside(part: Part, skill: str) -> list[str]:
    """The lines of a code block that hold anything, without its fences."""
    lines = part.of(skill).splitlines()[1:]
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(("```", "~~~"))]


def _is_prose(line: str) -> bool:
    """`If the sum is taken first: ...` and `for each row, ...` begin like code and are sentences."""
    return len(line.split()) > 6 and not re.search(r"[()\[\]=]", line)
