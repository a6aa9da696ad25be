// Decisions as they happen: where, why, what either way was estimated to take, what it took.

import { h, keyed, put, rowOf, s, say } from "./dom.js";
import { DASH, bytes, count, reason, seconds, time, words } from "./format.js";

const SHOWN = 25;
const SHOWN_NARROW = 10;
const LABELS = ["Time", "Request", "Prompt", "Prefill at", "Why", "Estimated TTFT", "TTFT", "Result"];
const PARTS = ["queue_s", "prefill_s", "transfer_s", "decode_s"];
const PART_NAMES = { queue_s: "queue", prefill_s: "prefill", transfer_s: "transfer", rtt_s: "round trip", decode_s: "decode step" };

export class Decisions {
  constructor(section) {
    this.body = section.querySelector("tbody");
    this.empty = section.querySelector(".empty");
    this.leftOut = section.querySelector("#left-out");
    this.requests = new Map();
    this.open = new Set();
    this.missed = 0;
  }

  add(message) {
    for (const each of message.requests) {
      this.requests.delete(each.id);
      this.requests.set(each.id, each);
    }
    this.missed += message.left_out;
    if (this.requests.size > 4 * SHOWN) {
      const newest = [...this.requests.values()].sort((a, b) => b.at - a.at).slice(0, 2 * SHOWN);
      this.requests = new Map(newest.map((each) => [each.id, each]));
    }
  }

  draw() {
    const most = window.innerWidth > 760 ? SHOWN : SHOWN_NARROW;
    const newest = [...this.requests.values()].sort((a, b) => b.at - a.at).slice(0, most);
    const rows = newest.flatMap((each) => this.open.has(each.id) ? [[each, false], [each, true]] : [[each, false]]);
    const shown = new Set(newest.map((each) => each.id));
    for (const id of this.open) if (!shown.has(id)) this.open.delete(id);
    keyed(this.body, rows, ([each, more]) => (more ? `+${each.id}` : each.id),
      ([each, more]) => (more ? moreRow() : this.row(each)),
      (row, [each, more]) => (more ? updateMore(row, each) : this.update(row, each)));
    this.empty.hidden = newest.length > 0;
    say(this.leftOut, this.missed ? `${count(this.missed)} came too fast to be shown` : "");
  }

  row(each) {
    const row = rowOf(LABELS.length, 1);
    LABELS.forEach((label, at) => put(row.children[at], { "data-label": label }));
    const button = h("button", { type: "button", class: "more", "aria-expanded": "false" });
    button.addEventListener("click", () => {
      if (!this.open.delete(each.id)) this.open.add(each.id);
      this.draw();
    });
    row.children[1].append(button);
    row.children[3].append(h("span", { class: "chip" }));
    const chart = h("div", { class: "estimates" });
    for (const target of ["local", "remote"]) {
      const bar = s("svg", { class: `estimate ${target}`, width: 96, height: 8, "aria-hidden": "true" });
      bar.append(...PARTS.map((part) => s("rect", { class: part, height: 8 })));
      chart.append(bar, h("span"));
    }
    row.children[5].append(chart, h("span", { class: "quiet" }, "not estimated"));
    return row;
  }

  update(row, each) {
    const [at, request, prompt, place, why, estimates, ttft, result] = row.children;
    put(row, { class: each.target });
    say(at, time(each.at));
    const button = request.firstChild;
    say(button, each.id.length > 14 ? `${each.id.slice(0, 13)}…` : each.id);
    put(button, { "aria-expanded": this.open.has(each.id), "aria-label": `Request ${each.id}, details` });
    say(prompt, each.uncached_tokens && each.uncached_tokens < each.prompt_tokens
      ? `${count(each.prompt_tokens)}, ${count(each.prompt_tokens - each.uncached_tokens)} cached`
      : `${count(each.prompt_tokens)}`);
    const chip = place.firstChild;
    put(chip, { class: `chip ${each.target}` });
    say(chip, each.target === "remote" ? each.places[0] ?? "remote" : each.engine || "local");
    say(why, reason(each.reason));
    const estimated = Boolean(each.local || each.remote);
    estimates.firstChild.hidden = !estimated;
    estimates.lastChild.hidden = estimated;
    bars(estimates.firstChild, each);
    say(ttft, seconds(each.ttft_s));
    const [text, tone] = outcome(each);
    say(result, text);
    put(result, { class: tone });
  }
}

function bars(chart, each) {
  const most = Math.max(each.local?.ttft_s ?? 0, each.remote?.ttft_s ?? 0) || 1;
  const [localBar, localText, remoteBar, remoteText] = chart.children;
  for (const [bar, text, estimate, target] of [[localBar, localText, each.local, "local"], [remoteBar, remoteText, each.remote, "remote"]]) {
    let x = 0;
    const all = PARTS.reduce((sum, part) => sum + (estimate?.[part] ?? 0), 0) || 1;
    PARTS.forEach((part, at) => {
      const width = estimate ? (96 * (estimate.ttft_s / most) * estimate[part]) / all : 0;
      put(bar.children[at], { x: x.toFixed(1), width: width.toFixed(1) });
      x += width;
    });
    say(text, seconds(estimate?.ttft_s));
    put(text, { class: each.target === target ? "chosen" : "quiet" });
  }
}

function outcome(each) {
  if (each.error) return [words(each.error), each.status === "499" ? "quiet" : "bad"];
  if (each.outcome && each.outcome !== "staged") {
    if (each.outcome_reason === "prefix_at_d") return ["all cached at the engine", "quiet"];
    return [`${each.outcome}: ${words(each.outcome_reason) || "no reason"}`, "warn"];
  }
  if (each.outcome) return [`${bytes(each.wire_bytes)} of KV came`, ""];
  if (!each.status) return [each.ttft_s === null ? "prefilling" : "answering", "quiet"];
  return each.status === "200" ? ["done", "quiet"] : [each.status, "bad"];
}

function moreRow() {
  return h("tr", { class: "details" }, h("td", { colspan: LABELS.length }, h("dl")));
}

function updateMore(row, each) {
  const facts = [
    ["Request", each.id],
    ["Engine", each.tried.length > 1 ? each.tried.join(", then ") : each.engine || DASH],
    ["Plan", each.places.join(", then ") || "local"],
    ["Policy", each.policy_role === "active" ? each.policy : `${each.policy} (${each.policy_role})`],
    ["Local would take", parts(each.local)],
    ["Remote would take", parts(each.remote)],
    ["Took", `TTFT ${seconds(each.ttft_s)}, in all ${seconds(each.e2e_s)}`],
  ];
  if (each.outcome) facts.push(["Transfer", [each.outcome, words(each.outcome_reason), bytes(each.wire_bytes), each.quality].filter(Boolean).join(", ")]);
  if (each.shadow) {
    const gain = each.shadow.saved_s === null ? "" : `, ${seconds(Math.abs(each.shadow.saved_s))} ${each.shadow.saved_s > 0 ? "less" : "more"}`;
    facts.push(["Shadow", each.shadow.agrees ? `${each.shadow.policy} agrees` : `${each.shadow.policy}: ${each.shadow.target}${gain}`]);
  }
  keyed(row.querySelector("dl"), facts, ([name]) => name, ([name]) => h("div", {}, h("dt", {}, name), h("dd")), (item, [, text]) => say(item.lastChild, text));
}

function parts(estimate) {
  if (!estimate) return DASH;
  const named = Object.keys(PART_NAMES).filter((part) => estimate[part] > 0).map((part) => `${PART_NAMES[part]} ${seconds(estimate[part])}`);
  return `${seconds(estimate.ttft_s)} at ${estimate.where}${named.length ? `: ${named.join(", ")}` : ""}`;
}
