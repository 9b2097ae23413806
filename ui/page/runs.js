// Simulates what is on the page, and shows it.

import { sentence, showTiles } from "./answers.js";
import { ask } from "./ask.js";
import { draw, lineChart, rangeChart } from "./charts.js";
import { $, count, el, fill, fixed, milliseconds, number } from "./dom.js";
import { state } from "./state.js";

const LATENCIES = [["ttft", "TTFT"], ["tpot", "TPOT"], ["itl", "ITL"], ["e2el", "E2EL"]];
let running = null;

export function cancelRun() {
  running?.abort();
  running = null;
  $("run-progress").hidden = true;
}

export function markRunStale() { $("run-found").classList.add("stale"); }

export async function simulate() {
  cancelRun();
  const mine = running = new AbortController();
  const [bar, words] = $("run-progress").children;
  $("run-progress").hidden = false;
  bar.removeAttribute("value");
  words.textContent = "starting";
  try {
    const found = await ask("simulate", { given: state.given }, mine.signal, (message) => {
      if (message.as_it_is) show(message);
      if (message.run) showProgress(bar, words, message);
    });
    show(found);
    $("run-caption").textContent = `Simulated: ${count(found.as_it_is.completed, "request")} in ${number(found.as_it_is.duration)} s of the service.${aboutSteady(found.as_it_is)}`;
    $("run").dataset.done = String(Number($("run").dataset.done ?? 0) + 1);
  } catch (error) {
    if (error.name === "AbortError") return;
    $("run-found").hidden = true;
    $("run-caption").textContent = `Cannot be simulated: ${error.message}`;
  } finally {
    if (running === mine) cancelRun();
  }
}

function showProgress(bar, words, { run, ended, expected }) {
  if (expected) { bar.max = expected; bar.value = ended; }
  words.textContent = `${run}: ${number(ended, 9)} ${expected ? `of ${number(expected, 9)} ` : ""}requests`;
}

function aboutSteady({ steady_from: from, steady_until: until }) {
  return from === null ? "" : ` Rates and means: from ${number(from)} to ${number(until)} s, without the ramp and what came after the last arrival.`;
}

function show({ as_it_is: mine, without = null }) {
  $("run-found").hidden = false;
  $("run-found").classList.remove("stale");
  const kind = state.given["speculation.algorithm"] === "NONE" ? "plain" : "drafted";
  const both = [{ name: kind === "plain" ? "plain decoding" : "as it is", kind, run: mine }, ...(without ? [{ name: "without drafts", kind: "plain", run: without }] : [])];
  const beside = (key) => (without ? `${milliseconds(without[key])} without drafts` : `mean ${milliseconds(mine[key.replace("p99", "mean")])}`);
  const tiles = [
    ["Output", `${number(mine.output_throughput, 4)} tokens/s`, without ? `${number(without.output_throughput, 4)} without drafts` : `${number(mine.request_throughput)} requests/s`],
    ["First token, p99", milliseconds(mine.p99_ttft_ms), beside("p99_ttft_ms")],
    ["Per token, p99", milliseconds(mine.p99_tpot_ms), beside("p99_tpot_ms")],
    ["Requests at once", number(mine.mean_running), without ? `${number(without.mean_running)} without drafts` : `at most ${number(mine.max_running, 9)}`],
    ["KV in use", `${fixed(100 * mine.kv_occupancy_mean, 0)} %`, `at most ${fixed(100 * mine.kv_occupancy_max, 0)} %`],
  ];
  if (mine.slo_attainment !== null) tiles.push(["Within the SLO", `${fixed(100 * mine.slo_attainment, 1)} %`, without ? `${fixed(100 * without.slo_attainment, 1)} % without drafts` : ""]);
  showTiles($("run-tiles"), tiles);
  const overloaded = both.filter(({ run }) => run.overloaded).map(({ name, run }) => `Overloaded (${name}): ${run.overload}.`);
  const refused = both.filter(({ run }) => run.refused).map(({ name, run }) => `${count(run.refused, "request")} refused (${name}).`);
  fill($("run-notices"), [...overloaded, ...refused, ...mine.notices.map(sentence)].map((one) => el("li", {}, one)));
  draw($("latencies"), (width) => rangeChart(width, { title: "Latencies: median, p90 and p99", unit: "ms", rows: LATENCIES.map(([key, name]) => ({
    name, ranges: both.map(({ kind: of, name: what, run }) => ({ kind: of, name: what, median: run[`median_${key}_ms`], p90: run[`p90_${key}_ms`], p99: run[`p99_${key}_ms`] })),
  })) }));
  overTime("load-chart", "Requests that run", "requests", both, "running", mine.max_running ? [{ name: "waiting", kind: "waiting", points: timeline(mine, "waiting") }] : []);
  overTime("kv-chart", "KV slots in use", "", both, "kv_occupancy", [], (value) => `${number(100 * value, 2)} %`);
  $("steps-chart").hidden = kind === "plain";
  if (kind !== "plain") overTime("steps-chart", "Draft steps in use", "mean of the rounds", both.slice(0, 1), "steps");
}

function timeline(run, key) { return run.timeline[key].map((value, i) => [i * run.timeline.bucket_s, value]); }

function overTime(id, title, label, both, key, more = [], format = undefined) {
  const series = [...both.map(({ name, kind, run }) => ({ name, kind, points: timeline(run, key) })), ...more];
  draw($(id), (width) => lineChart(width, { title, x: { label: "seconds" }, y: { label, format }, series, height: 180, isStep: true }));
}
