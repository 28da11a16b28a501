"""The built site, served on this machine, in a real browser. `make test-site` builds it first."""

import functools
import http.server
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
from places import ROOT, SITE

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "docs"))

# What Chromium asks of other hosts by itself would be taken for a page's.
FLAGS = """--disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync""".split()
PAINTS = pytest.StashKey[dict[str, float]]()


def pytest_ignore_collect(collection_path, config):
    # They need a site that was built and a browser: they run when they are named.
    asked = [Path(arg.partition("::")[0]).resolve() for arg in config.args]
    return None if any(path.is_relative_to(HERE) for path in asked) else True


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def serve(folder):
    handler = functools.partial(QuietHandler, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(scope="session")
def address():
    """The address of the site, without a slash at its end."""
    if not (SITE / "index.html").exists():
        pytest.fail("There is no site: `make site` builds it")
    server = serve(SITE)
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        missing = "no Chromium found: install it, or name it in CHROMIUM"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    from playwright.sync_api import sync_playwright

    # Chromium's sandbox refuses to run as root, as which containers run.
    root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS, *root])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def paints(request):
    """Milliseconds to each page's first paint; printed at the end, never asserted."""
    return request.config.stash.setdefault(PAINTS, {})


def pytest_terminal_summary(terminalreporter, config):
    if paints := config.stash.get(PAINTS, {}):
        terminalreporter.section("first paint, empty cache, loopback")
        for page, ms in sorted(paints.items(), key=lambda item: -item[1]):
            terminalreporter.line(f"{ms:6.0f} ms  {page}")
