"""The file of `assigner report` in a headless Chromium: what people do with it, and that nothing else happens."""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from builders import make_plan, make_profile

from assigner import formatting as fmt
from assigner.agreement import rehearsed
from assigner.cost import CostModel
from assigner.plan import Baseline, Candidate, SolverReport
from assigner.report.page import Shown, page_html, shown
from assigner.simulate import simulated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

    from assigner.trace import WorkerTrace

NASTY = "</script><img src=x onerror='window.hacked=1'><b>&amp;\u2028"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome")


def make_pages() -> list[Shown]:
    """Two plans of a model with a hostile partition name, the second one beside a run that was 10 % slower."""
    profile = make_profile(work=[2e-3, 3e-3, 1e-3, 4e-3], slowness=[1.0, 1.5, 1.2], batch=16, busy=0.1)
    names = {"p1": NASTY}
    profile = replace(
        profile,
        partitions=tuple(replace(each, name=names.get(each.name, each.name)) for each in profile.partitions),
        edges=tuple(
            replace(each, source=names.get(each.source, each.source), target=names.get(each.target, each.target))
            for each in profile.edges
        ),
        measurements=tuple(
            replace(each, partition=names.get(each.partition, each.partition)) for each in profile.measurements
        ),
        warnings=(NASTY,),
    )
    equal = make_plan(profile, [(0, ["p0", NASTY]), (1, ["p2"]), (2, ["p3"])])
    plan = make_plan(profile, [(0, ["p0", NASTY]), (2, ["p2", "p3"])], micro_batches=8)
    stages = (replace(plan.stages[0], rematerialise=(NASTY,)), plan.stages[1])
    plan = replace(
        plan, schedule="1f1b", stages=stages, baselines=(Baseline(NASTY, 0.3),),
        solver=SolverReport("HiGHS", "1.0", "optimal", 0.2, 0.19, 0.05, 0.5, {"note": NASTY}),
        candidates=(Candidate("1f1b", 8, 2, 0.2, 0.19, "chosen"), Candidate("gpipe", 4, 4, None, 0.25, NASTY)),
    )  # fmt: skip
    slower = replace(
        profile, measurements=tuple(
            replace(each, forward_s=1.1 * each.forward_s, backward_s=1.1 * each.backward_s)
            for each in profile.measurements
        ),
    )  # fmt: skip
    cost = CostModel(slower)
    trace = rehearsed(simulated(plan, cost), cost, steps=2)
    return [shown("equal.json", equal, profile), shown(NASTY, plan, profile, [("run.json", trace)])]


def big_page() -> Shown:
    """16 workers x 32 micro-batches."""
    rng = random.Random(1)
    work = [rng.uniform(1e-3, 5e-3) for _ in range(32)]
    profile = make_profile(work=work, slowness=[rng.choice([1.0, 1.7]) for _ in range(16)], batch=64)
    plan = make_plan(profile, [(w, [f"p{2 * w}", f"p{2 * w + 1}"]) for w in range(16)], micro_batches=32)
    plan = replace(plan, schedule="1f1b")
    cost = CostModel(profile)
    trace = rehearsed(simulated(plan, cost), cost, steps=3)

    def disturbed(worker: WorkerTrace) -> WorkerTrace:
        """No two times alike, and memory read after each action."""
        actions = (
            replace(each, end_s=each.end_s + rng.uniform(0, 1e-4), memory_bytes=rng.uniform(1e8, 9e8))
            for each in worker.actions
        )
        return replace(worker, actions=tuple(actions))

    trace = replace(trace, workers=tuple(map(disturbed, trace.workers)))
    return shown("big.json", plan, profile, [("run.json", trace)])


@pytest.fixture(scope="module")
def pages() -> list[Shown]:
    return make_pages()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install .[dev]")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page with all that it said and asked for."""

    def __init__(self, browser: Browser, file: Path, **settings: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **settings})
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(10_000)
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
    page.locator("input[name=plan]").nth(0).check(force=True)
    page.locator("input[name=plan]").nth(1).check(force=True)
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
    assert "micro-batch 1" in told.inner_text()
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
        ".filter((node) => node.offsetParent !== null && !(node.type === 'radio' && !node.checked))"
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


def test_without_scripts(browser, file):
    """Where scripts do not run, all plans' tables are there, each under its name."""
    plain = Opened(browser, file, java_script_enabled=False)
    assert plain.page.locator("#summary [data-plan='0']").is_visible()
    assert plain.page.locator("#stages [data-plan='1'] table").is_visible()
    assert plain.page.locator("#timeline-chart").is_hidden()
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
