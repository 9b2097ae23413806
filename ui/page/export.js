// Shows the files of a deployment for those who run it, and saves them.

import { askOnce } from "./ask.js";
import { $, el, fill } from "./dom.js";
import { asked, madePlan, onPlan } from "./plan.js";
import { state, valueOf } from "./state.js";

const SERVERS = [["vllm", "vLLM"], ["sglang", "SGLang"], ["trtllm", "TensorRT-LLM"]];
let files = {}, asking = 0;

function options(id, pairs) {
  const before = $(id).value;
  fill($(id), pairs.map(([value, name]) => el("option", { value }, name)));
  if (pairs.some(([value]) => value === before)) $(id).value = before;
}

export function makeExport() {
  options("export-server", [["", "the server that is simulated"], ...SERVERS]);
  showPlan();
  onPlan(() => { showPlan(); exportAgain(); });
  for (const id of ["export-of", "export-server"]) $(id).addEventListener("change", exportAgain);
  $("export-file").addEventListener("change", showFile);
  $("export").addEventListener("toggle", exportAgain);
  $("export-save").addEventListener("click", () => save($("export-file").value, exported()));
}

// The files of this page or of the candidates of the last plan, the best one first.
function showPlan() {
  const names = madePlan()?.candidates.filter((one) => one.load !== null && one.status !== "dropped").map((one) => one.name) ?? [];
  options("export-of", [["", "this page"], ...names.map((name) => [name, `the plan's ${name}`])]);
  if (names.length) $("export-of").value = names[0];
}

export async function exportAgain() {
  if (!$("export").open) return;
  const mine = ++asking, of = $("export-of").value;
  const simulated = valueOf("hardware.server").split("-")[0], known = SERVERS.some(([key]) => key === simulated);
  const server = $("export-server").value || (known || of ? null : SERVERS[0][0]);
  const plan = of ? { place: madePlan().place, candidate: of } : {};
  try {
    const found = await askOnce("export", { given: state.given, plan: asked(), server, ...plan });
    if (mine !== asking) return;
    files = found.files;
    $("export-about").textContent = `${found.replicas === 1 ? "One replica" : found.replicas === null ? "Replicas" : `${found.replicas} replicas`} of ${found.server}, each on ${found.gpus_per_replica === 1 ? "one GPU" : `${found.gpus_per_replica} GPUs`}.`;
    fill($("export-notes"), found.notes.map((note) => el("li", {}, `To do: ${note}.`)));
  } catch (error) {
    if (mine !== asking) return;
    files = {};
    $("export-about").textContent = error.message;
    fill($("export-notes"));
  }
  options("export-file", Object.keys(files).map((name) => [name, name]));
  showFile();
}

function showFile() {
  const text = exported();
  $("export-text").textContent = text;
  $("export-found").hidden = !text;
}

export function exported() { return files[$("export-file").value] ?? ""; }

export function save(name, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}
