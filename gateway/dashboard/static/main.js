// The page: takes the gateway's events and draws what they say.

import { Announcer } from "./announce.js";
import { Decisions } from "./decisions.js";
import { put, say } from "./dom.js";
import { duration } from "./format.js";
import { Scatter } from "./scatter.js";
import { follow } from "./stream.js";
import { Rate, drawFigures, drawLatency, drawPolicies, drawReasons, drawTogether } from "./summary.js";
import { drawEngines, drawLinks } from "./tables.js";
import { Topology } from "./topology.js";

const at = (selector) => document.querySelector(selector);
const topology = new Topology(at("#topology .drawing"));
const scatter = new Scatter(at("#latency .drawing"));
const decisions = new Decisions(at("#decisions"));
const announcer = new Announcer(at("#live"));
const rate = new Rate();
let paused = false;
let state = null;
let asked = false;

function draw() {
  if (paused) return;
  asked = false;
  decisions.draw();
  if (!state) return;
  put(at("#status"), { "data-status": state.status });
  say(at("#status"), state.status);
  drawTogether(at("#together"), state);
  say(at("#uptime"), `up ${duration(state.up_s)}`);
  drawFigures(at("#figures"), state, rate.value);
  topology.draw(state);
  scatter.draw(state);
  drawLatency(at("#latency tbody"), state);
  drawReasons(at("#reasons tbody"), state);
  drawPolicies(at("#policy .content"), state);
  drawEngines(at("#engines tbody"), state);
  drawLinks(at("#links tbody"), state);
  document.body.classList.remove("waiting");
}

// Once for all that has come, and not at all while nobody can see it.
function drawSoon() {
  if (asked || paused) return;
  asked = true;
  requestAnimationFrame(draw);
}

function banner(text) {
  at("#banner").hidden = !text;
  say(at("#banner"), text);
  document.body.classList.toggle("stale", Boolean(text));
}

at("#pause").addEventListener("click", () => {
  paused = !paused;
  put(at("#pause"), { "aria-pressed": paused });
  say(at("#pause"), paused ? "Go on" : "Pause");
  drawSoon();
});

window.addEventListener("resize", drawSoon);

follow({
  hello(data) {
    banner("");
    say(at("#model"), data.model);
    document.title = `prfaas · ${data.model}`;
    put(at("#model"), { title: `prfaas ${data.version}` });
  },
  state(data) {
    state = data;
    rate.see(data);
    announcer.see(data);
    drawSoon();
  },
  requests(data) {
    decisions.add(data);
    scatter.add(data.requests);
    drawSoon();
  },
  lost(why) {
    banner(`Not live: ${why}. Trying again.`);
  },
});
