// The page: whatever changes, the answer follows at once, then a simulation.

import { ask, choices } from "./ask.js";
import { name, showAnswer } from "./answers.js";
import { makeControls, showProblems } from "./controls.js";
import { $, el, fill } from "./dom.js";
import { acceptDrops } from "./drop.js";
import { exportAgain, exported, makeExport, save } from "./export.js";
import { asked, makePlan } from "./plan.js";
import { cancelRun, markRunStale, simulate } from "./runs.js";
import { address, onChange, readAddress, set, state } from "./state.js";

const QUIET_MS = 500; // without a change, until a simulation begins
let texts = { toml: "", commands: {} };

// -- answers: one question at a time, and the newest of those that came meanwhile -----------------------------------

let asking = null, isAskedAgain = false, simulateLater = 0;

async function answer() {
  if (asking && !asking.isRough) { isAskedAgain = true; return; }
  asking?.abort.abort(); // the server goes on with its tables; this answer is no more wanted
  const mine = asking = { abort: new AbortController(), isRough: false };
  const began = performance.now();
  const took = () => `answered in ${Math.max(1, Math.round(performance.now() - began))} ms`;
  isAskedAgain = false;
  try {
    const { batch, context } = state.page;
    const body = { given: state.given, batch, context, plan: asked() };
    const found = await ask("answer", body, mine.abort.signal, (rough) => {
      mine.isRough = true;
      if (rough.result) show(rough.result, `by the roofline in ${Math.round(performance.now() - began)} ms; measured kernels follow`);
    });
    show(found, took());
    $("found").dataset.answered = String(Number($("found").dataset.answered ?? 0) + 1);
    exportAgain();
    $("found").dataset.tookMs = String(Math.round(performance.now() - began));
    runLater();
  } catch (error) {
    if (error.name === "AbortError") return;
    showProblem(error);
    $("state").textContent = took();
    $("found").dataset.answered = String(Number($("found").dataset.answered ?? 0) + 1);
  } finally {
    if (asking === mine) {
      asking = null;
      if (isAskedAgain) answer();
    }
  }
}

function show(found, words) {
  showProblem(null);
  $("found").hidden = false;
  showAnswer(found);
  texts = found;
  showTexts();
  $("state").textContent = words;
}

function runLater() {
  clearTimeout(simulateLater);
  if ($("auto").checked && $("run").dataset.of !== JSON.stringify(state.given)) simulateLater = setTimeout(run, QUIET_MS);
}

function run() {
  $("run").dataset.of = JSON.stringify(state.given);
  return simulate();
}

function changed() {
  document.title = `${name()} · Foredraft`;
  clearTimeout(simulateLater);
  if ($("run").dataset.of !== JSON.stringify(state.given)) {
    cancelRun();
    markRunStale();
    delete $("run").dataset.of;
  }
  answer();
}

// -- what is wrong ---------------------------------------------------------------------------------------------------

function showProblem(error) {
  $("found").classList.toggle("stale", error !== null);
  const problems = error?.problems ?? [];
  showProblems(problems);
  $("problem").hidden = error === null;
  if (error === null) return;
  const lines = problems.map(({ key, message }) => el("li", {}, key ? el("code", {}, key) : null, key ? `: ${message}` : message,
    key in state.given ? el("button", { type: "button", click: () => set({ [key]: null }, key) }, `Leave ${key} out`) : null));
  fill($("problem"), lines.length ? el("ul", {}, lines) : error.message);
}

// -- the same, to take along -----------------------------------------------------------------------------------------

function showTexts() {
  $("toml").textContent = texts.toml;
  $("command").textContent = texts.commands[$("command-name").value] ?? "";
}

const COPIES = { export: exported, toml: () => texts.toml, command: () => $("command").textContent, link: () => location.origin + location.pathname + address() };

async function copy(what) {
  try {
    await navigator.clipboard.writeText(COPIES[what]());
    $("copied").textContent = { export: "The file is copied.", toml: "The scenario is copied.", command: "The command is copied.", link: "The link is copied." }[what];
  } catch {
    $("copied").textContent = "The browser does not let the page copy: select the text and copy it yourself.";
  }
}

// -- colours ---------------------------------------------------------------------------------------------------------

const THEMES = ["", "light", "dark"];

function theme(next) {
  document.documentElement.dataset.theme = next;
  $("theme").setAttribute("aria-label", `Colours: ${next || "as the system"}`);
  $("theme").textContent = { "": "◐", light: "○", dark: "●" }[next];
  try { localStorage.setItem("theme", next); } catch { /* a browser without storage forgets it */ }
}

function startTheme() {
  let kept = "";
  try { kept = localStorage.getItem("theme") ?? ""; } catch { /* as above */ }
  theme(THEMES.includes(kept) ? kept : "");
  $("theme").addEventListener("click", () => theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]));
}

// -- the start -------------------------------------------------------------------------------------------------------

async function start() {
  startTheme();
  const offered = await choices();
  Object.assign(state, { keys: offered.keys, begin: offered.begin });
  if (!readAddress()) state.given = { ...offered.begin };
  makeControls(offered);
  makePlan();
  makeExport();
  acceptDrops((error) => (error ? showProblem(error) : showProblem(null)));
  onChange(changed);
  addEventListener("hashchange", () => { if (location.hash !== address() && readAddress()) set({}, "address"); });
  $("skip").addEventListener("click", (event) => { event.preventDefault(); $("answers").focus(); }); // the address is the state
  $("simulate").addEventListener("click", run);
  $("auto").addEventListener("change", runLater);
  $("run-progress").lastElementChild.addEventListener("click", () => { cancelRun(); $("run-caption").textContent = "Cancelled."; });
  $("command-name").addEventListener("change", showTexts);
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button.dataset.copy));
  $("save").addEventListener("click", () => save("scenario.toml", texts.toml));
  changed();
}

start();
