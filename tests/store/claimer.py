"""A process of its own that opens a store, claims what it can, and prints it: `claimer.py LOCATION FOLDER KEY...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from metakernelbench.store.store import Store


def main(location: str, folder: str, *keys: str) -> None:
    sys.stdin.readline()  # all start together
    with Store.open(location, folder=Path(folder), create=True) as store, store.leases.owner() as owner:
        claimed = [key for key in keys if store.leases.claim("shared", key, owner)]
        print(json.dumps({"owner": owner.name, "claimed": claimed}), flush=True)
        sys.stdin.readline()  # until then its leases are alive


if __name__ == "__main__":
    main(*sys.argv[1:])
