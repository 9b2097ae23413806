// Asks for a plan, shows how far it is, and its answer.

import { sentence } from "./answers.js";
import { ask } from "./ask.js";
import { whiskerCell } from "./charts.js";
import { $, count, el, fill, number } from "./dom.js";
import { onChange, setPage, state } from "./state.js";

let running = null, made = null;
const fields = {}, planListeners = [];

// The last plan, and what follows each one.
export function madePlan() { return made; }
export function onPlan(listener) { planListeners.push(listener); }

function field(name, label, attributes, read) {
  const input = el("input", { ...attributes, change: () => setPage({ [name]: read(input.value) }, "plan") });
  fields[name] = input;
  return el("label", { class: attributes.class ?? null }, label, input);
}

const whole = (text) => (text === "" ? null : Math.round(Number(text)));

export function makePlan() {
  const button = el("button", { type: "submit", class: "main", id: "plan-start" }, "Plan");
  fill($("plan"),
    field("slo", "Limits", { type: "text", class: "wide" }, (text) => text),
    field("rate", "Load, requests/s", { type: "number", step: "any", min: 0, placeholder: "the greatest" }, (text) => (text === "" ? null : Number(text))),
    field("gpus", "GPUs", { type: "number", min: 1, placeholder: "one engine's" }, whole),
    field("tried", "Values to try", { type: "text", class: "wide", placeholder: "plain, 1 to 7 steps, a tree, adaptive" }, (text) => text),
    field("requests", "Requests of a run", { type: "number", min: 100 }, (text) => whole(text) ?? 600),
    field("seeds", "Most runs per load", { type: "number", min: 2, max: 100 }, (text) => whole(text) ?? 4),
    button);
  $("plan").addEventListener("submit", (event) => { event.preventDefault(); start(); });
  $("plan-progress").lastElementChild.addEventListener("click", () => { cancel(); $("plan-lead").textContent = "Cancelled."; });
  onChange(show);
  show();
}

function show() {
  for (const [name, input] of Object.entries(fields)) if (document.activeElement !== input) input.value = state.page[name] ?? "";
}

export function asked() {
  const { slo, rate, gpus, tried, requests, seeds } = state.page;
  return { slo, rate, gpus, requests, seeds, tried: String(tried).split(/\s+/).filter(Boolean) };
}

function cancel() {
  running?.abort();
  running = null;
  $("plan-progress").hidden = true;
  $("plan-start").disabled = false;
}

async function start() {
  cancel();
  const mine = running = new AbortController(), began = performance.now();
  const [bar, words] = $("plan-progress").children;
  $("plan-progress").hidden = false;
  $("plan-start").disabled = true;
  $("plan-scroll").hidden = true;
  for (const id of ["plan-lead", "plan-note"]) $(id).textContent = "";
  bar.removeAttribute("value");
  words.textContent = "starting";
  try {
    const question = asked();
    const found = await ask("plan", { given: state.given, plan: question }, mine.signal, ({ plan }) => plan && showProgress(bar, words, plan, (performance.now() - began) / 1000));
    made = found;
    for (const listener of planListeners) listener();
    showFound(found, question, (performance.now() - began) / 1000);
  } catch (error) {
    if (error.name !== "AbortError") $("plan-lead").textContent = error.message;
  } finally {
    if (running === mine) cancel();
  }
}

function showProgress(bar, words, { words: text, left_s: left }, seconds) {
  bar.max = 1;
  if (left !== null) bar.value = Math.max(bar.value || 0, seconds / (seconds + left));
  words.textContent = text;
}

function showFound(answer, question, seconds) {
  const { candidates, refused, load_unit: unit } = answer, isLoad = question.rate === null;
  const valueOf = (one) => (isLoad ? one.load : one.gpus), rangeOf = (one) => (isLoad ? one.load_interval : one.gpus_interval);
  const shown = candidates.filter((one) => one.load !== null), best = shown.find((one) => one.status === "best") ?? shown[0];
  const unable = refused.map(({ name, reason }) => `${name} cannot run: ${reason}`);
  const [title, lead = "No candidate can run.", ...rest] = answer.sentences;
  $("plan-lead").textContent = lead;
  if (!best) {
    $("plan-note").textContent = [title, ...unable].map(sentence).join(" ");
    return;
  }
  const most = Math.max(...shown.flatMap((one) => [valueOf(one), ...(rangeOf(one) ?? []).filter((end) => end !== null)]));
  const head = ["", "", ...(isLoad ? [unit, "half of runs"] : ["GPUs"]), "tokens/s", "tightest limit"];
  const rows = shown.map((one) => {
    const isOut = one.status === "dropped";
    const half = isLoad ? [el("td", {}, one.half_load === null ? "–" : number(one.half_load))] : [];
    const ends = rangeOf(one), range = ends && ends.every((end) => end !== null) ? ends : null;
    return el("tr", { class: one === best ? "best" : isOut ? "off" : null }, el("th", { scope: "row" }, one.status === "equal" ? `= ${one.name}` : one.name),
      el("td", { class: "bar" }, whiskerCell(valueOf(one), range, most, isOut ? "faint" : one.name.startsWith("plain") ? "plain" : "drafted")),
      el("td", {}, number(valueOf(one))), ...half, el("td", {}, number(one.tokens_per_s, 4)),
      el("td", {}, isOut ? "rough" : `${one.tightest} ${number(100 * one.taken, 3)} %`));
  });
  fill($("candidates"), el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows));
  $("plan-scroll").hidden = false;
  const hopeless = candidates.filter((one) => one.load === null).map((one) => one.name);
  const never = hopeless.length ? [`Within the limits at no load: ${hopeless.join("; ")}.`] : [];
  const range = shown.some((one) => rangeOf(one)) ? ["Whiskers: 80 % intervals, if the times of passes are not as simulated."] : [];
  $("plan-note").textContent = [title, ...rest, ...never, ...range, ...unable, `Found in ${number(seconds)} s`].map(sentence).join(" ");
}
