// STOP: asked for over HTTP and over the socket at once, again and again until the server has acknowledged it.

import { Refused, call } from "./api.js";
import { clock, make, say, set } from "./dom.js";

const PATIENCE = 1500; // ms for one attempt
const PAUSE = 400; // ms between attempts
const REASON = "STOP on the page";

export class Stop {
  constructor(button, report, live, said) {
    Object.assign(this, { button, report, live, said, number: 0, pending: null });
    button.addEventListener("click", () => this.press());
    // Captured before any field sees it: it works wherever the focus is.
    window.addEventListener("keydown", (event) => {
      const isStop = event.key === "Escape" || (event.code === "Space" && event.ctrlKey);
      if (!isStop) return;
      event.preventDefault();
      event.stopImmediatePropagation();
      if (!event.repeat) this.press();
    }, { capture: true });
    live.addEventListener("stopped", (event) => {
      const told = event.detail;
      if (this.pending && told.number === this.pending.number) this.done(this.pending, told.stopped, told.count, "socket", told.warning);
    });
    live.addEventListener("open", () => { if (this.pending) this.overSocket(this.pending); });
  }

  press() {
    if (this.pending) { this.overSocket(this.pending); this.overHttp(this.pending); return; }
    const pending = (this.pending = { number: ++this.number, at: performance.now(), attempts: 0, trouble: "" });
    this.show("asking", "STOP is being sent", "Waiting for the server to acknowledge it.");
    this.overSocket(pending);
    this.repeat(pending);
  }

  overSocket(pending) { this.live.send({ type: "stop", number: pending.number, reason: REASON }); }

  async repeat(pending) {
    while (this.pending === pending) {
      await this.overHttp(pending);
      if (this.pending !== pending) return;
      this.overSocket(pending);
      await new Promise((go) => setTimeout(go, PAUSE));
    }
  }

  async overHttp(pending) {
    pending.attempts += 1;
    try {
      const told = await call("POST", "debug/emergency_stop", { reason: REASON }, { signal: AbortSignal.timeout(PATIENCE), keepalive: true });
      this.done(pending, told.stopped, told.count, "HTTP", told.warning);
    } catch (error) {
      if (this.pending !== pending) return;
      const refused = error instanceof Refused && error.status !== 0;
      const text = refused ? `The server refused it (${error.message}).` : `${error.message[0].toUpperCase()}${error.message.slice(1)}.`;
      this.show("failed", "NOT STOPPED: the server has not acknowledged the STOP",
        `${text} Robots may still move: use the robot's own emergency stop or take its power. Trying again (attempt ${pending.attempts}).`);
    }
  }

  done(pending, stopped, count, how, warning) {
    if (this.pending !== pending) return;
    this.pending = null;
    const took = Math.round(performance.now() - pending.at);
    const others = count - stopped.length;
    const whose = stopped.join(", ") + (others > 0 ? `${stopped.length ? " and " : ""}${others} of others` : "");
    const what = count ? `${count} session${count === 1 ? "" : "s"} stopped and latched: ${whose}` : "there was no session to stop";
    this.stopped = stopped;
    this.show("done", `Stopped: ${what}`,
      `Acknowledged by the server at ${clock(Date.now() / 1000)}, ${took} ms after you asked (${how}, attempt ${Math.max(pending.attempts, 1)}). ` +
      (count ? "Nothing moves until each session is reset and then started." : "") + (warning ? ` Warning: ${warning}.` : ""));
  }

  // What the server says now of those that were stopped, beside what it acknowledged.
  confirm(sessions) {
    if (!this.stopped || !this.stopped.length || this.report.hidden) return;
    const latched = this.stopped.filter((id) => sessions.some((one) => one.id === id && one.latched));
    const gone = this.stopped.filter((id) => !sessions.some((one) => one.id === id));
    say(this.seen, `Latched as of now: ${latched.length} of ${this.stopped.length - gone.length}.`);
  }

  show(state, title, text) {
    const node = this.report;
    set(node, "data-state", state);
    this.seen = make("span", {});
    const close = make("button", { class: "small", onclick: () => { node.hidden = true; } }, "Close");
    node.replaceChildren(make("div", {}, title, make("p", {}, text, " ", this.seen)), make("span", { class: "grow" }), state === "done" ? close : "");
    node.hidden = false;
    set(this.button, "data-state", state);
  }
}
