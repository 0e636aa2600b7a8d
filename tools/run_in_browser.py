"""Open a notebook in JupyterLab in headless Chromium, run all its cells, and say whether every one succeeded.

    pip install selenium          # and Debian's packages chromium and chromium-driver
    python tools/run_in_browser.py notebooks/00_start_here.ipynb --screenshot lab.png

The notebook is opened from a copy of the folder, so the stored outputs stay as they are. Exit 1 if a cell fails.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

# The notebook's widget. Not `shell.currentWidget`: that is null until something on the page has had the focus.
NOTEBOOK = """
const app = window.jupyterapp;
const widget = [...app.shell.widgets('main')].find(w => w.content && w.content.widgets && w.sessionContext);
if (!widget) return null;
"""
CELLS = f"""{NOTEBOOK}
return widget.content.widgets.filter(c => c.model.type === 'code').map(c => ({{
  source: c.model.sharedModel.getSource(),
  count: c.model.executionCount,
  running: c.promptNode ? c.promptNode.textContent.includes('*') : false,
  error: c.model.outputs.toJSON().some(o => o.output_type === 'error'),
}}));
"""
IDLE = f"{NOTEBOOK} const k = widget.sessionContext.session?.kernel; return k && k.status === 'idle'"
RUN_ALL = f"{NOTEBOOK} app.shell.activateById(widget.id); app.commands.execute('notebook:restart-run-all')"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(what: str, condition, timeout_s: float):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            value = condition()
        except Exception:  # the page or the server is not there yet
            value = None
        if value:
            return value
        time.sleep(0.5)
    raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")


def browser() -> webdriver.Chrome:
    options = Options()
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1400,1600",
    ):  # fmt: skip
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tempfile.mkdtemp()}")
    driver = shutil.which("chromedriver")
    return webdriver.Chrome(options=options, service=Service(driver) if driver else None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--screenshot", type=Path)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for all cells")
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp())
    shutil.copytree(args.notebook.resolve().parent, folder / "notebooks")
    port, token = free_port(), secrets.token_hex(16)
    server = subprocess.Popen(
        [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root",
            f"--IdentityProvider.token={token}", "--expose-app-in-browser", f"--ServerApp.root_dir={folder}",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | {"LLM_LATENCY_SCORECARD": str(folder / "scorecard.json")},
    )  # fmt: skip
    driver = None
    try:
        status = f"http://127.0.0.1:{port}/api/status?token={token}"
        wait_for("JupyterLab", lambda: json.load(urllib.request.urlopen(status)), 60)
        driver = browser()
        driver.get(f"http://127.0.0.1:{port}/lab/tree/notebooks/{args.notebook.name}?token={token}")
        wait_for("the notebook", lambda: driver.execute_script(CELLS), 90)
        wait_for("the kernel", lambda: driver.execute_script(IDLE), 90)
        driver.execute_script(RUN_ALL)
        time.sleep(2)
        driver.execute_script(  # the restart asks for confirmation
            "document.querySelectorAll('.jp-Dialog .jp-mod-accept, .jp-Dialog .jp-mod-warn').forEach(b => b.click())"
        )
        time.sleep(3)

        def finished():
            cells = [cell for cell in driver.execute_script(CELLS) if cell["source"].strip()]
            counts = [cell["count"] for cell in cells]
            done = counts == list(range(1, len(cells) + 1)) and not any(cell["running"] for cell in cells)
            return cells if done or any(cell["error"] for cell in cells) else None

        cells = wait_for("all cells", finished, args.timeout)
        failed = [cell for cell in cells if cell["error"]]
        if args.screenshot:
            driver.save_screenshot(str(args.screenshot))
        for cell in failed:
            print(f"FAILED cell {cell['count']}:\n{cell['source']}")
        ran = sum(cell["count"] is not None and not cell["error"] for cell in cells)
        print(f"{args.notebook.name}: {ran} of {len(cells)} code cells ran without error")
        return 1 if failed else 0
    finally:
        if driver:
            driver.quit()
        server.terminate()
        server.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
