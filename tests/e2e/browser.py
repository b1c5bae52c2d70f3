"""A real browser that opens the page of a cluster."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

from tests.programs import CHROMIUM

WIDE, NARROW = (1400, 900), (390, 844)

ANSWER_MS = 60_000
"""Time limit for an answer, and for whatever else the page must show: the machine may be busy."""

_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. While it is open, this thread can run no other event loop."""
    assert CHROMIUM is not None, "Chromium is not installed: scripts/install_test_tools.sh"
    expect.set_options(timeout=ANSWER_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watch:
    """What happened in a window that nobody should see."""

    console: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


@contextmanager
def window(
    browser: Browser, url: str, size: tuple[int, int] = WIDE, **options: Any
) -> Iterator[tuple[BrowserContext, Watch]]:
    """A window of its own, without cookies or storage. `options` are those of Playwright's `new_context`."""
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, base_url=url, **options)
    watch, host = Watch(), urlsplit(url).netloc
    context.on("console", lambda message: watch.console.append(f"{message.type}: {message.text}"))
    context.on("weberror", lambda error: watch.console.append(f"error: {error.error}"))
    context.on("request", lambda request: _note(watch, host, request.url))
    context.set_default_timeout(ANSWER_MS)
    try:
        yield context, watch
    finally:
        context.close()


def _note(watch: Watch, host: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("data", "blob") and parts.netloc != host:
        watch.elsewhere.append(url)


def opened(context: BrowserContext, view: str = "chat") -> Page:
    """The page with one of its views, where no key is asked for."""
    page = context.new_page()
    page.goto(f"/#{view}")
    expect(page.locator(f"main[data-view={view}]")).to_be_visible()
    return page


def sign_in(page: Page, key: str) -> None:
    """Enters a key and waits for the chat."""
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_label("Message", exact=True)).to_be_visible()


def set_fields(page: Page, **values: str) -> None:
    """Sets fields of the settings by their names in the API."""
    page.get_by_role("button", name="Settings", exact=True).click()
    for name, value in values.items():
        page.locator(f"#setting-{name}").fill(value)
    page.get_by_role("button", name="Close settings").click()


def send(page: Page, text: str) -> Locator:
    """Sends a message and returns the answer that begins."""
    before = page.locator("li.assistant").count()
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator("li.assistant")).to_have_count(before + 1)
    return page.locator("li.assistant").last


def ask(page: Page, text: str) -> Locator:
    """Sends a message and returns the complete answer, with its time line."""
    answer = send(page, text)
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer.locator(".time-line")).to_be_visible()
    return answer


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong with the page as it is shown. The window needs `bypass_csp`."""
    source = files("axe_playwright_python").joinpath("axe.min.js").read_text()
    page.evaluate(source)
    found: Mapping[str, Any] = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{violation['id']}: {violation['help']}: {[node['html'][:200] for node in violation['nodes']]}"
        for violation in found["violations"]
    ]


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than the window."""
    wider: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return wider
