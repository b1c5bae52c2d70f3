"""Takes pictures of the page: a cluster with the bundled model, at rest, in a burst, and with a dead worker.

    python -m scripts.page_picture docs/page.png       # the one of the README
    python -m scripts.page_picture --all DIR           # every view, wide and narrow, light and dark, to look at

It needs Chromium (scripts/install_test_tools.sh).
"""

import argparse
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, expect

from models import tiny
from tests.e2e.browser import ANSWER_MS, NARROW, WIDE, ask, chromium, opened, set_fields, window
from tests.e2e.cluster import Cluster

STREAMS = 8
COLOURS = (
    "copper",
    "silver",
    "golden",
    "green",
    "purple",
    "white",
    "black",
    "orange",
    "yellow",
    "brown",
    "grey",
    "pink",
)
THINGS = ("door", "key", "box", "gate", "safe", "drawer")
FACTS = " ".join(
    f"The code for the {colour} {thing} is {4817 + 137 * (at + 12 * number)}."
    for number, thing in enumerate(THINGS)
    for at, colour in enumerate(COLOURS)
)
QUESTION = f"{FACTS} What is the code for the copper door?"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", nargs="?", type=Path, help="File for the picture of the README.")
    parser.add_argument("--all", type=Path, metavar="DIR", help="Folder for pictures of every view.")
    arguments = parser.parse_args()
    with (
        Cluster(
            model=str(tiny.CHECKPOINT), served_model_name="cpd-tiny", prefill=1, combined=2, policy={"gap_weight": 1.0}
        ) as cluster,
        chromium() as browser,
    ):
        if arguments.picture is not None:
            with busy(cluster.url):
                of_an_answer(browser, cluster.url, arguments.picture)
        if arguments.all is not None:
            arguments.all.mkdir(parents=True, exist_ok=True)
            of_everything(browser, cluster, arguments.all)


def of_an_answer(browser: Browser, url: str, file: Path) -> None:
    """Takes the picture of an answer that a prefill worker has begun."""
    with window(browser, url, (1200, 1160), device_scale_factor=1.25) as (context, _):
        page = opened(context)
        set_fields(page, temperature="0")
        ask(page, "Hello, who are you?")
        answer = ask(page, QUESTION)
        answer.get_by_text("Why it took this long").click()
        page.locator(".thread").evaluate("thread => { thread.scrollTop = thread.scrollHeight; }")
        page.screenshot(path=file)


def of_everything(browser: Browser, cluster: Cluster, folder: Path) -> None:
    """Takes pictures of all views."""

    def take(situation: str) -> None:
        for size, width in ((WIDE, "wide"), (NARROW, "narrow")):
            for colours in ("light", "dark"):
                with window(browser, cluster.url, size, color_scheme=colours) as (context, _):
                    name = f"{situation}-{width}-{colours}"
                    for page, view in views(opened(context)):
                        page.screenshot(path=folder / f"{name}-{view}.png")

    def views(page: Page) -> Iterator[tuple[Page, str]]:
        yield page, "empty"
        set_fields(page, max_tokens="60")
        ask(page, "Spell the word “window”.")
        ask(page, QUESTION).get_by_text("Why it took this long").click()
        page.locator("li.assistant").last.scroll_into_view_if_needed()
        yield page, "chat"
        page.get_by_role("button", name="Settings", exact=True).click()
        yield page, "settings"
        page.get_by_role("button", name="Close settings").click()
        page.get_by_role("link", name="Cluster").click()
        expect(page.locator("article.worker").first).to_be_visible(timeout=ANSWER_MS)
        page.wait_for_timeout(2500)  # for speeds, two snapshots
        yield page, "cluster"

    take("rest")
    with busy(cluster.url):
        take("burst")
        # stopped before it is killed, so that it stays dead for a while
        cluster.send("combined-1", signal.SIGSTOP)
        time.sleep(12.0)  # until its silence has ended its session
        take("dead")
        os.kill(cluster.pid("combined-1"), signal.SIGKILL)


@contextmanager
def busy(url: str) -> Iterator[None]:
    """Keeps STREAMS streams and now and then a long prompt running."""
    over = threading.Event()

    def stream(number: int) -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while not over.is_set():
                prompt = [5 + (number * 31 + at) % 2000 for at in range(600 if number == 0 else 20)]
                body = {"model": "cpd-tiny", "prompt": prompt, "max_tokens": 300, "ignore_eos": True, "stream": True}
                try:
                    with http.stream("POST", "/v1/completions", json=body) as response:
                        for _ in response.iter_lines():
                            if over.is_set():
                                break
                except httpx.HTTPError:
                    over.wait(0.5)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    over.wait(3.0)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
