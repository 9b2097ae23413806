// Takes what is dropped, pasted or chosen: the server says which keys it stands for.

import { $, el, fill } from "./dom.js";
import { askOnce } from "./ask.js";
import { state, replace } from "./state.js";

const MOST_BYTES = 7_500_000; // the server takes bodies of 8 MiB

let sayProblem = () => {};

export async function take(file) {
  try {
    if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${Math.round(file.size / 1e6)} MB, and the page takes 7.5: start with foredraft ui --trace FILE`);
    const found = await askOnce("read", { name: file.name, text: await file.text(), given: state.given });
    sayProblem(null);
    fill($("read-notes"), [`Read as a ${found.kind === "launch" ? "launch command" : found.kind}.`, ...found.notes].map((note) => el("li", {}, note)));
    replace(found.given);
  } catch (error) {
    fill($("read-notes"));
    sayProblem(error); // what is on the page stays
  }
}

export function acceptDrops(onProblem) {
  sayProblem = onProblem;
  let depth = 0;
  const show = (isOver) => { $("dropping").hidden = !isOver; };
  addEventListener("dragenter", (event) => { event.preventDefault(); depth += 1; show(true); });
  addEventListener("dragleave", () => { depth = Math.max(0, depth - 1); show(depth > 0); });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    show(false);
    const [file] = event.dataTransfer.files, text = event.dataTransfer.getData("text/plain");
    if (file) take(file);
    else if (text.trim()) take(new File([text], "dropped text"));
  });
  addEventListener("paste", (event) => {
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (!event.target.closest("input, textarea") && text.trim()) take(new File([text], "pasted text"));
  });
}
