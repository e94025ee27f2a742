"""How large the report of a full study is, how long `mkb report` takes, and how fast a browser opens it:
`python -m benchmarks.report [STORE]`.

The study is simulated at the benchmark's size: 74 problems, two DSLs, six models, 1,776 attempts with texts and
trajectories of a realistic size, in a store on the disk (`mkb simulate`; give a STORE that has one to spare the time).
Every number is from a process of its own. In the browser, headless Chromium, `opened` is from the start of navigation
to the first picture of the overview and to the end of loading; `page` is from a click to the page it leads to.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

CHROMIUM = "/usr/bin/chromium"
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
TIMES = 5


def mkb(*arguments: str) -> dict[str, float]:
    """Run a command of ours: wall-clock and processor seconds, and the largest memory in MB."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "metakernelbench", *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": time.perf_counter() - start, "cpu_s": processor, "memory_mb": after.ru_maxrss / 1024}


def opened(path: Path) -> dict[str, float]:
    """Medians over `TIMES` fresh browser contexts."""
    found: list[dict[str, float]] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        for _ in range(TIMES):
            context = browser.new_context(viewport={"width": 1440, "height": 900}, offline=True)
            tab = context.new_page()
            tab.goto(path.as_uri())
            tab.locator("#overview .forest").wait_for()
            found.append(tab.evaluate(_OPENED) | {f"{name}_ms": _follow(tab, to) for name, to in _PAGES.items()})
            context.close()
        browser.close()
    return {name: round(statistics.median(one[name] for one in found)) for name in found[0]}


_OPENED = """() => {
    const [loading] = performance.getEntriesByType("navigation");
    const painted = performance.getEntriesByName("first-contentful-paint")[0];
    return { first_paint_ms: painted.startTime, loaded_ms: loading.loadEventEnd };
}"""
_PAGES = {"comparisons": "#comparisons", "family": "#overview .matrix a", "comparison": "#all-comparisons a"}
"""What is opened, and by which link."""


def _follow(tab: Any, link: str) -> float:
    """Milliseconds from a click to the page, drawn."""
    if link.startswith("#all"):
        tab.evaluate("location.hash = 'comparisons'")
    elif link.startswith("#overview"):
        tab.evaluate("location.hash = 'overview'")
    target = f"header a[href='{link}']" if link == "#comparisons" else link
    tab.locator(target).first.wait_for()
    return float(tab.evaluate(_CLICK, target))


_CLICK = """selector => new Promise((resolve) => {
    const main = document.querySelector("main"), start = performance.now();
    new MutationObserver((_, observer) => {
        observer.disconnect();
        requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - start)));
    }).observe(main, { childList: true });
    document.querySelector(selector).click();
})"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "store"
        if not store.exists():
            mkb("simulate", str(store))
        path = Path(folder) / "report.html"
        made = mkb("report", "simulated", "--store", str(store), "--out", str(path))
        size = path.stat().st_size / 1e6
        result = {
            "machine": f"{os.cpu_count()} cores, Python {platform.python_version()}",
            "load_average": os.getloadavg()[0],
            "size_mb": round(size, 2),
            "report": {name: round(value, 1) for name, value in made.items()},
            "browser": opened(path),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
