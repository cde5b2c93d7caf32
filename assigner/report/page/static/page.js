// Puts the charts together: which plan, which run, which theme, how wide.
const data = JSON.parse(document.getElementById("data").textContent);
const runPick = document.getElementById("run"), capacity = document.getElementById("to-capacity");
let waiting = 0;

const page = {
  number: data.plans.length - 1,
  // A run with other rematerialisation stands beside the step and the memory of the plan as it was run.
  plan: () => ({ ...data.plans[page.number], ...page.run()?.as_run }),
  run: () => (runPick.value === "" ? null : data.plans[page.number].measured[Number(runPick.value.split(" ")[0])]),
  step: () => page.run()?.steps[Number(runPick.value.split(" ")[1])] ?? null,
  zoomed() {
    clearTimeout(waiting);
    waiting = setTimeout(zoomMemory, 120);
  },
  draw() {
    const narrow = window.innerWidth < 640;
    drawTimeline(page.plan(), narrow);
    drawMemory(page.plan(), page.run(), page.step(), capacity.checked);
    drawSplits(page.plan());
    fillTable();
  },
  choose(number) {
    page.number = number;
    for (const part of document.querySelectorAll("[data-plan]")) part.hidden = Number(part.dataset.plan) !== number;
    const runs = data.plans[number].measured;
    document.getElementById("run-pick").hidden = runs.length === 0;
    runPick.replaceChildren(...runs.flatMap((run, n) => run.steps.map((step, k) =>
      element("option", { value: `${n} ${k}` }, `${run.name}: ${step.label} step, ${seconds(step.step_s)}`))), element("option", { value: "" }, "not shown"));
    page.lay();
  },
  lay() {
    document.getElementById("inspected").textContent = "";
    document.getElementById("run-said").textContent = page.run()?.said ?? "";
    layTimeline(page.plan(), page.step());
    page.draw();
  },
};

function setTheme(name) {
  root.dataset.theme = name;
  const button = document.getElementById("theme");
  button.setAttribute("aria-pressed", String(name === "dark"));
  button.textContent = name === "dark" ? "Light" : "Dark";
  button.setAttribute("aria-label", name === "dark" ? "Use light colours" : "Use dark colours");
}

root.classList.add("scripted");
document.getElementById("contents").replaceChildren(...[...document.querySelectorAll("main > section")].map((section) =>
  element("li", {}, element("a", { href: `#${section.id}` }, section.querySelector("h2").textContent))));
const prefers = window.matchMedia("(prefers-color-scheme: dark)");
setTheme(prefers.matches ? "dark" : "light");
page.choose(page.number);
listen();
prefers.addEventListener("change", () => { setTheme(prefers.matches ? "dark" : "light"); page.draw(); });
document.getElementById("theme").addEventListener("click", () => { setTheme(root.dataset.theme === "dark" ? "light" : "dark"); page.draw(); });
for (const choice of document.querySelectorAll("input[name=plan]")) choice.addEventListener("change", () => page.choose(Number(choice.value)));
runPick.addEventListener("change", page.lay);
document.getElementById("critical").addEventListener("change", (event) => { view.critical = event.target.checked; drawTimeline(page.plan(), window.innerWidth < 640); });
capacity.addEventListener("change", page.draw);
// A table that is wider than its box says so: the bar that scrolls it is not drawn everywhere.
const boxes = new ResizeObserver((changed) => {
  for (const { target } of changed) target.classList.toggle("cut", target.scrollWidth > target.clientWidth + 1);
});
for (const box of document.querySelectorAll(".scroll")) boxes.observe(box);
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  page.draw();
});

// On paper: light, and as wide as the sheet.
let before = "";
window.addEventListener("beforeprint", () => { before = root.dataset.theme; setTheme("light"); page.draw(); });
window.addEventListener("afterprint", () => { setTheme(before); page.draw(); });
