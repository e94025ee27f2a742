"""The file that describes an experiment, resolved: past this module nothing has a default or a relative path any more.

    name = "demo"                        # of the experiment in its store
    design = "cross-dsl"                 # or several: ["cross-dsl", "retry"]
    problems = ["p28", "attention"]      # ids, families, or "all"
    dsls = ["cute", "tirx"]
    models = ["openrouter/vendor/model"]

`docs/experiments.md` shows every key. Paths are relative to the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from metakernelbench.attempts.settings import AttemptSettings
from metakernelbench.dsls.dsl import DSL_HINT, dsl_names
from metakernelbench.errors import SpecError, UnknownName
from metakernelbench.experiments.registry import design_names, load_design
from metakernelbench.experiments.toml_lines import line_of
from metakernelbench.files import read_text
from metakernelbench.judging.registry import check_judge, judge_names
from metakernelbench.problems.catalog import family_of, problem_ids


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"each named once; {', '.join(f'`{value}`' for value in twice)} is named twice")
    return values


type Name = Annotated[str, Field(pattern=r"^[^\s`]+$")]
type Names = Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(_distinct)]
type OneOrMore = Annotated[Names, BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


EXPERIMENT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
EXPERIMENT_NAME_IS = "up to 100 letters, digits, `.`, `_` and `-`, the first a letter or a digit"
"""What may be an experiment's name; it is also that of a folder."""


_AT_ONCE = 10_000
"""More than one runner can look after: a slip of the finger."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Concurrency(_Part):
    """How much goes on at once in one runner."""

    sandboxes: int = Field(default=2, ge=1, le=_AT_ONCE)
    """Attempts at once."""
    models: int | None = Field(default=None, ge=1, le=_AT_ONCE)
    """Attempts at once with one model, for providers that allow only so much; None: no bound of its own."""
    judges: int | None = Field(default=None, ge=1, le=_AT_ONCE)
    """Gradings at once; the rest wait. None: as many as the judge does at once, for `local` one a GPU."""


class Usage(_Part):
    """Tokens of one attempt, for the cost estimate of models of which none has finished yet.

    Assumed, not measured: forty turns with thirty thousand tokens of conversation each, four fifths of them read from
    the provider's cache.
    """

    input_tokens: int = Field(default=1_200_000, ge=0)
    """Sent to the model, those read from its cache included."""
    cached_tokens: int = Field(default=960_000, ge=0)
    """Of these, read from its cache."""
    output_tokens: int = Field(default=60_000, ge=0)
    """Written by the model, its reasoning included."""


class ExperimentSpec(_Part):
    """One experiment."""

    name: str = Field(pattern=EXPERIMENT_NAME, description=EXPERIMENT_NAME_IS)
    design: OneOrMore = Field(description="the name of a design, or a list of them")
    options: dict[str, dict[str, Any]] = Field(default={}, description="tables of designs' options, [options.NAME]")
    problems: Names = Field(description='a list of ids such as "p28" and families such as "moe", or "all"')
    dsls: Names = Field(description="a list of DSL names")
    models: Names = Field(description='a list of model names such as "openrouter/vendor/model"')
    replicates: int = Field(default=1, ge=1, le=1000)
    attempt: AttemptSettings = Field(default=AttemptSettings(), description="a table, [attempt]")
    judge: str = Field(default="local", description="the name of a judge")
    judge_options: dict[str, Any] = Field(default={}, description="a table of the judge's options, [judge_options]")
    concurrency: Concurrency = Field(default=Concurrency(), description="a table, [concurrency]")
    usage: Usage = Field(default=Usage(), description="a table, [usage]")
    store: str = Field(min_length=1, description="a folder, or the URL of a database")
    artifacts: str | None = None
    """The store's folder where `store` is a URL."""
    indifference_band: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """A paired ratio within this band of 1 is neutral."""


def load_spec(path: Path, *, store: str | None = None, model: str | None = None) -> ExperimentSpec:
    """Read an experiment file. What the command line gives (`store`, `model`) goes over the file's own values.

    Raises `SpecError`, which names the key, the line and what is allowed, or `UnknownName`.
    """
    text = _read(path)
    try:
        return _loaded(text, path, store, model)
    except RecursionError as error:
        raise SpecError(f"{path} holds tables or lists in one another too deeply to be read") from error


def _loaded(text: str, path: Path, store: str | None, model: str | None) -> ExperimentSpec:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} is not TOML: {error}", hint=_hint_for(str(error))) from error
    if model is not None:
        data["models"] = [model]
    try:  # strictly: a number in quotes is a mistake, not a number
        spec = ExperimentSpec.model_validate(_resolved(data, path), strict=True)
    except ValidationError as error:
        raise SpecError(_explain(error, text, path), hint="docs/experiments.md shows every key") from error
    if store is not None:
        spec = spec.model_copy(update={"store": store})
    _check_names(spec, text, path)
    return spec


def _hint_for(said: str) -> str:
    """What to do about a mistake in the TOML."""
    if said.startswith(("Cannot overwrite", "Cannot declare")):
        return "a key or a table stands there for the second time: keep one"
    return f"{'strings need quotes; ' if said.startswith('Invalid value') else ''}see examples/demo.toml"


def _read(path: Path) -> str:
    try:
        return read_text(path).removeprefix("\ufeff")  # the mark that some editors for Windows begin a file with
    except OSError as error:
        raise SpecError(
            f"cannot read {path}: {error.strerror}", hint="examples/demo.toml is a first experiment"
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _resolved(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The file's values with families spelt out, lists as tuples and paths made absolute."""
    resolved = dict(data)
    for key in ("design", "dsls", "models", "problems"):
        if isinstance(data.get(key), list):
            resolved[key] = tuple(data[key])
    if (problems := data.get("problems")) is not None:
        listed = [problems] if isinstance(problems, str) else problems
        once = isinstance(listed, list) and all(isinstance(item, str) and listed.count(item) == 1 for item in listed)
        if once:  # else it is a mistake, and told as it stands
            resolved["problems"] = tuple(dict.fromkeys(_expanded(listed)))
    folder = path.resolve().parent
    store = data.get("store", f"runs/{data.get('name')}")
    is_folder = isinstance(store, str) and store and "://" not in store
    resolved["store"] = str(_place_of(store, folder).resolve()) if is_folder else store
    if isinstance(data.get("artifacts"), str):
        resolved["artifacts"] = str(_place_of(data["artifacts"], folder).resolve())
    attempt = data.get("attempt")
    if isinstance(attempt, dict) and isinstance(attempt.get("script"), str):
        resolved["attempt"] = attempt | {"script": _place_of(attempt["script"], folder)}
    return resolved


def _place_of(name: str, folder: Path) -> Path:
    """A path of the file, of which `~` is the home folder as in a shell."""
    with suppress(RuntimeError):  # of a user whom nobody knows
        return folder / Path(name).expanduser()
    return folder / name


def _expanded(names: Iterable[str]) -> list[str]:
    """Ids for families and "all"; other names stay."""
    found: list[str] = []
    for name in names:
        if name == "all":
            found += problem_ids()
        else:
            found += problem_ids(name) if name in _families() else [name]
    return found


def _families() -> list[str]:
    return list(dict.fromkeys(family_of(id) for id in problem_ids()))


def _check_names(spec: ExperimentSpec, text: str, path: Path) -> None:
    _check_known("design", ["design"], spec.design, design_names(), text, path, hint="see `mkb designs list`")
    see = "see all of them with `mkb problems list`"
    _check_known("problem", ["problems"], spec.problems, [*problem_ids(), *_families(), "all"], text, path, hint=see)
    _check_known("DSL", ["dsls"], spec.dsls, dsl_names(), text, path, hint=DSL_HINT)
    _check_known("judge", ["judge"], [spec.judge], judge_names(), text, path, hint="docs/judges.md")
    _check_judge(spec, text, path)
    _check_options(spec, text, path)


def _check_judge(spec: ExperimentSpec, text: str, path: Path) -> None:
    try:
        check_judge(spec.judge, spec.judge_options)
    except UnknownName as error:
        error.message = f"{_place(path, line_of(text, ['judge_options', error.name]))}: {error.message}"
        raise


def _check_options(spec: ExperimentSpec, text: str, path: Path) -> None:
    for name in spec.options:
        if name not in spec.design:
            place = _place(path, line_of(text, ["options", name]))
            raise SpecError(f"{place}: [options.{name}] is for a design that `design` does not name")
    for name in spec.design:
        try:
            load_design(name).checked(spec.options.get(name, {}))
        except SpecError as error:
            error.message = f"{_place(path, line_of(text, ['options', name]))}: {error.message}"
            raise


def _check_known(
    what: str,
    key: list[str],
    names: Iterable[str],
    known: Iterable[str],
    text: str,
    path: Path,
    hint: str | None = None,
) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            error = UnknownName(what, name, known, hint=hint)
            error.message = f"{_place(path, line_of(text, key, value=name))}: {error.message}"
            raise error


def _place(path: Path, line: int | None) -> str:
    return str(path) if line is None else f"{path}, line {line}"


def _explain(error: ValidationError, text: str, path: Path) -> str:
    """One line a mistake, in the order of the file."""
    explained: dict[tuple[str, ...], tuple[int, str]] = {}
    for mistake in error.errors(include_url=False):
        keys = [part for part in mistake["loc"] if isinstance(part, str)]
        line = line_of(text, keys)
        # Of a list, the first mistake: without its wrong items it is also called too short.
        explained.setdefault(tuple(keys), (line or 0, f"{_place(path, line)}: {_what_is_wrong(keys, mistake)}"))
    return "\n".join(message for _, message in sorted(explained.values()))


def _what_is_wrong(keys: list[str], mistake: Mapping[str, Any]) -> str:
    name = f"`{'.'.join(keys)}`"
    owner, field = _owner(keys)
    if mistake["type"] == "extra_forbidden":
        unknown = UnknownName("key", keys[-1], owner.model_fields)
        table = f" of [{'.'.join(keys[:-1])}]" if keys[:-1] else ""
        return f"{unknown.message}; allowed{table}: {', '.join(f'`{key}`' for key in owner.model_fields)}"
    described = owner.model_fields[field].description if field in owner.model_fields else None
    if described and mistake["type"] == "string_type" and any(isinstance(part, int) for part in mistake["loc"]):
        return f"{name} holds {_shown(mistake['input'])}, which is not a name in quotes; allowed: {described}"
    if mistake["type"] == "missing":
        return f"{name} is missing; it is {described}"
    allowed = mistake["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if described and mistake["type"] != "value_error":
        allowed = described
    return f"{name} is {_shown(mistake['input'])}; allowed: {allowed}"


def _owner(keys: list[str]) -> tuple[type[BaseModel], str]:
    """The model that a key belongs to, and the key's name there."""
    owner: type[BaseModel] = ExperimentSpec
    for place, key in enumerate(keys[:-1]):
        table = owner.model_fields[key].annotation if key in owner.model_fields else None
        if not (isinstance(table, type) and issubclass(table, BaseModel)):
            return owner, keys[place]
        owner = table
    return owner, keys[-1] if keys else ""


def _shown(value: object) -> str:
    """A value as it stands in the file, shortened."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            shown = f'"{value}"'
        case tuple():
            shown = f"[{', '.join(_shown(item) for item in value)}]"
        case _:
            shown = str(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
