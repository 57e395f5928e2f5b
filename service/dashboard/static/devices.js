// What policies run on: how busy each device is, in what batches, and which one is left out because it failed.

import { call } from "./api.js";
import { make, number, say } from "./dom.js";

const PERIOD = 2000;

export class Devices {
  constructor(node) {
    this.node = node;
    this.rows = make("tbody", {});
    this.text = make("p", { class: "dim" });
    const heads = ["Device", "In use", "Waiting", "Batches by size", "A batch takes"];
    node.append(make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((name) => make("th", { scope: "col" }, name)))), this.rows)), this.text);
    node.parentElement.addEventListener("toggle", () => this.follow());
    document.addEventListener("visibilitychange", () => this.follow());
  }

  // Only while somebody can see it.
  follow() {
    clearTimeout(this.timer);
    if (this.node.parentElement.open && !document.hidden) this.look();
  }

  async look() {
    try {
      const { engine } = await call("GET", "health");
      if (engine) this.show(engine);
      else say(this.text, "Only whoever is signed in is told.");
    } catch (error) {
      say(this.text, `Devices cannot be shown: ${error.message}`);
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.follow(), PERIOD);
  }

  show(engine) {
    this.rows.replaceChildren(...engine.devices.map((one) => {
      const state = one.failed ? make("span", { class: "bad" }, `left out: ${one.failed}`) : `${number(one.load * 100, 0)} %`;
      const counts = Object.entries(one.batches).map(([size, count]) => `${size}: ${count}`).join(", ") || "–";
      const times = one.batch_ms.flatMap((sizes) => Object.entries(sizes).map(([size, ms]) => `${size}: ${number(ms.p50, 1)} ms`)).join(", ") || "–";
      return make("tr", {}, make("td", { class: "short" }, make("code", {}, one.device || "none yet")), make("td", { class: "short" }, state),
        make("td", { class: "short" }, String(one.waiting)), make("td", { class: "says" }, counts), make("td", { class: "says" }, times));
    }));
    say(this.text, `${number(engine.promised_load * 100, 0)} % of a device's time is promised to sessions.`);
  }
}
