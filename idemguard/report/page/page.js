// Draws what the page's JSON holds; what a figure is called and how it is written is read off the
// table beside its chart, so that both say the same.
"use strict";
{
  const report = JSON.parse(document.getElementById("report").textContent);
  const root = document.documentElement;
  const MOST = 12; // bars of a chart; the table has more
  const SEEN = 6; // px of a line
  const MINUTE = 60_000, HOUR = 60 * MINUTE, DAY = 24 * HOUR;
  const STEPS = [5 * MINUTE, 15 * MINUTE, 30 * MINUTE, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY,
    2 * DAY, 7 * DAY, 14 * DAY, 28 * DAY, 91 * DAY, 364 * DAY];

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 2 });
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
  // as many digits as tell one tick from the next
  const digits = (apart) => {
    let found = 2;
    const whole = (at) => at > 0.5 && Math.abs(at - Math.round(at)) < 1e-6;
    while (found < 15 && !whole(apart * 10 ** found)) found += 1;
    return found;
  };
  const amount = (at, sign, apart) => sign + (sign && at % 1
    ? at.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: digits(apart) })
    : compact.format(at));
  const rows = (id) => [...document.querySelectorAll(`#${id} tbody tr`)].map(
    (row) => [...row.cells].map((cell) => cell.textContent));

  const cut = (text, most) => {
    const all = [...text];
    const half = Math.floor((most - 1) / 2);
    return all.length > most ? `${all.slice(0, half).join("")}\u2026${all.slice(-half).join("")}` : text;
  };

  const tooltip = (callbacks, more = {}) => ({
    animation: false, backgroundColor: colour("ink"), titleColor: colour("paper"),
    bodyColor: colour("paper"), cornerRadius: 4, padding: 10, displayColors: false,
    titleFont: { weight: 600 }, callbacks, ...more,
  });

  const axis = (more) => ({
    border: { display: false }, grid: { color: colour("grid"), drawTicks: false }, ...more,
    ticks: { padding: 8, ...more.ticks },
  });

  function overTime(canvas) {
    const found = report.over_time, told = rows("over_time");
    const offset = Number(canvas.dataset.offset) * MINUTE;
    const starts = found.map((one) => Date.parse(one.start));
    const step = Date.parse(found[0].end) - starts[0];
    const min = starts[0], max = starts.at(-1) + step;
    const rates = [];
    let first = 0; // point of a stretch without a gap
    found.forEach((one, row) => {
      if (starts[row - 1] !== starts[row] - step) first = rates.length;
      rates.push({ x: starts[row], y: one.duplication_rate, row, steps: 0 });
      rates[first].steps += 1;
      // a rate holds until the end of its step; where no other follows at once there is a gap
      if (starts[row + 1] !== starts[row] + step) {
        rates.push({ x: starts[row] + step, y: one.duplication_rate });
        rates.push({ x: starts[row] + step, y: NaN });
      }
    });
    // as wide as a step, however far apart those are in which something happened
    const width = (chart) => (chart.chartArea?.width ?? chart.width) * step / (max - min);
    const barThickness = ({ chart }) => Math.max(1, 0.8 * width(chart));
    // a stretch too short to be seen as a line is seen as a dot
    const pointRadius = ({ chart, raw }) => raw?.steps > 0 && raw.steps * width(chart) < SEEN ? 2.5 : 0;
    const bars = (field) => found.map((one, row) => ({ x: starts[row] + step / 2, y: one[field], row }));
    const limit = report.checked.find((one) => one.kind === "duplication")?.limit;
    const top = Math.max(...found.map((one) => one.duplication_rate));
    const datasets = [{
      label: "Duplication rate", type: "line", yAxisID: "rate", data: rates, stepped: "before",
      borderColor: colour("accent"), borderWidth: 1.5, pointRadius, pointHoverRadius: 3, clip: 4,
      pointBackgroundColor: colour("accent"), pointHitRadius: 8,
    }, {
      label: "Duplicates", yAxisID: "volume", data: bars("duplicates"), grouped: false, order: 1,
      backgroundColor: colour("accent"), barThickness,
    }, {
      label: "Executions", yAxisID: "volume", data: bars("executions"), grouped: false, order: 2,
      backgroundColor: colour("plain"), barThickness,
    }];
    // what the pointer is at is the step, wherever in it the pointer is
    Chart.Interaction.modes.step = (chart, event) => {
      const at = chart.scales.x.getValueForPixel(event.x);
      const index = starts.findIndex((start) => start <= at && at < start + step);
      const element = chart.getDatasetMeta(2).data[index];
      return element === undefined ? [] : [{ element, datasetIndex: 2, index }];
    };
    if (limit !== undefined) {
      datasets.push({
        label: "Limit", type: "line", yAxisID: "rate", borderDash: [5, 4], borderWidth: 1.25,
        data: [{ x: min, y: limit }, { x: max, y: limit }], borderColor: colour("ink"),
        pointRadius: 0, pointHitRadius: 0,
      });
    }
    const day = (at) => new Date(at + offset).toLocaleDateString(
      "en", { timeZone: "UTC", day: "numeric", month: "short" });
    const clock = (at) => new Date(at + offset).toISOString().slice(11, 16);
    return {
      type: "bar",
      data: { datasets },
      options: {
        interaction: { mode: "step" },
        scales: {
          x: axis({
            type: "linear", min, max, offset: false, grid: { display: false },
            afterBuildTicks(scale) {
              const fit = Math.max(2, scale.width / 80);
              const apart = STEPS.find((one) => (max - min) / one <= fit) ?? STEPS.at(-1);
              const first = Math.ceil((min + offset) / apart) * apart - offset;
              scale.ticks = [];
              for (let value = first; value <= max; value += apart) scale.ticks.push({ value });
              scale.apart = apart;
            },
            ticks: {
              maxRotation: 0, autoSkip: false,
              callback(value) {
                return this.apart >= DAY || (value + offset) % DAY === 0 ? day(value) : clock(value);
              },
            },
          }),
          volume: axis({
            axis: "y", position: "left", stack: "time", stackWeight: 2, min: 0, ticks: {
              maxTicksLimit: 3, precision: 0, callback: (value) => compact.format(value),
            },
          }),
          between: {
            axis: "y", position: "left", stack: "time", stackWeight: 0.5, border: { display: false },
            grid: { display: false }, ticks: { display: false },
          },
          rate: axis({
            axis: "y", position: "left", stack: "time", stackWeight: 5, min: 0, max: top > 0.5 ? 1 : undefined, suggestedMax: 2 * (limit ?? 0.01),
            ticks: { maxTicksLimit: 6, callback: (value) => percent.format(value) },
          }),
        },
        plugins: {
          tooltip: tooltip({
            title: ([item]) => item && `${told[item.raw.row][0]} to ${told[item.raw.row][1]}`,
            label(item) {
              const [, , executions, duplicates, rate] = told[item.raw.row];
              return [`Duplication rate ${rate}`, `${duplicates} of ${executions} executions`];
            },
          }),
        },
      },
    };
  }

  function cost(canvas) {
    const id = canvas.dataset.of, told = rows(id), sign = canvas.dataset.sign ?? "";
    const found = report[id].slice(0, MOST);
    const heads = [...document.querySelectorAll(`#${id} thead th`)];
    const column = (field) => heads.findIndex((head) => head.dataset.of === field);
    const named = (field) => heads[column(field)].textContent.replace(/^./, (one) => one.toUpperCase());
    const fields = canvas.dataset.fields.split(" ");
    canvas.parentElement.style.height = `${44 + 36 * found.length}px`;
    const looks = [
      { backgroundColor: colour("plain"), stack: "spent", order: 2 },
      { backgroundColor: colour("accent"), stack: "spent", order: 1, barPercentage: 0.4 },
      { backgroundColor: colour("paper"), borderColor: colour("plain"), borderWidth: 1.5,
        borderSkipped: "start", stack: "saved", order: 2 },
    ];
    return {
      type: "bar",
      data: {
        labels: found.map((_, row) => told[row][0]),
        datasets: fields.map((field, number) => ({
          label: named(field), barPercentage: 0.85,
          categoryPercentage: 0.8, data: found.map((one) => Number(one[field])), field,
          ...looks[number],
        })),
      },
      options: {
        indexAxis: "y",
        interaction: { mode: "index", axis: "y", intersect: false },
        scales: {
          x: axis({
            min: 0, stacked: false,
            ticks: {
              maxRotation: 0, maxTicksLimit: 6,
              callback: (at, _, all) => amount(at, sign, all.length > 1 ? all[1].value - all[0].value : at),
            },
          }),
          y: axis({
            stacked: true, grid: { display: false },
            ticks: {
              autoSkip: false, color: colour("ink"),
              callback(value) {
                return cut(this.getLabelForValue(value), this.chart.width < 420 ? 16 : 24);
              },
            },
          }),
        },
        plugins: {
          tooltip: tooltip({
            title: ([item]) => cut(item.label, 60),
            label: (item) =>
              `${item.dataset.label} ${told[item.dataIndex][column(item.dataset.field)]}`,
          }, { itemSort: (one, other) => one.datasetIndex - other.datasetIndex }),
        },
      },
    };
  }

  const KINDS = { over_time: overTime, cost };
  let charts = [];
  function draw() {
    charts.forEach((chart) => chart.destroy());
    Object.assign(Chart.defaults, {
      animation: false, maintainAspectRatio: false, color: colour("quiet"),
      borderColor: colour("grid"), locale: "en",
    });
    Object.assign(Chart.defaults.font, { family: getComputedStyle(document.body).fontFamily, size: 12 });
    Chart.defaults.plugins.legend.display = false; // it stands beside, as text
    charts = [...document.querySelectorAll("canvas")].map(
      (canvas) => new Chart(canvas, KINDS[canvas.dataset.chart](canvas)));
  }

  root.dataset.drawn = "";
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => { root.dataset.print = ""; draw(); });
  addEventListener("afterprint", () => { delete root.dataset.print; draw(); });
}
