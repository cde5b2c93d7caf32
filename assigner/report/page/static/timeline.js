// The step as rows of actions. A span is one thing that is drawn; see assigner/report/page/timeline.py for the tables.
const KINDS = { forward: "F", backward: "B", update: "U" };

// All spans of one side: compute, idle time with what it waited for, messages in the row of their sender.
function predictedSpans(line) {
  const spans = [], arrivals = new Map(), free = line.workers.map(() => 0);
  for (const [route, m, start] of line.messages) arrivals.set(`${route} ${m}`, start + line.routes[route][6]);
  const [onPath, messagesOnPath] = line.critical.map((places) => new Set(places));
  for (const [place, [number, m, start]] of line.events.entries()) {
    const [worker, kind, stage, length, again, waits, sends] = line.jobs[number];
    spans.push({ side: "predicted", what: kind, worker, stage, m, start, end: start + length, again, waits, sends, critical: onPath.has(place) });
  }
  spans.sort((a, b) => a.start - b.start);
  const idle = [];
  for (const span of spans) {
    const gap = span.start - free[span.worker];
    if (gap > 1e-9) {
      const last = span.waits.map((route) => [arrivals.get(`${route} ${line.routes[route][0] === "tie" ? -1 : span.m}`), route])
        .sort((a, b) => b[0] - a[0])[0];
      idle.push({ side: "predicted", what: "idle", worker: span.worker, stage: -1, m: span.m, start: free[span.worker],
        end: span.start, route: last && last[0] >= span.start - 1e-8 ? last[1] : null });
    }
    free[span.worker] = span.end;
  }
  free.forEach((at, worker) => {
    if (line.step_s - at > 1e-9) idle.push({ side: "predicted", what: "idle", worker, stage: -1, m: -1, start: at, end: line.step_s, route: null });
  });
  const messages = line.messages.map(([route, m, start], place) => ({
    ...message(line, "predicted", route, m, start, start + line.routes[route][6]), critical: messagesOnPath.has(place),
  }));
  return [...idle, ...messages, ...spans];
}

function measuredSpans(line, step) {
  const one = step.unit_s;
  const spans = step.actions.map(([job, m, start, length]) => {
    const [worker, what, stage] = line.jobs[job];
    return { side: "measured", what, worker, stage, m, start: start * one, end: (start + length) * one, again: 0 };
  });
  const messages = step.messages.map(([route, m, start, length]) => message(line, "measured", route, m, start * one, (start + length) * one));
  const idle = line.workers.flatMap((_, worker) => {
    const mine = spans.filter((span) => span.worker === worker).sort((a, b) => a.start - b.start);
    return [...mine, null].flatMap((span, n) => {
      const start = n ? mine[n - 1].end : 0, end = span ? span.start : step.step_s;
      if (end - start <= 1e-6) return [];
      const last = messages.filter((one) => one.to === worker && one.end > start && one.end <= end).sort((a, b) => b.end - a.end)[0];
      return [{ side: "measured", what: "idle", worker, stage: -1, m: span && last ? last.m : span ? span.m : -1, start, end, route: span && last ? last.route : null }];
    });
  });
  return [...idle, ...messages, ...spans];
}

function message(line, side, route, m, start, end) {
  const [payload, partition, , from, to, size] = line.routes[route];
  return { side, what: payload, worker: from, to, stage: -1, m, start, end, route, partition, bytes: size };
}

const isMessage = (span) => span.bytes !== undefined;

// What a span is, in pairs of words: for the tooltip, for whoever steps through with the keys, and for the table.
function described(plan, span, other) {
  const line = plan.timeline, name = line.workers[span.worker], pairs = [];
  const batch = span.m >= 0 ? `, micro-batch ${span.m}` : "";
  if (span.what === "idle") {
    if (span.route !== null) {
      const [payload, partition, , from] = line.routes[span.route];
      pairs.push(["waits for", `${payload} of ${partition} from ${line.workers[from]}${batch}`]);
    } else if (span.m < 0) pairs.push(["waits for", span.side === "measured" ? "the end of the step, or begins the next one" : "the end of the step"]);
  } else if (isMessage(span)) {
    pairs.push(["from", name], ["to", line.workers[span.to]], ["of partition", span.partition], ["size", bytes(span.bytes)]);
  } else {
    pairs.push(["worker", name]);
    if (span.stage >= 0) pairs.push(["stage", `${span.stage}: ${plan.stages[span.stage].partitions}`]);
  }
  const length = span.end - span.start, u = unit(TIME, [span.end]);
  pairs.push(["start", `${u.show(span.start)} ${u.name}`], ["end", `${u.show(span.end)} ${u.name}`], ["length", seconds(length)]);
  if (span.critical) pairs.push(["critical path", "yes"]);
  if (span.again) pairs.push(["of which recompute", `${seconds(span.again)}, drawn first`]);
  for (const [word, routes] of [["needs messages of", span.waits], ["sends", span.sends]]) {
    if (routes?.length) pairs.push([word, bytes(routes.reduce((sum, route) => sum + line.routes[route][5], 0))]);
  }
  if (other) {
    const took = other.end - other.start, more = span.side === "predicted" ? took / length - 1 : length / took - 1;
    pairs.push([other.side, seconds(took)]);
    if (Number.isFinite(more)) pairs.push(["measured against predicted", percent(more, true)]);
  }
  const noun = isMessage(span) ? `${span.what} message` : span.what;
  return { head: `${noun}${batch} (${span.side})`, pairs };
}

const spanKey = (span) => [span.what, span.worker, span.stage, span.m, span.route ?? ""].join(" ");

// State of the timeline: what is drawn, and which part of it is seen.
const view = { spans: [], lanes: [], from: 0, to: 1, whole: 1, selected: -1, critical: false, pairs: new Map() };

function layTimeline(plan, step) {
  const line = plan.timeline;
  // How many of its worker's stages come before each: later ones are lighter.
  view.chunk = plan.stages.map((stage, n) => plan.stages.slice(0, n).filter((each) => each.worker === stage.worker).length);
  view.spans = [...predictedSpans(line), ...(step ? measuredSpans(line, step) : [])];
  view.lanes = line.workers.flatMap((_, worker) => (step ? ["predicted", "measured"] : ["predicted"]).map((side) => ({ worker, side })));
  const place = new Map(view.lanes.map((lane, n) => [`${lane.worker} ${lane.side}`, n]));
  for (const span of view.spans) span.lane = place.get(`${span.worker} ${span.side}`);
  view.pairs = new Map();
  for (const span of view.spans) {
    const both = view.pairs.get(spanKey(span)) ?? {};
    view.pairs.set(spanKey(span), { ...both, [span.side]: span });
  }
  view.begin = Math.min(0, ...view.spans.map((span) => span.start));
  view.whole = Math.max(line.step_s, step?.step_s ?? 0, ...view.spans.map((span) => span.end));
  view.from = view.begin;
  view.to = view.whole;
  view.atStart = view.begin === 0;
  view.selected = -1;
}

const counterpart = (span) => view.pairs.get(spanKey(span))?.[span.side === "predicted" ? "measured" : "predicted"];

// Compute fills the upper part of a row, messages a strip below it.
function drawSpan(plan, params, api) {
  const span = view.spans[params.dataIndexInside === undefined ? params.dataIndex : api.value(3)];
  const [x, y] = api.coord([span.start, span.lane]), [right] = api.coord([span.end, span.lane]);
  const band = api.size([0, 1])[1], paired = view.lanes.length > plan.timeline.workers.length;
  const lift = paired ? (span.side === "predicted" ? 0.06 : -0.06) * band : 0;
  const top = y - band * (paired ? 0.4 : 0.42) + lift, body = band * (paired ? 0.62 : 0.64), strip = band * 0.15;
  const width = Math.max(right - x, isMessage(span) ? 2 : 0.75), marked = view.spans[view.selected] === span;
  const opacity = view.critical && span.side === "predicted" && !span.critical ? 0.22 : 1;
  const edge = marked ? { stroke: colour("text"), lineWidth: 3 } : { stroke: tints.page, lineWidth: width > 4 ? 1 : 0 };
  if (isMessage(span)) {
    return { type: "rect", shape: { x, y: top + body + strip * 0.25, width, height: Math.max(2, strip) },
      style: { fill: tints[span.what], opacity, ...(marked ? edge : {}) }, z2: 5 };
  }
  const shape = { x, y: top, width, height: body };
  if (span.what === "idle") return { type: "rect", shape, style: { fill: tints.idle, ...(marked ? edge : {}) } };
  const fill = mixed(tints[span.what], tints.page, 0.28 * Math.min(2, view.chunk[span.stage] ?? 0)), children = [{ type: "rect", shape, style: { fill, opacity, ...edge } }];
  if (span.again) {
    const share = (width * span.again) / (span.end - span.start);
    children.push({ type: "rect", shape: { ...shape, width: share }, style: { fill: tints.recompute, opacity, ...edge, lineWidth: 0 } });
  }
  const label = span.m < 0 ? KINDS[span.what] : width > 34 ? `${KINDS[span.what]} ${span.m}` : `${span.m}`;
  const widest = span.m < 0 ? 1 : width > 34 ? label.length : String(plan.micro_batches - 1).length;
  if (width > 7 * widest + 3 && body > 9) {
    children.push({ type: "text", silent: true, style: { text: label, x: x + width / 2, y: top + body / 2, align: "center",
      verticalAlign: "middle", fill: opacity < 1 ? colour("faint") : ink(span.again > (span.end - span.start) / 2 ? tints.recompute : fill), fontSize: Math.min(12, body - 2) } });
  }
  return { type: "group", children };
}

let tints = {};

function drawTimeline(plan, narrow) {
  const line = plan.timeline, lanes = view.lanes, paired = lanes.length > line.workers.length;
  tints = Object.fromEntries(["forward", "backward", "recompute", "update", "activation", "gradient", "tie", "idle", "page"].map((name) => [name, colour(name)]));
  const kinds = new Set(view.spans.map((span) => span.what));
  const entries = ["forward", "backward", "update"].map((name) => [name, tints[name]]);
  if (view.spans.some((span) => span.again)) entries.splice(2, 0, ["recompute", tints.recompute]);
  for (const name of ["activation", "gradient", "tie"]) if (kinds.has(name)) entries.push([`${name} on its way`, tints[name], "thin"]);
  entries.push(["idle", tints.idle]);
  if (Math.max(...view.chunk) > 0) entries.push(["lighter: a worker's later stages", mixed(tints.forward, tints.page, 0.28)]);
  legend("timeline-legend", entries);
  const node = document.getElementById("timeline-chart");
  const row = paired ? Math.max(26, Math.min(36, 420 / lanes.length)) : Math.max(28, Math.min(46, 320 / lanes.length));
  const it = chart(node, Math.round(lanes.length * row + 78));
  const u = unit(TIME, [view.whole]), plain = axis();
  const label = (n) => {
    const lane = lanes[n], name = line.workers[lane.worker].replace(narrow ? "worker:" : "", "");
    return lane.side === "measured" ? "{side|measured}" : paired && !narrow ? `{name|${name}} {side|predicted}` : `{name|${name}}`;
  };
  it.clear(); // what it drew before knows spans that are gone
  it.resize();
  it.setOption({
    animation: false,
    grid: { left: 8, right: 14, top: 6, bottom: 40, containLabel: true },
    tooltip: { ...tooltip(), trigger: "item", formatter: ({ value }) => {
      const span = view.spans[value[3]], text = described(plan, span, counterpart(span));
      return tip(text.head, text.pairs);
    } },
    xAxis: { ...plain, type: "value", min: view.begin, max: view.whole, splitNumber: narrow ? 4 : 8,
      axisLabel: { ...plain.axisLabel, hideOverlap: true, showMaxLabel: false, showMinLabel: view.from === 0, formatter: (value) => `${+(value / u.size).toPrecision(6)} ${u.name}` } },
    yAxis: { ...plain, type: "category", inverse: true, data: lanes.map((_, n) => n), splitLine: { show: false }, axisTick: { show: false },
      axisLine: { show: false },
      axisLabel: { interval: 0, color: colour("text"), fontSize: 12, formatter: label, rich: {
        name: { color: colour("text"), fontSize: 12 }, side: { color: colour("faint"), fontSize: 11 } } } },
    dataZoom: [
      { type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, moveOnMouseWheel: false,
        startValue: view.from, endValue: view.to },
      { type: "slider", filterMode: "weakFilter", startValue: view.from, endValue: view.to, height: 22, bottom: 6, showDetail: false, brushSelect: false,
        borderColor: colour("line"), fillerColor: "rgba(90, 150, 200, 0.22)", handleStyle: { color: colour("raised"), borderColor: colour("faint") },
        moveHandleSize: 0, showDataShadow: false, backgroundColor: colour("raised") },
    ],
    series: [{
      type: "custom", clip: true, renderItem: (params, api) => drawSpan(plan, params, api), encode: { x: [1, 2], y: 0 },
      dimensions: ["lane", "start", "end", "span"], data: view.spans.map((span, n) => [span.lane, span.start, span.end, n]),
      progressive: 0,
    }],
  }, { notMerge: true });
  showRange();
}

function showRange() {
  const u = unit(TIME, [view.to]);
  document.getElementById("range").textContent = `${u.show(view.from)} to ${u.show(view.to)} ${u.name}`;
}
