// The step as rows of actions. A span is one thing that is drawn; see assigner/report/page/figures.py for the tables.
const KINDS = { forward: "F", backward: "B", backward_input: "I", backward_weight: "W", update: "U" };

// All spans of one side: compute, what lies between, messages in the row of their sender.
function predictedSpans(line) {
  const [onPath, messagesOnPath, reductionsOnPath] = line.critical.map((places) => new Set(places));
  const spans = line.events.map(([number, m, start], place) => {
    const [worker, what, stage, length, again, waits, sends, busy] = line.jobs[number];
    return { side: "predicted", what, worker, stage, m, start, end: start + length, again, waits, sends, busy, critical: onPath.has(place) };
  });
  const messages = line.messages.map(([route, m, start], place) => ({
    ...message(line, "predicted", route, m, start, start + line.routes[route][6]), critical: messagesOnPath.has(place),
  }));
  const reductions = line.reductions.map(([worker, stage, start, length, size, what], place) => ({
    ...together("predicted", what, worker, stage, start, start + length, size), critical: reductionsOnPath.has(place),
  }));
  return [...predictedBetween(line, spans), ...messages, ...reductions, ...spans];
}

// Behind an action its messages keep a worker busy; then it is idle until the last message that its next one needs.
function predictedBetween(line, spans) {
  const arrivals = new Map(line.messages.map(([route, m, start]) => [`${route} ${m}`, start + line.routes[route][6]]));
  return line.workers.flatMap((_, worker) => {
    const mine = spans.filter((span) => span.worker === worker).sort((a, b) => a.start - b.start), found = [];
    let free = 0, before = null;
    for (const span of [...mine, null]) {
      const start = span ? span.start : line.step_s, busy = Math.min(free + (before?.busy ?? 0), start);
      if (busy - free > 1e-9) found.push({ ...between("predicted", worker, "busy", before.m, free, busy), critical: before.critical && span?.critical && start - busy < 1e-9 });
      const last = span?.waits.map((route) => [arrivals.get(`${route} ${line.routes[route][0] === "tie" ? -1 : span.m}`), route]).sort((a, b) => b[0] - a[0])[0];
      if (start - busy > 1e-9) found.push(between("predicted", worker, "idle", span ? span.m : -1, busy, start, last && last[0] >= start - 1e-8 ? last[1] : null));
      free = span?.end;
      before = span;
    }
    return found;
  });
}

function measuredSpans(line, step) {
  const one = step.unit_s;
  const spans = step.actions.map(([job, m, start, length]) => {
    const [worker, what, stage] = line.jobs[job];
    return { side: "measured", what, worker, stage, m, start: start * one, end: (start + length) * one, again: 0 };
  });
  const messages = step.messages.map(([route, m, start, length, queued]) => ({
    ...message(line, "measured", route, m, start * one, (start + length) * one), queued: queued * one,
  }));
  const sizes = new Map(line.reductions.map(([, stage, , , size, what]) => [`${what} ${stage}`, size]));
  const reductions = step.reductions.map(([worker, stage, start, length, what]) => together("measured", what, worker, stage, start * one, (start + length) * one, sizes.get(`${what} ${stage}`) ?? 0));
  return [...measuredBetween(line, step, spans), ...messages, ...reductions, ...spans];
}

// Between two actions a worker waits for messages, as it noted, and is busy for the rest.
function measuredBetween(line, step, spans) {
  const one = step.unit_s;
  return line.workers.flatMap((_, worker) => {
    const mine = spans.filter((span) => span.worker === worker).sort((a, b) => a.start - b.start), found = [];
    const waits = step.waits.filter(([who]) => who === worker).map(([, route, m, start, length]) => ({ route, m, start: start * one, end: (start + length) * one }));
    const add = (what, m, start, end, route) => end - start > 1e-6 && found.push(between("measured", worker, what, m, start, end, route));
    let at = 0;
    for (const span of mine) {
      for (const wait of waits.filter(({ start, end }) => start < span.start && end > at)) {
        add("busy", -1, at, Math.min(wait.start, span.start));
        add("idle", wait.m, Math.max(at, wait.start), Math.min(wait.end, span.start), wait.route);
        at = Math.max(at, Math.min(wait.end, span.start));
      }
      add("busy", -1, at, span.start);
      at = Math.max(at, span.end);
    }
    add("idle", -1, at, step.step_s);
    return found;
  });
}

const between = (side, worker, what, m, start, end, route = null) => ({ side, what, worker, stage: -1, m, start, end, route });

function message(line, side, route, m, start, end) {
  const [payload, partition, , from, to, size] = line.routes[route];
  return { side, what: payload, worker: from, to, stage: -1, m, start, end, route, partition, bytes: size };
}

// What the workers of a stage do together, beside what each does: gradients are added up ("reduction"), updated parameters
// handed out ("gathering"); from when this one has begun it.
const together = (side, what, worker, stage, start, end, size) => ({ side, what, worker, stage, m: -1, start, end, bytes: size });

const isTogether = (span) => span.what === "reduction" || span.what === "gathering";
const isMessage = (span) => span.bytes !== undefined;

// A worker, with its host where there are several.
const named = (line, worker) => line.workers[worker] + (line.hosts[worker] ? ` on ${line.hosts[worker]}` : "");

// What a span is, in pairs of words: for the tooltip, for whoever steps through with the keys, and for the table.
function described(plan, span, other) {
  const line = plan.timeline, name = named(line, span.worker), pairs = [];
  const batch = span.m >= 0 ? `, micro-batch ${span.m}` : "";
  if (span.what === "busy") {
    pairs.push(["worker", name], ["busy", span.side === "measured" ? "neither computes nor waits for a message" : "with messages that it sent or received"]);
  } else if (span.what === "idle") {
    if (span.route !== null) {
      const [payload, partition, , from] = line.routes[span.route];
      pairs.push(["waits for", `${payload} of ${partition} from ${named(line, from)}${batch}`]);
    } else if (span.m < 0) pairs.push(["waits for", span.side === "measured" ? "the end of the step, or begins the next one" : "the end of the step"]);
  } else if (isTogether(span)) {
    pairs.push(["worker", name], ["of stage", `${span.stage}: ${plan.stages[span.stage].partitions}`], [span.side === "measured" ? "size, in all" : "size", bytes(span.bytes)]);
  } else if (isMessage(span)) {
    pairs.push(["from", name], ["to", named(line, span.to)], ["of partition", span.partition], ["size", bytes(span.bytes)]);
  } else {
    pairs.push(["worker", name]);
    if (span.stage >= 0) pairs.push(["stage", `${span.stage}: ${plan.stages[span.stage].partitions}`]);
  }
  const length = span.end - span.start, u = unit(TIME, [span.end]);
  pairs.push(["start", `${u.show(span.start)} ${u.name}`], ["end", `${u.show(span.end)} ${u.name}`], ["length", seconds(length)]);
  if (span.critical) pairs.push(["critical path", "yes"]);
  if (span.queued > 0) pairs.push(["before, in the queue of its link", seconds(span.queued)]);
  if (span.again) pairs.push(["of which recompute", `${seconds(span.again)}, drawn first`]);
  for (const [word, routes] of [["needs messages of", span.waits], ["sends", span.sends]]) {
    if (routes?.length) pairs.push([word, bytes(routes.reduce((sum, route) => sum + line.routes[route][5], 0))]);
  }
  if (other) {
    const took = other.end - other.start, more = span.side === "predicted" ? took / length - 1 : length / took - 1;
    pairs.push([other.side, seconds(took)]);
    if (Number.isFinite(more)) pairs.push(["measured against predicted", percent(more, true)]);
  }
  const noun = isMessage(span) && !isTogether(span) ? `${span.what} message` : span.what;
  return { head: `${noun}${batch} (${span.side})`, pairs };
}

// Spans with one key are one thing, predicted and measured; time in between is no one thing.
const spanKey = (span) => [span.what, span.worker, span.stage, span.m, span.route ?? "", span.what === "busy" ? span.side + span.start : ""].join(" ");

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
  if (span.what === "idle" || span.what === "busy") return { type: "rect", shape, style: { fill: tints[span.what], opacity: span.what === "busy" ? opacity : 1, ...(marked ? edge : {}) } };
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

function timelineLegend() {
  const kinds = new Set(view.spans.map((span) => span.what));
  const entries = ["forward", "backward", "update"].map((name) => [name, tints[name]]);
  if (kinds.has("backward_weight")) entries.splice(2, 0, ["weight part of a backward", tints.backward_weight]);
  if (view.spans.some((span) => span.again)) entries.splice(2, 0, ["recompute", tints.recompute]);
  for (const name of ["activation", "gradient", "tie"]) if (kinds.has(name)) entries.push([`${name} on its way`, tints[name], "thin"]);
  if (kinds.has("reduction")) entries.push(["gradients are added up", tints.reduction, "thin"]);
  if (kinds.has("gathering")) entries.push(["updated parameters are handed out", tints.gathering, "thin"]);
  if (kinds.has("busy")) entries.push([view.lanes.some((lane) => lane.side === "measured") ? "busy with messages (measured: any overhead)" : "busy with messages", tints.busy]);
  entries.push(["idle", tints.idle]);
  if (Math.max(...view.chunk) > 0) entries.push(["lighter: a worker's later stages", mixed(tints.forward, tints.page, 0.28)]);
  legend("timeline-legend", entries);
}

function drawTimeline(plan, narrow) {
  const paired = view.lanes.length > plan.timeline.workers.length, lanes = view.lanes.length;
  tints = Object.fromEntries(["forward", "backward", "recompute", "update", "activation", "gradient", "tie", "busy", "idle", "page"].map((name) => [name, colour(name)]));
  tints.backward_input = tints.backward;
  tints.backward_weight = mixed(tints.backward, tints.page, 0.45);
  tints.reduction = tints.gathering = tints.tie;
  timelineLegend();
  const row = paired ? Math.max(26, Math.min(36, 420 / lanes)) : Math.max(28, Math.min(46, 320 / lanes));
  const it = chart(document.getElementById("timeline-chart"), Math.round(lanes * row + 78));
  it.clear(); // what it drew before knows spans that are gone
  it.resize();
  it.setOption({
    animation: false,
    grid: { left: 8, right: 14, top: 6, bottom: 40, containLabel: true },
    tooltip: { ...tooltip(), trigger: "item", formatter: ({ value }) => {
      const span = view.spans[value[3]], text = described(plan, span, counterpart(span));
      return tip(text.head, text.pairs);
    } },
    xAxis: timeAxis(narrow), yAxis: laneAxis(plan, paired, narrow), dataZoom: zooms(),
    series: [{
      type: "custom", clip: true, renderItem: (params, api) => drawSpan(plan, params, api), encode: { x: [1, 2], y: 0 },
      dimensions: ["lane", "start", "end", "span"], data: view.spans.map((span, n) => [span.lane, span.start, span.end, n]),
      progressive: 0,
    }],
  }, { notMerge: true });
  showRange();
}

function timeAxis(narrow) {
  const u = unit(TIME, [view.whole]), plain = axis();
  return { ...plain, type: "value", min: view.begin, max: view.whole, splitNumber: narrow ? 4 : 8,
    axisLabel: { ...plain.axisLabel, hideOverlap: true, showMaxLabel: false, showMinLabel: view.from === 0,
      formatter: (value) => `${+(value / u.size).toPrecision(6)} ${u.name}` } };
}

function laneAxis(plan, paired, narrow) {
  const label = (n) => {
    const lane = view.lanes[n], line = plan.timeline;
    const name = narrow ? line.workers[lane.worker].replace("worker:", "") : named(line, lane.worker);
    return lane.side === "measured" ? "{side|measured}" : paired && !narrow ? `{name|${name}} {side|predicted}` : `{name|${name}}`;
  };
  const rich = { name: { color: colour("text"), fontSize: 12 }, side: { color: colour("faint"), fontSize: 11 } };
  return { ...axis(), type: "category", inverse: true, data: view.lanes.map((_, n) => n), splitLine: { show: false },
    axisTick: { show: false }, axisLine: { show: false },
    axisLabel: { interval: 0, color: colour("text"), fontSize: 12, formatter: label, rich } };
}

function zooms() {
  const seen = { filterMode: "weakFilter", startValue: view.from, endValue: view.to };
  return [
    { ...seen, type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, moveOnMouseWheel: false },
    { ...seen, type: "slider", height: 22, bottom: 6, showDetail: false, brushSelect: false, borderColor: colour("line"),
      fillerColor: "rgba(90, 150, 200, 0.22)", handleStyle: { color: colour("raised"), borderColor: colour("faint") },
      moveHandleSize: 0, showDataShadow: false, backgroundColor: colour("raised") },
  ];
}

function showRange() {
  const u = unit(TIME, [view.to]);
  document.getElementById("range").textContent = `${u.show(view.from)} to ${u.show(view.to)} ${u.name}`;
}
