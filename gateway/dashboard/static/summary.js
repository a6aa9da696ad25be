// The figures at the top, the percentiles, the reasons and the policies.

import { h, keyed, put, rowOf, s, say } from "./dom.js";
import { DASH, bytes, count, duration, percent, reason, seconds, words } from "./format.js";

export class Rate {
  constructor() {
    this.before = null;
    this.value = null;
  }

  see(state) {
    const { before } = this;
    if (before && state.at > before.at && state.decided >= before.decided) {
      const now = (state.decided - before.decided) / (state.at - before.at);
      this.value = this.value === null ? now : 0.6 * this.value + 0.4 * now;
    }
    this.before = { at: state.at, decided: state.decided };
  }
}

export function drawFigures(section, state, requestRate) {
  const { share, saved } = state;
  const p50 = (target) => state.latency[target].ttft_s?.[0];
  const figures = [
    ["Requests", requestRate === null ? DASH : `${requestRate < 9.95 ? requestRate.toFixed(1) : Math.round(requestRate)}/s`, `${state.in_flight} in flight, ${count(state.decided)} in all`],
    ["Offloaded", percent(share.remote_requests, share.requests), share.tokens ? `${percent(share.remote_tokens, share.tokens)} of uncached tokens` : "of recent requests", share],
    ["TTFT, median", `${seconds(p50("local"))} local`, `${seconds(p50("remote"))} remote`],
    ["Saved by prefixes", bytes(saved.prefix_bytes), "of KV that the engines had"],
    ["Saved by codecs", bytes(Math.max(0, saved.raw_bytes - saved.wire_bytes)), saved.wire_bytes ? `${bytes(saved.raw_bytes)} sent as ${bytes(saved.wire_bytes)}` : "no KV has come yet"],
  ];
  keyed(section, figures, ([name]) => name, ([name]) => h("div", { class: "figure" }, h("h2", {}, name), h("p", { class: "number" }), h("p", { class: "quiet" })), (box, [, number, below]) => {
    say(box.children[1], number);
    say(box.children[2], below);
  });
}

export function drawTogether(pill, { together }) {
  pill.hidden = !together;
  if (!together) return;
  put(pill, { "data-status": together.up ? "ready" : "no engine" });
  const others = together.gateways === 1 ? "alone" : `${together.gateways} gateways`;
  const lost = together.age_s < 86400 ? `shared state lost ${duration(together.age_s)} ago` : "shared state not reached";
  say(pill, together.up ? others : lost);
}

export function drawLatency(body, state) {
  keyed(body, ["local", "remote"], (target) => target, () => rowOf(8), (row, target) => {
    const latency = state.latency[target];
    put(row, { class: target });
    say(row.children[0], target);
    say(row.children[1], count(latency.requests));
    [...(latency.ttft_s ?? [null, null, null]), ...(latency.itl_s ?? [null, null, null])]
      .forEach((value, at) => say(row.children[at + 2], seconds(value)));
  });
}

export function drawReasons(body, state) {
  const most = Math.max(1, ...state.reasons.map((each) => each[2]));
  const shown = state.reasons.slice(0, 9);
  keyed(body, shown, (each) => `${each[0]} ${each[1]}`, () => {
    const row = rowOf(3);
    row.children[1].append(s("svg", { width: 90, height: 8, "aria-hidden": "true" }, s("rect", { height: 8, rx: 1 })), h("span", { class: "unseen" }));
    return row;
  }, (row, [target, why, decisions]) => {
    say(row.children[0], reason(why));
    const [chart, text] = row.children[1].children;
    put(chart.firstChild, { class: target, width: Math.max(1, (90 * decisions) / most).toFixed(1) });
    say(text, target);
    say(row.children[2], count(decisions));
  });
}

export function drawPolicies(box, state) {
  keyed(box, state.policies, (each) => each.role, () => h("article", {}, h("h3"), h("p", { class: "name" }), h("dl")), (article, each) => {
    const [title, name, facts] = article.children;
    say(title, each.role === "canary" ? `canary, ${percent(each.share)} of requests` : each.role);
    say(name, `${words(each.name)}, version ${each.version}`);
    const items = Object.entries(each.state).map(([key, value]) => [words(key.replace(/_s$/, "")), measured(key, value)]);
    if (each.role === "shadow" && state.shadow) items.unshift(...shadowed(state.shadow));
    keyed(facts, items, ([key]) => key, ([key]) => h("div", {}, h("dt", {}, key), h("dd")), (item, [, value]) => say(item.lastChild, value));
  });
}

function shadowed({ agreed, differed, saved_s: saved, lost_s: lost }) {
  return [
    ["agrees", percent(agreed, agreed + differed)],
    ["would have saved", seconds(saved)],
    ["would have lost", seconds(lost)],
  ];
}

function measured(key, value) {
  if (typeof value === "number" && /bytes$/.test(key)) return bytes(value);
  if (typeof value === "number" && /(^seconds|_s)$/.test(key)) return seconds(value);
  return number(value);
}

function number(value) {
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? String(value) : value.toPrecision(3);
}
