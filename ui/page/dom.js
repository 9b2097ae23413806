// Elements, and numbers as text.

const SVG = "http://www.w3.org/2000/svg";
const SVG_NAMES = new Set(["svg", "g", "path", "line", "rect", "circle", "text", "title"]);

export const $ = (id) => document.getElementById(id);

// Makes an element: attributes by name (null leaves one out, a function listens to that event), then children.
export function el(name, attributes = {}, ...children) {
  const made = SVG_NAMES.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(key, value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null));
  return made;
}

export function fill(parent, ...children) { parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null)); }

// At least so many digits, none of them after the point of a large number: 1,234  12.3  0.123
export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = value === 0 ? 1 : Math.floor(Math.log10(Math.abs(value))) + 1;
  return value.toLocaleString("en", { minimumFractionDigits: 0, maximumFractionDigits: Math.max(0, Math.min(6, digits - size)) });
}

export function fixed(value, decimals) { return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }); }

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  return value >= 10_000 ? `${number(value / 1000)} s` : `${number(value)} ms`;
}

export function count(value, noun) { return `${number(value, 9)} ${noun}${value === 1 ? "" : "s"}`; }
