// Shows what `cost` and `doctor` say.

import { barCell, draw, lineChart } from "./charts.js";
import { $, count, el, fill, fixed, number } from "./dom.js";
import { valueOf } from "./state.js";

const PARTS = [["target", "target's pass"], ["draft", "drafts"], ["other", "sampling, launch"], ["host", "scheduler on the host"]];

function kindOf(part) {
  if (part.startsWith("draft")) return "draft";
  return ["launch", "sampling", "comm"].includes(part) ? "other" : "target";
}

export function showAnswer(found) {
  const { rounds } = found.cost, plain = rounds[0], gainOf = (one) => one.tokens_per_s / plain.tokens_per_s;
  const best = rounds.reduce((one, other) => (other.tokens_per_s > one.tokens_per_s ? other : one));
  const [lead, more, short] = verdict(found, best, gainOf);
  if ($("verdict").textContent !== lead) $("verdict").textContent = lead;
  $("verdict-more").textContent = more;
  $("what").textContent = short;
  const perUser = best.tokens_per_s / found.batch;
  const tiles = [
    ["Draft steps", best.steps ? `${best.steps}` : "none", `best at batch ${number(found.batch, 9)}`],
    ["Round", `${fixed(best.total_us / 1000, 2)} ms`, around(found, best)],
    ["Each user", `${number(perUser)} tokens/s`, `${number(1000 / perUser)} ms per token`],
    ["Each GPU", `${number(best.tokens_per_s / found.devices, 4)} tokens/s`, `${number(best.accept_length, 3)} tokens a round and user`],
    ["Requests that fit", number(found.most_rows, 9), `${number(found.context, 9)} tokens each, ${number(found.kv_slots, 9)} KV slots`],
  ];
  showTiles($("tiles"), tiles);
  fill($("notices"), found.notices.map((notice) => el("li", {}, notice)));
  showRounds(found, best, gainOf);
  showSpeeds(found);
  showGains(found.doctor);
  $("timing").textContent = found.timing;
}

export function showTiles(place, tiles) {
  fill(place, tiles.map(([name, value, below]) => {
    const [amount, ...unit] = value.split(" ");
    return el("div", {}, el("dt", {}, name), el("dd", {}, amount, unit.length ? el("span", {}, ` ${unit.join(" ")}`) : null, el("small", {}, below)));
  }));
}

function around(found, best) {
  const interval = found.cost.interval;
  return interval ? `80 %: ${interval.map((factor) => fixed((factor * best.total_us) / 1000, 2)).join(" to ")}` : `batch ${number(found.batch, 9)}`;
}

// Returns the sentence that matters most, what is to be said beside it, and a few words for the head of the page.
function verdict(found, best, gainOf) {
  const { doctor, context } = found, at = `with ${number(context, 9)} tokens of context`;
  const here = `${number(gainOf(best), 3)} × the tokens of plain decoding at batch ${number(found.batch, 9)}`;
  if (!doctor) return ["Plain decoding: choose how to draft, and this page says whether it pays.", "", `plain decoding, ${number(best.tokens_per_s, 4)} tokens/s`];
  const { surely, perhaps, most, busy_rate: rate, error } = doctor, margin = `Gains err by ±${fixed(100 * (error - 1), 0)} % (80 %).`;
  const short = best.steps ? `${number(gainOf(best), 3)} × with ${count(best.steps, "step")} at batch ${number(found.batch, 9)}` : `plain decoding at batch ${number(found.batch, 9)}`;
  if (!perhaps) return [`Speculation does not pay: ${at}, plain decoding is faster at every batch up to ${number(most, 9)}.`, margin, short];
  const beyond = perhaps < most ? ` Beyond batch ${number(perhaps, 9)} it does not pay.` : "";
  if (!surely) return [`It cannot be told whether speculation pays ${at}: all gains are within their error.${beyond}`, margin, short];
  const gives = best.steps ? `${here}, with ${count(best.steps, "step")}` : `not at batch ${number(found.batch, 9)}`;
  if (surely === most) return [`Speculation pays: ${gives}. It pays at every batch that fits, up to ${number(most, 9)}.`, margin, short];
  const between = perhaps > surely ? ` From there to ${number(perhaps, 9)} it cannot be told.` : "";
  const busy = ` About ${number(rate)} requests/s on each engine keep such a batch busy.`;
  return [`Speculation pays up to batch ${number(surely, 9)}: ${gives}.`, `${at[0].toUpperCase()}${at.slice(1)}.${busy}${between}${beyond} ${margin}`, short];
}

function showRounds(found, best, gainOf) {
  const { rounds, about, rests_on: restsOn, interval } = found.cost;
  const ends = (one) => (one.is_overlapped ? one.total_us : one.device_us + one.host_us), whole = Math.max(...rounds.map(ends));
  $("cost-caption").textContent = `${count(found.batch, "request")} with ${number(found.context, 9)} tokens of context each`;
  const head = ["steps", "", "ms", "break-even", "accepted", "tokens/s", "gain"];
  const rows = rounds.map((one) => {
    const pieces = Object.entries(grouped(one)).map(([kind, us]) => ({ kind, value: us, title: `${PARTS.find(([name]) => name === kind)[1]}: ${number(us / 1000)} ms` }));
    const host = { kind: "host", value: one.host_us, from: one.is_overlapped ? 0 : one.device_us, title: `host: ${number(one.host_us / 1000)} ms` };
    const gain = gainOf(one);
    return el("tr", { class: one === best ? "best" : gain < 1 ? "off" : null }, el("th", { scope: "row" }, one.steps ? String(one.steps) : "plain"),
      el("td", { class: "bar" }, barCell(pieces, whole, host)), el("td", {}, fixed(one.total_us / 1000, 2)),
      el("td", { class: "wide-only" }, fixed(one.break_even, 2)), el("td", { class: "wide-only" }, fixed(one.accept_length, 2)),
      el("td", {}, number(one.tokens_per_s, 4)), el("td", {}, `${fixed(gain, 2)} ×`));
  });
  fill($("rounds"), el("thead", {}, el("tr", {}, head.map((name, i) => el("th", { scope: "col", class: i === 3 || i === 4 ? "wide-only" : null }, name)))), el("tbody", {}, rows));
  fill($("parts"), PARTS.map(([kind, name]) => el("span", { class: `key-${kind}` }, name)));
  const sure = interval ? `80 % intervals of a round: ${fixed(interval[0], 2)} to ${fixed(interval[1], 2)} times; they rest on ${restsOn}. ` : "";
  $("cost-note").textContent = `Break-even is the accept length at which a round is as fast as plain decoding. ${sure}${rounds.length > 1 ? about : ""}`;
}

function grouped(round) {
  const sums = { target: 0, draft: 0, other: 0 };
  for (const [part, us] of Object.entries(round.parts_us)) sums[kindOf(part)] += us;
  return sums;
}

function showSpeeds(found) {
  const { speeds, devices, batch } = found, curve = (name) => speeds.map((one) => [one[name] / one.batch, one[name] / devices]);
  const mark = speeds.reduce((near, one, i) => (Math.abs(Math.log(one.batch / batch)) < Math.abs(Math.log(speeds[near].batch / batch)) ? i : near), 0);
  const labels = (steps) => speeds.map((one) => `batch ${one.batch}${steps ? `, ${count(one.steps, "step")}` : ""}`);
  const series = [{ name: "plain decoding", kind: "plain", points: curve("plain"), labels: labels(false), mark }];
  if (found.doctor) series.unshift({ name: "with drafts", kind: "drafted", points: curve("drafted"), labels: labels(true), mark });
  draw($("speeds"), (width) => lineChart(width, {
    title: "", x: { label: "tokens/s of each user", log: false }, y: { label: "tokens/s of each GPU" }, series,
    note: `Batches from 1 to ${number(speeds.at(-1).batch, 9)}, each with its best number of steps; the ring is batch ${number(speeds[mark].batch, 9)}.`,
  }));
}

function showGains(doctor) {
  $("gains-section").hidden = !doctor;
  if (!doctor) return;
  const head = el("tr", {}, el("th", { scope: "col" }, "batch"), doctor.contexts.map((context) => el("th", { scope: "col" }, number(context, 9))));
  const rows = doctor.gains.map(({ batch, cells }) => el("tr", {}, el("th", { scope: "row" }, number(batch, 9)), cells.map((cell) => gainCell(cell, doctor.error))));
  fill($("gains"), el("caption", { class: "visually-hidden" }, "Gain and best steps by batch and tokens of context"), el("thead", {}, head), el("tbody", {}, rows));
}

function gainCell(cell, error) {
  if (!cell) return el("td", { class: "none" }, "no room");
  const { gain, steps } = cell, size = Math.log(gain), isKnown = Math.abs(size) > Math.log(error);
  const made = el("td", {}, `${isKnown ? "" : "= "}${fixed(gain, 2)} ×`, el("small", {}, gain < 1 && isKnown ? "plain" : count(steps, "step")));
  if (isKnown) {
    const share = Math.min(60, 14 + 46 * Math.abs(size));
    made.style.background = `color-mix(in srgb, var(--${gain > 1 ? "drafted" : "plain"}) ${share.toFixed(0)}%, var(--card))`;
  }
  return made;
}

export function name() { return `${valueOf("model.target")} on ${valueOf("hardware.gpu")}`; }
