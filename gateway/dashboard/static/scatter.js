// Time to first token of each recent request, over time: one dot each, local and remote.

import { keyed, put, s, say } from "./dom.js";
import { seconds } from "./format.js";

const HEIGHT = 210;
const LEFT = 46;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 24;
const MINUTES = 5;
const MOST = 800;
const TICKS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500];

export class Scatter {
  constructor(element) {
    this.element = element;
    this.points = new Map();
    this.svg = s("svg", { role: "img", height: HEIGHT });
    this.grid = s("g", { class: "grid" });
    this.dots = { local: s("path", { class: "dots local" }), remote: s("path", { class: "dots remote" }) };
    this.medians = { local: s("path", { class: "median local" }), remote: s("path", { class: "median remote" }) };
    this.key = s("g", { class: "in-chart" });
    this.svg.append(this.grid, this.dots.local, this.dots.remote, this.medians.local, this.medians.remote, this.key);
    element.append(this.svg);
    this.key.append(
      s("circle", { class: "local", cx: 5, cy: 0, r: 3 }), s("text", { x: 13, y: 4 }, "local"),
      s("path", { class: "remote", d: "M56 -3.6l3.6 3.6l-3.6 3.6l-3.6 -3.6Z" }), s("text", { x: 64, y: 4 }, "remote"),
      s("path", { class: "median", d: "M116 0h18" }), s("text", { x: 140, y: 4 }, "median"),
    );
  }

  add(requests) {
    for (const each of requests) {
      if (each.ttft_s === null) continue;
      this.points.delete(each.id);
      this.points.set(each.id, [each.at, each.ttft_s, each.target]);
    }
    for (const id of this.points.keys()) {
      if (this.points.size <= MOST) break;
      this.points.delete(id);
    }
  }

  draw(state) {
    const now = state.at;
    let oldest = now;
    for (const [id, point] of this.points) {
      if (now - point[0] > 60 * MINUTES) this.points.delete(id);
      else oldest = Math.min(oldest, point[0]);
    }
    const minutes = Math.max(1, Math.ceil((now - oldest) / 60));
    const span = 60 * Math.min(MINUTES, minutes);
    const width = Math.max(260, this.element.clientWidth);
    put(this.svg, { width, viewBox: `0 0 ${width} ${HEIGHT}` });
    put(this.key, { transform: `translate(${LEFT + 8} ${TOP + 8})` });
    const values = [...this.points.values()].map((point) => point[1]);
    const [low, high] = range(values);
    const x = (at) => LEFT + (width - LEFT - RIGHT) * (1 - Math.max(0, now - at) / span);
    const y = (value) => {
      const share = Math.log(value / low) / Math.log(high / low);
      return TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(1, Math.max(0, share)));
    };
    this.drawGrid(width, low, high, x, y, now, span / 60);
    const paths = { local: "", remote: "" };
    for (const [at, value, target] of this.points.values()) {
      const [px, py] = [x(at).toFixed(1), y(value).toFixed(1)];
      paths[target] += target === "remote" ? `M${px} ${py - 3.4}l3.4 3.4l-3.4 3.4l-3.4 -3.4Z` : `M${px - 2.6} ${py}a2.6 2.6 0 1 0 5.2 0a2.6 2.6 0 1 0 -5.2 0`;
    }
    for (const target of ["local", "remote"]) {
      put(this.dots[target], { d: paths[target] });
      const p50 = state.latency[target].ttft_s?.[0];
      put(this.medians[target], { d: p50 ? `M${LEFT} ${y(p50).toFixed(1)}H${width - RIGHT}` : null });
    }
    const median = (target) => seconds(state.latency[target].ttft_s?.[0]);
    put(this.svg, { "aria-label": `${this.points.size} requests of the last five minutes; median local ${median("local")}, remote ${median("remote")}` });
  }

  drawGrid(width, low, high, x, y, now, span) {
    const wanted = TICKS.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    const rows = wanted.map((tick) => ({ key: `y${tick}`, path: `M${LEFT} ${y(tick).toFixed(1)}H${width - RIGHT}`, text: seconds(tick), x: LEFT - 6, y: y(tick) + 4, anchor: "end" }));
    const columns = Array.from({ length: span + 1 }, (_, minutes) => {
      const anchor = minutes === 0 ? "end" : minutes === span ? "start" : "middle";
      const text = minutes ? `−${minutes} min` : "now";
      return { key: `x${minutes}`, path: "", text, x: x(now - 60 * minutes), y: HEIGHT - 6, anchor };
    });
    keyed(this.grid, [...rows, ...columns], (each) => each.key, () => s("g", {}, s("path"), s("text")), (group, each) => {
      put(group.children[0], { d: each.path || null });
      put(group.children[1], { x: each.x.toFixed(1), y: each.y.toFixed(1), "text-anchor": each.anchor });
      say(group.children[1], each.text);
    });
  }
}

function range(values) {
  if (!values.length) return [0.1, 10];
  const smallest = Math.min(...values);
  const largest = Math.max(...values);
  const low = TICKS.findLast((tick) => tick <= smallest) ?? TICKS[0];
  const high = TICKS.find((tick) => tick >= largest && tick > low * 3) ?? TICKS.at(-1);
  return [low, high];
}
