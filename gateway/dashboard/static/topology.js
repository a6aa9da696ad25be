// Gateway, decode engines, peers with their instances, and the links between them.

import { keyed, put, s, say } from "./dom.js";
import { bytes, count, percent, rate, seconds } from "./format.js";

const NODE = 52;
const GAP = 14;
const HEAD = 34;
const MARGIN = 6;
const LABELLED = 4; // more links than this carry no text of their own
const MANY = 24; // more links than this are drawn thinner

export class Topology {
  constructor(element) {
    this.element = element;
    this.svg = s("svg", { role: "img" });
    this.wires = s("g");
    this.flows = s("g");
    this.nodes = s("g");
    this.heads = s("g");
    this.labels = s("g");
    this.svg.append(this.wires, this.flows, this.nodes, this.heads, this.labels);
    element.append(this.svg);
    new ResizeObserver(() => this.state && this.draw(this.state)).observe(element);
  }

  draw(state) {
    this.state = state;
    const width = Math.max(280, this.element.clientWidth);
    const plan = layout(state, width);
    put(this.svg, { width, height: plan.height, viewBox: `0 0 ${width} ${plan.height}` });
    put(this.svg, { "aria-label": summary(state) });
    const links = plan.links;
    keyed(this.wires, [...plan.spokes, ...links], (each) => each.key, () => s("path"), wire);
    const flowing = links.filter(({ link }) => link.ready && (link.in_flight_bytes > 0 || link.rate_bytes_per_s > 0));
    keyed(this.flows, flowing, (each) => each.key, () => s("path", { class: "flow" }), flow);
    keyed(this.nodes, plan.nodes, (each) => each.name, node, updateNode);
    keyed(this.heads, plan.heads, (each) => each.key, head, updateHead);
    const labelled = width >= 560 && links.length <= LABELLED ? links : [];
    keyed(this.labels, labelled, (each) => each.key, () => s("text", { class: "label" }), label);
  }
}

function layout(state, width) {
  const wide = width >= 720;
  const nodeWidth = wide ? Math.min(210, width * 0.23) : Math.min(150, width * 0.4);
  const peers = new Map();
  for (const each of state.instances) {
    if (!peers.has(each.peer)) peers.set(each.peer, []);
    peers.get(each.peer).push(each);
  }
  const left = stackHeight(state.engines.length);
  let right = 0;
  for (const group of peers.values()) right += HEAD + stackHeight(group.length) + 2 * GAP;
  right = Math.max(0, right - 2 * GAP);
  const height = Math.max(left + HEAD, right, NODE + HEAD) + 2 * MARGIN;
  const nodes = [];
  const places = new Map();
  const engineX = wide ? 130 : 1;
  let y = Math.max(HEAD, (height - left) / 2);
  for (const engine of state.engines) {
    places.set(engine.name, [engineX + nodeWidth, y + NODE / 2]);
    nodes.push({ name: engine.name, title: engine.name, place: engine, x: engineX, y, width: nodeWidth });
    y += NODE + GAP;
  }
  const heads = [];
  y = Math.max(MARGIN, (height - right) / 2);
  const x = width - nodeWidth - 1;
  for (const [peer, group] of peers) {
    heads.push({ key: peer, x, y, width: nodeWidth, ...about(state, peer, group) });
    y += HEAD;
    for (const each of group) {
      places.set(each.name, [x, y + NODE / 2]);
      const title = each.name.slice(peer.length + 1);
      nodes.push({ name: each.name, title, place: each, x, y, width: nodeWidth });
      y += NODE + GAP;
    }
    y += GAP;
  }
  const spokes = [];
  if (wide) {
    const middle = height / 2;
    const gateway = { name: "gateway", status: state.status === "ready" ? "up" : "down" };
    nodes.push({ name: "*", title: "gateway", gateway: state, place: gateway, x: 1, y: middle - NODE / 2, width: 94 });
    for (const engine of state.engines) {
      const [, endY] = places.get(engine.name);
      const path = curve(95, middle, engineX, endY);
      spokes.push({ key: `* ${engine.name}`, path, kind: engine.status === "down" ? "broken" : "spoke", width: 1.25 });
    }
  }
  const thinner = state.links.length > MANY ? 0.5 : 1;
  const links = state.links.map((link, at) => {
    const [x1, y1] = places.get(link.engine);
    const [x2, y2] = places.get(`${link.peer}/${link.instance}`);
    const engines = state.engines.length;
    const t = engines > 1 ? 0.3 + (0.4 * Math.floor(at / Math.max(1, state.instances.length))) / (engines - 1) : 0.5;
    return {
      key: `${link.engine} ${link.peer}/${link.instance}`,
      link,
      path: curve(x1, y1, x2, y2),
      at: point(x1, y1, x2, y2, t),
      kind: kind(link),
      width: thinner * (1 + Math.min(3, Math.max(0, Math.log10((link.goodput_bytes_per_s || 1) / 1e6)))),
    };
  });
  return { height, nodes, heads, links, spokes };
}

const stackHeight = (nodes) => nodes * NODE + Math.max(0, nodes - 1) * GAP;

function curve(x1, y1, x2, y2) {
  const bend = (x2 - x1) * 0.5;
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}

function point(x1, y1, x2, y2, t) {
  const bend = (x2 - x1) * 0.5;
  const u = 1 - t;
  const mix = (a, b, c, d) => u * u * u * a + 3 * u * u * t * b + 3 * u * t * t * c + t * t * t * d;
  return [mix(x1, x1 + bend, x2 - bend, x2), mix(y1, y1, y2, y2)];
}

export function kind(link) {
  if (!link.ready || link.breaker !== "closed") return "broken";
  return link.stalled_s > 0 ? "stalled" : "ready";
}

function wire(path, each) {
  put(path, { d: each.path, class: `wire ${each.kind}`, "stroke-width": each.width.toFixed(2) });
}

function flow(path, each) {
  const fast = Math.min(1, each.link.rate_bytes_per_s / (each.link.goodput_bytes_per_s || 1));
  const pace = fast > 0.66 ? "fast" : fast > 0.1 ? "middling" : "slow";
  put(path, { d: each.path, class: `flow ${pace}`, "stroke-width": (each.width + 0.75).toFixed(2) });
}

function label(text, each) {
  const { link } = each;
  put(text, { x: each.at[0].toFixed(1), y: (each.at[1] - 6).toFixed(1) });
  const now = link.rate_bytes_per_s > 0 ? rate(link.rate_bytes_per_s) : rate(link.goodput_bytes_per_s);
  say(text, link.ready ? `${now} · ${seconds(link.rtt_s)}` : "not usable");
}

function node() {
  const group = s("g", { class: "node" });
  group.append(
    s("rect", { class: "box", rx: 7, height: NODE }),
    s("path", { class: "mark" }),
    s("text", { class: "title", y: 20 }),
    s("text", { class: "quiet", y: 37 }),
    s("rect", { class: "track", y: NODE - 5, height: 2, rx: 1 }),
    s("rect", { class: "bar", y: NODE - 5, height: 2, rx: 1 }),
    s("title"),
  );
  return group;
}

const MARKS = {
  up: "M10 15a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0Z",
  draining: "M13.5 10.5l4 8h-8Z",
  silent: "M13.5 10.5l4 8h-8Z",
  down: "M10.5 12l6 6M16.5 12l-6 6",
};

function updateNode(group, each) {
  const { place } = each;
  const tripped = place.breaker && place.breaker !== "closed";
  put(group, { class: `node ${place.status}${tripped ? " tripped" : ""}`, transform: `translate(${each.x.toFixed(1)} ${each.y.toFixed(1)})` });
  const [box, mark, title, quiet, track, bar, hint] = group.children;
  put(box, { width: each.width });
  put(mark, { d: MARKS[place.status] });
  put(title, { x: 24 });
  put(quiet, { x: 10 });
  say(title, clipped(each.title, (each.width - 30) / 7.2));
  say(quiet, busy(each, (each.width - 14) / 6.2));
  const used = place.kv_used ?? null;
  put(track, { x: 10, width: used === null ? 0 : each.width - 20 });
  put(bar, { x: 10, width: used === null ? 0 : Math.max(0, (each.width - 20) * used).toFixed(1) });
  say(hint, [each.title, place.status, place.detail, used === null ? "" : `KV ${percent(used)} in use`].filter(Boolean).join(", "));
}

function clipped(text, most) {
  return text.length <= most ? text : `${text.slice(0, Math.max(1, most - 1))}…`;
}

// The longest that fits.
function busy({ place, gateway }, most) {
  if (gateway) return `${gateway.in_flight} in flight`;
  if (place.status === "down") return "down";
  if (place.breaker !== "closed") return `breaker ${place.breaker}`;
  const { running, waiting } = place;
  const texts = [
    `${running} running · ${waiting} waiting · ${count(place.queue_tokens)} tokens`,
    `${running} running · ${waiting} waiting`,
    `${running} run · ${waiting} wait`,
  ];
  return texts.find((text) => text.length <= most) ?? texts.at(-1);
}

function about(state, peer, group) {
  const links = state.links.filter((link) => link.peer === peer && link.ready);
  const rtts = links.map((link) => link.rtt_s).filter((rtt) => rtt > 0);
  const now = links.reduce((sum, link) => sum + link.rate_bytes_per_s, 0);
  const under = links.reduce((sum, link) => sum + link.in_flight_bytes, 0);
  const facts = rtts.length ? [`${seconds(Math.min(...rtts))} RTT`] : [];
  facts.push(now > 0 ? rate(now) : under > 0 ? `${bytes(under)} in flight` : links.length ? "idle" : "no link");
  return { title: `${peer} · ${group[0].link_class}`, facts: facts.join(" · ") };
}

function head() {
  return s("g", {}, s("text", { class: "title", y: 12 }), s("text", { class: "quiet", y: 27 }));
}

function updateHead(group, each) {
  put(group, { transform: `translate(${each.x.toFixed(1)} ${each.y.toFixed(1)})` });
  const [title, quiet] = group.children;
  say(title, each.title);
  say(quiet, clipped(each.facts, each.width / 5.9));
}

function summary(state) {
  const up = (places) => places.filter((each) => each.status === "up").length;
  const usable = state.links.filter((link) => kind(link) === "ready").length;
  return `${up(state.engines)} of ${state.engines.length} decode engines up, ` +
    `${up(state.instances)} of ${state.instances.length} prefill instances up, ` +
    `${usable} of ${state.links.length} links usable. The tables below have all numbers.`;
}
