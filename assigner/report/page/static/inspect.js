// Zoom, pan and a walk through the actions, with buttons or keys.
function zoomTo(from, to) {
  const least = (view.whole - view.begin) / 2000, length = Math.min(view.whole - view.begin, Math.max(least, to - from));
  const start = Math.min(Math.max(view.begin, (from + to - length) / 2), view.whole - length);
  chart(document.getElementById("timeline-chart")).dispatchAction({ type: "dataZoom", batch: [0, 1].map((dataZoomIndex) => ({ dataZoomIndex, startValue: start, endValue: start + length })) });
}

const MOVES = {
  in: () => scaled(0.5), out: () => scaled(2), left: () => panned(-0.3), right: () => panned(0.3),
  all: () => zoomTo(view.begin, view.whole),
};

function scaled(by) {
  const chosen = view.spans[view.selected], seen = chosen && chosen.end > view.from && chosen.start < view.to;
  const middle = seen ? (chosen.start + chosen.end) / 2 : (view.from + view.to) / 2, half = ((view.to - view.from) * by) / 2;
  zoomTo(middle - half, middle + half);
}

function panned(by) {
  const length = view.to - view.from, start = Math.min(Math.max(view.begin, view.from + by * length), view.whole - length);
  zoomTo(start, start + length);
}

// The next span of a lane, or the one of another lane that lies nearest in time.
function walk(along, across) {
  const current = view.spans[view.selected], lane = current ? current.lane + across : 0;
  if (lane < 0 || lane >= view.lanes.length) return;
  const mine = view.spans.map((span, n) => [span, n]).filter(([span]) => span.lane === lane && !isMessage(span));
  mine.sort((a, b) => a[0].start - b[0].start);
  const at = current ? (current.start + current.end) / 2 : view.from;
  let place = mine.findIndex(([, n]) => n === view.selected);
  place = place >= 0 ? place + along : mine.findIndex(([span]) => span.end > at);
  const found = mine[Math.min(Math.max(0, place), mine.length - 1)];
  if (found) select(found[1]);
}

function select(index) {
  const it = chart(document.getElementById("timeline-chart")), span = view.spans[index], length = view.to - view.from;
  view.selected = index;
  if (span.start < view.from || span.end > view.to) zoomTo(span.start - length / 4, span.start + (3 * length) / 4);
  it.setOption({ series: [{ data: it.getOption().series[0].data }] });
  it.dispatchAction({ type: "showTip", seriesIndex: 0, dataIndex: index });
  const text = described(page.plan(), span, counterpart(span));
  document.getElementById("inspected").textContent = `${text.head}: ${text.pairs.map(([term, value]) => `${term} ${value}`).join("; ")}.`;
}

const KEYS = {
  "+": MOVES.in, "=": MOVES.in, "-": MOVES.out, "0": MOVES.all,
  ArrowLeft: (shift) => (shift ? MOVES.left() : walk(-1, 0)), ArrowRight: (shift) => (shift ? MOVES.right() : walk(1, 0)),
  ArrowUp: () => walk(0, -1), ArrowDown: () => walk(0, 1),
};

function listen() {
  const node = document.getElementById("timeline-chart");
  node.addEventListener("keydown", (event) => {
    const move = event.ctrlKey || event.metaKey || event.altKey ? null : KEYS[event.key];
    if (!move) return;
    event.preventDefault();
    move(event.shiftKey);
  });
  for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", () => MOVES[button.dataset.do]());
  chart(node).on("datazoom", () => {
    const { startValue, endValue } = chart(node).getOption().dataZoom[0];
    [view.from, view.to] = [startValue, endValue];
    if ((view.from === 0) !== view.atStart) {
      view.atStart = view.from === 0;
      chart(node).setOption({ xAxis: { axisLabel: { showMinLabel: view.atStart } } });
    }
    showRange();
    page.zoomed();
  });
  document.getElementById("timeline-table").addEventListener("toggle", fillTable);
}

// Every span as a row: made when it is asked for, since it may have thousands.
function fillTable() {
  const details = document.getElementById("timeline-table"), box = details.querySelector(".filled");
  box.replaceChildren();
  if (!details.open) return;
  const plan = page.plan(), u = unit(TIME, [view.whole]), line = plan.timeline, body = element("tbody");
  const heads = ["worker", "", "action", "stage", "micro-batch", `start ${u.name}`, `length ${u.name}`, "bytes", "to"];
  for (const span of [...view.spans].sort((a, b) => a.worker - b.worker || a.side.localeCompare(b.side) * -1 || a.start - b.start)) {
    const cells = [line.workers[span.worker], span.side, span.what, span.stage < 0 ? "" : `${span.stage}`, span.m < 0 ? "" : `${span.m}`,
      u.show(span.start), u.show(span.end - span.start), isMessage(span) ? Math.round(span.bytes).toLocaleString("en-US") : "", line.workers[span.to] ?? ""];
    body.append(element("tr", {}, ...cells.map((text, n) => element("td", { class: n < 3 || n === 8 ? "name" : "" }, text))));
  }
  const head = element("thead", {}, element("tr", {}, ...heads.map((text, n) => element("th", { scope: "col", class: n < 3 || n === 8 ? "name" : "" }, text))));
  box.append(element("table", {}, head, body));
}
