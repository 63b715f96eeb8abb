"""A page in headless Chromium, without a driver: a probe script goes into a copy, and the DOM is printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

REQUIRED = (
    os.environ.get("LTX_INDUCTOR_BROWSER") == "required"
)  # without a browser tests fail, instead of being skipped
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def probe(page: str, folder: Path, script: str = "return {}", flags: tuple[str, ...] = ()) -> tuple[Any, list[str]]:
    """(what `script`, the body of a function that returns JSON-able data, found in the loaded page; console errors)."""
    if not CHROMIUM:
        (pytest.fail if REQUIRED else pytest.skip)("no Chromium here (Debian package: chromium)")
    wrapped = (
        "<script>addEventListener('load', () => { const found = (() => {" + script + "})();"
        "const out = document.createElement('pre'); out.id = 'probe-result'; out.textContent = JSON.stringify(found);"
        "document.body.append(out); });</script></body>"
    )
    path = folder / "probed.html"
    path.write_text(page.replace("</body>", wrapped), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=2000", *flags, "--dump-dom", path.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe-result">(.*?)</pre>', run.stdout, re.DOTALL)
    errors = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(found.group(1))) if found else None, errors
