"""The page of a report: one file that stands alone, says what the JSON says, and runs nothing else."""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import Clock
from playwright.sync_api import Error, sync_playwright
from programs import need
from test_report import partly_priced
from workers import story

from idemguard import ExecutionLedger, Guard, OutOfScope, agent, record_usage, scope, worker
from idemguard.alerts import Limits
from idemguard.cli import command
from idemguard.report import Report, gather, html, plain
from idemguard.report.markup import LONGEST
from idemguard.report.words import brief, cell, harmless, money, share, short, spent
from idemguard.stores.memory import MemoryStore

OWN = "window.owned = 1"
IMG = f'<img src=x onerror="{OWN}">'
SCRIPT = f"</script><script>{OWN}</script><!--"
QUOTED = f"\"' autofocus onfocus='{OWN}' x=\""
RTL = "\u05e9\u05dc\u05d5\u05dd \u202e<b>evil</b>\u2066 \u2028next"
LONG = "w" * 150 + "<wbr>" + "\u65e5\u672c" * 70 + "\x00\x1b[31m"
FOREIGN = (IMG, SCRIPT, QUOTED, RTL, LONG)
FOLDER = files("idemguard.report") / "page"
LIBRARY = "87364cc2b2a76a6684929e7d6b80b18a897794db38400caff1fcf1791c6925d2"


def named(text):
    """A foreign text as the page shows it."""
    return brief(harmless(text), LONGEST)


def carries(_):
    """A body whose input grows with each step."""
    for step in range(1, 9):
        record_usage(input_tokens=1000 * step, output_tokens=10, model="m")


@pytest.fixture(scope="module")
def found():
    """A report in which everything is found, of three days, with names that mean ill."""
    clock = Clock()
    clock.now -= clock.now % 3_600_000
    store = MemoryStore(clock)
    told = {"store": store, "namespace": f"n{SCRIPT}{IMG}", "pricer": story.PRICES}
    observed, enforced = Guard(**told, mode="observe"), Guard(**told)
    for hour in range(40):
        for number in range(1 + hour % 5):
            observed.run_task("past", {"doc": f"{hour}-{number}"}, story.spends(3000, 10))
        if hour % 7 == 0:
            observed.run_task("past", {"doc": f"{hour}-0"}, story.spends(3000, 10))
        clock.advance(3600 if hour % 9 else 3 * 3600)  # with gaps
    clock.advance(6 * 3600)
    story.tell(store, told["namespace"], broken=IMG)
    for number, name in enumerate(FOREIGN):
        with worker(name), agent(name), scope(name):
            for _ in range(2):
                observed.run_task(name, {"doc": number}, story.spends(10 ** (number + 2), 7))
            enforced.run_task(name, {"doc": number}, story.quiet)
        for _ in range(2):
            with worker(name), scope(name), suppress(OutOfScope):
                enforced.run_task(name, {"back": number}, story.hands_back)
    for number in range(8):
        fields = {"doc": 1, IMG: sha256(bytes([number])).hexdigest()}
        enforced.run_task("hidden", fields, story.spends(100, 0))
    enforced.run_task("agent", 1, carries)
    clock.advance(3600)
    for number in range(45):  # an alert, in each of three windows
        observed.run_task(SCRIPT, {"late": number - number % 3}, story.spends(2_000_000, 1))
        clock.advance(20)
    clock.now += -clock.now % 300_000
    store.tend(None)
    ledger = ExecutionLedger(store, namespace=told["namespace"])
    gathered = gather(ledger, limits=Limits(), store="sqlite:///<b>.db")
    observed.close()
    enforced.close()
    return gathered


@pytest.fixture(scope="module")
def told(found):
    """What the JSON report says."""
    return json.loads(plain.dump(plain.report(found)))


@pytest.fixture(scope="module")
def empty():
    """The report of a ledger in which nothing has happened."""
    return gather(ExecutionLedger(MemoryStore(Clock()), namespace=IMG), limits=Limits())


class Read(HTMLParser):
    """What a page is made of."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], {"script": [], "style": []}
        self._in = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in self.texts:
            self._in = tag
            self.texts[tag].append("")

    def handle_endtag(self, tag):
        self._in = None if tag == self._in else self._in

    def handle_data(self, data):
        if self._in:
            self.texts[self._in][-1] += data


@pytest.fixture(scope="module")
def read(found):
    """The page of `found`, parsed."""
    return Read(html.page(found))


# --- one file ----------------------------------------------------------------------------------------


def test_everything_was_found_so_that_every_table_is_there(told):
    for key in (
        "task_types", "agents", "over_time", "worst_tasks", "alerts", "drops", "loops",
        "missed_duplicates", "workers", "growth",
    ):  # fmt: skip
        assert told[key], key


def test_the_file_loads_nothing(read):
    for tag, attributes in read.tags:
        assert not {"src", "srcset", "data", "action", "style"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")], tag
        assert tag in {"html", "head", "body", "link"} or "href" not in attributes, tag
    links = [attributes for tag, attributes in read.tags if tag == "link"]
    assert links == [{"rel": "icon", "href": "data:,"}]
    (style,) = read.texts["style"]
    assert not re.search(r"url\(|@import|https?:", style)
    data, library, script = read.texts["script"]
    assert "sourceMappingURL" not in library + script
    assert "http" not in script
    assert set(re.findall(r"https?://[\w./-]+", library)) <= {
        "https://www.chartjs.org", "https://github.com/kurkle/color",
    } | set(re.findall(r"http://www.w3.org/[\w./-]+", library))  # fmt: skip
    assert json.loads(data)


def test_the_policy_names_what_is_written_here_and_nothing_else(read):
    (policy,) = (one["content"] for _, one in read.tags if "http-equiv" in one)
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split("; ")}

    def hashed(text):
        return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"

    assert rules == {
        "default-src": ["'none'"],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "style-src": [hashed(read.texts["style"][0])],
        "script-src": [hashed(text) for text in read.texts["script"][1:]],
        "require-trusted-types-for": ["'script'"],
    }
    names = [tag for tag, _ in read.tags]
    policy_at = next(at for at, (_, one) in enumerate(read.tags) if "http-equiv" in one)
    assert policy_at < names.index("style") < names.index("script")


def test_the_json_in_it_is_the_json_report(found, told, read):
    data = read.texts["script"][0]
    assert json.loads(data) == told == plain.report(found)
    assert not re.search(r"[<>&]|[^\x20-\x7e]", data)


def test_it_is_the_same_in_every_encoding(found):
    assert html.page(found).isascii()


def test_the_library_is_as_its_package_ships_it_and_brings_its_licences():
    text = (FOLDER / "chart.js").read_bytes()
    assert sha256(text).hexdigest() == LIBRARY
    assert text.startswith(b"/*!\n * Chart.js v4.6.1\n * https://www.chartjs.org\n")
    assert b"Released under the MIT License" in text[:200]
    licence = (FOLDER / "chart.LICENSE.txt").read_text()
    assert "Chart.js 4.6.1" in licence
    assert licence.count("Permission is hereby granted") == 2
    assert "Chart.js Contributors" in licence
    assert "Jukka Kurkela" in licence


def test_it_is_small(found, empty):
    assert 200_000 < len(html.page(empty)) < 260_000
    assert len(html.page(found)) < 400_000


@pytest.fixture
def elsewhere(found, monkeypatch):
    """The page of `found` as it is written in India."""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        return html.page(found)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_times_are_told_by_one_offset_that_is_named(found, elsewhere):
    first = datetime.fromtimestamp(found.over_time[0]["start"] / 1000 + 19_800, UTC)
    assert "Times are UTC+05:30." in elsewhere
    assert f">{first:%Y-%m-%d %H:%M}</time>" in elsewhere


def test_a_time_that_no_calendar_has_is_told(found):
    text = html.page(replace(found, until=10**17))
    assert "All until <time>for ever</time>, UTC" in text


@pytest.fixture(scope="module")
def unpriced():
    """The report of tasks whose prices nobody knows."""
    guard = Guard(store=MemoryStore(), mode="observe")
    for _ in range(2):
        guard.run_task("t", 1, lambda _: record_usage(input_tokens=1000, output_tokens=100))
    gathered = gather(guard.ledger, limits=Limits())
    guard.close()
    return gathered


def test_without_prices_it_tells_tokens(unpriced):
    text = html.page(unpriced)
    assert "$" not in re.sub(r"<script.*</script>", "", text, flags=re.DOTALL)
    assert '<dd class="value">2,200 tokens</dd>' in text


def test_no_limit_is_told_where_none_is_checked(found):
    checked = replace(found.checked, limits=Limits(on=()), measured=(), alerts=())
    text = html.page(replace(found, checked=checked))
    assert "nothing is checked" in text
    assert "no limit is checked" in text
    assert "; limit 3%" not in text


def _luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    line = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * line[0] + 0.7152 * line[1] + 0.0722 * line[2]


def _contrast(one, other):
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_stand_out(scheme):
    block = re.findall(
        r"(?:^|\s):root[^{]*\{([^}]*--paper[^}]*)\}", (FOLDER / "style.css").read_text()
    )
    colours = dict(re.findall(r"--(\w+): (#\w{6});", block[scheme]))
    for text in ("ink", "quiet", "accent"):
        assert _contrast(colours[text], colours["paper"]) >= 4.5, text
    for text in ("ink", "accent"):
        assert _contrast(colours[text], colours["wash"]) >= 4.5, text
    for mark in ("plain", "accent"):
        assert _contrast(colours[mark], colours["paper"]) >= 3, mark


@pytest.fixture
def file(tmp_path):
    """The options that name a ledger in which everything has happened once."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    story.tell(url, broken=IMG)
    return ("--store", url)


def test_the_command_writes_it(file, tmp_path):
    args = ("report", *file, "--format", "html")
    path = tmp_path / "report.html"
    done = CliRunner().invoke(command, [*args, "--output", str(path)])
    assert (done.exit_code, done.output) == (0, "")
    printed = CliRunner().invoke(command, args).output
    alike = [re.sub(r"\d\d:\d\d:\d\d(\.\d+)?", "", text) for text in (path.read_text(), printed)]
    assert alike[0] == alike[1]
    as_json = json.loads(CliRunner().invoke(command, ["report", *file, "--format", "json"]).output)
    held = json.loads(Read(printed).texts["script"][0])
    assert held | {"until": None} == as_json | {"until": None}


# --- in a browser --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    """One Chromium for all of them."""
    where = need("chromium", "browser", others=["chromium-browser", "google-chrome"])
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=where)
        yield made
        made.close()


@dataclass
class Shown:
    """A page that is open, and what came of it."""

    page: object
    said: list
    asked: list


@pytest.fixture(scope="module")
def opens(browser, tmp_path_factory):
    """Opens a report, or a text, as a file; to be closed by its context."""

    def opened(report, **more):
        context = browser.new_context(
            **{"viewport": {"width": 1440, "height": 900}, "timezone_id": "UTC", **more}
        )
        path = tmp_path_factory.mktemp("page") / "report.html"
        path.write_text(html.page(report) if isinstance(report, Report) else report)
        shown = Shown(context.new_page(), [], [])

        def route(one):
            shown.asked.append(one.request.url)
            one.continue_() if one.request.url.startswith("file:") else one.abort()

        context.route("**/*", route)
        shown.page.on("console", lambda one: shown.said.append(one.text))
        shown.page.on("pageerror", lambda one: shown.said.append(str(one)))
        shown.page.goto(path.as_uri())
        assert shown.asked == [path.as_uri()]
        return shown

    return opened


@pytest.fixture
def show(opens):
    """The same, closed after the test."""
    contexts = []

    def shown(report, **more):
        made = opens(report, **more)
        contexts.append(made.page.context)
        return made

    yield shown
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def shown(found, opens):
    """The page of `found`, for tests that only look."""
    made = opens(found)
    yield made
    made.page.context.close()


def drawn(page):
    """The datasets of each chart, as the library holds them."""
    return page.evaluate("""() => [...document.querySelectorAll("canvas")].map((canvas) => {
      const chart = Chart.getChart(canvas);
      return {
        of: canvas.dataset.of ?? canvas.dataset.chart, width: chart.width, height: chart.height,
        labels: chart.data.labels,
        ticks: chart.scales.x.ticks.map((one) => one.label),
        data: Object.fromEntries(chart.data.datasets.map((one) => [one.label, one.data])),
        colours: chart.data.datasets.map((one) => one.backgroundColor ?? one.borderColor),
      };
    })""")


def told_by(page, name):
    """The cells of a table, row by row."""
    return page.eval_on_selector_all(
        f"#{name} tbody tr",
        "rows => rows.map((row) => [...row.cells].map((one) => one.textContent))",
    )


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_an_error_and_fits(found, show, scheme):
    shown = show(found, color_scheme=scheme)
    page = shown.page
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_function(
            """(width) => [...document.querySelectorAll("canvas")].every(
          (canvas) => Chart.getChart(canvas).width < width)""",
            arg=width,
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        charts = drawn(page)
        assert [chart["of"] for chart in charts] == ["over_time", "task_types", "agents"]
        assert all(chart["width"] > 250 for chart in charts)
    assert page.evaluate("""() => [...document.querySelectorAll("canvas")].every((canvas) => {
      const { width, height } = canvas;
      return canvas.getContext("2d").getImageData(0, 0, width, height).data.some((one) => one);
    })""")  # something is on each
    paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) > 380) is (scheme == "light")
    assert shown.said == []


@pytest.mark.browser
def test_what_is_drawn_is_what_the_json_says(told, shown):
    over_time, task_types, agents = drawn(shown.page)
    steps = told["over_time"]
    starts = [datetime.fromisoformat(one["start"]).timestamp() * 1000 for one in steps]
    ends = [datetime.fromisoformat(one["end"]).timestamp() * 1000 for one in steps]
    assert {end - start for start, end in zip(starts, ends, strict=True)} == {3_600_000}
    own = [one for one in over_time["data"]["Duplication rate"] if "row" in one]
    assert [(one["x"], one["y"]) for one in own] == [
        (start, one["duplication_rate"]) for start, one in zip(starts, steps, strict=True)
    ]
    ended = [one for one in over_time["data"]["Duplication rate"] if "row" not in one]
    gaps = [end for end in ends if end not in starts]
    assert [one["x"] for one in ended[::2]] == gaps  # the rate holds until there
    assert len(gaps) > 3
    for label in ("Executions", "Duplicates"):
        assert [(one["x"], one["y"]) for one in over_time["data"][label]] == [
            (start + 1_800_000, one[label.lower()])
            for start, one in zip(starts, steps, strict=True)
        ]
    assert [one["y"] for one in over_time["data"]["Limit"]] == [told["checked"][0]["limit"]] * 2
    for chart, rows, key in (
        (task_types, told["task_types"], "task_type"),
        (agents, told["agents"], "agent"),
    ):
        assert chart["labels"] == [named(one[key] or "(no agent)") for one in rows[:12]]
        for field in ("charged", "wasted", "saved"):
            assert chart["data"][field.capitalize()] == [float(one[field]) for one in rows[:12]]
    assert len(told["task_types"]) > 12  # so that some are in the table alone


@pytest.mark.browser
def test_without_prices_tokens_are_drawn(unpriced, show):
    over_time, task_types = drawn(show(unpriced).page)
    assert task_types["data"] == {"Tokens": [2200], "Wasted tokens": [1100], "Saved tokens": [0]}
    assert [one["y"] for one in over_time["data"]["Duplicates"]] == [1]
    assert len(over_time["ticks"]) >= 1


@pytest.mark.browser
def test_tables_say_what_the_json_says(told, shown):
    page = shown.page

    def paid(text, missing=0):
        return spent(plain.Decimal(text), missing)

    def clock(text, spec="%m-%d %H:%M:%S"):
        return datetime.fromisoformat(text).strftime(spec)

    def workers(names):
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return ", ".join(map(named, names[:5])) + more

    assert told_by(page, "over_time") == [
        [
            clock(one["start"], "%Y-%m-%d %H:%M"), clock(one["end"], "%H:%M"),
            str(one["executions"]), str(one["duplicates"]), share(one["duplication_rate"]),
        ]
        for one in told["over_time"]
    ]  # fmt: skip
    for name, key in (("task_types", "task_type"), ("agents", "agent")):
        assert told_by(page, name) == [
            [
                named(one[key] or "(no agent)"),
                paid(one["charged"], one["unpriced"]),
                paid(one["wasted"], min(one["unpriced"], one["duplicates"])), paid(one["saved"]),
                cell(one["total_tokens"]), cell(one["executions"]),
                share(one["duplication_rate"]),
                "-" if one["doubled_share"] is None else share(one["doubled_share"]),
            ]
            for one in told[name]
        ]  # fmt: skip
    assert told_by(page, "worst_tasks") == [
        [
            named(one["task_type"]), named(one["scope"] or "-"), one["fingerprint"][:16],
            paid(one["wasted"], one["unpriced_duplicates"]), paid(one["charged"], one["unpriced"]),
            cell(one["wasted_tokens"]), cell(one["duplicates"]),
            cell(one["executions"]), workers(one["workers"]), clock(one["last"]),
        ]
        for one in told["worst_tasks"]
    ]  # fmt: skip
    for name in ("drops", "loops"):
        assert told_by(page, name) == [
            [
                named(one["task_type"]), named(one["scope"] or "-"), one["fingerprint"][:16],
                workers(one["workers"]), str(one["times"]), clock(one["last"]),
            ]
            for one in sorted(told[name], key=lambda one: one["last"], reverse=True)
        ]  # fmt: skip
    assert told_by(page, "missed_duplicates") == [
        [
            named(one["task_type"]),
            ", ".join(
                f"{named(each['field'])} (differs in {each['differs']} of {each['pairs']} pairs)"
                for each in one["suspects"]
            ),
            str(one["looked_at"]), str(one["executions"]), cell(one["tokens"]), paid(one["charged"]),
        ]
        for one in told["missed_duplicates"]
    ]  # fmt: skip
    assert told_by(page, "growth") == [
        [
            one["task_type"], cell(one["executions"]), cell(one["tokens"]), f"{one['steps']:.1f}",
            f"{one['per_step']:,.0f}", cell(one["capped"]), f"{one['every']} steps",
            cell(one["summarised"]),
        ]
        for one in told["growth"]
    ]  # fmt: skip
    assert told_by(page, "workers") == [
        [
            named(one["worker"]),
            *(cell(one[field]) for field in ("executions", "duplicates", "failed", "lost")),
            cell(one["total_tokens"]), paid(one["charged"], one["unpriced"]),
            paid(one["wasted"], one["unpriced_duplicates"]),
        ]
        for one in told["workers"]
    ]  # fmt: skip


@pytest.mark.browser
def test_the_key_figures_and_alerts_come_first(told, shown):
    page, totals = shown.page, told["totals"]
    (alert,) = told["alerts"]
    text = page.inner_text(".alerts li")
    assert text.startswith(f"duplication: {alert['figure']:.2%}".rstrip("%").rstrip("0"))
    assert "limit 3%" in text
    assert page.text_content(".alerts code") == alert["command"]
    figures = page.eval_on_selector_all(
        ".figures > div",
        "all => all.map((one) => [...one.children].map((part) => part.textContent))",
    )
    assert {name: value for name, value, _ in figures} == {
        **{
            name.capitalize(): money(plain.Decimal(totals[name]))
            for name in ("charged", "saved", "wasted")
        },
        "Duplication rate": share(totals["duplication_rate"]),
        "Doubled share": share(totals["doubled_share"]),
    }
    notes = {name: note for name, _, note in figures}
    assert notes["Charged"] == f"{short(totals['total_tokens'])} tokens"
    assert notes["Duplication rate"] == (
        f"{totals['duplicates']} of {totals['executions']} executions; limit 3%"
    )
    doubled = round(totals["doubled_share"] * totals["tasks"])  # none is of another part
    assert notes["Doubled share"] == f"{doubled} of {totals['tasks']} tasks"
    assert page.eval_on_selector_all("h1, h2", "all => all.map((one) => one.tagName)")[0] == "H1"


@pytest.mark.browser
def test_foreign_text_is_text(shown):
    page = shown.page
    assert page.evaluate("window.owned") is None
    assert page.locator("img, svg, iframe, b, wbr, [autofocus], [onerror], [onfocus]").count() == 0
    assert page.locator("script").count() == 3
    text = page.text_content("main")
    for name in FOREIGN:
        assert named(name) in text
    whole = page.eval_on_selector_all("main bdi[title]", "all => all.map((one) => one.title)")
    assert set(whole) == {harmless(LONG)}
    assert "\u202e" not in text
    store = f"sqlite:///{Path('<b>.db').absolute()}"
    assert f"--store '{store}'" in page.text_content(".alerts code")
    assert page.text_content("h1") == f"idemguard: n{SCRIPT}{IMG}"
    assert page.title() == f"idemguard: n{SCRIPT}{IMG}"
    assert shown.said == []


@pytest.mark.browser
def test_markup_that_got_in_all_the_same_could_not_run(found, show):
    bad = f"<script>window.owned = 1</script><img src='data:,' onerror='{OWN}'>"
    more = "<img src='http://192.0.2.1/x.png'><style>body { display: none }</style>"
    shown = show(html.page(found).replace("<header>", f"{bad}{more}<header>", 1))
    page = shown.page
    assert page.locator("img").count() == 2
    assert page.evaluate("window.owned") is None
    assert page.is_visible("h1")
    assert len(shown.asked) == 1
    assert all("Content Security Policy" in one for one in shown.said)
    assert len(shown.said) >= 4
    with pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<p>'")


@pytest.mark.browser
def test_the_keyboard_reaches_everything_in_the_order_of_the_page(found, show):
    page = show(found, viewport={"width": 390, "height": 844}).page
    number = page.locator("summary, [tabindex]").count()
    assert number == 10
    page.eval_on_selector_all(
        "summary, [tabindex]", "all => all.forEach((one, at) => { one.dataset.at = at; })"
    )
    reached = []
    for _ in range(number):
        page.keyboard.press("Tab")
        at = page.evaluate("document.activeElement.dataset.at")
        reached.append(at)
        if page.evaluate("document.activeElement.tagName") == "SUMMARY":
            assert not page.is_visible("#over_time")
            page.keyboard.press("Enter")
            assert page.is_visible("#over_time")
        ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert ring == "solid"
    assert reached == [str(at) for at in range(number)]
    page.focus("#worst_tasks >> xpath=..")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "() => document.querySelector('#worst_tasks').parentElement.scrollLeft > 0"
    )


@pytest.mark.browser
def test_who_does_not_see_it_is_told_the_same(shown):
    page = shown.page
    assert page.get_attribute("html", "lang") == "en"
    for canvas in page.locator("canvas").all():
        assert canvas.get_attribute("role") == "img"
        assert "The table that follows has all figures." in canvas.get_attribute("aria-label")
    tables = page.locator("table")
    assert tables.count() == 9
    for table in tables.all():
        assert table.locator("caption").count() == 1
        assert table.locator("thead th:not([scope=col])").count() == 0
        assert table.locator("tbody tr").count() == table.locator("tbody th[scope=row]").count()
    for section in page.locator("section").all():
        heading = page.locator(f"#{section.get_attribute('aria-labelledby')}")
        assert heading.evaluate("one => one.tagName") == "H2"
    names = page.eval_on_selector_all("[id]", "all => all.map((one) => one.id)")
    assert len(names) == len(set(names))


@pytest.mark.browser
def test_charts_follow_the_scheme_and_the_printer(found, show):
    page = show(found, color_scheme="light").page
    light = drawn(page)[0]["colours"]
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        """(was) => Chart.getChart(document.querySelector("canvas")).data.datasets[0].borderColor
          !== was""",
        arg=light[0],
    )
    dark = drawn(page)[0]["colours"]
    assert all(one != other for one, other in zip(light, dark, strict=True))
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert drawn(page)[0]["colours"] == light
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert drawn(page)[0]["colours"] == dark


@pytest.mark.browser
@pytest.mark.parametrize("minutes", [0, 330])
def test_the_time_axis_is_of_the_place_where_the_report_was_made(found, elsewhere, show, minutes):
    page = show(elsewhere if minutes else found, timezone_id="America/New_York").page
    ticks = page.evaluate("""() => Chart.getChart(document.querySelector("canvas")).scales.x.ticks
      .map((one) => [one.value / 1000, one.label])""")
    assert len(ticks) > 5
    for at, label in ticks:
        there = datetime.fromtimestamp(at + minutes * 60, UTC)
        assert there.hour % 6 == there.minute == 0
        assert label == (f"{there:%H:%M}" if there.hour else f"{there:%b} {there.day}")
    assert {there for _, there in ticks} >= {"12:00", "18:00"}


@pytest.mark.browser
def test_what_is_pointed_at_is_told_as_in_the_table(shown):
    page = shown.page
    tips = page.evaluate("""() => [...document.querySelectorAll("canvas")].map((canvas) => {
      const chart = Chart.getChart(canvas), time = canvas.dataset.chart === "over_time";
      const bar = chart.getDatasetMeta(time ? 2 : 0).data[0];
      const box = canvas.getBoundingClientRect();
      return { x: box.x + scrollX + bar.x - (time ? 0 : 4), y: box.y + scrollY + bar.y };
    })""")
    rows = [told_by(page, name)[0] for name in ("over_time", "task_types", "agents")]
    wanted = [[f"Duplication rate {rows[0][4]}", f"{rows[0][3]} of {rows[0][2]} executions"]]
    wanted += [[f"Charged {row[1]}", f"Wasted {row[2]}", f"Saved {row[3]}"] for row in rows[1:]]
    for number, tip in enumerate(tips):
        page.evaluate(f"scrollTo(0, {tip['y'] - 400})")
        y = tip["y"] - page.evaluate("scrollY")
        page.mouse.move(tip["x"], y)
        page.wait_for_function(f"""() => {{
          const chart = Chart.getChart(document.querySelectorAll("canvas")[{number}]);
          return chart.tooltip.opacity > 0;
        }}""")
        lines = page.evaluate(f"""Chart.getChart(document.querySelectorAll("canvas")[{number}])
          .tooltip.body.flatMap((one) => one.lines)""")
        assert lines == wanted[number]


@pytest.mark.browser
def test_each_table_is_told_from_all_others_by_its_caption(shown):
    captions = shown.page.eval_on_selector_all(
        "table",
        """all => all.map((one) => [
          one.closest("section").querySelector("h2").textContent, one.caption.textContent,
          one.parentElement.getAttribute("aria-label"),
        ])""",
    )
    for title, caption, label in captions:
        assert caption == label
        assert caption.startswith(f"{title}: ")
    assert len({caption for _, caption, _ in captions}) == len(captions) == 9


@pytest.fixture(scope="module")
def apart():
    """A report of two windows that are an hour and a half apart."""
    clock = Clock()
    clock.now -= clock.now % 3_600_000
    guard = Guard(store=MemoryStore(clock), mode="observe")
    for _ in range(2):
        for _ in range(3):
            guard.run_task("t", clock.now, story.quiet)
        clock.advance(90 * 60)
    gathered = gather(guard.ledger, limits=Limits())
    guard.close()
    return gathered


@pytest.mark.browser
def test_a_bar_is_as_wide_as_its_window_however_far_the_next_is(apart, show):
    page = show(apart).page
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_function(
            "(width) => Chart.getChart(document.querySelector('canvas')).width < width", arg=width
        )
        bars, area = page.evaluate("""() => {
          const chart = Chart.getChart(document.querySelector("canvas"));
          const { left, right } = chart.chartArea;
          return [[1, 2].map((set) => chart.getDatasetMeta(set).data.map(
            (one) => [one.x - left, one.width])), right - left];
        }""")
        step = area * 5 / 95
        for bar in bars:
            assert [one[0] for one in bar] == pytest.approx([step / 2, area - step / 2])
            assert [one[1] for one in bar] == pytest.approx([0.8 * step] * 2)


@pytest.mark.browser
def test_traffic_so_sparse_that_no_line_is_seen_is_dots(apart, found, show):
    rows = apart.over_time
    week = 7 * 86_400_000
    later = {**rows[1], "start": rows[1]["start"] + week, "end": rows[1]["end"] + week}
    sparse = replace(apart, over_time=[rows[0], later])

    def radii(report):
        return show(report).page.evaluate("""() => {
          const chart = Chart.getChart(document.querySelector("canvas"));
          return chart.getDatasetMeta(0).data.map((one) => one.options.radius);
        }""")

    assert [one for one in radii(sparse) if one] == [2.5, 2.5]
    assert not any(radii(apart))  # a twentieth of the chart each: lines
    step = rows[0]["end"] - rows[0]["start"]
    begin = rows[0]["start"]
    dense = [
        {**rows[0], "start": begin + step * number, "end": begin + step * (number + 1)}
        for number in range(400)
    ]
    assert not any(radii(replace(apart, over_time=dense)))  # one line, of steps narrower than that


@pytest.mark.browser
@pytest.mark.parametrize("dearest", ["0.0000009", "0.00004", "0.013", "0.9", "7", "123456"])
def test_no_two_labels_of_an_axis_are_alike(partly, show, dearest):
    row = partly.task_types[0] | {"charged": plain.Decimal(dearest)}
    page = show(replace(partly, task_types=[row])).page
    ticks = drawn(page)[1]["ticks"]
    values = page.evaluate("""() => Chart.getChart(document.querySelectorAll("canvas")[1])
      .scales.x.ticks.map((one) => one.value)""")
    assert len(set(ticks)) == len(ticks) > 2
    for label, value in zip(ticks, values, strict=True):
        assert label.startswith("$")
        if float(dearest) < 1000:  # above, in thousands
            assert float(label[1:]) == pytest.approx(value, abs=1e-15)


def test_the_summary_tells_of_missed_duplicates(found):
    said = next(
        line for line in html.page(found).split("<li>") if line.startswith("<strong>Missed: ")
    )
    executions = sum(one.executions for one in found.missed_duplicates)
    assert said.startswith(f"<strong>Missed: {executions:,} executions look like duplicates that")
    assert "Missed: " not in html.page(replace(found, missed_duplicates=[]))


def test_fifty_of_what_was_handed_back_are_told_the_newest_first(found):
    one = found.drops[0]
    many_ = [
        replace(one, fingerprint=f"{number:064x}"[::-1], last=one.last + number * 1000)
        for number in range(60)
    ]
    text = html.page(replace(found, drops=many_))
    table = text[text.index('id="drops"') :].partition("</table>")
    told = re.findall(r"<code>([0-9a-f]{16})</code>", table[0])
    assert told == [f"{number:064x}"[::-1][:16] for number in range(59, 9, -1)]
    assert "and 10 more (--format json has all)" in table[2].partition("</section>")[0]


def test_a_scope_is_told_where_any_has_one(found, partly):
    for name in ("worst_tasks", "drops", "loops"):
        text = html.page(found)
        head = text[text.index(f'id="{name}"') :].partition("</thead>")[0]
        assert ">scope</th>" in head
    text = html.page(partly)
    assert ">scope</th>" not in text


@pytest.mark.browser
def test_where_nothing_is_known_no_chart_is_drawn_and_it_says_so(apart, show):
    shown = show(apart)
    assert [chart["of"] for chart in drawn(shown.page)] == ["over_time"]
    section = shown.page.inner_text("section[aria-labelledby=task_types-title]")
    assert "No tokens and no prices are known here, so that there is nothing to draw." in section
    assert told_by(shown.page, "task_types")[0][:4] == ["t", "-", "-", "-"]
    figures = shown.page.eval_on_selector_all(
        ".figures .value", "all => all.map((one) => one.textContent)"
    )
    assert figures[:3] == ["unknown", "0 tokens", "unknown"]  # charged, saved, wasted
    assert shown.said == []


@pytest.fixture(scope="module")
def partly():
    """A report in which some executions have no price."""
    guard = Guard(store=MemoryStore(), mode="observe", pricer=story.PRICES)
    partly_priced(guard)
    gathered = gather(guard.ledger, limits=Limits())
    guard.close()
    return gathered


def test_a_question_mark_stands_where_money_is_missing(partly):
    text = html.page(partly)
    rows = [
        re.findall(r">([^<>]+)</(?:bdi|td|code)>", row)
        for row in re.findall(r"<tr>(?!<th[^>]*scope=\"col).*?</tr>", text)
    ]
    told = {}
    for row in rows:
        told.setdefault(row[0], []).append(row[1:])
    assert told["half"][0][:3] == ["$0.0030+?", "?", "-"]
    assert told["half"][1][1:3] == ["?", "$0.0030+?"]  # worst tasks: wasted, charged
    assert told["none"][1][1:3] == ["?", "?"]
    assert told["reader"][0][:3] == ["?", "?", "-"]
    assert told["w-2"][0][-2:] == told["w-3"][0][-2:] == ["?", "?"]
    assert told["w-4"][0][-2:] == ["$0.0030+?", "-"]
    assert '<dd class="value">$0.0090</dd>' in text
    assert '<dt>Wasted</dt><dd class="value">?</dd>' in text
    held = json.loads(Read(text).texts["script"][0])
    assert [one["unpriced"] for one in held["workers"]] == [0, 2, 1, 1]


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1440])
def test_a_task_type_without_end_is_cut_where_it_is_shown_and_whole_where_it_is_used(
    found, show, width
):
    name = "x" * 1500 + "\x1b" + "y" * 1500
    alerts = [replace(one, task_type=name) for one in found.alerts]
    alerts = [replace(one, task_types=(replace(one.figure, task_type=name),)) for one in alerts]
    found = replace(found, checked=replace(found.checked, alerts=alerts))
    shown = show(found, viewport={"width": width, "height": 844})
    page = shown.page
    line = page.text_content(".alerts li > span")
    assert len(line) < 250
    assert f"of {brief(harmless(name))} are duplicates" in line
    assert page.get_attribute(".alerts li > span > span", "title") == harmless(name)
    assert page.text_content(".alerts code").count("x" * 1500) == 1
    assert page.evaluate("document.querySelector('.alerts li').offsetHeight") < 350
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "CODE"
    assert shown.said == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1440])
def test_an_empty_ledger_says_so(empty, show, width):
    shown = show(empty, viewport={"width": width, "height": 844})
    page = shown.page
    text = f"Nothing was called or executed until then: namespace {IMG} was not used."
    assert page.text_content(".empty p") == text
    assert page.locator("canvas, table, .figures").count() == 0
    assert "`" not in page.text_content("main")
    assert page.text_content(".empty code") == "idemguard report --namespace NAME"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.said == []


@pytest.mark.browser
def test_without_scripts_every_figure_is_there(found, show):
    shown = show(found, java_script_enabled=False)
    assert not any(one.is_visible() for one in shown.page.locator("canvas").all())
    assert shown.page.is_visible("#task_types")
    assert shown.said == []
