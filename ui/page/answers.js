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
  const { batch, interval, rounds } = found.cost.batches[0], { context } = found.cost;
  const speed = found.speeds.find((one) => one.batch === batch), pays = speed.drafted > speed.plain;
  const best = { ...rounds.find((one) => one.steps === (pays ? speed.steps : 0)), tokens_per_s: pays ? speed.drafted : speed.plain };
  const look = { ...found, batch, context, interval, rounds, best, gain: best.tokens_per_s / speed.plain };
  const [lead, more, short] = verdict(look);
  if ($("verdict").textContent !== lead) $("verdict").textContent = lead;
  $("verdict-more").textContent = more;
  $("what").textContent = short;
  const perUser = best.tokens_per_s / batch, ends = best.interval_us?.map((us) => fixed(us / 1000, 2)).join(" to ");
  showTiles($("tiles"), [
    ["Draft steps", best.steps ? `${best.steps}` : "none", `best at batch ${number(batch, 9)}`],
    ["Round", `${fixed(best.round_us / 1000, 2)} ms`, ends ? `80 %: ${ends}` : `${number(best.accept_length)} tokens for each user`],
    ["Each user", `${number(perUser)} tokens/s`, `${number(1000 / perUser)} ms per token`],
    ["Each GPU", `${number(best.tokens_per_s / found.devices, 4)} tokens/s`, found.output_tokens ? "with the time of prompts" : "decode alone"],
    ["Requests that fit", number(found.most_rows, 9), `${number(context, 9)} tokens each, ${number(found.kv_slots, 9)} KV slots`],
  ]);
  fill($("notices"), found.notices.map((notice) => el("li", {}, sentence(notice))));
  showRounds(look);
  showSpeeds(look);
  showGains(found.doctor);
  $("timing").textContent = found.cost.timing;
}

export function sentence(text) { return `${text[0].toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`; }

export function showTiles(place, tiles) {
  fill(place, tiles.map(([name, value, below]) => {
    const [amount, ...unit] = value.split(" ");
    return el("div", {}, el("dt", {}, name), el("dd", {}, amount, unit.length ? el("span", {}, ` ${unit.join(" ")}`) : null, el("small", {}, below)));
  }));
}

// Returns the sentence that matters most, what is to be said beside it, and a few words for the head of the page.
function verdict({ doctor, batch, context, best, gain: times }) {
  if (!doctor) return ["Plain decoding: choose how to draft, and this page says whether it pays.", "", `plain: ${number(best.tokens_per_s, 4)} tokens/s`];
  const { pays_up_to_batch: surely, may_pay_up_to_batch: perhaps, most_drafted: most, busy_rate: rate } = doctor;
  const at = `With ${number(doctor.context, 9)} tokens of context`, steps = count(best.steps, "step"), gain = fixed(times, 2);
  const short = best.steps ? `${gain} × with ${steps} at batch ${number(batch, 9)}` : `plain decoding at batch ${number(batch, 9)}`;
  if (doctor.verdict === "pays not") return [`Speculation does not pay: plain decoding is faster at every batch up to ${number(most, 9)}.`, `${at}.`, short];
  const other = context === doctor.context ? "" : ` and ${number(context, 9)} tokens`;
  const here = best.steps ? `${gain} × the tokens of plain decoding at batch ${number(batch, 9)}${other}, with ${steps}` : `but not at batch ${number(batch, 9)}${other}`;
  const beyond = perhaps < most ? ` Beyond batch ${number(perhaps, 9)} it does not pay.` : "";
  if (doctor.verdict === "uncertain") return ["It is uncertain whether speculation pays: all gains are within their error.", `${at}: ${here}.${beyond}`, short];
  const busy = ` About ${number(rate)} requests/s on each engine keep batch ${number(surely, 9)} busy.`;
  if (surely === most) return [`Speculation pays at every batch that fits, up to ${number(most, 9)}: ${here}.`, `${at}.${busy}`, short];
  const between = perhaps > surely ? ` From there to batch ${number(perhaps, 9)} it is uncertain.` : "";
  return [`Speculation pays up to batch ${number(surely, 9)}: ${here}.`, `${at}.${busy}${between}${beyond}`, short];
}

function showRounds({ cost, batch, context, interval, rounds, best }) {
  const gainOf = (one) => one.tokens_per_s / rounds[0].tokens_per_s;
  const whole = Math.max(...rounds.map((one) => (one.is_overlapped ? one.round_us : one.device_us + one.host_us)));
  $("cost-caption").textContent = `${count(batch, "request")} with ${number(context, 9)} tokens of context each, decode alone: without the time of prompts`;
  const head = ["steps", "", "ms", "break-even", "accepted", "tokens/s", "gain"], isWide = (i) => (i === 3 || i === 4 ? "wide-only" : null);
  const rows = rounds.map((one) => {
    const pieces = Object.entries(grouped(one)).map(([kind, us]) => ({ kind, value: us, title: `${PARTS.find(([name]) => name === kind)[1]}: ${number(us / 1000)} ms` }));
    const host = { kind: "host", value: one.host_us, from: one.is_overlapped ? 0 : one.device_us, title: `host: ${number(one.host_us / 1000)} ms` };
    const cells = [fixed(one.round_us / 1000, 2), fixed(one.break_even, 2), fixed(one.accept_length, 2), number(one.tokens_per_s, 4), `${fixed(gainOf(one), 2)} ×`];
    return el("tr", { class: one.steps === best.steps ? "best" : gainOf(one) < 1 ? "off" : null }, el("th", { scope: "row" }, one.steps ? String(one.steps) : "plain"),
      el("td", { class: "bar" }, barCell(pieces, whole, host)), cells.map((cell, i) => el("td", { class: isWide(i + 2) }, cell)));
  });
  fill($("rounds"), el("thead", {}, el("tr", {}, head.map((name, i) => el("th", { scope: "col", class: isWide(i) }, name)))), el("tbody", {}, rows));
  fill($("parts"), PARTS.map(([kind, name]) => el("span", { class: `key-${kind}` }, name)));
  const sure = interval ? `80 % intervals of a round: ${interval.map((factor) => fixed(factor, 2)).join(" to ")} times; they rest on ${cost.intervals_rest_on}. ` : "";
  $("cost-note").textContent = `Break-even is the accept length at which a round is as fast as plain decoding. ${sure}${rounds.length > 1 ? cost.about_speed_ups : ""}`;
}

function grouped(round) {
  const sums = { target: 0, draft: 0, other: 0 };
  for (const [part, us] of Object.entries(round.parts_us)) sums[kindOf(part)] += us;
  return sums;
}

function showSpeeds(found) {
  const { speeds, devices, batch, output_tokens: output } = found, curve = (name) => speeds.map((one) => [one[name] / one.batch, one[name] / devices]);
  const mark = speeds.findIndex((one) => one.batch === batch);
  const alone = output ? "" : ", decode alone", prompts = output ? `Prompts take their part of the time, for outputs of ${number(output, 9)} tokens.` : "Other engines compute the prompts.";
  const labels = (steps) => speeds.map((one) => `batch ${one.batch}${steps ? `, ${count(one.steps, "step")}` : ""}`);
  const series = [{ name: "plain decoding", kind: "plain", points: curve("plain"), labels: labels(false), mark }];
  if (found.doctor) series.unshift({ name: "with drafts", kind: "drafted", points: curve("drafted"), labels: labels(true), mark });
  draw($("speeds"), (width) => lineChart(width, {
    title: "", x: { label: "tokens/s of each user", log: false }, y: { label: `tokens/s of each GPU${alone}` }, series,
    note: `${prompts} Batches from 1 to ${number(speeds.at(-1).batch, 9)}, each with its best number of steps; the ring is batch ${number(speeds[mark].batch, 9)}.`,
  }));
}

function showGains(doctor) {
  $("gains-section").hidden = !doctor;
  if (!doctor) return;
  const of = (key) => [...new Set(doctor.gains.map((one) => one[key]))], contexts = of("context");
  const head = el("tr", {}, el("th", { scope: "col" }, "batch"), contexts.map((context) => el("th", { scope: "col" }, number(context, 9))));
  const rows = of("batch").map((batch) => el("tr", {}, el("th", { scope: "row" }, number(batch, 9)), doctor.gains.filter((one) => one.batch === batch).map(gainCell)));
  fill($("gains"), el("caption", { class: "visually-hidden" }, "Gain and best steps by batch and tokens of context"), el("thead", {}, head), el("tbody", {}, rows));
  $("gains-note").textContent = doctor.gains.some((one) => one.verdict === "equal") ? "= no clear difference from plain decoding." : "";
}

function gainCell({ gain, steps, verdict }) {
  if (verdict === "no room") return el("td", { class: "none" }, "no room");
  const made = el("td", {}, `${verdict === "equal" ? "= " : ""}${fixed(gain, 2)} ×`, el("small", {}, verdict === "slower" ? "plain" : count(steps, "step")));
  if (verdict !== "equal") {
    const share = Math.min(44, 8 + 36 * Math.abs(Math.log(gain)));
    made.style.background = `color-mix(in srgb, var(--${verdict === "faster" ? "drafted" : "plain"}) ${share.toFixed(0)}%, var(--card))`;
  }
  return made;
}

export function name() { return `${valueOf("model.target")} on ${valueOf("hardware.gpu")}`; }
