// What is set on the page: the keys of the scenario that differ from their defaults (`given`), and what only the page
// knows (`page`). The address keeps both, as KEY=VALUE pairs like those of `--set`; a key of the page begins with "page.".

export const PAGE_DEFAULTS = {
  batch: 8, context: null, slo: "ttft_p99<1s,tpot_p99<50ms", gpus: null, rate: null, tried: "", requests: 600, seeds: 4,
};

export const state = { given: {}, page: { ...PAGE_DEFAULTS }, keys: {}, begin: {} };
const listeners = [];

export function onChange(listener) { listeners.push(listener); }

function changed(source) {
  history.replaceState(null, "", address());
  for (const listener of listeners) listener(source);
}

export function valueOf(key) {
  return key in state.given ? state.given[key] : state.keys[key]?.default ?? null;
}

// Sets keys; null, or the default, takes a key away.
export function set(values, source) {
  for (const [key, value] of Object.entries(values)) {
    if (value === null || same(value, state.keys[key]?.default)) delete state.given[key];
    else state.given[key] = value;
  }
  changed(source);
}

export function setPage(values, source) {
  Object.assign(state.page, values);
  changed(source);
}

export function replace(given) {
  state.given = Object.fromEntries(Object.entries(given).filter(([key, value]) => !same(value, state.keys[key]?.default)));
  changed("replaced");
}

export function startAgain() {
  state.page = { ...PAGE_DEFAULTS };
  replace(state.begin);
}

export function same(one, other) { return JSON.stringify(one) === JSON.stringify(other); }

// A value as text: JSON, or a bare word where that is read back as the same text.
export function asText(value) {
  if (typeof value !== "string") return JSON.stringify(value);
  try { JSON.parse(value); } catch { return value; }
  return JSON.stringify(value);
}

export function fromText(text) {
  try { return JSON.parse(text); } catch { return text; }
}

export function address() {
  const pairs = Object.entries(state.given).map(([key, value]) => [key, asText(value)]);
  for (const [name, value] of Object.entries(state.page)) {
    if (name === "batch" || !same(value, PAGE_DEFAULTS[name])) pairs.push([`page.${name}`, asText(value)]);
  }
  return "#" + pairs.map(([key, text]) => `${key}=${encodeURIComponent(text)}`).join("&");
}

// Takes the state from the address; false if it has none.
export function readAddress() {
  const pairs = location.hash.slice(1).split("&").filter((pair) => pair.includes("=")).map((pair) => {
    const at = pair.indexOf("=");
    try { return [pair.slice(0, at), fromText(decodeURIComponent(pair.slice(at + 1)))]; } catch { return ["", null]; }
  });
  const known = pairs.filter(([key, value]) => key && value !== null);
  if (!known.length) return false;
  state.given = {};
  state.page = { ...PAGE_DEFAULTS };
  for (const [key, value] of known) {
    if (key.startsWith("page.")) {
      const name = key.slice(5);
      if (name in PAGE_DEFAULTS) state.page[name] = value;
    } else state.given[key] = value;
  }
  return true;
}
