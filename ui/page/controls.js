// The controls of the deployment. Each shows one key of the scenario, or one value of the page.

import { $, el, fill } from "./dom.js";
import { state, set, setPage, valueOf, onChange, startAgain, asText, fromText } from "./state.js";
import { take } from "./drop.js";

const POLICIES = { fixed: "fixed", ema: "adaptive (ema)", goodput: "adaptive (goodput)" };
const ALGORITHMS = { NONE: "none (plain)", EAGLE3: "EAGLE-3", MULTI_LAYER_EAGLE: "MTP", STANDALONE: "a draft model", NGRAM: "n-gram look-up" };
const DRAFT_KEYS = ["policy", "steps", "topk", "num_draft_tokens", "adaptive", "probe_backoff", "heads"].map((name) => `speculation.${name}`);
const FIRST_STEPS = 3;

let choices;
const made = []; // { keys, show }: the controls, each with the keys that it shows

// -- kinds of controls ---------------------------------------------------------------------------------------------

let lastId = 0;

function row(label, keys, hint, inputs, { slides = false, show = null } = {}) {
  const id = `control-${++lastId}`;
  const why = el("p", { class: "why", id: `${id}-why`, hidden: true });
  const named = [inputs].flat();
  named[0].id = id;
  for (const input of named) input.setAttribute("aria-describedby", why.id);
  const line = el("div", { class: slides ? "control slides" : "control" }, el("label", { for: id, title: hint }, label), named, why);
  made.push({ keys, line, inputs: named, why, show });
  return line;
}

function choice(label, key, options, { hint, change = (value) => ({ [key]: value }), numeric = false } = {}) {
  const select = el("select", { change: () => set(change(numeric ? Number(select.value) : select.value || null), key) });
  const fillOptions = (extra) => {
    const groups = Array.isArray(options) ? [["", options]] : Object.entries(options);
    const all = groups.map(([name, items]) => {
      const entries = items.map((item) => (Array.isArray(item) ? item : [item, item])).map(([value, text]) => el("option", { value }, text));
      return name ? el("optgroup", { label: name }, entries) : entries;
    });
    fill(select, ...all.flat(), extra === null ? null : el("option", { value: extra }, extra));
  };
  fillOptions(null);
  return row(label, [key], hint ?? state.keys[key]?.meaning, select, {
    show() {
      const value = String(valueOf(key) ?? "");
      if (![...select.options].some((option) => option.value === value)) fillOptions(value);
      select.value = value;
    },
  });
}

// The values of a slider: round numbers with one ratio between them, or equal steps.
function valuesOf(low, high, { integer, log }) {
  if (!log) return Array.from({ length: Math.round((high - low) / (integer ? 1 : 0.05)) + 1 }, (_, i) => Number((low + i * (integer ? 1 : 0.05)).toFixed(2)));
  const all = Array.from({ length: 201 }, (_, i) => tidy(low * (high / low) ** (i / 200)));
  return [...new Set(integer ? all.map(Math.round) : all)];
}

function nearest(values, value) {
  return values.reduce((best, one, i) => (Math.abs(one - value) < Math.abs(values[best] - value) ? i : best), 0);
}

// A slider with the number beside it; each of its steps is another number.
function slider(label, keys, low, high, read, write, { integer = false, log = false, unit = "", hint, placeholder = "" } = {}) {
  const values = valuesOf(low, high, { integer, log });
  const range = el("input", { type: "range", min: 0, max: values.length - 1, step: 1 });
  const exact = el("input", { type: "number", "aria-label": `${label}${unit ? `, ${unit}` : ""}`, step: "any", placeholder });
  range.addEventListener("input", () => write(values[range.value], label));
  exact.addEventListener("change", () => {
    const value = exact.value === "" ? null : Number(exact.value);
    write(value !== null && integer ? Math.round(value) : value, label);
  });
  return row(label, keys, hint, [range, exact], {
    slides: true,
    show() {
      const value = read();
      range.value = value === null ? 0 : nearest(values, value);
      range.setAttribute("aria-valuetext", value === null ? placeholder || "not set" : `${value} ${unit}`.trim());
      if (document.activeElement !== exact || Number(exact.value) !== value) exact.value = value ?? "";
    },
  });
}

function tidy(value) { return Number(value.toPrecision(2)); }

function keySlider(label, key, low, high, options = {}) {
  return slider(label, [key], low, high, () => valueOf(key), (value) => set({ [key]: value }, key), { hint: state.keys[key]?.meaning, ...options });
}

function group(title, open, ...lines) {
  return el("details", { class: "group", open }, el("summary", {}, title), el("div", { role: "group", "aria-label": title }, lines));
}

// -- the controls --------------------------------------------------------------------------------------------------

function modelGroup() {
  const models = { "Built in": choices.models, "With measured kernels": choices.measured_models };
  const formats = [["", "checkpoint's"], "bf16", "fp8", "int8", "int4", "nvfp4", "mxfp4"];
  return [
    choice("Model", "model.target", models),
    choice("Weights", "model.weight_dtype", formats),
    choice("GPU", "hardware.gpu", choices.gpus),
    choice("Tensor parallel", "hardware.tensor_parallel", [1, 2, 4, 8, 16], { numeric: true }),
    keySlider("Engines", "hardware.replicas", 1, 32, { integer: true }),
    choice("Server", "hardware.server", choices.servers),
  ];
}

function draftGroup() {
  const algorithms = choices.algorithms.map((name) => [name, ALGORITHMS[name] ?? name]);
  const texts = [["", "the usual"], ...choices.texts];
  return [
    choice("Drafts by", "speculation.algorithm", algorithms, {
      change: (value) => ({ ...(value === "NONE" ? Object.fromEntries([...DRAFT_KEYS, ...ownAcceptance()].map((key) => [key, null])) : {}), "speculation.algorithm": value }),
    }),
    choice("Draft steps", "speculation.policy", Object.entries(POLICIES), {
      change: (value) => ({
        "speculation.policy": value, "speculation.adaptive": null,
        "speculation.steps": value === "fixed" ? valueOf("speculation.steps") ?? FIRST_STEPS : null,
        ...(value === "fixed" ? {} : { "speculation.topk": null, "speculation.num_draft_tokens": null }),
      }),
    }),
    keySlider("Steps", "speculation.steps", 0, 10, { integer: true, hint: "draft steps of each round" }),
    keySlider("Branches", "speculation.topk", 1, 8, { integer: true }),
    choice("Kind of text", "acceptance.preset", texts),
    keySlider("Accept length", "acceptance.mean_length", 1, 8, { placeholder: "usual", hint: state.keys["acceptance.mean_length"]?.meaning }),
  ];
}

function ownAcceptance() { return Object.keys(state.given).filter((key) => key.startsWith("acceptance.")); }

function loadGroup() {
  const kinds = [["open", "arrival rate"], ["closed", "users at once"], ["trace", "recorded trace"]];
  const kind = el("select", { change: () => set(LOADS[kind.value](), "load") }, kinds.map(([value, text]) => el("option", { value }, text)));
  return [
    row("Load", ["workload.arrivals"], "how requests arrive", kind, { show() {
      kind.value = loadKind();
      kind.options[2].disabled = loadKind() !== "trace";
    } }),
    keySlider("Requests/s", "workload.rate", 0.1, 500, { log: true, unit: "requests per second" }),
    keySlider("Users", "workload.concurrency", 1, 2048, { log: true, integer: true }),
    keySlider("Trace speed", "workload.rate_scale", 0.1, 20, { log: true, unit: "times" }),
    lengthSlider("Prompt", "prompt", 65536),
    lengthSlider("Output", "output", 16384),
    keySlider("Simulated", "workload.num_requests", 50, 20000, { log: true, integer: true, placeholder: "usual", hint: "requests of a simulation" }),
  ];
}

const LOADS = {
  open: () => ({ "workload.concurrency": null, "workload.trace": null, "workload.rate_scale": null }),
  closed: () => ({ "workload.concurrency": 32, "workload.rate": null, "workload.arrivals": null, "workload.trace": null, "workload.rate_scale": null }),
  trace: () => ({}),
};

export function loadKind() {
  if (valueOf("workload.trace") !== null) return "trace";
  return valueOf("workload.concurrency") !== null ? "closed" : "open";
}

// The mean of a lognormal length, or the value of a fixed one.
function lengthSlider(label, name, high) {
  const key = () => `workload.${name}.${valueOf(`workload.${name}.kind`) === "fixed" ? "value" : "mean"}`;
  const keys = ["kind", "value", "mean"].map((part) => `workload.${name}.${part}`);
  return slider(label, keys, 8, high, () => valueOf(key()), (value) => set({ [key()]: value }, key()), { log: true, integer: true, unit: "tokens on average" });
}

function batchGroup() {
  return [
    slider("Batch", ["page.batch"], 1, 1024, () => state.page.batch, (value) => setPage({ batch: value ?? 8 }, "batch"), { log: true, integer: true, unit: "requests that decode together" }),
    slider("Context", ["page.context"], 16, 131072, () => state.page.context, (value) => setPage({ context: value }, "context"), { log: true, integer: true, unit: "tokens of each", placeholder: "usual" }),
  ];
}

function otherGroup() {
  const area = el("textarea", { rows: 4, spellcheck: "false", change: () => set(read(), "other"), "aria-label": "Other keys, KEY=VALUE in each line" });
  const others = () => Object.keys(state.given).filter((key) => !made.some((one) => one.line && one.keys.includes(key)));
  const read = () => {
    const lines = area.value.split("\n").map((line) => line.trim()).filter(Boolean);
    const values = lines.map((line) => [line.split("=")[0].trim(), fromText(line.slice(line.indexOf("=") + 1).trim())]);
    return { ...Object.fromEntries(others().map((key) => [key, null])), ...Object.fromEntries(values) };
  };
  const why = el("p", { class: "why", hidden: true });
  made.push({ keys: [], inputs: [area], why, show() {
    if (document.activeElement !== area) area.value = others().map((key) => `${key}=${asText(state.given[key])}`).join("\n");
  } });
  return [area, why, el("p", { class: "note" }, "Every key of a scenario, one in each line, such as engine.max_running=64.")];
}

function dropGroup() {
  const file = el("input", { type: "file", class: "visually-hidden", id: "file", tabindex: -1, "aria-hidden": "true", change: () => file.files[0] && take(file.files[0]) });
  const text = el("textarea", { rows: 3, class: "paste", spellcheck: "false", placeholder: "vllm serve … or a scenario", "aria-label": "Launch command or scenario" });
  return [
    el("p", { class: "note" }, "Drop a scenario, a trace or a launch command of vLLM, SGLang or TensorRT-LLM anywhere on the page, or:"),
    el("div", { class: "buttons" }, el("button", { type: "button", click: () => file.click() }, "Choose a file"), file),
    text,
    el("div", { class: "buttons" },
      el("button", { type: "button", id: "take", click: () => text.value.trim() && take(new File([text.value], "pasted text")) }, "Read the text"),
      el("button", { type: "button", id: "again", click: startAgain }, "Start again")),
    el("ul", { class: "notices", id: "read-notes", role: "status", "aria-live": "polite" }),
  ];
}

export function makeControls(offered) {
  choices = offered;
  const isWide = matchMedia("(min-width: 60rem)").matches;
  fill($("controls"),
    group("Model and hardware", true, modelGroup()),
    group("Drafts", true, draftGroup()),
    group("Load and lengths", isWide, loadGroup()),
    group("A round to look at", isWide, batchGroup()),
    group("Read a scenario, a trace, a command", isWide, dropGroup()),
    group("Other keys", false, otherGroup()));
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  onChange(showControls);
  showControls();
}

function showControls() {
  for (const control of made) control.show?.();
  const speculates = valueOf("speculation.algorithm") !== "NONE", kind = loadKind();
  const visible = {
    "speculation.policy": speculates, "speculation.steps": speculates && valueOf("speculation.policy") === "fixed",
    "speculation.topk": speculates && valueOf("speculation.policy") === "fixed", "acceptance.preset": speculates, "acceptance.mean_length": speculates,
    "workload.rate": kind === "open", "workload.concurrency": kind === "closed", "workload.rate_scale": kind === "trace",
    "workload.prompt.mean": kind !== "trace", "workload.output.mean": kind !== "trace",
  };
  for (const { keys, line } of made) for (const key of keys) if (line && key in visible) line.hidden = !visible[key];
}

// Shows each problem at the control of its key, too.
export function showProblems(problems) {
  for (const { inputs, why } of made) {
    why.hidden = true;
    for (const input of inputs) input.removeAttribute("aria-invalid");
  }
  for (const problem of problems) {
    const control = made.find((one) => one.line && !one.line.hidden && one.keys.includes(problem.key));
    if (!control) continue;
    control.why.textContent = problem.message;
    control.why.hidden = false;
    for (const input of control.inputs) input.setAttribute("aria-invalid", "true");
    control.line.closest("details").open = true;
  }
}
