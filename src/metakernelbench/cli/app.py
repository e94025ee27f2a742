"""Where the `mkb` command begins. `main` imports everything else, so that an interruption of the imports, too, ends as
any other does."""

from __future__ import annotations

import sys
from typing import Any


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line and leave with its exit code."""
    try:
        from metakernelbench.cli.root import run

        sys.exit(run(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        from metakernelbench.cli.output import ExitCode

        sys.exit(ExitCode.INTERRUPTED)
