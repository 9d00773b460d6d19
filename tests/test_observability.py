"""The Prometheus rules, the dashboard and the compose file name what a real scrape has, and parse."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
import yaml
from click.testing import CliRunner
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from programs import need
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from servers.server import HOST, free_port, until

from idemguard import Guard, agent, record_usage
from idemguard.cli import command
from idemguard.errors import StoreUnavailableError, WaitTimeoutError
from idemguard.record import DUPLICATES, Cause
from idemguard.stores.memory import MemoryStore
from idemguard.windows import OUTCOMES

FOLDER = Path(__file__).parents[1] / "examples" / "observability"
RULES = yaml.safe_load((FOLDER / "idemguard-rules.yml").read_text())
TESTS = sorted(FOLDER.glob("*.test.yml"))
PAGE = (FOLDER / "README.md").read_text()
DASHBOARD = json.loads((FOLDER / "grafana" / "dashboards" / "idemguard.json").read_text())
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
COLLECTOR = yaml.safe_load((FOLDER / "otel-collector.yml").read_text())
PROMETHEUS = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "idemguard"

RECORDED = {
    rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule
}
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]

PRICES = {"m": {"input": "3", "output": "15"}}


# --- a real scrape ---------------------------------------------------------------------------------------


def body(payload):
    record_usage(input_tokens=1000, output_tokens=100, model="m")
    return payload


def fails(_):
    raise ValueError


class Down(MemoryStore):
    """A store that answers nothing."""

    def perform(self, _):
        raise StoreUnavailableError("down")


def every_outcome(provider):
    """Guarded calls of every outcome, and of the duplicates' causes that need no dead process."""
    calls = []
    guard = Guard(store=MemoryStore(), meter_provider=provider, pricer=PRICES)

    def run(number, act=body, guard=guard, **options):
        calls.append(guard.run_task("summarise", {"n": number}, act, **options).source)

    with agent("researcher"):
        run(1)
        run(1)
    run(2, lambda _: {"status": "out_of_scope"})
    with pytest.raises(ValueError):  # noqa: PT011 - it is the body's own
        run(3, fails)
    started, go_on = threading.Event(), threading.Event()

    def slow(payload):
        started.set()
        assert go_on.wait(20)
        return body(payload)

    leader = threading.Thread(target=run, args=(4, slow))
    leader.start()
    try:
        assert started.wait(20)
        with pytest.raises(WaitTimeoutError):
            run(4, wait_timeout=0, on_timeout="raise")
        run(4, wait_timeout=0)
    finally:
        go_on.set()
        leader.join()
    down = Guard(store=Down(), meter_provider=provider, pricer=PRICES, on_store_error="run")
    run(5, guard=down)
    down.engine.backlog._owed.clear()  # nobody will ever be there to be told
    observing = Guard(store=MemoryStore(), meter_provider=provider, pricer=PRICES, mode="observe")
    run(6, guard=observing)
    run(6, guard=observing)
    return {*calls, "failed", "refused"}


@dataclass(frozen=True)
class Scrape:
    """What a scrape holds: of every sample's name the labels of its series."""

    series: dict[str, list[dict[str, str]]]
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float]

    @classmethod
    def of(cls, text):
        series, values = {}, {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("idemguard"):
                    series.setdefault(sample.name, []).append(sample.labels)
                    values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        return cls(series, values)

    def labels(self, name):
        return {label for labels in self.series[name] for label in labels}

    def told(self, name, label):
        """The values that a label of a metric has."""
        return {labels.get(label, "") for labels in self.series[name]}


@pytest.fixture(scope="module")
def scrape():
    """What Prometheus gets of a process that had calls of every outcome."""
    registry = CollectorRegistry()
    provider = MeterProvider(metric_readers=[PrometheusMetricReader(registry=registry)])
    try:
        assert every_outcome(provider) == set(OUTCOMES)
        return Scrape.of(generate_latest(registry).decode())
    finally:
        provider.shutdown()


def test_the_scrape_has_every_series_that_a_rule_may_ask_for(scrape):
    assert scrape.told("idemguard_calls_total", "idemguard_outcome") == set(OUTCOMES)
    assert scrape.told("idemguard_executions_total", "idemguard_cause") == set(map(str, Cause))
    assert scrape.told("idemguard_duplicates_total", "idemguard_cause") == set(map(str, DUPLICATES))
    for name in ("idemguard_usage_tokens_total", "idemguard_saved_tokens_total"):
        assert scrape.told(name, "gen_ai_token_type") == {"input", "output"}
    for name in ("idemguard_usage_cost_USD_total", "idemguard_saved_cost_USD_total"):
        assert scrape.told(name, "gen_ai_agent_name") == {"researcher", ""}
    assert scrape.told("idemguard_claims_found_total", "gen_ai_agent_name") == {"researcher", ""}
    found = {
        dict(labels).get("gen_ai_agent_name", ""): value
        for (name, labels), value in scrape.values.items()
        if name == "idemguard_claims_found_total"
    }
    assert found == {"researcher": 0, "": 2}  # one was refused, one fell back


# --- the names in what ships -----------------------------------------------------------------------------

TEXT = r'"(?:[^"\\]|\\.)*"'
SELECTOR = re.compile(rf"([a-zA-Z_:][\w:]*)?\{{((?:[^{{}}\"]|{TEXT})*)\}}")
MATCHER = re.compile(rf"(\w+)\s*(=~|!~|!=|=)\s*({TEXT})")
GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
METRIC = re.compile(r"(?<![\w:])(?:idemguard[_:][\w:]*|ALERTS)(?![\w:])")
OF_ALERTS = {"alertname", "alertstate", "severity", "idemguard_task_type"}
TARGET = {"job", "instance"}  # which Prometheus adds
SCOPE = {"otel_scope_name", "otel_scope_version", "otel_scope_schema_url"}


@dataclass
class Names:
    """What a query names: metrics, labels of each, and labels that it groups by."""

    metrics: set[str]
    matchers: list[tuple[str, str, str, str]]  # metric, label, operator, value
    grouped: set[str]

    @classmethod
    def of(cls, query):
        matchers = [
            (selector[1] or "", label, how, json.loads(text))
            for selector in SELECTOR.finditer(query)
            for label, how, text in MATCHER.findall(selector[2])
        ]
        bare = re.sub(TEXT, "", SELECTOR.sub(lambda found: found[1] or "", query))
        grouped = {
            label.strip()
            for found in GROUPING.finditer(bare)
            for label in found[1].split(",")
            if label.strip()
        }
        return cls(set(METRIC.findall(GROUPING.sub(" ", bare))), matchers, grouped)


def check(query, scrape):
    """Fail where a query names what no scrape and no rule has."""
    names = Names.of(query)
    assert names.metrics or "__name__" in query, query
    known = RECORDED | {"ALERTS"} | scrape.series.keys()
    assert names.metrics <= known, (query, names.metrics - known)

    def labels(metric):
        if metric in RECORDED:
            return {"idemguard_task_type"}
        return OF_ALERTS if metric == "ALERTS" else scrape.labels(metric) | TARGET

    for metric, label, how, value in names.matchers:
        if label == "__name__":
            continue
        assert label in labels(metric), (query, metric, label)
        closed = label in ("idemguard_outcome", "idemguard_cause", "gen_ai_token_type")
        if metric in scrape.series and closed and how == "=":
            assert value in scrape.told(metric, label), (query, value)
    of_all = set().union(*map(labels, names.metrics)) if names.metrics else set()
    assert names.grouped <= of_all, (query, names.grouped - of_all)


def queries(panel):
    return [target["expr"] for target in panel.get("targets", ())]


def all_of_the_dashboard():
    found = [query for panel in DASHBOARD["panels"] for query in queries(panel)]
    found += [one["expr"] for one in DASHBOARD["annotations"]["list"] if "expr" in one]
    return found


def test_a_wrong_name_is_found(scrape):
    for query in (
        "idemguard_call_total",
        "idemguard:executions:increase7m",
        'sum(rate(idemguard_calls_total{outcome="executed"}[5m]))',
        'sum(rate(idemguard_calls_total{idemguard_outcome="reuse"}[5m]))',
        "sum by (idemguard_cause) (idemguard_calls_total)",
        "sum by (gen_ai_agent_name) (idemguard_wait_duration_seconds_count)",
        'idemguard:fallbacks:increase15m{idemguard_outcome="fallback"}',
    ):
        with pytest.raises(AssertionError):
            check(query, scrape)


def test_the_rules_name_what_is_scraped_and_what_they_record(scrape):
    seen = set()
    for group in RULES["groups"]:
        for rule in group["rules"]:
            check(rule["expr"], scrape)
            used = Names.of(rule["expr"]).metrics
            assert not {name for name in used & RECORDED if name not in seen}, "used before it is"
            seen.add(rule.get("record"))


def test_the_dashboard_names_what_is_scraped_and_what_the_rules_record(scrape):
    for query in all_of_the_dashboard():
        check(query, scrape)
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(
                r"label_values\((\w+), (\w+)\)", variable["definition"]
            ).groups()
            assert label in scrape.labels(metric)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_the_series_of_the_rules_tests_are_series_of_the_scrape(path, scrape):
    for test in yaml.safe_load(path.read_text())["tests"]:
        check_series(test, scrape)
        for asked in test.get("promql_expr_test", ()):
            check(asked["expr"], scrape)
        for asked in test.get("alert_rule_test", ()):
            assert asked["alertname"] in {alert["alert"] for alert in ALERTS}


def check_series(test, scrape):
    """Fail where a rules test makes up a series that no scrape has."""
    for series in test["input_series"]:
        name, inside = SELECTOR.fullmatch(series["series"]).groups()
        given = {label: json.loads(text) for label, _, text in MATCHER.findall(inside)}
        assert given.pop("job"), series
        assert given.pop("instance"), series
        free = {"idemguard_task_type", "gen_ai_agent_name"}
        scraped = [
            {label: value for label, value in labels.items() if label not in SCOPE | free}
            for labels in scrape.series[name]
        ]
        there = {label: value for label, value in given.items() if label not in free}
        # outcomes that need more patience than this scrape has are those of the calls
        if name.startswith("idemguard_wait_duration"):
            assert there.keys() == scraped[0].keys(), series
            assert there["idemguard_outcome"] in OUTCOMES
        else:
            assert there in scraped, series
        assert given.keys() <= scrape.labels(name), series
        assert "idemguard_task_type" in given


def test_every_alert_is_seen_to_fire_and_not_to_fire():
    fired, quiet = set(), set()
    for path in TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for asked in test.get("alert_rule_test", ()):
                (fired if asked["exp_alerts"] else quiet).add(asked["alertname"])
            for asked in test.get("promql_expr_test", ()):
                if asked["expr"] == "ALERTS" and not asked["exp_samples"]:
                    quiet |= {alert["alert"] for alert in ALERTS}
    assert fired == quiet == {alert["alert"] for alert in ALERTS}


# --- the commands that the alerts name -------------------------------------------------------------------


def test_the_commands_that_the_alerts_name_explain_them(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    guard = Guard(store=url, pricer=PRICES)
    guard.run_task('app\'s "task"', {"n": 1}, body)
    guard.close()
    told = set()
    for alert in ALERTS:
        for name, text in alert["annotations"].items():
            if name.startswith("command"):
                line = text.replace("{{ $labels.idemguard_task_type }}", "TASK")
                program, *words = shlex.split(line)
                assert program == "idemguard"
                words = [word.replace("TASK", 'app\'s "task"') for word in words]
                done = CliRunner().invoke(command, ["--store", url, *words])
                assert done.exit_code == 0, (line, done.output)
                told.add(words[0])
    assert told == {"report", "explain", "compare"}


# --- the files around them -------------------------------------------------------------------------------


def test_the_dashboard_is_whole():
    assert DASHBOARD["uid"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    own = {"__range", "__rate_interval"}
    for query in all_of_the_dashboard():
        assert set(re.findall(r"\$(\w+)", query)) <= variables | own, query
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
        assert panel["type"] == "row" or queries(panel)


def test_the_limits_on_the_dashboard_are_those_of_the_alerts():
    limits = {}
    for alert in ALERTS:  # each of its windows has the same
        (limit,) = set(re.findall(r"> (\S+)", alert["expr"]))
        limits[alert["alert"]] = float(limit)
    drawn = {
        query.split("{")[0]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
        for panel in DASHBOARD["panels"]
        for query in queries(panel)
        if panel["type"] == "timeseries"
    }
    assert (
        drawn["idemguard:duplication_rate:ratio5m"]
        == limits["IdemguardDuplicationRateHigh"]
        == 0.03
    )
    assert drawn["idemguard:fallback_share:ratio5m"] == limits["IdemguardFallbackShareHigh"] == 0.05
    assert (
        drawn["idemguard:input_tokens_growth:ratio15m"] == limits["IdemguardInputTokensHigh"] == 1.5
    )


def test_images_are_pinned_files_are_there_and_nothing_listens_beyond_this_machine():
    for name, service in COMPOSE["services"].items():
        if "build" in service:
            dockerfile = (
                FOLDER / service["build"]["context"] / service["build"]["dockerfile"]
            ).resolve()
            assert dockerfile.is_file()
            assert dockerfile.with_name(dockerfile.name + ".dockerignore").is_file()
            (image,) = re.findall(r"^FROM (\S+)$", dockerfile.read_text(), flags=re.MULTILINE)
        else:
            image = service["image"]
        assert re.search(r":v?\d+\.\d+\.\d+(-[\w.-]+)?$", image), (name, image)
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (FOLDER / source).exists(), volume
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), port
        for needed in service.get("depends_on", ()):
            assert needed in COMPOSE["services"]


def test_each_service_finds_the_others():
    found = {
        COLLECTOR["exporters"]["otlphttp"]["endpoint"]: {4318},
        COMPOSE["services"]["demo"]["environment"]["IDEMGUARD_STORE"]: {6379},
        COMPOSE["services"]["demo"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]: {
            urlsplit(f"//{COLLECTOR['receivers']['otlp']['protocols']['http']['endpoint']}").port
        },
    }
    (job,) = PROMETHEUS["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    exposed = urlsplit(f"//{COLLECTOR['exporters']['prometheus']['endpoint']}").port
    found[f"http://{target}"] = {exposed}
    sources = yaml.safe_load(
        (FOLDER / "grafana/provisioning/datasources/datasources.yml").read_text()
    )["datasources"]
    for source in sources:
        found[source["url"]] = {9090} if source["type"] == "prometheus" else {16686}
    for url, ports in found.items():
        assert urlsplit(url).hostname in COMPOSE["services"], url
        assert urlsplit(url).port in ports, url
    assert job["honor_labels"] is True  # else three workers would be one
    (provider,) = yaml.safe_load(
        (FOLDER / "grafana/provisioning/dashboards/dashboards.yml").read_text()
    )["providers"]
    mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted
    chosen = DASHBOARD["templating"]["list"][0]["current"]["value"]
    assert chosen in {source["uid"] for source in sources}


# --- promtool --------------------------------------------------------------------------------------------


def promtool(*args, cwd=None):
    program = need("promtool", how="install Debian's package prometheus")
    done = subprocess.run(
        [program, *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.promtool
def test_promtool_takes_the_rules():
    told = promtool("check", "rules", FOLDER / "idemguard-rules.yml")
    assert f"{len(RECORDED) + len(ALERTS)} rules found" in told


@pytest.mark.promtool
def test_promtool_takes_the_configuration():
    assert "SUCCESS: 1 rule files found" in promtool("check", "config", FOLDER / "prometheus.yml")


@pytest.mark.promtool
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_promtool_sees_the_alerts_fire_and_not_fire(path):
    assert "SUCCESS" in promtool("test", "rules", path)


@pytest.mark.promtool
def test_promtool_sees_a_limit_that_is_changed(tmp_path):
    for path in FOLDER.glob("*.yml"):
        shutil.copy(path, tmp_path)
    rules = tmp_path / "idemguard-rules.yml"
    rules.write_text(rules.read_text().replace("> 0.03", "> 0.05"))
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", tmp_path / "idemguard-rules.test.yml")


# --- what lasts, and what is over ------------------------------------------------------------------------

HOUR_AND_A_HALF = 90 * 60
FALLS = 30 * 60  # s after which what is looked for begins
SILENT = None


@dataclass(frozen=True)
class Told:
    """What workers count, and between which minutes it first fires; `SILENT`: at no time.

    Attributes:
        usual: a minute, of what is no duplicate and no fallback.
        more: a minute, of what is one.
        lasts: minutes of it; None: to the end.
        usual_lasts: minutes of the usual, from the same moment on; None: always.
        restarts: the minute at which the worker's counters begin anew.
        leaves: the minute after which the worker that has `more` is gone; the usual is another's.

    """

    name: str
    usual: float
    more: float
    lasts: float | None = None
    fires: tuple[int, int] | None = SILENT
    usual_lasts: float | None = None
    restarts: int | None = None
    leaves: int | None = None

    def counted(self, minute, lasts, second):
        """How many there were by a second."""
        there = max(0, second - FALLS)
        return int(minute * (there if lasts is None else min(there, 60 * lasts)) / 60)

    def series(self, every, missed):
        """The scrapes of the usual and of more."""
        usual, more = [], []
        for second in range(0, HOUR_AND_A_HALF + 1, every):
            if self.usual_lasts is None:
                common = int(self.usual * second / 60)
            else:
                common = self.counted(self.usual, self.usual_lasts, second)
            usual.append(common)
            more.append(self.counted(self.more, self.lasts, second))
        if self.restarts is not None:
            at = self.restarts * 60 // every
            for values in (usual, more):
                values[at:] = [value - values[at] for value in values[at:]]
        usual, more = list(map(str, usual)), list(map(str, more))
        if missed:
            for number in range(7, len(usual), 8):
                usual[number] = more[number] = "_"
        if self.leaves is not None:
            gone = self.leaves * 60 // every + 1
            more[gone:] = ["stale"] + ["_"] * (len(more) - gone - 1)
        return " ".join(usual), " ".join(more)


def lasting(limit):
    """What lasts and what does not; `limit` in percent."""
    over = limit + 0.5
    return [
        Told("weak for ten minutes", 2000, 160, lasts=10),
        Told("strong for two minutes", 100, 100, lasts=2),
        Told("strong for ten minutes", 100, 100, lasts=10),
        Told("strong for ten minutes, and a restart", 100, 100, lasts=10, restarts=33),
        Told("for 75 seconds alone", 100, 100, lasts=1.25, usual_lasts=1.25),
        Told("a worker that leaves", 2000, 160, leaves=40),
        Told("exactly the limit", 20 * (100 - limit), 20 * limit),
        Told("exactly the limit, and a restart", 20 * (100 - limit), 20 * limit, restarts=45),
        Told("steady", 20 * (100 - over), 20 * over, fires=(46, 52)),
        Told("steady, and a restart", 20 * (100 - over), 20 * over, fires=(46, 52), restarts=41),
        Told("steady from the start", 20 * (100 - over), 20 * over, fires=(46, 48), usual_lasts=60),
        Told("strong and steady", 100, 100, fires=(46, 48)),
        Told("strong for a quarter of an hour", 100, 100, lasts=15.5, fires=(46, 48)),
    ]


WHERE = 'job="workers",instance='
KINDS = {
    "IdemguardDuplicationRateHigh": (
        3,
        'idemguard_executions_total{idemguard_cause="first",',
        (
            'idemguard_executions_total{idemguard_cause="observed",',
            'idemguard_duplicates_total{idemguard_cause="observed",',
        ),
    ),
    "IdemguardFallbackShareHigh": (
        5,
        "idemguard_claims_found_total{",
        (
            "idemguard_claims_found_total{",
            'idemguard_calls_total{idemguard_outcome="fallback",',
        ),
    ),
}


def lasting_test(alert, every, *, missed):
    """A rules test of an alert: every case is a task type."""
    limit, of_usual, of_more = KINDS[alert]
    series, asked = [], []
    for case in lasting(limit):
        usual, more = case.series(every, missed)
        kind = f'idemguard_task_type="{case.name}"'
        series.append({"series": f'{of_usual}{kind},{WHERE}"a"}}', "values": usual})
        series.extend({"series": f'{name}{kind},{WHERE}"b"}}', "values": more} for name in of_more)
        fired = f'count_over_time(ALERTS{{alertstate="firing", {kind}}}[2h]) > bool 0'
        labels = f'{{alertname="{alert}", alertstate="firing", {kind}, severity="SEVERITY"}}'
        (severity,) = (one["labels"]["severity"] for one in ALERTS if one["alert"] == alert)
        there = [{"labels": labels.replace("SEVERITY", severity), "value": 1}]
        before, by = case.fires or (90, None)
        asked.append(
            {"expr": fired, "eval_time": f"{before - (by is not None)}m", "exp_samples": []}
        )
        if by is not None:
            asked.append({"expr": fired, "eval_time": f"{by}m", "exp_samples": there})
    return {"interval": f"{every}s", "input_series": series, "promql_expr_test": asked}


def rules_test(folder, *tests):
    """A file of rules tests, beside the rules."""
    rules, path = folder / "idemguard-rules.yml", folder / "made.test.yml"
    if not rules.exists():
        shutil.copy(FOLDER / rules.name, rules)
    text = {"rule_files": [rules.name], "evaluation_interval": "1m", "tests": list(tests)}
    path.write_text(yaml.safe_dump(text, sort_keys=False))
    return path


@pytest.mark.promtool
@pytest.mark.parametrize(
    ("every", "missed"),
    [(15, False), (30, True), (60, False), (60, True)],
    ids=["15 s", "30 s, one missed", "60 s", "60 s, one missed"],
)
@pytest.mark.parametrize("alert", KINDS)
def test_what_lasts_a_quarter_of_an_hour_fires_and_no_burst_does(
    alert, every, missed, tmp_path, scrape
):
    test = lasting_test(alert, every, missed=missed)
    check_series(test, scrape)
    assert "SUCCESS" in promtool("test", "rules", rules_test(tmp_path, test))


@pytest.mark.promtool
@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (r"for: 6m", "for: 0m", "strong for ten minutes"),
        (r"ratio5m(?: offset \d+m)?, (?=.*>)", "ratio15m, ", "strong for two minutes"),
        (r" +and round\(.* offset 10m, .*\n", "", "strong for ten minutes"),
    ],
)
def test_rules_to_which_a_burst_looks_like_a_quarter_of_an_hour_are_found(old, new, why, tmp_path):
    text = (FOLDER / "idemguard-rules.yml").read_text()
    other, changes = re.subn(old, new, text)
    assert changes
    (tmp_path / "idemguard-rules.yml").write_text(other)
    test = lasting_test("IdemguardDuplicationRateHigh", 15, missed=False)
    with pytest.raises(AssertionError, match=f"idemguard_task_type=.{{0,2}}{why}.* time: 1h30m"):
        promtool("test", "rules", rules_test(tmp_path, test))


# --- what happens now and then ---------------------------------------------------------------------------

STEP = 5  # s of a rules test
EVERY = (15, 30, 60)  # s between scrapes


def seen(counted, every, until):
    """What scrapes see of a counter until a minute; none of them is at one, where an evaluation is.

    A range that is closed at both ends, as before Prometheus 3, would hold one scrape more there.
    """
    seconds = range(0, 60 * until + 1, STEP)
    return " ".join(str(counted(second)) if second % every == STEP else "_" for second in seconds)


def phases_test(alert, every, until, phases, counted, **asked):
    """A rules test of an alert: every phase is a task type, and half of what it counts is one more."""
    _, of_usual, of_more = KINDS[alert]
    series = []
    for phase in phases:
        values = seen(lambda second, phase=phase: counted(second - phase), every, until)
        kind = f'idemguard_task_type="{phase:03}",{WHERE}'
        series.append({"series": f'{of_usual}{kind}"a"}}', "values": values})
        series.extend({"series": f'{name}{kind}"b"}}', "values": values} for name in of_more)
    return {"interval": f"{STEP}s", "input_series": series, "promql_expr_test": [asked]}


def fires_to_the_end(until, number, where=""):
    """That this many task types fire, and have for ten minutes."""
    fired = f'count_over_time(ALERTS{{alertstate="firing", {where}}}[10m]) >= 10'
    there = [{"labels": "{}", "value": number}]
    return {"expr": f"count({fired})", "eval_time": f"{until}m", "exp_samples": there}


def batches_test(alert, every):
    """A rules test: every five minutes 30 executions, or claims found, at once."""
    phases, until = range(0, 300, 45), 50
    return phases_test(
        alert,
        every,
        until,
        phases,
        lambda second: 15 * (second // 300 + 1),
        **fires_to_the_end(until, len(phases)),
    )


def burst_test(alert, every):
    """A rules test: ten minutes in which half of all are one more, and nothing before or after."""
    until = 60
    return phases_test(
        alert,
        every,
        until,
        range(900, 960, 15),
        lambda second: 2 * min(max(0, second), 600),
        expr='count by (idemguard_task_type) (count_over_time(ALERTS{alertstate="firing"}[2h]))',
        eval_time=f"{until}m",
        exp_samples=[],
    )


GROWS = 3  # hours after which the tokens triple


def quarters_test():
    """A rules test: every quarter of an hour 30 executions of a minute, later of three times the tokens."""
    phases, until, series, asked = range(0, 300, 75), 60 * (GROWS + 2), [], []

    def executions(second):
        return 30 * (second // 900 + 1)

    def tokens(second):
        ended = executions(second - 60)
        return 1000 * ended + 2000 * max(0, ended - 30 * 4 * GROWS)

    for every in EVERY:
        for phase in phases:
            kind = f'idemguard_task_type="{every} {phase}",{WHERE}"a"'
            for name, counted in (
                ('idemguard_executions_total{idemguard_cause="first",', executions),
                ('idemguard_usage_tokens_total{gen_ai_token_type="input",', tokens),
            ):
                values = seen(lambda at, of=counted, phase=phase: of(at - phase), every, until)
                series.append({"series": f"{name}{kind}}}", "values": values})
        asked.append(fires_to_the_end(until, len(phases), f'idemguard_task_type=~"{every} .*"'))
    before = 'count_over_time(ALERTS{alertstate="firing"}[1d])'
    asked.append({"expr": before, "eval_time": f"{60 * GROWS}m", "exp_samples": []})
    return {"interval": f"{STEP}s", "input_series": series, "promql_expr_test": asked}


def changed(folder, old, new, times):
    """The rules with another text, in a folder."""
    text = (FOLDER / "idemguard-rules.yml").read_text()
    assert text.count(old) == times
    (folder / "idemguard-rules.yml").write_text(text.replace(old, new))


@pytest.mark.promtool
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("alert", KINDS)
def test_batches_every_five_minutes_fire(alert, every, tmp_path, scrape):
    test = batches_test(alert, every)
    check_series(test, scrape)
    path = rules_test(tmp_path, test)
    assert "SUCCESS" in promtool("test", "rules", path)

    changed(tmp_path, "[6m]", "[5m]", times=4)
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", path)


@pytest.mark.promtool
@pytest.mark.parametrize("alert", KINDS)
def test_ten_minutes_fire_at_no_time_whenever_they_begin(alert, tmp_path, scrape):
    tests = [burst_test(alert, every) for every in EVERY]
    check_series(tests[0], scrape)
    path = rules_test(tmp_path, *tests)
    assert "SUCCESS" in promtool("test", "rules", path)

    changed(tmp_path, "\n        for: 6m", "\n        for: 5m", times=2)
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", path)


@pytest.mark.promtool
def test_a_job_of_every_quarter_of_an_hour_fires_when_its_tokens_triple(tmp_path, scrape):
    test = quarters_test()
    check_series(test, scrape)
    path = rules_test(tmp_path, test)
    assert "SUCCESS" in promtool("test", "rules", path)

    # [90s]: with scrapes of 60 s, a range of 16 minutes holds no end more
    for old, new, times, fail in (("[16m]", "[15m]", 2, EVERY), ("[90s]", "[30s]", 4, EVERY[:-1])):
        changed(tmp_path, old, new, times=times)
        with pytest.raises(AssertionError, match="FAILED") as told:
            promtool("test", "rules", path)
        missing = re.findall(r"task_type=~\W*(\d+) .*\n\s+exp: \{\} 4E", told.value.args[0])
        assert missing == list(map(str, fail))


@pytest.mark.promtool
def test_an_hour_that_a_burst_has_raised_is_found(tmp_path):
    text = (FOLDER / "idemguard-rules.yml").read_text()
    other, changes = re.subn(
        r"growth:ratio15m(\[\w+\])(?: offset \d+m)?", r"growth:ratio1h\1", text
    )
    assert changes == 4
    (tmp_path / "idemguard-rules.yml").write_text(other)
    shutil.copy(FOLDER / "idemguard-rules.week.test.yml", tmp_path)
    with pytest.raises(AssertionError, match=r"got: .*IdemguardInputTokensHigh.*five"):
        promtool("test", "rules", tmp_path / "idemguard-rules.week.test.yml")


@pytest.mark.promtool
def test_the_duplicates_of_observe_mode_can_be_left_out_as_the_page_says(tmp_path, scrape):
    (matcher,) = re.findall(r"`idemguard_duplicates_total(\{.*?\})`", PAGE)
    text = (FOLDER / "idemguard-rules.yml").read_text()
    assert text.count("idemguard_duplicates_total[") == 2
    (tmp_path / "idemguard-rules.yml").write_text(
        text.replace("idemguard_duplicates_total[", f"idemguard_duplicates_total{matcher}[")
    )
    series = []
    for cause, kind in (("observed", "observing"), ("first", "guarded"), ("lost", "guarded")):
        labels = f'idemguard_task_type="{kind}",idemguard_cause="{cause}",{WHERE}"a"'
        series.append({"series": f"idemguard_executions_total{{{labels}}}", "values": "0+10x60"})
        if cause != "first":
            series.append(
                {"series": f"idemguard_duplicates_total{{{labels}}}", "values": "0+10x60"}
            )
    asked = {
        "expr": 'count by (idemguard_task_type) (ALERTS{alertstate="firing"})',
        "eval_time": "40m",
        "exp_samples": [{"labels": '{idemguard_task_type="guarded"}', "value": 1}],
    }
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [asked]}
    check_series(test, scrape)
    assert "SUCCESS" in promtool("test", "rules", rules_test(tmp_path, test))


@pytest.mark.promtool
def test_the_commands_on_the_page_run_from_the_root():
    root = FOLDER.parents[1]
    lines = [shlex.split(line) for line in re.findall(r"(?m)^\$ (.*)$", PAGE)]
    checks, tests = (words[1:] for words in lines if words[0] == "promtool")
    assert "SUCCESS" in promtool(*checks, cwd=root)
    assert tests[:2] == ["test", "rules"]
    assert [root / path for path in tests[2:]] == TESTS
    (composed,) = (words for words in lines if words[0] == "docker")
    assert (root / composed[composed.index("-f") + 1]).samefile(FOLDER / "compose.yaml")


def short_lived():
    """A rules test: every 10 s a worker that finds a leader twice; of 15 workers, one falls back once."""
    series = []
    for number in range(360):
        fell = number % 15 == 0
        labels = f'idemguard_task_type="summarise",job="workers",instance="{number}"'
        for name, values in (
            ("idemguard_claims_found_total{", "0 1 2x8"),
            ('idemguard_calls_total{idemguard_outcome="fallback",', "0 0 1x8" if fell else "0x9"),
            # a histogram's series is there with its first value
            (
                'idemguard_wait_duration_seconds_count{idemguard_outcome="reused",',
                "_ 1 1x8" if fell else "_ 1 2x8",
            ),
            (
                'idemguard_wait_duration_seconds_count{idemguard_outcome="fallback",',
                "_ _ 1x8" if fell else "_x9",
            ),
        ):
            shifted = f"_x{number} {values} stale" if number else f"{values} stale"
            series.append({"series": f"{name}{labels}}}", "values": shifted})

    def asked(query, *samples, at="40m"):
        told = [{"labels": '{idemguard_task_type="summarise"}', "value": v} for v in samples]
        return {"expr": query, "eval_time": at, "exp_samples": told}

    return {
        "interval": "10s",
        "input_series": series,
        "promql_expr_test": [
            asked("ALERTS"),
            asked("ALERTS", at="55m"),
            asked("round(idemguard:fallback_share:ratio15m, 0.001)", round(2 / 60, 3)),
            asked("idemguard:claims_found:increase15m >= bool 20", 1),
        ],
    }


@pytest.mark.promtool
def test_workers_of_two_waits_each_do_not_make_five_percent_of_three(tmp_path, scrape):
    test = short_lived()
    check_series(test, scrape)
    path = rules_test(tmp_path, test)
    assert "SUCCESS" in promtool("test", "rules", path)

    # a histogram's count below the line lacks the first wait of every worker
    rules = tmp_path / "idemguard-rules.yml"
    text = rules.read_text()
    counted = text.replace("idemguard_claims_found_total", "idemguard_wait_duration_seconds_count")
    assert counted != text
    rules.write_text(counted)
    with pytest.raises(AssertionError, match=r"IdemguardFallbackShareHigh.*firing"):
        promtool("test", "rules", path)


@pytest.mark.promtool
def test_promtool_takes_every_query_of_the_dashboard(tmp_path):
    found = [
        re.sub(r"\$(task_type|agent)", ".*", re.sub(r"\$__\w+", "5m", query))
        for query in all_of_the_dashboard()
    ]
    assert len(found) > 20
    path = tmp_path / "dashboard.yml"
    rules = [{"record": f"q:{number}", "expr": query} for number, query in enumerate(found)]
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(found)} rules found" in promtool("check", "rules", path)


# --- the collector ---------------------------------------------------------------------------------------


@pytest.fixture
def collector(tmp_path):
    """The collector's configuration, run by what is built of the same parts; where it takes and gives."""
    program = need(
        "jaeger",
        places=sorted(CACHE.glob("jaeger-*/jaeger"), reverse=True),
        how="run tests/build_jaeger.sh, which needs Go",
    )
    takes, gives = free_port(), free_port()
    configured = json.loads(json.dumps(COLLECTOR))
    configured["receivers"]["otlp"]["protocols"] = {"http": {"endpoint": f"{HOST}:{takes}"}}
    configured["exporters"]["prometheus"]["endpoint"] = f"{HOST}:{gives}"
    configured["service"]["telemetry"] = {"metrics": {"level": "none"}}
    path = tmp_path / "collector.yml"
    path.write_text(yaml.safe_dump(configured))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([program, "--config", path], stdout=log, stderr=log)
    try:
        yield f"http://{HOST}:{takes}/v1/metrics", f"http://{HOST}:{gives}/metrics"
    finally:
        process.kill()
        process.wait()


def got(url):
    """What is there."""
    with urlopen(url, timeout=5) as answer:
        return answer.read().decode()


@pytest.mark.jaeger
def test_the_collector_gives_prometheus_the_same_names(collector, scrape):
    takes, gives = collector
    until(lambda: got(gives) or True, what="the collector")
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=takes, timeout=10))
    provider = MeterProvider(metric_readers=[reader])
    try:
        every_outcome(provider)
    finally:
        provider.shutdown()
    until(lambda: "idemguard_calls_total" in got(gives), what="metrics at the collector")
    there = Scrape.of(got(gives))
    assert there.series.keys() == scrape.series.keys()
    for name in scrape.series:
        assert there.labels(name) == scrape.labels(name) | TARGET, name
