"""How far an annotation has come: a bar at a terminal, one line a stage elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from metakernelbench.text import harmless

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from metakernelbench.annotation.run import Todo
    from metakernelbench.annotation.stages import Stage


class Shown:
    """The progress of one run, on a console for people."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID | None = None
        self._failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, stage: Stage) -> None:
        """A stage begins: what of it is answered, what is asked now."""
        answered = stage.needed - len(stage.items)
        self._task = self._progress.add_task(stage.name, total=stage.needed, completed=answered)
        self._say(f"{stage.name}: {len(stage.items)} questions to ask, {answered} answered before")

    def done(self, item: Todo, reason: str | None) -> None:
        """One question has its answer, or none."""
        if self._task is not None:
            self._progress.advance(self._task)
        if reason is not None:
            self._failed += 1
            self._say(f"no answer to a question about {item.asked.question} {item.asked.subject[:12]}: {reason}")

    def _say(self, text: str) -> None:
        self._progress.console.print(harmless(text), markup=False, soft_wrap=True)
