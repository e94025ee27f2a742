"""An experiment file made ready for this machine, the same way for every command that reads one."""

from __future__ import annotations

from pathlib import Path

from metakernelbench.attempts.sandbox.available import sandbox_available
from metakernelbench.attempts.settings import SCRIPTED
from metakernelbench.dsls import dsl as dsls
from metakernelbench.errors import SpecError, UserError
from metakernelbench.experiments.spec import ExperimentSpec, load_spec
from metakernelbench.store.store import Store


def prepared(
    path: Path, *, store: str | None = None, model: str | None = None
) -> tuple[ExperimentSpec, tuple[str, ...]]:
    """The experiment as it can run here, and what has to be said about it, a sentence each."""
    spec = load_spec(path, store=store, model=model)
    _check_devices(spec, path)
    spec, replaced = _with_a_sandbox(spec)
    return spec, tuple(note for note in (_rehearsal(spec), replaced) if note)


def open_store(spec: ExperimentSpec, *, create: bool = False) -> Store:
    """The store that an experiment names."""
    folder = None if spec.artifacts is None else Path(spec.artifacts)
    return Store.open(spec.store, folder=folder, create=create)


def is_rehearsal(spec: ExperimentSpec) -> bool:
    """Whether every model stands for prepared turns."""
    return all(model.startswith(SCRIPTED) for model in spec.models)


def _rehearsal(spec: ExperimentSpec) -> str | None:
    if not is_rehearsal(spec):
        return None
    place = "a CPU" if spec.attempt.device == "cpu" else "a GPU"
    return (
        "This is a rehearsal, not a result: the model's turns are prepared. The kernels are graded for real, "
        f"on {place}, at the {spec.attempt.workload} workload."
    )


def _check_devices(spec: ExperimentSpec, path: Path) -> None:
    for name in spec.dsls:
        devices = dsls.load(name).devices
        if spec.attempt.device not in devices:
            raise SpecError(
                f"{path}: `{name}` does not run on the device `{spec.attempt.device}`",
                hint=f"set `device` of [attempt] to {' or '.join(sorted(devices))}, or choose other `dsls`",
            )


def _with_a_sandbox(spec: ExperimentSpec) -> tuple[ExperimentSpec, str | None]:
    """Prepared turns may run without a sandbox where there is none; a model may not."""
    if spec.attempt.sandbox != "bubblewrap" or (why := sandbox_available()) is None:
        return spec, None
    if not is_rehearsal(spec):
        raise UserError(f"the bubblewrap sandbox cannot be had: {why}", hint="`mkb doctor` says what is missing")
    settings = spec.attempt.model_copy(update={"sandbox": "host"})
    return spec.model_copy(update={"attempt": settings}), (
        f"No sandbox here ({why}): the prepared turns run without isolation, in the `host` sandbox."
    )
