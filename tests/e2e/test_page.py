"""The page at `/` in a real browser, in front of real processes."""

import json
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Route, expect

from models import tiny
from tests.e2e.browser import (
    NARROW,
    WIDE,
    Watch,
    ask,
    chromium,
    opened,
    overflow,
    send,
    set_fields,
    sign_in,
    violations,
    window,
)
from tests.e2e.cluster import Cluster
from tests.e2e.test_up import started_command
from tests.programs import needs_chromium

pytestmark = [pytest.mark.e2e, needs_chromium]

LONG = " ".join(f"number {number}" for number in range(200))
KEYS = """
- key: the-boss
  name: boss
  admin: true
- key: the-user
  name: user
- key: the-other
  name: other
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Simulated workers, which go on for as long as a test wants; no keys."""
    with Cluster(
        model=str(tiny.CHECKPOINT),
        served_model_name="tiny",
        simulate="h200-qwen3-8b",
        prefill=1,
        combined=2,
        long_prefill_tokens=200,
        kv_memory="1GiB",
    ) as running:
        yield running


@pytest.fixture
def context(browser: Browser, cluster: Cluster) -> Iterator[BrowserContext]:
    """A window in which nothing may be logged or asked of another host."""
    with window(browser, cluster.url) as (opened_window, watch):
        yield opened_window
        _nothing_odd(watch)


@pytest.fixture
def page(context: BrowserContext) -> Page:
    """The chat, for answers of 40 tokens."""
    chat = opened(context)
    set_fields(chat, max_tokens="40")
    return chat


def _nothing_odd(watch: Watch) -> None:
    assert watch.console == []
    assert watch.elsewhere == []


class TestChat:
    def test_an_answer_is_streamed_with_its_figures(self, page: Page) -> None:
        answer = ask(page, "Hello?")
        expect(answer.locator(".markdown")).not_to_be_empty()
        figures = answer.locator(".figures")
        expect(figures).to_contain_text("first token after")
        expect(figures).to_contain_text("tokens/s")
        expect(figures).to_contain_text("40 tokens")
        expect(figures).to_contain_text(re.compile("local: combined-[01]"))
        expect(figures).to_contain_text("cut at the most tokens")

    def test_a_long_prompt_is_computed_by_a_prefill_worker(self, page: Page) -> None:
        answer = ask(page, LONG)
        expect(answer.locator(".figures")).to_contain_text(re.compile("remote: prefill-0 → combined-[01]"))
        answer.get_by_text("Why it took this long").click()
        told = answer.locator(".told")
        expect(told).to_contain_text(re.compile(r"The prompt was sent to prefill-0: [\d,]+ uncached tokens of [\d,]+"))
        expect(told).to_contain_text("KV pages")
        expect(told).to_contain_text("The first token was predicted after")
        phases = answer.get_by_role("group", name="Phases")
        expect(phases.get_by_role("row", name=re.compile("^prefill prefill-0"))).to_be_visible()
        expect(phases.get_by_role("row", name=re.compile("^decode combined-"))).to_be_visible()
        options = answer.get_by_role("group", name="What each way was predicted to cost")
        expect(options.get_by_role("row", name=re.compile(r"\(chosen\)"))).to_have_count(1)
        assert options.get_by_role("row").count() >= 3

    def test_the_time_line_adds_up_to_what_the_browser_measured(self, page: Page) -> None:
        set_fields(page, max_tokens="400")
        shares = []
        for text in ("Hello?", LONG, "Hello again?"):  # the machine may be busy with something else
            answer = ask(page, text)
            measured = float(answer.locator(".figures").get_attribute("data-e2e") or 0)
            total = float(answer.locator(".time-line").get_attribute("data-total") or 0)
            shares.append(total / measured)
            assert answer.locator(".ticks path").get_attribute("d").count("M") == 400  # type: ignore[union-attr]
            if abs(shares[-1] - 1) <= 0.05:
                return
        raise AssertionError(f"the sum of the phases is not what was measured: {shares}")

    def test_stop_ends_the_answer_on_the_worker_too(self, context: BrowserContext, cluster: Cluster) -> None:
        page = opened(context)
        answer = send(page, "Go on for ever.")
        expect(answer.locator(".markdown")).not_to_be_empty()
        page.get_by_role("button", name="Stop").click()
        expect(answer).to_have_attribute("data-state", "stopped")
        expect(answer.locator(".figures")).to_contain_text("stopped")
        cluster.wait_until_idle()
        expect(answer.locator(".time-line")).to_be_visible()
        expect(page.get_by_role("button", name="Send")).to_be_visible()

    def test_an_answer_and_a_question_can_have_several_versions(self, page: Page) -> None:
        first = ask(page, "Hello?")
        set_fields(page, max_tokens="10")
        page.get_by_role("button", name="Regenerate answer").click()
        answers, questions = page.locator("li.assistant"), page.locator("li.user")
        expect(answers.locator(".branches")).to_have_text("2 of 2")
        expect(answers.last).to_have_attribute("data-state", "done")
        expect(answers.locator(".figures")).to_contain_text("10 tokens")
        page.get_by_role("button", name="Earlier version").click()
        expect(first.locator(".figures")).to_contain_text("40 tokens")
        page.get_by_role("button", name="Edit message").click()
        page.get_by_label("Edited message").fill("Goodbye?")
        page.locator("form.edit").get_by_role("button", name="Send").click()
        expect(questions.locator(".plain")).to_have_text("Goodbye?")
        expect(questions.locator(".branches")).to_have_text("2 of 2")
        expect(answers.last).to_have_attribute("data-state", "done")
        questions.get_by_role("button", name="Earlier version").click()
        expect(questions.locator(".plain")).to_have_text("Hello?")
        expect(answers.locator(".branches")).to_have_text("1 of 2")

    def test_conversations_outlive_the_page(self, page: Page) -> None:
        ask(page, "The first one")
        page.get_by_role("button", name="New chat").click()
        ask(page, "The second one")
        page.reload()
        kept = page.get_by_role("region", name="Conversations")
        kept.get_by_role("button", name="The first one", exact=True).click()
        expect(page.locator("li.user .plain")).to_have_text("The first one")
        expect(page.locator("li.assistant .time-line")).to_be_visible()
        kept.get_by_role("button", name="Delete “The first one”").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(kept.get_by_role("button", name="The first one", exact=True)).to_have_count(0)
        expect(kept.get_by_role("button", name="The second one", exact=True)).to_be_visible()

    def test_system_prompt_and_sampling_are_sent(self, context: BrowserContext) -> None:
        page = opened(context)
        sent: list[Any] = []
        page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
        set_fields(page, system="Be brief.", temperature="0.5", top_p="0.9", seed="7", max_tokens="5", stop="END\n###")
        ask(page, "Hello?")
        (body,) = sent
        assert body["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello?"},
        ]
        fields = ("temperature", "top_p", "seed", "max_tokens", "stop", "model")
        assert [body[name] for name in fields] == [0.5, 0.9, 7, 5, ["END", "###"], "tiny"]

    def test_an_error_of_the_server_is_shown_and_the_next_try_works(self, context: BrowserContext) -> None:
        page = opened(context)
        set_fields(page, max_tokens="40")
        error = {"error": {"message": "All workers' queues are full.", "type": "", "param": None, "code": "queue_full"}}
        body = f"data: {json.dumps(error)}\n\n"

        def fail(route: Route) -> None:
            route.fulfill(status=200, content_type="text/event-stream", body=body)

        page.route("**/v1/chat/completions", fail, times=1)
        answer = send(page, "Hello?")
        expect(answer).to_have_attribute("data-state", "failed")
        expect(answer.locator(".error")).to_contain_text("All workers' queues are full.")
        page.get_by_role("button", name="Regenerate answer").click()
        expect(page.locator("li.assistant")).to_have_attribute("data-state", "done")


def _chunk(**delta: Any) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}) + "\n\n"


def _scripted(page: Page, chunks: list[str]) -> None:
    """Lets the page's next call get these chunks as its answer."""
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(chunks)}}
    body = "".join(chunks) + "".join(f"data: {json.dumps(one)}\n\n" for one in (end, usage)) + "data: [DONE]\n\n"

    def fulfill(route: Route) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", fulfill, times=1)
    nothing = json.dumps({"id": "", "placements": [], "missing": {}})
    page.route("**/requests/*", lambda route: route.fulfill(status=200, body=nothing), times=1)


class TestWhatModelsWrite:
    def test_html_and_scripts_are_text(self, context: BrowserContext) -> None:
        page = opened(context)
        dangerous = (
            "<script>window.hacked = 1</script> <img src=x onerror='window.hacked = 1'> "
            "[a link](javascript:window.hacked=1) ![a picture](https://evil.example/x.png) "
            "<iframe src=https://evil.example></iframe>\n\n```html\n<script>window.hacked = 1</script>\n```\n\n"
            "| a | b |\n|---|---|\n| <b>bold</b> | <svg onload=window.hacked=1> |\n"
        )
        _scripted(page, [_chunk(content=piece) for piece in re.findall(r"(?s).{1,7}", dangerous)])
        answer = send(page, "Hack me.")
        expect(answer).to_have_attribute("data-state", "done")
        shown = answer.locator(".markdown")
        expect(shown).to_contain_text("<script>window.hacked = 1</script>")
        expect(shown.locator("td").last).to_have_text("<svg onload=window.hacked=1>")
        assert shown.locator("script, img, iframe, svg:not(.icon), b").count() == 0
        links = shown.locator("a").all()
        addresses = ["https://evil.example/x.png", "https://evil.example/"]
        assert [link.get_attribute("href") for link in links] == addresses
        assert {link.get_attribute("rel") for link in links} == {"noopener noreferrer nofollow"}
        assert page.evaluate("window.hacked") is None

    def test_markdown_is_shown_the_same_whether_it_comes_in_pieces_or_at_once(self, context: BrowserContext) -> None:
        page = opened(context)
        text = MARKDOWN.read_text()
        shown = []
        for size in (3, len(text)):
            _scripted(page, [_chunk(content=piece) for piece in re.findall(rf"(?s).{{1,{size}}}", text)])
            answer = send(page, "Format.")
            expect(answer).to_have_attribute("data-state", "done")
            expect(answer.locator("h3").last).to_have_text("The end")
            shown.append(answer.locator(".markdown").inner_html())
        assert shown[0] == shown[1]
        tags = re.findall(r"<(h3|h4|ul|ol|li|pre|table|blockquote|em|strong|s|hr|a)\b", shown[0])
        assert {tag: tags.count(tag) for tag in sorted(set(tags))} == {
            "a": 2,
            "blockquote": 1,
            "em": 2,
            "h3": 2,
            "h4": 1,
            "hr": 1,
            "li": 8,
            "ol": 1,
            "pre": 2,
            "s": 1,
            "strong": 2,
            "table": 1,
            "ul": 3,
        }

    def test_a_heading_may_have_any_spaces_and_number_signs(self, context: BrowserContext) -> None:
        page = opened(context)
        gap = " " * 15_000
        _scripted(page, [_chunk(content=f"## C#\n\n## Closed ##\n\n# A{gap}B\n\n#{gap}C\r\n\nThe end.")])
        answer = send(page, "Write headings.")
        expect(answer.locator(".markdown p").last).to_have_text("The end.")
        expect(answer.locator(".markdown").locator("h3, h4")).to_have_text(["C#", "Closed", "A B", "C"])

    def test_a_long_row_of_backticks_is_text(self, context: BrowserContext) -> None:
        page = opened(context)
        _scripted(page, [_chunk(content=f"Row {'`' * 15_000}\n\n``a`b`` and ```c`\n\nThe end.")])
        answer = send(page, "Write backticks.")
        expect(answer.locator(".markdown p").last).to_have_text("The end.")
        expect(answer.locator(".markdown p").first).to_have_text(f"Row {'`' * 15_000}")
        expect(answer.locator(".markdown code")).to_have_text(["a`b"])

    def test_numbers_of_a_tool_call_are_shown_as_they_are(self, context: BrowserContext) -> None:
        page = opened(context)
        function = {"name": "get_post", "arguments": '{"id": 1234567890123456789, "share": 1.0}'}
        _scripted(page, [_chunk(tool_calls=[{"index": 0, "id": "call_1", "type": "function", "function": function}])])
        answer = send(page, "Which post?")
        expect(answer.locator(".call pre")).to_have_text('{ "id": 1234567890123456789, "share": 1.0 }')

    def test_reasoning_is_folded_and_tool_calls_are_shown_and_answered(self, context: BrowserContext) -> None:
        page = opened(context)
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": ""}}
        pieces = [{"index": 0, "function": {"arguments": piece}} for piece in ('{"city": ', '"Oslo"}')]
        calls = [_chunk(tool_calls=[one]) for one in (call, *pieces)]
        _scripted(page, [_chunk(reasoning_content="Which city? Oslo."), *calls])
        answer = send(page, "What time is it?")
        expect(answer).to_have_attribute("data-state", "done")
        reasoning = answer.locator(".reasoning .plain")
        expect(reasoning).to_be_hidden()
        answer.get_by_text("Reasoning", exact=True).click()
        expect(reasoning).to_have_text("Which city? Oslo.")
        expect(answer.locator(".call")).to_contain_text("get_time")
        expect(answer.locator(".call")).to_contain_text('"city": "Oslo"')
        answer.get_by_label("Result of get_time").fill("12:05")
        sent: list[Any] = []
        page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
        _scripted(page, [_chunk(content="It is 12:05.")])
        answer.get_by_role("button", name="Send result").click()
        expect(page.locator("li.assistant").last.locator(".markdown")).to_have_text("It is 12:05.")
        assert sent[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
        assert sent[0]["messages"][2] == {"role": "tool", "tool_call_id": "call_1", "content": "12:05"}

    def test_a_gigantic_answer_leaves_the_page_usable(self, context: BrowserContext) -> None:
        page = opened(context)
        paragraph = "word " * 100 + "\n\n"
        code = "```text\n" + "x = 1\n" * 30_000 + "```\n\n"
        _scripted(
            page,
            [
                _chunk(content=text)
                for text in [paragraph * 500, "y" * 300_000, "\n\n", code, paragraph * 500, "The end."]
            ],
        )
        answer = send(page, "Write a lot.")
        field = page.get_by_label("Message", exact=True)
        field.fill("Still here")
        expect(field).to_have_value("Still here")
        expect(answer).to_have_attribute("data-state", "done")
        expect(answer.locator(".markdown p").last).to_have_text("The end.")
        assert len(answer.locator(".markdown").text_content() or "") > 900_000
        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_role("heading", name="What shall the model answer?")).to_be_visible()


MARKDOWN = Path(__file__).parent / "markdown.md"


class TestSizesAndColours:
    def test_it_fits_a_telephone(self, browser: Browser, cluster: Cluster) -> None:
        with window(browser, cluster.url, NARROW) as (context, watch):
            page = opened(context)
            set_fields(page, max_tokens="40")
            answer = ask(page, f"{LONG} {'unbroken' * 40}")
            answer.get_by_text("Why it took this long").click()
            assert overflow(page) == 0
            page.get_by_role("button", name="Conversations", exact=True).click()
            kept = page.get_by_role("region", name="Conversations")
            expect(kept.get_by_role("button", name="New chat")).to_be_in_viewport()
            page.keyboard.press("Escape")
            expect(kept).to_be_hidden()
            expect(page.get_by_role("button", name="Conversations", exact=True)).to_be_focused()
            page.get_by_role("link", name="Cluster").click()
            expect(page.locator("article.worker")).to_have_count(3)
            assert overflow(page) == 0
            _nothing_odd(watch)

    def test_it_is_dark_where_the_system_is_and_can_be_changed(self, browser: Browser, cluster: Cluster) -> None:
        with window(browser, cluster.url, color_scheme="dark") as (context, watch):
            page = opened(context)
            assert _is_dark(page)
            page.get_by_role("button", name="Colours: auto").click()
            assert not _is_dark(page)
            page.reload()
            page.get_by_role("button", name="Colours: light").click()
            assert _is_dark(page)
            _nothing_odd(watch)

    @pytest.mark.parametrize(("size", "colours"), [(WIDE, "light"), (NARROW, "dark")], ids=["wide", "narrow"])
    def test_axe_finds_nothing(self, browser: Browser, cluster: Cluster, size: tuple[int, int], colours: str) -> None:
        with window(browser, cluster.url, size, color_scheme=colours, bypass_csp=True) as (context, _):
            page = opened(context)
            assert violations(page) == []
            set_fields(page, max_tokens="20")
            answer = ask(page, LONG)
            answer.get_by_text("Why it took this long").click()
            _scripted(page, [_chunk(reasoning_content="Hm."), _chunk(content=MARKDOWN.read_text())])
            send(page, "Format.")
            page.get_by_role("button", name="Settings", exact=True).click()
            assert violations(page) == []
            page.get_by_role("button", name="Close settings").click()
            page.get_by_role("link", name="Cluster").click()
            expect(page.locator("article.worker")).to_have_count(3)
            assert violations(page) == []

    def test_it_works_with_the_keyboard_alone(self, context: BrowserContext) -> None:
        page = opened(context)
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("main")).to_be_focused()
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "message":
                break
        page.keyboard.type("Go on for ever.")
        page.keyboard.press("Enter")
        answer = page.locator("li.assistant")
        expect(answer.locator(".markdown")).not_to_be_empty()
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Stop")).to_be_focused()
        page.keyboard.press("Enter")
        expect(answer).to_have_attribute("data-state", "stopped")
        expect(page.locator("#announcer")).to_have_text("The answer was stopped.")


def _is_dark(page: Page) -> bool:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return max(map(int, re.findall(r"\d+", colour)[:3])) < 128


class TestCluster:
    def test_it_is_live(self, context: BrowserContext, cluster: Cluster) -> None:
        page = opened(context, "cluster")
        workers = page.locator("article.worker")
        expect(workers).to_have_count(3)
        names = [workers.nth(at).get_by_role("heading").text_content() for at in range(3)]
        assert names == ["prefill-0", "combined-0", "combined-1"]
        for at in range(3):
            expect(workers.nth(at).locator(".state")).to_have_text("ready")
        expect(_model(page, "tiny").locator(".state")).to_have_text("ready")
        changes = re.compile("Drain|Sleep|Wake|Pin|Scale")
        expect(page.get_by_role("button", name=changes)).to_have_count(0)  # without keys nobody may
        chat = opened(context)
        send(chat, "Go on for ever.")
        running = page.locator(".figures-grid > div", has_text="Running").locator("dd")
        page.bring_to_front()
        expect(running).to_have_text("1")
        expect(page.locator(".figures-grid > div", has_text="Tokens/s").locator("dd")).not_to_have_text("0.0")
        chat.get_by_role("button", name="Stop").click()
        expect(running).to_have_text("0")

    def test_a_hidden_view_asks_for_nothing(self, context: BrowserContext) -> None:
        page = opened(context, "cluster")
        expect(page.locator("article.worker")).to_have_count(3)
        with page.expect_event("requestfailed", lambda request: request.url.endswith("/cluster/live")):
            page.get_by_role("link", name="Chat").click()
        with page.expect_request("**/cluster/live"):
            page.get_by_role("link", name="Cluster").click()


class TestLostConnections:
    def test_a_stream_that_is_cut_is_said_and_the_page_comes_back_by_itself(
        self, browser: Browser, cluster: Cluster
    ) -> None:
        with window(browser, cluster.url) as (context, watch):
            page, view = opened(context), opened(context, "cluster")
            expect(view.locator("article.worker")).to_have_count(3)
            answer = send(page, "Go on for ever.")
            expect(answer.locator(".markdown")).not_to_be_empty()
            cluster.send("router-0", signal.SIGKILL)
            expect(answer).to_have_attribute("data-state", "failed")
            expect(answer.locator(".error")).to_contain_text("broke")
            expect(answer.locator(".markdown")).not_to_be_empty()
            for tab in (page, view):
                tab.bring_to_front()
                expect(tab.get_by_role("status").filter(has_text="Connected again.")).to_be_visible()
            cluster.wait_until_healthy()
            expect(view.locator(".figures-grid > div", has_text="State").locator("dd")).to_have_text("ready")
            set_fields(page, max_tokens="10")
            page.get_by_role("button", name="Regenerate answer").click()
            expect(page.locator("li.assistant")).to_have_attribute("data-state", "done")
            assert watch.elsewhere == []


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Real workers that can be killed one by one; keys of an operator and two tenants."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    with Cluster(
        model=str(tiny.CHECKPOINT), served_model_name="tiny", prefill=1, combined=2, api_key_file=str(keys)
    ) as running:
        yield running


@pytest.fixture
def guarded(browser: Browser, real: Cluster) -> Iterator[BrowserContext]:
    """A window in front of the cluster with keys."""
    with window(browser, real.url) as (opened_window, watch):
        yield opened_window
        _nothing_odd(watch)


class TestKeys:
    def test_without_a_key_there_is_the_sign_in_and_nothing_else(self, guarded: BrowserContext) -> None:
        page = guarded.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto("/#cluster")
        expect(page.get_by_label("API key")).to_be_focused()
        assert page.get_by_role("navigation").count() == page.locator("article").count() == 0
        assert not [url for url in asked if not re.search(r"/(#cluster)?$|/page/[\w.]+$", url)]

    def test_a_wrong_key_is_said(self, browser: Browser, real: Cluster) -> None:
        with window(browser, real.url) as (context, _):
            page = context.new_page()
            page.goto("/")
            for key in ("wrong", "“quoted” by a word processor"):
                page.get_by_label("API key").fill(key)
                page.get_by_role("button", name="Sign in").click()
                expect(page.get_by_label("API key")).to_have_value("")
                expect(page.get_by_role("alert")).to_have_text("The API key is wrong.")
                expect(page.get_by_label("API key")).to_be_focused()

    def test_a_tenant_sees_its_own_time_lines_and_no_cluster(self, guarded: BrowserContext) -> None:
        page = guarded.new_page()
        page.goto("/")
        sign_in(page, "the-user")
        expect(page.get_by_text("user", exact=True)).to_be_visible()
        assert page.get_by_role("link", name="Cluster").count() == 0
        set_fields(page, temperature="0")
        answer = ask(page, "The code for the copper door is 4817. What is the code for the copper door?")
        expect(answer.locator(".markdown")).to_have_text("The code for the copper door is 4817.")
        answer.get_by_text("Why it took this long").click()
        expect(answer.locator(".told")).to_contain_text("computed the prompt")
        expect(answer.locator(".told")).to_contain_text("The first token was predicted after")
        assert answer.get_by_role("group", name="What each way was predicted to cost").count() == 0

    def test_the_key_is_kept_for_this_tab_only(self, guarded: BrowserContext) -> None:
        page = guarded.new_page()
        page.goto("/")
        sign_in(page, "the-user")
        page.reload()
        expect(page.get_by_label("Message", exact=True)).to_be_visible()
        stored = page.evaluate("JSON.stringify([localStorage, document.cookie])")
        assert "the-user" not in stored
        second = guarded.new_page()
        second.goto("/")
        expect(second.get_by_label("API key")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("API key")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0
        page.reload()
        expect(page.get_by_label("API key")).to_be_visible()

    def test_a_key_that_expires_ends_in_the_sign_in_and_what_has_come_is_kept(
        self, browser: Browser, real: Cluster
    ) -> None:
        with window(browser, real.url) as (context, _):
            page = context.new_page()
            page.goto("/")
            sign_in(page, "the-boss")
            answer = send(page, "Go on for ever.")
            expect(answer.locator(".markdown")).not_to_be_empty()
            page.get_by_role("button", name="Delete all").click()
            expect(page.get_by_role("dialog")).to_be_visible()
            expired = {"error": {"message": "The API key is wrong.", "code": "invalid_api_key"}}
            page.route("**/session", lambda route: route.fulfill(status=401, json=expired), times=1)
            page.evaluate("dispatchEvent(new Event('online'))")  # one of the moments at which the page asks
            expect(page.get_by_role("alert")).to_have_text("The API key is wrong.")
            # what was open may ask for something now, without the key
            page.evaluate("import('/page/api.js').then(({ json }) => json('session')).catch((error) => error.status)")
            expect(page.get_by_role("alert")).to_have_text("The API key is wrong.")
            assert page.get_by_role("dialog").count() == 0
            sign_in(page, "the-boss")
            page.get_by_role("button", name="Go on for ever.", exact=True).click()
            expect(answer).to_have_attribute("data-state", re.compile("stopped|done"))
            expect(answer.locator(".markdown")).not_to_be_empty()

    def test_two_keys_in_two_tabs_have_their_own_conversations(self, guarded: BrowserContext) -> None:
        tabs: dict[str, Page] = {}
        for tenant in ("user", "other"):
            tabs[tenant] = guarded.new_page()
            tabs[tenant].goto("/")
            sign_in(tabs[tenant], f"the-{tenant}")
            set_fields(tabs[tenant], max_tokens="5")
            ask(tabs[tenant], f"I am {tenant}")
        for tenant, foreign in (("user", "other"), ("other", "user")):
            tabs[tenant].reload()
            kept = tabs[tenant].get_by_role("region", name="Conversations")
            expect(kept.get_by_role("button", name=f"I am {tenant}", exact=True)).to_be_visible()
            assert kept.get_by_role("button", name=f"I am {foreign}").count() == 0

    @pytest.mark.parametrize("colours", ["light", "dark"])
    def test_axe_finds_nothing_in_the_sign_in(self, browser: Browser, real: Cluster, colours: str) -> None:
        with window(browser, real.url, NARROW, color_scheme=colours, bypass_csp=True) as (context, _):
            page = context.new_page()
            page.goto("/")
            expect(page.get_by_label("API key")).to_be_visible()
            assert violations(page) == []
            assert overflow(page) == 0


class TestOperator:
    @pytest.fixture
    def view(self, guarded: BrowserContext) -> Page:
        """The cluster, as an operator sees it."""
        page = guarded.new_page()
        page.goto("/")
        sign_in(page, "the-boss")
        page.get_by_role("link", name="Cluster").click()
        expect(page.locator("article.worker")).to_have_count(3)
        return page

    def test_a_killed_worker_is_shown_as_dead_and_then_back(self, view: Page, real: Cluster) -> None:
        worker = view.get_by_role("article", name="combined-1")
        expect(worker.locator(".state")).to_have_text("ready")
        with real.without("combined-1", kill=True):
            died = re.compile("combined-1 (died|was lost)")  # lost, if its port outlives its connections for a moment
            expect(view.locator(".events li.bad", has_text=died)).to_be_visible()
            expect(worker.locator(".state")).to_have_text("gone")
            expect(view.locator(".figures-grid > div", has_text="Workers").locator("dd")).to_have_text("2 of 3 ready")
            view.reload()  # who comes later sees it, too
            expect(worker.locator(".state")).to_have_text("gone")
        real.wait_until_healthy()
        expect(worker.locator(".state")).to_have_text("ready")
        expect(view.locator("article.worker")).to_have_count(3)
        expect(view.locator(".events li").first).to_contain_text("combined-1 joined")

    def test_an_answer_whose_worker_is_killed_goes_on_and_its_time_line_says_so(
        self, guarded: BrowserContext, real: Cluster
    ) -> None:
        page = guarded.new_page()
        page.goto("/")
        sign_in(page, "the-boss")
        page.route("**/v1/chat/completions", _without_end)
        set_fields(page, max_tokens="2500", temperature="1.5")
        for _ in range(10):  # an answer may still have ended before its worker is killed
            page.get_by_role("button", name="New chat").click()
            answer = send(page, "Please repeat: " + "one two three four five six seven eight nine ten " * 4)
            expect(answer.locator(".markdown")).not_to_be_empty()
            running = [worker["id"] for worker in real.state()["workers"] if worker["routers"]["router-0"]["sequences"]]
            for name in running:
                real.kill(name)
            expect(answer).to_have_attribute("data-state", "done")
            real.wait_until_healthy()
            expect(answer.locator(".time-line")).to_be_visible()
            if answer.locator(".phase.replaced").count():
                break
        answer.get_by_text("Why it took this long").click()
        expect(answer.locator(".told")).to_contain_text(re.compile("was lost; combined-[01] went on"))

    def test_a_worker_that_is_drained_is_not_started_again(self, view: Page, real: Cluster) -> None:
        worker = view.get_by_role("article", name="combined-1")
        worker.get_by_role("button", name="Drain combined-1").click()
        question = view.get_by_role("dialog")
        expect(question).to_contain_text("is not started again")
        question.get_by_role("button", name="Cancel").click()
        expect(worker.locator(".state")).to_have_text("ready")
        worker.get_by_role("button", name="Drain combined-1").click()
        view.get_by_role("dialog").get_by_role("button", name="Drain").click()
        expect(view.locator(".events li", has_text="combined-1 has ended in order")).to_be_visible()
        expect(worker.locator(".state")).to_have_text("gone")
        assert real.exit_code("combined-1") == 77


def _without_end(route: Route) -> None:
    """Asks for an answer that is as long as it may be."""
    body: Any = route.request.post_data_json
    route.continue_(post_data={**body, "ignore_eos": True})


@pytest.fixture(scope="module")
def sleepers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two models that share memory for both; the keys are those of `real`. No launcher has started it."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    models = [{"name": name, "model": str(tiny.CHECKPOINT)} for name in ("first", "second")]
    shared: dict[str, Any] = {"device_memory": "1GiB", "sleep": {"drain_timeout": 0.5}}
    with Cluster(models=models, api_key_file=str(keys), **shared) as running:
        yield running


def _signed_in(context: BrowserContext, key: str = "the-boss") -> Page:
    page = context.new_page()
    page.goto("/")
    sign_in(page, key)
    return page


def _model(view: Page, name: str) -> Locator:
    """A model in the view of the cluster."""
    row = view.locator(f".models [data-model={name}]")
    expect(row).to_be_visible()
    return row


@contextmanager
def _busy(cluster: Cluster, model: str) -> Iterator[None]:
    """Four clients ask again and again, so that a stream always runs."""
    over = threading.Event()

    def stream() -> None:
        body = {"model": model, "prompt": "fox", "max_tokens": 500, "ignore_eos": True}
        with httpx.Client(base_url=cluster.url, timeout=60, headers={"authorization": "Bearer the-user"}) as http:
            while not over.is_set():
                http.post("/v1/completions", json=body).raise_for_status()

    with ThreadPoolExecutor(4) as threads:
        clients = [threads.submit(stream) for _ in range(4)]
        try:
            yield
        finally:
            over.set()
    for one in clients:
        one.result()


class TestModels:
    @pytest.fixture
    def windows(self, browser: Browser, sleepers: Cluster) -> Iterator[BrowserContext]:
        """A window in front of the two models."""
        with window(browser, sleepers.url) as (opened_window, watch):
            yield opened_window
            _nothing_odd(watch)

    @pytest.fixture
    def view(self, windows: BrowserContext) -> Page:
        """The cluster, as an operator sees it; both models are awake."""
        view = _signed_in(windows)
        view.get_by_role("link", name="Cluster").click()
        for name in ("first", "second"):
            button = _model(view, name).get_by_role("button", name=re.compile("Sleep|Wake"))
            expect(button).to_be_visible()
            if button.text_content() == "Wake":
                button.click()
            expect(_model(view, name).locator(".state")).to_have_text("awake")
        return view

    def test_a_model_is_sent_to_sleep_and_woken_with_the_keyboard_and_then_chats(self, view: Page) -> None:
        row, announced = _model(view, "first"), view.locator("#announcer")
        button = row.get_by_role("button", name=re.compile("(Sleep|Wake) first"))
        button.focus()
        view.keyboard.press("Enter")
        expect(row.locator(".state")).to_have_text("asleep")
        expect(announced).to_have_text("first is asleep.")
        expect(_model(view, "second").locator(".state")).to_have_text("awake")
        worker = view.get_by_role("article", name="first-combined-0")
        expect(worker.locator(".state")).to_have_text("asleep")
        expect(button).to_be_focused()
        expect(button).to_have_text("Wake")
        view.keyboard.press("Enter")
        expect(row.locator(".state")).to_have_text("awake")
        expect(announced).to_have_text("first is awake.")
        expect(button).to_have_text("Sleep")
        view.get_by_role("link", name="Chat").click()
        view.get_by_label("Model", exact=True).select_option("first")
        set_fields(view, max_tokens="5")
        expect(ask(view, "Hello?").locator(".figures")).to_contain_text("first-combined-0")

    def test_people_are_asked_before_streams_stand_still(self, view: Page, sleepers: Cluster) -> None:
        row, question = _model(view, "second"), view.get_by_role("dialog")
        with _busy(sleepers, "second"):
            expect(row).to_contain_text(re.compile("[1-9] requests?"))
            row.get_by_role("button", name="Sleep second").click()
            expect(question).to_contain_text(re.compile("[1-9] requests? there may go on for a while"))
            question.get_by_role("button", name="Cancel").click()
            expect(question).to_have_count(0)
            expect(row.locator(".state")).to_have_text("awake")

    def test_a_pin_is_shown_and_ended(self, view: Page) -> None:
        row = _model(view, "first")
        row.get_by_role("button", name="Pin first").click()
        expect(row).to_contain_text("pinned")
        row.get_by_role("button", name="Unpin first").click()
        expect(row).not_to_contain_text("pinned")

    def test_an_error_is_said_in_words(self, browser: Browser, sleepers: Cluster) -> None:
        error = {"error": {"message": "worker first-combined-0 refuses: it can't.", "code": ""}}
        with window(browser, sleepers.url) as (context, _):
            view = _signed_in(context)
            view.route("**/cluster/pin?**", lambda route: route.fulfill(status=503, json=error), times=1)
            view.get_by_role("link", name="Cluster").click()
            _model(view, "first").get_by_role("button", name="Pin first").click()
            expect(view.get_by_role("dialog")).to_contain_text("first-combined-0 refuses: it can't.")
            view.get_by_role("dialog").get_by_role("button", name="OK").click()
            expect(_model(view, "first")).not_to_contain_text("pinned")

    def test_without_a_launcher_nothing_can_be_scaled(self, view: Page) -> None:
        assert view.get_by_role("button", name=re.compile("Scale")).count() == 0

    @pytest.mark.parametrize(("size", "colours"), [(WIDE, "dark"), (NARROW, "light")], ids=["wide", "narrow"])
    def test_axe_finds_nothing(self, browser: Browser, sleepers: Cluster, size: tuple[int, int], colours: str) -> None:
        with window(browser, sleepers.url, size, color_scheme=colours, bypass_csp=True) as (context, _):
            view = _signed_in(context)
            view.get_by_role("link", name="Cluster").click()
            expect(_model(view, "first").get_by_role("button", name="Pin first")).to_be_visible()
            assert violations(view) == []
            assert overflow(view) == 0


@contextmanager
def _up() -> Iterator[str]:
    """A cluster that `cpd up` has started, with the keys of `real`; its URL."""
    with started_command() as command:
        config, keys = command.directory / "cpd.yaml", command.directory / "keys.yaml"
        keys.write_text(KEYS)
        settings = {"model": str(tiny.CHECKPOINT), "served-model-name": "tiny", "prefill": 0, "kv-memory": "64MiB"}
        config.write_text(json.dumps({**settings, "api-key-file": str(keys)}))
        code, output = command.run("up", "--detach", "--port", "0", "--config", str(config))
        assert code == 0, output
        yield output[output.index("http") :].split()[0]
        assert command.run("down")[0] == 0


def _scale(view: Page, what: str, **numbers: int) -> None:
    """Asks for numbers by the first words of their labels."""
    view.get_by_role("button", name=f"Scale {what}").click()
    dialog = view.get_by_role("dialog")
    for label, number in numbers.items():
        dialog.get_by_label(label).fill(str(number))
    dialog.get_by_role("button", name="Scale").click()


def _changed(view: Page) -> None:
    """Waits until the cluster is no longer being changed."""
    expect(view.get_by_role("status").filter(has_text="The cluster is being changed")).to_have_count(0)


def test_workers_and_routers_are_started_and_ended(browser: Browser) -> None:
    with _up() as url, window(browser, url, bypass_csp=True) as (context, watch):
        view = _signed_in(context)
        view.get_by_role("link", name="Cluster").click()
        workers, row, dialog = view.locator("article.worker"), _model(view, "tiny"), view.get_by_role("dialog")
        expect(workers).to_have_count(1)
        view.get_by_role("button", name="Scale tiny").click()
        expect(dialog.get_by_label("Combined workers")).to_have_value("1")
        assert violations(view) == []
        dialog.get_by_role("button", name="Cancel").click()
        assert row.get_by_role("button", name=re.compile("Sleep|Pin")).count() == 0  # its device is not shared

        _scale(view, "tiny", Combined=2, Prefill=1)
        expect(view.get_by_role("status").filter(has_text="The cluster is being changed: Starting")).to_be_visible()
        expect(workers).to_have_count(3)
        expect(row).to_contain_text("2 combined workers · 1 prefill worker")
        _changed(view)

        _scale(view, "tiny", Combined=1000)
        expect(view.get_by_role("alert").filter(has_text="The cluster was not scaled")).to_be_visible()
        assert violations(view) == []

        _scale(view, "routers", Routers=2)
        expect(view.get_by_role("rowheader", name="router-1")).to_be_visible()
        _changed(view)
        _scale(view, "tiny", Combined=1, Prefill=0)
        for name in ("combined-1", "prefill-0"):
            expect(view.locator(".events li", has_text=f"{name} has ended in order")).to_be_visible()
        _changed(view)
        view.get_by_role("link", name="Chat").click()
        set_fields(view, max_tokens="5")
        ask(view, "Hello?")
        _nothing_odd(watch)
