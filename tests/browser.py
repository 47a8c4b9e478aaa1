"""The browser of the tests: the system's Chromium, without what they do not need."""

from __future__ import annotations

import shutil

CHROMIUM = shutil.which("chromium-headless-shell") or "/usr/bin/chromium"
"""Without windows, where the system has that: it takes half the processor time."""

LIMIT_MS = 60_000
"""No wait for a page gives up sooner, as `until` does not: a busy machine must not fail a test."""

_PLAYWRIGHTS = (
    "AvoidUnnecessaryBeforeUnloadCheckSync",
    "DestroyProfileOnBrowserClose",
    "HttpsFirstBalancedModeAutoEnable",
    "HttpsUpgrades",
    "PaintHolding",
    "ThirdPartyStoragePartitioning",
)
"""What Playwright switches off; our list replaces its own."""
_WINDOWS = (
    "PreloadTopChromeWebUI",
    "SpareRendererForSitePerProcess",
    "WebUIOmniboxAimPopup",
    "WebUIOmniboxFullPopup",
    "WebUIOmniboxPopup",
)
"""Parts of a window that nobody sees, each a process: they take two thirds of a tab's CPU time."""

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--disable-features={','.join(_PLAYWRIGHTS + _WINDOWS)}",
]
