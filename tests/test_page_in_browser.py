"""The file of `assigner report` in a headless Chromium: what people do with it, and that nothing else happens."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from page_cases import NASTY, big_page, make_pages

from assigner import formatting as fmt
from assigner.report.page.document import page_html

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from assigner.report.page.shown import Shown


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome"),
]


@pytest.fixture(scope="module")
def pages() -> list[Shown]:
    return make_pages()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install .[dev]")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=300_000)
        yield started
        started.close()


class Opened:
    """A page with all that it said and asked for."""

    def __init__(self, browser: Browser, file: Path, **settings: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **settings})
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(120_000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def middle(self, what: str, stage: int, micro_batch: int, side: str = "predicted") -> tuple[dict[str, Any], Any]:
        """An action as the page has it, and where it is drawn."""
        found = self.page.evaluate(
            """([what, stage, m, side]) => {
                const node = document.getElementById("timeline-chart"), it = echarts.getInstanceByDom(node);
                const plan = JSON.parse(document.getElementById("data").textContent).plans.at(-1).timeline;
                const [job] = plan.jobs.flatMap((each, n) => each[1] === what && each[2] === stage ? [n] : []);
                const event = plan.events.find((each) => each[0] === job && each[1] === m);
                const lanes = it.getOption().yAxis[0].data.length / plan.workers.length;
                const [worker, , , seconds] = plan.jobs[job], lane = worker * lanes + (side === "measured" ? 1 : 0);
                node.scrollIntoView({ block: "center" });
                const box = node.getBoundingClientRect();
                const [x, y] = it.convertToPixel({ gridIndex: 0 }, [event[2] + seconds / 2, lane]);
                return { start: event[2], seconds, x: box.x + x, y: box.y + y - 4 };
            }""",
            [what, stage, micro_batch, side],
        )
        return found, (found["x"], found["y"])

    def range(self) -> tuple[float, float]:
        """What the timeline shows, in seconds."""
        zoom = self.page.evaluate(
            "echarts.getInstanceByDom(document.getElementById('timeline-chart')).getOption().dataZoom[0]"
        )
        return zoom["startValue"], zoom["endValue"]


@pytest.fixture(scope="module")
def file(pages: list[Shown], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page_html(pages, title=NASTY, made_at="today"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def loaded(browser: Browser, file: Path) -> Iterator[Opened]:
    """The page, loaded once for all tests that leave it open."""
    loaded = Opened(browser, file)
    yield loaded
    loaded.context.close()


@pytest.fixture
def opened(loaded: Opened, file: Path) -> Iterator[Opened]:
    """The page with its second plan, its run and the whole step; in the end it has said and asked for nothing."""
    page = loaded.page
    page.mouse.move(0, 0)
    page.evaluate(
        """() => {
            const plan = document.querySelector("input[name=plan][value='1']"), run = document.getElementById("run");
            if (!plan.checked) return plan.click();
            run.selectedIndex = 0;
            run.dispatchEvent(new Event("change")); // lays everything out anew
        }"""
    )
    yield loaded
    assert loaded.said == [], "the page's console stays empty whatever was done"
    assert loaded.asked == [file.as_uri()], "nothing but the file itself was asked for"
    assert page.evaluate("window.hacked") is None, "no name in a plan is run"


def test_loads(opened, pages):
    """The page draws its charts, says nothing on its console and asks for nothing; names stay text."""
    page = opened.page
    assert page.evaluate("echarts.version") in (Path(__file__).parents[1] / "tools/charts/package.json").read_text()
    assert page.title() == page.locator("h1").inner_text() == NASTY.replace("\u2028", page.title()[-1])
    assert page.locator("img").count() == 0
    step = pages[1].predicted.step_s
    assert page.locator("#summary [data-plan='1'] dd b").first.inner_text() == fmt.seconds(step)
    assert page.evaluate("JSON.parse(document.getElementById('data').textContent).plans[1].step_s") == step


@pytest.mark.parametrize(("what", "stage", "micro_batch"), [("forward", 0, 3), ("backward", 1, 5), ("backward", 0, 0)])
def test_hover_tells_the_action(opened, pages, what, stage, micro_batch):
    """A hover over an action shows what it is, when it starts and how long it takes, as simulated and as measured."""
    events = pages[1].timeline.events
    event = next(
        each for each in events
        if (each.action.kind, each.action.stage, each.action.micro_batch) == (what, stage, micro_batch)
    )  # fmt: skip
    found, place = opened.middle(what, stage, micro_batch)
    assert found["start"] == pytest.approx(event.start_s, abs=1e-9)
    opened.page.mouse.move(*place)
    tip = opened.page.locator(".tip")
    tip.wait_for()
    text = tip.inner_text()
    unit = fmt.time_unit(event.end_s)
    assert f"{what}, micro-batch {micro_batch} (predicted)" in text
    assert pages[1].plan.stages[stage].worker in text
    assert unit.text(event.start_s) in text
    assert fmt.seconds(event.end_s - event.start_s) in text
    assert re.search(r"measured against predicted\s+\+", text)
    assert ("of which recompute" in text) == ((what, stage) == ("backward", 0))


def test_hover_over_a_measured_action(opened):
    """Measured actions lie below the predicted ones on the same axis and tell the same."""
    _, (x, y) = opened.middle("forward", 0, 0, "measured")
    opened.page.mouse.move(x, y + 6)
    opened.page.locator(".tip").wait_for()
    assert "forward, micro-batch 0 (measured)" in opened.page.locator(".tip").inner_text()


def test_zoom_and_pan(opened, pages):
    """Buttons, keys and Ctrl with the wheel change what is seen, and the text and the memory's axis follow."""
    page = opened.page
    whole = opened.range()
    assert whole[0] == 0
    assert whole[1] > pages[1].predicted.step_s
    page.get_by_role("button", name="Zoom in").click()
    nearer = opened.range()
    assert nearer[1] - nearer[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.get_by_role("button", name="Later").click()
    assert opened.range()[0] > nearer[0]
    unit = fmt.time_unit(opened.range()[1])
    said = page.locator("#range").inner_text()
    assert said == f"{unit.show(opened.range()[0])} to {unit.show(opened.range()[1])} {unit.name}"
    page.wait_for_function(
        "([from]) => echarts.getInstanceByDom(document.querySelector('#memory-charts .chart'))"
        ".getOption().xAxis[0].min === from",
        arg=[opened.range()[0]],
    )
    page.locator("#timeline-chart").press("0")
    assert opened.range() == pytest.approx(whole)
    opened.page.mouse.move(*opened.middle("forward", 0, 3)[1])
    page.keyboard.down("Control")
    page.mouse.wheel(0, -240)
    page.keyboard.up("Control")
    page.wait_for_function("() => document.getElementById('range').textContent.startsWith('0 to') === false")


def test_keys_walk_through_the_actions(opened, pages):
    """With the arrow keys every action is reached and told in words, for whoever sees or points at nothing."""
    chart, told = opened.page.locator("#timeline-chart"), opened.page.locator("#inspected")
    chart.press("ArrowRight")
    assert "forward, micro-batch 0 (predicted): worker worker:0/cpu" in told.inner_text()
    chart.press("ArrowRight")
    assert "busy, micro-batch 0 (predicted)" in told.inner_text()
    chart.press("ArrowRight")
    assert "forward, micro-batch 1" in told.inner_text()
    chart.press("ArrowDown")
    assert "(measured)" in told.inner_text()
    chart.press("ArrowDown")
    chart.press("ArrowLeft")
    text = told.inner_text()
    assert "worker:2/cpu" in text or "idle" in text


def test_keyboard_reaches_every_control(opened):
    """The tab key alone reaches each button, choice, chart and table."""
    page = opened.page
    wanted = page.evaluate(
        "[...document.querySelectorAll('button, select, input, summary, a[href], [tabindex=\"0\"]')]"
        ".filter((node) => node.checkVisibility() && !(node.type === 'radio' && !node.checked))"
        ".map((node, n) => { node.dataset.tabbed = n; return n; })"
    )
    reached = set()
    for _ in range(len(wanted) + 2):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("Number(document.activeElement.dataset.tabbed ?? -1)"))
    assert set(wanted) <= reached


def test_choosing_a_plan(opened, pages):
    """The other plan's summary, timeline and tables take the place of the first one's."""
    page = opened.page
    assert page.locator("#summary [data-plan='0']").is_hidden()
    page.locator("input[name=plan]").nth(1).focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#summary [data-plan='0']").is_visible()
    assert page.locator("#run-pick").is_hidden()
    assert opened.range()[1] == pytest.approx(pages[0].predicted.step_s)
    assert page.locator("#memory-charts .chart").count() == 3


def test_timeline_as_a_table(opened, pages):
    """Below the chart is every action as a row, predicted and measured."""
    page = opened.page
    page.locator("#timeline-table summary").click()
    page.locator("#timeline-table table").wait_for()
    rows = page.locator("#timeline-table tbody tr")
    texts = rows.all_inner_texts()
    forwards = [text for text in texts if "\tforward\t" in text]
    assert len(forwards) == 2 * sum(each.action.kind == "forward" for each in pages[1].timeline.events)
    assert any("\tgradient\t" in text and "worker:0/cpu" in text for text in texts)
    busy = [text.split("\t") for text in texts if "\tpredicted\tbusy\t" in text]
    said = sum(each.busy_s for each in pages[1].timeline.events if each.action.route is None)
    unit = fmt.time_unit(max(pages[1].predicted.step_s, pages[1].runs[0].trace.step_s[0]))
    assert sum(float(cells[6]) for cells in busy) * unit.size == pytest.approx(said, rel=0.05)


def test_a_run_with_other_rematerialisation(opened, pages):
    """Beside it stands the step of the plan as it was run, and the page says so where the run is chosen."""
    page, said = opened.page, opened.page.locator("#run-said")
    assert said.inner_text() == ""
    assert opened.range()[1] < pages[1].runs[1].agreement.step.predicted_s
    page.locator("#run").select_option(label=page.locator("#run option", has_text="always.json").first.inner_text())
    assert "rematerialised every partition" in said.inner_text()
    assert opened.range()[1] == pytest.approx(pages[1].runs[1].agreement.step.predicted_s, rel=1e-4)
    assert "Both sides" in said.inner_text()


@pytest.mark.parametrize("width", [1120, 1240])
def test_tables_beside_each_other_fit(opened, width):
    """The summary's tables need no scrolling, and no title is cut off, at usual widths of a window."""
    page = opened.page
    page.set_viewport_size({"width": width, "height": 900})
    page.locator("input[name=plan]").nth(0).check(force=True)
    cut = "[...document.querySelectorAll('#summary [data-plan=\"0\"] .table')].filter((node) => node.checkVisibility())"
    assert page.evaluate(f"{cut}.length") >= 2
    assert page.evaluate(f"{cut}.filter((node) => node.lastChild.scrollWidth > node.lastChild.clientWidth).length") == 0
    titles = "[...document.querySelectorAll('figcaption')].filter((node) => node.checkVisibility())"
    assert page.evaluate(f"{titles}.filter((node) => node.scrollWidth > node.clientWidth + 1).length") == 0
    page.set_viewport_size({"width": 1200, "height": 900})


def test_theme(opened):
    """The page takes the system's colours; the button changes them, charts included."""
    page = opened.page
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    label = "echarts.getInstanceByDom(document.getElementById('splits-chart')).getOption().yAxis[0].axisLabel.color"
    light = page.evaluate(label)
    button = page.get_by_role("button", name="Use dark colours")
    button.press("Enter")
    assert page.evaluate(background) != "rgb(255, 255, 255)"
    assert page.evaluate(label) != light
    assert page.get_by_role("button", name="Use light colours").get_attribute("aria-pressed") == "true"
    page.get_by_role("button", name="Use light colours").click()
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"() => {background} !== 'rgb(255, 255, 255)'")
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"() => {background} === 'rgb(255, 255, 255)'")


def test_phone(browser, file):
    """At 390 pixels nothing sticks out; wide tables scroll in their own box; a tap tells the action."""
    phone = Opened(browser, file, viewport={"width": 390, "height": 844}, has_touch=True)
    assert phone.page.evaluate("document.documentElement.scrollWidth") == 390
    phone.page.locator("input[name=plan]").nth(0).check(force=True)
    assert phone.page.evaluate("document.documentElement.scrollWidth") == 390
    phone.page.locator("input[name=plan]").nth(1).check(force=True)
    phone.page.touchscreen.tap(*phone.middle("backward", 1, 5)[1])
    phone.page.locator(".tip").wait_for()
    assert "backward, micro-batch 5" in phone.page.locator(".tip").inner_text()
    assert phone.said == []
    phone.context.close()


@pytest.mark.parametrize("width", [320, 420, 600])
def test_a_narrow_page_scrolls_only_its_tables_and_says_so(browser, tmp_path, pages, width):
    """Whatever files are called: nothing is wider than the screen, and each table that is cut has a word below it."""
    page = pages[1]
    runs = tuple(replace(run, name=f"/a/folder/whose/name/is/long/{run.name}.trace.json") for run in page.runs)
    assert runs
    path = tmp_path / "report.html"
    path.write_text(page_html([pages[0], replace(page, runs=runs)], title=NASTY, made_at="today"), encoding="utf-8")
    narrow = Opened(browser, path, viewport={"width": width, "height": 844})
    assert narrow.page.locator("#run").is_visible()
    assert narrow.page.evaluate("document.documentElement.scrollWidth") == width
    told = """[...document.querySelectorAll(".table")].filter((node) => node.checkVisibility()).map((node) => {
        const box = node.querySelector(".scroll");
        return [box.scrollWidth > box.clientWidth + 1, getComputedStyle(node, "::after").content.includes("sideways")];
    })"""
    narrow.page.wait_for_function(f"{told}.every(([cut, said]) => cut === said)")  # said when the browser has drawn it
    found = narrow.page.evaluate(told)
    assert any(cut for cut, _ in found)
    assert narrow.said == []
    narrow.context.close()


def test_without_scripts(browser, file):
    """Where scripts do not run, all plans' tables are there, each under its name."""
    plain = Opened(browser, file, java_script_enabled=False)
    assert plain.page.locator("#summary [data-plan='0']").is_visible()
    assert plain.page.locator("#stages [data-plan='1'] table").is_visible()
    assert plain.page.locator("#timeline-chart").is_hidden()
    assert plain.page.locator("#timeline-starts").is_visible()
    assert plain.page.locator("#timeline-starts [data-plan='1'] tbody tr").count() == 8
    plain.context.close()


def test_print(opened):
    """On paper the page is light, without buttons."""
    page = opened.page
    page.get_by_role("button", name="Use dark colours").click()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("[data-do=in]").is_hidden()
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.emulate_media(media="screen")
    page.get_by_role("button", name="Use light colours").click()


def test_numbers_read_as_the_command_lines(opened, pages):
    """The page's own code writes times and sizes as the tables and the terminal do."""
    step = pages[1].predicted.step_s
    value = opened.page.evaluate("document.querySelector('#run option').textContent.match(/median step, (.*)$/)[1]")
    assert value == fmt.seconds(pages[1].runs[0].trace.step_s[0])
    captions = opened.page.locator("#memory-charts figcaption").all_inner_texts()
    for caption, held in zip(captions, pages[1].memory, strict=True):
        assert f"at most {fmt.size(held.peak.total)}" in caption
    assert fmt.seconds(step) in opened.page.locator(".choice").inner_text()


def test_sixteen_workers_and_thirty_two_micro_batches(browser, tmp_path):
    """The page of a large plan with a run of it is under 1 MB and draws every action."""
    large = big_page()
    file = tmp_path / "big.html"
    file.write_text(page_html([large], title="big", made_at="today"), encoding="utf-8")
    assert file.stat().st_size < 1_000_000
    opened = Opened(browser, file)
    assert opened.said == []
    drawn = opened.page.evaluate(
        "echarts.getInstanceByDom(document.getElementById('timeline-chart')).getOption().series[0].data.length"
    )
    assert drawn > 2 * len(large.timeline.events)
    assert opened.page.locator("#memory-charts .chart").count() == 16
    opened.context.close()
