"""Where the site is built, and from what."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SITE = ROOT / "build" / "site"
