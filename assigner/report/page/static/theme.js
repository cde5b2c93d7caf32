// Colours come from the style sheet; charts are drawn again when they change.
const root = document.documentElement;
const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

// Black or white, whichever reads better on a colour (relative luminance of WCAG 2).
function ink(hex) {
  const [r, g, b] = [1, 3, 5].map((at) => {
    const part = parseInt(hex.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#10151c" : "#ffffff";
}

// A colour with a share of another in it.
function mixed(hex, other, share) {
  const parts = [1, 3, 5].map((at) => [hex, other].map((each) => parseInt(each.slice(at, at + 2), 16)));
  return `#${parts.map(([a, b]) => Math.round(a + share * (b - a)).toString(16).padStart(2, "0")).join("")}`;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "background") made.style.background = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((each) => each !== null));
  return made;
}

// A tooltip's content: a heading and pairs, all of it text.
function tip(head, pairs) {
  const list = element("dl");
  for (const [term, text] of pairs) list.append(element("dt", {}, term), element("dd", {}, text));
  return element("div", { class: "tip" }, element("b", {}, head), list);
}

const tooltip = () => ({
  confine: true, transitionDuration: 0, padding: 10, borderWidth: 1, borderColor: colour("line"),
  backgroundColor: colour("tip"), textStyle: { color: colour("text"), fontSize: 13 },
});

const axis = () => ({
  axisLine: { lineStyle: { color: colour("line") } }, axisTick: { lineStyle: { color: colour("line") } },
  axisLabel: { color: colour("faint"), fontSize: 12 }, splitLine: { lineStyle: { color: colour("line"), opacity: 0.6 } },
  nameTextStyle: { color: colour("faint"), fontSize: 12 },
});

function legend(id, entries) {
  const list = document.getElementById(id);
  list.replaceChildren(...entries.map(([text, tint, shape]) => {
    const sign = element("i", shape === "rule" ? { class: "rule" } : { class: shape ?? "", background: shape?.includes("hollow") ? "none" : tint });
    sign.style.color = tint;
    return element("li", {}, sign, text);
  }));
}

function chart(node, height) {
  if (height) node.style.height = `${height}px`;
  return echarts.getInstanceByDom(node)
    ?? echarts.init(node, null, { renderer: "canvas", devicePixelRatio: Math.max(2, window.devicePixelRatio) });
}
