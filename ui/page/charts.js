// Pictures in SVG, drawn for the width that they have; drawn again when it changes.

import { el, fill, number } from "./dom.js";

const drawings = new Map();
const watcher = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const drawing = drawings.get(target);
    if (drawing && drawing.width !== target.clientWidth) draw(target, drawing.paint);
  }
});

// Calls paint(width), which returns elements, now and at each change of the width.
export function draw(place, paint) {
  const width = place.clientWidth;
  drawings.set(place, { paint, width });
  if (width) fill(place, ...[paint(width)].flat());
  watcher.observe(place);
}

// Round numbers from 0 or `low` to `high`, about `most` of them.
export function ticks(low, high, most) {
  const span = high - low || 1, power = 10 ** Math.floor(Math.log10(span / most));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => span / one <= most);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

export function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const digit of [1, 2, 5]) if (digit * 10 ** power >= low * 0.999 && digit * 10 ** power <= high * 1.001) found.push(digit * 10 ** power);
  }
  return found;
}

function scale(low, high, from, to, log = false) {
  const at = log ? Math.log : (value) => value;
  return (value) => from + ((at(value) - at(low)) / (at(high) - at(low) || 1)) * (to - from);
}

function text(x, y, words, options = {}) {
  return el("text", { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": options.anchor ?? "start", class: options.class ?? null }, words);
}

function picture(width, height, label, ...parts) {
  return el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label }, parts);
}

function pathOf(points) { return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(""); }

// Lines over an axis. series: { name, kind, points: [[x, y or null]], labels: of the points, mark: index of one or null }.
export function lineChart(width, { title, note = "", x, y, series, height = 250, isStep = false }) {
  const left = 52, right = 12, top = 14, bottom = 38;
  const all = series.flatMap(({ points }) => points).filter(([, value]) => value !== null);
  const xs = all.map(([value]) => value), most = Math.max(...all.map(([, value]) => value), y.least ?? 0) * 1.06 || 1;
  const [low, high] = x.log ? [Math.min(...xs), Math.max(...xs)] : [x.low ?? 0, Math.max(...xs)];
  const toX = scale(low, high, left, width - right, x.log), toY = scale(0, most, height - bottom, top);
  const across = x.log ? thinned(logTicks(low, high), toX) : ticks(low, high, Math.max(3, Math.floor(width / 90)));
  const grid = [
    ...ticks(0, most, 4).map((value) => [el("line", { class: "grid", x1: left, x2: width - right, y1: toY(value), y2: toY(value) }), text(left - 6, toY(value) + 4, (y.format ?? compact)(value), { anchor: "end" })]),
    ...across.map((value) => text(toX(value), height - bottom + 16, compact(value), { anchor: "middle" })),
    text(width - right, height - 4, x.label, { anchor: "end" }),
  ].flat();
  const lines = series.map(({ name, kind, points, labels = [], mark = null }) => {
    const known = points.filter(([, value]) => value !== null).map(([px, py]) => [toX(px), toY(py)]);
    if (!known.length) return null;
    const stepped = isStep ? known.flatMap(([px, py], i) => (i ? [[px, known[i - 1][1]], [px, py]] : [[px, py]])) : known;
    const dots = labels.map((label, i) => el("circle", { class: `dot fill-${kind}`, cx: known[i][0], cy: known[i][1], r: 3.5 }, el("title", {}, label)));
    return el("g", { class: kind },
      el("path", { class: `line ${kind}`, d: pathOf(stepped) }),
      dots,
      mark === null ? null : el("circle", { class: `ring ${kind}`, cx: known[mark][0], cy: known[mark][1], r: 7 }),
      el("title", {}, name));
  });
  const keys = el("p", { class: "legend" }, series.map(({ name, kind }) => el("span", { class: `key key-${kind}` }, name)));
  const label = `${title}: ${series.map(({ name, points }) => `${name}, ${points.length} points`).join("; ")}`;
  return [title ? el("h3", {}, title) : null, series.length > 1 ? keys : null, picture(width, height, label, grid, lines, text(left, 10, y.label)), note ? el("p", { class: "note" }, note) : null];
}

function thinned(values, toX) {
  let last = -Infinity;
  return values.filter((value) => { const at = toX(value); if (at - last < 34) return false; last = at; return true; });
}

export function compact(value) {
  if (Math.abs(value) >= 1e6) return `${number(value / 1e6, 2)}M`;
  if (Math.abs(value) >= 10_000) return `${number(value / 1000, 3)}k`;
  return number(value, 3);
}

// Ranges from the median to the 99th percentile on a logarithmic axis. rows: { name, ranges: [{ kind, name, median, p90, p99 }] }.
export function rangeChart(width, { title, rows, unit }) {
  const left = 62, right = 62, each = 17, gap = 15, top = 4;
  const values = rows.flatMap(({ ranges }) => ranges.flatMap(({ median, p99 }) => [median, p99])).filter((value) => value > 0);
  if (!values.length) return [];
  const height = top + rows.reduce((sum, { ranges }) => sum + ranges.length * each + gap, 0) + 26;
  const low = Math.min(...values) / 1.25, high = Math.max(...values) * 1.25, toX = scale(low, high, left, width - right, true);
  const parts = thinned(logTicks(low, high), toX).flatMap((value) => [
    el("line", { class: "grid", x1: toX(value), x2: toX(value), y1: top, y2: height - 26 }), text(toX(value), height - 10, compact(value), { anchor: "middle" }),
  ]);
  parts.push(text(width, height - 10, unit, { anchor: "end" }));
  let at = top + gap / 2;
  for (const { name, ranges } of rows) {
    parts.push(text(0, at + (ranges.length * each) / 2 + 4, name, { class: "strong" }));
    for (const { kind, name: of, median, p90, p99 } of ranges) {
      const y = at + each / 2;
      if (median > 0) {
        parts.push(el("g", {}, el("title", {}, `${name} ${of}: median ${number(median)}, p90 ${number(p90)}, p99 ${number(p99)} ${unit}`),
          el("line", { class: `range ${kind}`, x1: toX(median), x2: toX(p99), y1: y, y2: y }),
          [median, p90, p99].map((value, i) => el("circle", { class: `dot fill-${kind}`, cx: toX(value), cy: y, r: [5, 3, 4][i] }))));
        parts.push(text(toX(p99) + 10, y + 4, `${number(p99)}`, { class: kind }));
      }
      at += each;
    }
    at += gap;
  }
  const label = `${title}: ${rows.map(({ name, ranges }) => `${name} ${ranges.map(({ name: of, median, p99 }) => `${of} from ${number(median)} to ${number(p99)} ${unit}`).join(", ")}`).join("; ")}`;
  return [el("h3", {}, title), picture(width, height, label, parts)];
}

// Pieces one behind the other, as shares of `whole`, with a thin line below. For a cell of a table.
export function barCell(pieces, whole, below = null) {
  let at = 0;
  const made = pieces.map(({ kind, value, title }) => {
    const piece = el("rect", { class: `fill-${kind}`, x: `${(100 * at) / whole}%`, y: 1, width: `${(100 * value) / whole}%`, height: below ? 11 : 15, rx: 1.5 }, el("title", {}, title));
    at += value;
    return piece;
  });
  if (below) made.push(el("rect", { class: `fill-${below.kind}`, x: `${(100 * (below.from ?? 0)) / whole}%`, y: 14, width: `${(100 * below.value) / whole}%`, height: 4, rx: 1.5 }, el("title", {}, below.title)));
  return el("svg", { "aria-hidden": "true" }, made);
}

export function whiskerCell(value, range, whole, kind) {
  const parts = [el("rect", { class: `fill-${kind}`, x: 0, y: 2, width: `${(100 * value) / whole}%`, height: 14, rx: 2 })];
  if (range) {
    const [low, high] = range.map((end) => `${Math.min(100, (100 * end) / whole)}%`);
    parts.push(el("line", { class: "whisker", x1: low, x2: high, y1: 9, y2: 9 }), ...[low, high].map((x) => el("line", { class: "whisker", x1: x, x2: x, y1: 5, y2: 13 })));
  }
  return el("svg", { "aria-hidden": "true" }, parts);
}
