// Engines, instances and links with all their numbers.

import { h, keyed, put, rowOf, say } from "./dom.js";
import { DASH, bytes, count, percent, rate, seconds } from "./format.js";

function fill(row, texts) {
  texts.forEach((text, at) => say(row.children[at], text));
}

function status(cell, word, tone, detail) {
  if (!cell.firstChild) cell.append(h("span", { class: "state" }), h("small"));
  put(cell.firstChild, { "data-tone": tone });
  say(cell.firstChild, word);
  say(cell.lastChild, detail);
}

const TONES = { up: "good", draining: "warn", silent: "warn", down: "bad" };

export function drawEngines(body, state) {
  const places = [...state.engines, ...state.instances];
  keyed(body, places, (each) => each.name, () => rowOf(9), (row, each) => {
    const told = each.age_s !== null && each.status !== "down";
    fill(row, [each.name]);
    status(row.children[1], each.status, TONES[each.status], each.detail || (each.paced ? "paced" : ""));
    const numbers = [
      told ? String(each.running) : DASH,
      told ? String(each.waiting) : DASH,
      told ? `${count(each.queue_tokens)} tokens` : DASH,
      each.kv_used === null || !told ? DASH : percent(each.kv_used),
      each.prefill_tokens_per_s ? `${count(each.prefill_tokens_per_s)} tokens/s` : DASH,
      each.decode_step_s ? seconds(each.decode_step_s) : DASH,
    ];
    numbers.forEach((text, at) => say(row.children[at + 2], text));
    breaker(row.children[8], each);
  });
}

function breaker(cell, each) {
  const opened = each.openings ? `opened ${each.openings}×` : "";
  status(cell, each.breaker, each.breaker === "closed" ? "plain" : "bad", opened);
}

const LIMITS = { idle: "idle", sender: "prefill", receiver: "receiver", link: "network" };

export function drawLinks(body, state) {
  const key = (each) => `${each.engine} ${each.peer}/${each.instance}`;
  keyed(body, state.links, key, () => rowOf(10), (row, each) => {
    fill(row, [`${each.engine} ← ${each.peer}/${each.instance}`]);
    const stalled = each.stalled_s > 0 ? `stalled for ${seconds(each.stalled_s)}` : "";
    const word = !each.ready ? "not ready" : stalled ? "stalled" : "ready";
    status(row.children[1], word, !each.ready ? "bad" : stalled ? "warn" : "good", each.ready ? stalled : each.detail);
    const queueing = each.queueing_s > 0.001 ? ` (${seconds(each.queueing_s)} queueing)` : "";
    const numbers = [
      rate(each.goodput_bytes_per_s),
      rate(each.rate_bytes_per_s),
      each.rtt_s ? `${seconds(each.rtt_s)}${queueing}` : DASH,
      bytes(each.in_flight_bytes),
      String(each.sessions),
      each.ready ? `${each.wire_ratio.toFixed(2)} : 1` : DASH,
      LIMITS[each.limit] ?? DASH,
    ];
    numbers.forEach((text, at) => say(row.children[at + 2], text));
    breaker(row.children[9], each);
  });
}
