// Numbers as assigner/formatting.py writes them: three significant digits, never an exponent.
const TIME = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];
const BYTES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];

function number(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  const digits = size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.9995 ? 2 : size < 5e-4 ? 0 : 3;
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function unit(units, values) {
  const largest = Math.max(0, ...values.map(Math.abs));
  const found = units.find(([, size]) => largest >= size) ?? units[largest ? units.length - 1 : 0];
  return { name: found[0], size: found[1], show: (value) => number(value / found[1]) };
}

const seconds = (value) => ((u) => `${u.show(value)} ${u.name}`)(unit(TIME, [value]));
const bytes = (value) => ((u) => `${u.show(value)} ${u.name}`)(unit(BYTES, [value]));
const percent = (share, sign) => `${sign && share > 0 ? "+" : ""}${(100 * share).toFixed(1)} %`;
