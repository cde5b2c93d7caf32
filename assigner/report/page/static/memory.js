// One small chart for each worker: what it holds, stacked by what holds it.
const PARTS = ["parameters", "gradients", "optimizer", "buffers", "activations", "workspace", "messages"];
const OFF_SCALE = 2.5; // a capacity above so many peaks would leave nothing to see below it

function drawMemory(plan, run, step, toCapacity) {
  const box = document.getElementById("memory-charts");
  for (const node of box.querySelectorAll(".chart")) echarts.getInstanceByDom(node)?.dispose();
  const used = PARTS.filter((part) => plan.memory.some((each) => each.always[part] > 0 || each.levels.some((level) => level[PARTS.indexOf(part) - 4] > 0)));
  const readings = (worker) => (step?.memory ?? []).filter(([mine]) => mine === worker).map(([, at, held]) => [at * step.unit_s, held]);
  const entries = used.map((part) => [part === "optimizer" ? "optimizer state" : part, colour(part)]);
  legend("memory-legend", [...entries, ["the plan allows for", colour("faint"), "rule"], ["capacity", colour("bad"), "rule"], ...(step ? [["measured", colour("text"), "round"]] : [])]);
  box.replaceChildren(...plan.memory.map((each, worker) => {
    const peak = run?.peak_bytes[each.worker], far = scaleTop(each, readings(worker), toCapacity) < each.capacity_bytes;
    const text = `at most ${bytes(each.peak_bytes)}${peak === undefined ? "" : `, measured ${bytes(peak)}`}, of ${bytes(each.capacity_bytes)}${far ? " (off the scale)" : ""}`;
    return element("figure", {}, element("figcaption", {}, element("b", {}, each.worker), ` ${text}`),
      element("div", { class: "chart", role: "img", "aria-label": `Memory of ${each.worker} over the step: ${text}` }));
  }));
  const nodes = box.querySelectorAll(".chart");
  plan.memory.forEach((each, worker) => memoryChart(nodes[worker], plan, each, used, readings(worker), toCapacity));
}

function memoryChart(node, plan, each, used, readings, toCapacity) {
  const it = chart(node), plain = axis(), time = unit(TIME, [view.whole]);
  const top = scaleTop(each, readings, toCapacity), size = unit(BYTES, [top]);
  const moments = [...each.moments, [plan.timeline.step_s, each.moments.at(-1)[1]]];
  const value = (part, level) => each.always[part] ?? each.levels[level][PARTS.indexOf(part) - 4];
  // A block is one part of what is held, from one change of its place in the stack to the next.
  const blocks = used.flatMap((part, n) => {
    const found = [];
    moments.slice(0, -1).forEach(([at, level], k) => {
      const low = used.slice(0, n).reduce((sum, below) => sum + value(below, level), 0), high = low + value(part, level), last = found.at(-1);
      if (last && last[2] === low && last[3] === high) last[1] = moments[k + 1][0];
      else found.push([at, moments[k + 1][0], low, high, n]);
    });
    return found.filter(([, , low, high]) => high > low);
  });
  const tints = used.map(colour);
  const areas = [{
    name: "held", type: "custom", clip: true, encode: { x: [0, 1], y: [2, 3] }, data: blocks, renderItem: (_, api) => {
      const [x, bottom] = api.coord([api.value(0), api.value(2)]), [right, y] = api.coord([api.value(1), api.value(3)]);
      const [left, width, top, height] = [crisp(x), crisp(right) - crisp(x), crisp(y), crisp(bottom) - crisp(y)];
      return { type: "rect", shape: { x: left, y: top, width, height }, style: { fill: tints[api.value(4)] } };
    },
  }];
  const rule = (name, height, tint) => ({ name, type: "line", symbol: "none", silent: true, emphasis: { disabled: true },
    z: 20, lineStyle: { color: tint, width: 1.5, type: "dashed" }, data: [[view.begin, height], [view.whole, height]] });
  const seen = readings.length ? [{ name: "measured", type: "line", symbol: "circle", symbolSize: 4, showSymbol: true, z: 21, itemStyle: { color: colour("text") },
    lineStyle: { color: colour("text"), width: 1, opacity: 0.5 }, data: readings }] : [];
  const tick = niceStep(top / size.size) * size.size;
  it.setOption({
    animation: false, grid: { left: 6, right: 12, top: 10, bottom: 4, containLabel: true },
    tooltip: { ...tooltip(), trigger: "axis", axisPointer: { type: "line", lineStyle: { color: colour("faint") } }, formatter: (found) => {
      const at = found[0].axisValue, now = moments.findLast(([from]) => from <= at) ?? moments[0];
      const pairs = used.filter((part) => value(part, now[1]) > 0).map((part) => [part, bytes(value(part, now[1]))]);
      pairs.push(["in all", bytes(used.reduce((sum, part) => sum + value(part, now[1]), 0))]);
      const read = found.find((one) => one.seriesName === "measured");
      if (read) pairs.push(["measured", bytes(read.value[1])]);
      return tip(`${each.worker} at ${seconds(at)}`, pairs);
    } },
    xAxis: { ...plain, type: "value", min: view.from, max: view.to, splitLine: { show: false }, splitNumber: 4,
      axisLabel: { ...plain.axisLabel, hideOverlap: true, showMaxLabel: false, showMinLabel: view.from === 0,
        formatter: (at) => `${+(at / time.size).toPrecision(4)} ${time.name}` } },
    yAxis: { ...plain, type: "value", min: 0, max: Math.ceil((top * 1.02) / tick) * tick, interval: tick,
      axisLabel: { ...plain.axisLabel, formatter: (held) => `${+(held / size.size).toPrecision(4)} ${size.name}` } },
    series: [...areas, rule("allowed for", each.allowed_bytes, colour("faint")), rule("capacity", each.capacity_bytes, colour("bad")), ...seen],
  }, { notMerge: true });
}

// Where the scale ends: at the most that is held or at the capacity, unless that is far above.
function scaleTop(each, readings, toCapacity) {
  const highest = Math.max(each.allowed_bytes, ...readings.map(([, held]) => held));
  return toCapacity || each.capacity_bytes <= OFF_SCALE * highest ? Math.max(highest, each.capacity_bytes) : highest;
}

// To half a pixel, so that blocks side by side leave no seam.
const crisp = (at) => Math.round(2 * at) / 2;

// A round distance between ticks, for about four of them.
function niceStep(top) {
  const rough = top / 4, power = 10 ** Math.floor(Math.log10(rough || 1));
  return power * ([1, 2, 2.5, 5, 10].find((each) => each * power >= rough) ?? 10);
}

function zoomMemory() {
  for (const node of document.querySelectorAll("#memory-charts .chart")) {
    chart(node).setOption({ xAxis: { min: view.from, max: view.to, axisLabel: { showMinLabel: view.from === 0 } } });
  }
}
