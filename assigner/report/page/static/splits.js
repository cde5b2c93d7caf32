// The step time at each number of micro-batches: this placement, and what the solver found with others.
const CROSS = "path://M2,0 L5,3 L8,0 L10,2 L7,5 L10,8 L8,10 L5,7 L2,10 L0,8 L3,5 L0,2 Z";

function drawSplits(plan) {
  const { placement, candidates, bound_s: bound, micro_batches: mine } = plan.splits, plain = axis();
  const priced = placement.filter((each) => each.step_s !== null), found = candidates.filter((each) => each.objective_s !== null);
  const proven = candidates.filter((each) => each.bound_s !== null);
  const mineOnly = bound === null || proven.length ? [] : [{ ...placement.find((each) => each.micro_batches === mine), objective_s: null, bound_s: bound, status: "this plan" }];
  const bounds = [...proven, ...mineOnly];
  const u = unit(TIME, [...priced, ...found].map((each) => each.step_s ?? each.objective_s));
  const dots = priced.map((each) => {
    const tint = colour(each.fits ? "forward" : "bad"), fill = each.fits && !each.measured ? colour("page") : tint;
    return { value: [each.micro_batches, each.step_s], each, symbol: each.fits ? "circle" : CROSS,
      symbolSize: each.micro_batches === mine ? 13 : 8, itemStyle: { color: fill, borderColor: tint, borderWidth: each.fits ? 2 : 0 } };
  });
  const entries = [["this placement, the plan's own number larger", colour("forward"), "round"]];
  if (priced.some((each) => !each.measured)) entries.push(["size not measured", colour("forward"), "round hollow"]);
  if (priced.some((each) => !each.fits)) entries.push(["does not fit (cross)", colour("bad"), "round"]);
  if (found.length) entries.push(["best plan that the solver found", colour("update"), "round"]);
  if (bounds.length) entries.push(["bound of this plan's search", colour("backward"), "thin"]);
  legend("splits-legend", entries);
  const rules = bounds.map((each) => ({ value: [each.micro_batches, each.bound_s], each }));
  const series = [
    { name: "placement", type: "line", data: dots, lineStyle: { color: colour("forward"), width: 2 }, z: 3 },
    { name: "found", type: "line", lineStyle: { width: 0 }, symbol: "diamond", symbolSize: 13, itemStyle: { color: colour("update") }, z: 4,
      data: found.map((each) => ({ value: [each.micro_batches, each.objective_s], each })) },
    { name: "bound", type: "line", lineStyle: { width: 0 }, symbol: "rect", symbolSize: [26, 3], itemStyle: { color: colour("backward") }, data: rules },
  ];
  const it = chart(document.getElementById("splits-chart"), 320);
  it.resize();
  it.setOption({
    animation: false, grid: { left: 8, right: 24, top: 30, bottom: 30, containLabel: true },
    tooltip: { ...tooltip(), trigger: "item", formatter: ({ data }) => splitTip(data.each, mine) },
    xAxis: { ...plain, type: "log", logBase: 2, min: 1, name: "micro-batches", nameLocation: "middle", nameGap: 28, minorSplitLine: { show: false } },
    yAxis: { ...plain, type: "value", min: 0, name: `step, ${u.name}`, nameTextStyle: { ...plain.nameTextStyle, align: "left" },
      axisLabel: { ...plain.axisLabel, formatter: (value) => `${+(value / u.size).toPrecision(4)}` } },
    series,
  }, { notMerge: true });
  const best = priced.filter((each) => each.fits).sort((a, b) => a.step_s - b.step_s)[0];
  document.getElementById("splits-text").textContent = best
    ? `This placement is fastest with ${best.micro_batches} micro-batches of ${best.rows}: ${seconds(best.step_s)}; the plan has ${mine}.`
    : "This placement fits the workers' memory with no number of micro-batches that the profile can price.";
}

function splitTip(each, mine) {
  const head = `${each.micro_batches} micro-batches of ${each.rows}${each.micro_batches === mine ? " (this plan's)" : ""}`;
  if (each.status !== undefined) {
    return tip(head, [...(each.schedule ? [["schedule", each.schedule]] : []), ["best found", each.objective_s === null ? "-" : seconds(each.objective_s)],
      ["bound", each.bound_s === null ? "-" : seconds(each.bound_s)], ["", each.status]]);
  }
  return tip(head, [["this placement", seconds(each.step_s)], ["memory", each.fits ? "fits" : "does not fit"],
    ["size", each.measured ? "measured" : "between or beyond those measured"]]);
}
