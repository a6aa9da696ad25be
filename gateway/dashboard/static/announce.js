// What a screen reader is told: changes of state, a few sentences at a time, never every number.

import { say } from "./dom.js";

const PAUSE_MS = 4000;
const MOST = 4;

export class Announcer {
  constructor(element) {
    this.element = element;
    this.known = null;
    this.waiting = [];
    this.timer = 0;
  }

  see(state) {
    const now = new Map([["gateway", `The gateway is ${words(state.status)}`]]);
    for (const each of [...state.engines, ...state.instances]) {
      now.set(each.name, `${each.name} is ${each.status}`);
      now.set(`breaker ${each.name}`, `The breaker of ${each.name} is ${each.breaker}`);
    }
    for (const each of state.links) {
      const name = `${each.engine} to ${each.peer}/${each.instance}`;
      const usable = each.ready && each.breaker === "closed";
      now.set(`link ${name}`, `The link from ${name} is ${usable ? "usable" : "not usable"}`);
    }
    if (state.together) now.set("together", `The state shared by gateways is ${state.together.up ? "reached" : "lost"}`);
    for (const each of state.policies) {
      now.set(`policy ${each.role}`, `The ${each.role} policy is ${each.name}, version ${each.version}`);
    }
    if (this.known) {
      for (const [what, text] of now) if (this.known.get(what) !== text) this.tell(text);
    }
    this.known = now;
  }

  tell(text) {
    this.waiting.push(text);
    if (!this.timer) this.timer = setTimeout(() => this.flush(), 300);
  }

  flush() {
    const texts = this.waiting.splice(0);
    const told = texts.slice(0, MOST);
    if (texts.length > MOST) told.push(`and ${texts.length - MOST} more changes`);
    say(this.element, told.length ? `${told.join(". ")}.` : "");
    this.timer = told.length ? setTimeout(() => this.flush(), PAUSE_MS) : 0;
  }
}

function words(status) {
  return status === "no engine" ? "without an engine" : status;
}
