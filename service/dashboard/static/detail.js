// The chosen session: why its robot does not move, its cameras, joints and plan, and the buttons that control it.

import { call, inSession } from "./api.js";
import { make, number, say, set, twice } from "./dom.js";
import { Motion, drawHistogram, drawJoint, inks } from "./plots.js";
import { PolicyCard } from "./policy.js";
import { isMoving, progressOf, reasonOf, silentSince, toneOf, wordOf } from "./words.js";

const STALE = 1.0; // seconds after which a picture no longer counts as live
const HELP = {
  "commands sent": "Commands that the robot's connection accepted, holds included.",
  "missed ticks": "Ticks of the control loop that the server was too late for. The robot kept its last command.",
  "holds": "How often the robot was held where it was, by reason. A hold ends by itself when its reason is over.",
  "starved": "How often the queue of actions was empty because the next chunk was late.",
  "late actions": "Actions whose time had passed when their chunk arrived: while the policy computes, the robot follows the chunk before. They are dropped, so that the robot follows the newest chunk in time. Some per chunk are normal.",
  "chunks refused": "Chunks that the action guard refused because they were not safe to execute.",
  "sends refused": "Commands that the robot's connection did not accept.",
  "errors": "Inferences that failed, and chunks that were refused.",
};

export class Detail {
  constructor(root, said) {
    Object.assign(this, { root, said, id: null, motion: new Motion(), isLive: false, mayOperate: true });
    this.forget();
    this.ink = inks();
    const frame = () => { requestAnimationFrame(frame); this.draw(); };
    requestAnimationFrame(frame);
  }

  recolour() { this.ink = inks(); }

  show(line) {
    if (line === null) {
      if (this.id !== null) { this.id = null; this.forget(); this.root.replaceChildren(); }
      return;
    }
    if (line.id !== this.id) { this.id = line.id; this.forget(); this.build(line); }
    this.line = line;
    this.update(line);
  }

  forget() {
    this.motion.clear();
    for (const camera of Object.values(this.cameras || {})) if (camera.url) URL.revokeObjectURL(camera.url);
    Object.assign(this, { cameras: {}, plots: [], joints: "", detail: null });
  }

  build(line) {
    const act = (move, done) => async () => {
      say(this.told, `${move} ...`);
      this.told.className = "told dim";
      this.busy(true);
      try {
        const told = await done();
        this.told.className = "told";
        say(this.told, (told && told.message) || "done");
        const text = this.told.textContent;
        setTimeout(() => { if (this.told.textContent === text) say(this.told, ""); }, 8000);
      } catch (error) {
        this.told.className = "told bad";
        say(this.told, `${move} was refused: ${error.message}`);
      }
      this.busy(false);
    };
    const id = line.id;
    const button = (text, attributes = {}) => make("button", { type: "button", ...attributes }, text);
    this.start = button("Start", { class: "main", id: "start" });
    this.halt = button("Stop", { id: "halt" });
    this.restart = button("Restart", { id: "restart" });
    this.reset = button("Reset latch", { id: "reset" });
    this.record = button("Record", { id: "record", "aria-pressed": "false" });
    this.remove = button("Delete", { class: "danger", id: "delete" });
    this.start.onclick = act("Start", () => call("POST", inSession(id, "start")));
    this.halt.onclick = act("Stop", () => call("POST", inSession(id, "stop")));
    twice(this.restart, "Restart: really?", act("Restart", () => call("POST", inSession(id, "restart"))));
    this.onReset = act("Reset", () => call("POST", `debug/${inSession(id, "reset")}`));
    twice(this.reset, "Robot is safe: reset", () => this.onReset());
    twice(this.remove, "Really delete?", act("Delete", () => call("DELETE", inSession(id))));
    this.record.onclick = act("Recording", async () => {
      const { recording } = await call("POST", inSession(id, "record"), { on: !this.isRecording });
      return { message: recording.state === "on" ? "It is recorded" : "It is not recorded any more" };
    });
    this.pill = make("span", { class: "pill", id: "stage" });
    this.recorded = make("span", { class: "pill", id: "recorded", hidden: true });
    this.facts = make("div", { class: "facts" });
    this.warned = make("p", { class: "reason", id: "warned", "data-tone": "warn", hidden: true });
    this.reason = make("p", { class: "reason", id: "reason", hidden: true });
    this.instruction = make("input", { id: "instruction", autocomplete: "off", maxlength: 4096 });
    this.tell = button("Tell it", { id: "tell" });
    this.tell.onclick = act("Instruction", () => call("PATCH", inSession(id), { language_instruction: this.instruction.value.trim() }));
    this.instruction.onkeydown = (event) => { if (event.key === "Enter") this.tell.click(); };
    this.told_to = make("div", { class: "row actions", hidden: true }, make("label", { for: "instruction" }, "Instruction"), make("div", { class: "grow" }, this.instruction), this.tell);
    this.progress = make("progress", { "aria-label": "Loading", hidden: true });
    this.told = make("p", { class: "told", id: "told", role: "status" });
    this.dry = make("span", { class: "pill", "data-tone": "warn", hidden: true }, "dry run: nothing is sent");
    const head = make("div", { class: "card" },
      make("div", { class: "title" }, make("h2", {}, id), this.pill, this.dry, this.recorded), this.facts, this.reason, this.warned, this.progress,
      make("div", { class: "row actions" }, this.start, this.halt, this.restart, this.record, this.reset, this.remove), this.told_to, this.told);
    this.cameraBox = make("div", { class: "cameras" });
    this.cameraCard = make("div", { class: "card" }, make("h3", {}, "Cameras"), this.cameraBox);
    this.plotBox = make("div", { class: "plots", id: "plots" }, make("p", { class: "dim" }, "Joints are drawn from the first tick on."));
    const plotCard = make("div", { class: "card" }, make("div", { class: "row" }, make("h3", {}, "Joints"), make("span", { class: "grow" }),
      make("p", { class: "legend" }, make("span", { class: "measured" }, "measured"), make("span", { class: "sent" }, "sent"), make("span", { class: "planned" }, "planned"), make("span", { class: "limit" }, "limit"), make("span", { class: "held" }, "held"))),
      make("p", { class: "dim note" }, "Position in the robot's units, over the last 8 seconds and the next 2."), this.plotBox);
    this.histograms = {};
    const histogram = (name, title) => {
      const canvas = make("canvas", { role: "img", "aria-label": title });
      this.histograms[name] = { canvas, text: make("span", { class: "dim" }), counts: [], limit: null };
      return make("div", { class: "histogram" }, make("div", { class: "row" }, make("h3", {}, title), make("span", { class: "grow" }), this.histograms[name].text), canvas);
    };
    this.numbers = make("dl", { class: "numbers", id: "numbers" });
    this.cells = {};
    const times = make("div", { class: "card stack" }, histogram("inference", "Inference, ms"), histogram("lateness", "Lateness of ticks, ms"), this.numbers);
    this.policy = new PolicyCard(id, act);
    this.everything = make("tbody", {});
    const all = make("details", { class: "card" }, make("summary", {}, make("h2", {}, "Every figure")), make("div", { class: "wide" }, make("table", {}, this.everything)));
    this.driven = [this.cameraCard, times, plotCard];
    for (const card of this.driven) card.hidden = true;
    this.root.replaceChildren(head, make("div", { class: "columns" }, make("div", { class: "stack" }, this.cameraCard, times), make("div", { class: "stack" }, plotCard, this.policy.node)), all);
  }

  busy(isBusy) { this.isBusy = isBusy; if (this.line) this.update(this.line); }

  update(line) {
    set(this.pill, "data-tone", toneOf(line));
    say(this.pill, wordOf(line));
    this.dry.hidden = !line.dry_run;
    const reason = reasonOf(line);
    this.reason.hidden = !reason;
    if (reason) {
      set(this.reason, "data-tone", reason.tone);
      const text = `${reason.of}\n${reason.text}`;
      if (this.reason.dataset.text !== text) { this.reason.dataset.text = text; this.reason.replaceChildren(make("b", {}, reason.of), reason.text); }
    }
    const progress = progressOf(line);
    this.progress.hidden = !progress;
    if (progress) {
      progress.part === null ? this.progress.removeAttribute("value") : (this.progress.value = progress.part);
      this.reason.hidden = false;
      set(this.reason, "data-tone", "");
      const text = `Loading\n${progress.text}`;
      if (this.reason.dataset.text !== text) { this.reason.dataset.text = text; this.reason.replaceChildren(make("b", {}, "Loading"), progress.text); }
    }
    const enable = (button, may) => { button.disabled = this.isBusy || !this.mayOperate || !may; };
    const isAbsent = silentSince(line, Date.now() / 1000) !== null;
    enable(this.start, !line.latched && !isAbsent && ["ready", "stopped"].includes(line.stage));
    set(this.start, "title", isAbsent ? "No robot is connected to this session" : null);
    enable(this.halt, isMoving(line) || ["ready", "timeout"].includes(line.stage));
    enable(this.restart, !line.latched && line.stage !== "initializing");
    if (!this.restart.classList.contains("sure")) say(this.restart, line.stage === "interrupted" ? "Load again" : "Restart");
    for (const node of [this.instruction, this.tell]) enable(node, !["initializing", "interrupted", "error"].includes(line.stage));
    enable(this.record, !["initializing", "interrupted", "error"].includes(line.stage));
    enable(this.reset, line.latched);
    enable(this.remove, true);
    this.reset.hidden = !line.latched;
    this.policy.enable(this.mayOperate && !this.isBusy);
  }

  take(message) {
    if (message.session !== this.id) return;
    for (const part of message.parts) if (part.kind === "detail") this.takeDetail(JSON.parse(new TextDecoder().decode(part.content)));
    this.motion.take(message, this.plots.length);
    for (const part of message.parts) if (part.kind === "picture") this.takePicture(part);
    for (const [name, camera] of Object.entries(this.cameras)) {
      const age = message.frame_ages ? message.frame_ages[name] : undefined;
      camera.age = age === undefined ? null : age;
    }
    this.markPictures();
  }

  takeDetail(detail) {
    this.detail = detail;
    const { status, joints, spread, edges_ms: edges } = detail;
    const stats = status.stats, inference = status.inference_stats;
    const facts = [status.policy_path, status.policy_type, inference && inference.device, stats.rate && `${number(stats.rate, 0)} Hz`,
      stats.inferences_per_second && `asks ${number(stats.inferences_per_second, 1)} times a second${stats.is_degraded ? ", slowed down" : ""}`,
      stats.protocol && `over ${stats.protocol}`,
      `workspace ${(status.workspace_id || "–").replace(/^(.{8}).{8,}$/, "$1…")}`, this.line && this.line.owner && `of ${this.line.owner}`].filter(Boolean);
    if (this.facts.dataset.text !== facts.join("\n")) { this.facts.dataset.text = facts.join("\n"); this.facts.replaceChildren(...facts.map((fact) => make("span", {}, fact))); }
    const known = JSON.stringify(joints);
    if (known !== this.joints) { this.joints = known; this.buildPlots(joints); }
    for (const camera of status.camera_names) if (!this.cameras[camera]) this.buildCamera(camera);
    // Before its rooms are joined there is nothing to see, and empty boxes would look like something broken.
    for (const card of this.driven) card.hidden = joints.length === 0;
    if (!status.camera_names.length) this.cameraCard.hidden = true;
    for (const [camera, shown] of Object.entries(this.cameras)) shown.fps = (stats.camera_fps || {})[camera];
    this.takeTimes(stats, inference, spread, edges);
    this.takeInstruction(stats);
    this.takeRecording(stats.recording || {});
    this.takeWarnings(stats);
    this.policy.take(stats);
    const rows = Object.entries({ ...stats, ...(inference || {}), ...status.rooms }).sort(([one], [other]) => (one < other ? -1 : 1));
    if (this.everything.closest("details").open || !this.everything.childElementCount) {
      this.everything.replaceChildren(...rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, typeof value === "object" && value !== null ? JSON.stringify(value) : String(value ?? "–")))));
    }
  }

  takeTimes(stats, inference, spread, edges) {
    const stages = (inference && inference.stages_ms && inference.stages_ms.total) || {}, late = stats.tick_lateness_ms || {};
    const show = (name, counts, limit, text) => { const one = this.histograms[name]; Object.assign(one, { counts: counts || [], limit, edges }); say(one.text, text); set(one.canvas, "aria-label", text); };
    show("inference", spread.inference, null, `median ${number(stages.p50)}, p99 ${number(stages.p99)}`);
    show("lateness", spread.lateness, stats.rate ? 1000 / stats.rate : null, `median ${number(late.p50, 2)}, p99 ${number(late.p99, 2)}`);
    const bad = (value) => (value ? "warn" : "");
    const refused = stats.chunks_rejected || 0;
    const holds = Object.entries(stats.holds || {});
    const cells = {
      "commands sent": [stats.commands_sent], "ticks": [stats.ticks], "missed ticks": [stats.missed_ticks, bad(stats.missed_ticks)],
      "inferences": [stats.inference_count], "holds": [holds.reduce((sum, [, count]) => sum + count, 0)], "starved": [stats.starvations, bad(stats.starvations)], "late actions": [stats.late_actions_dropped],
      "chunks refused": [refused, bad(refused)], "sends refused": [stats.commands_refused, bad(stats.commands_refused)], "errors": [stats.errors, stats.errors ? "bad" : ""],
    };
    for (const [name, [value, tone]] of Object.entries(cells)) {
      if (!this.cells[name]) {
        this.cells[name] = make("dd", {});
        this.numbers.append(make("div", { title: HELP[name] }, make("dt", { class: HELP[name] ? "helped" : null }, name), this.cells[name]));
      }
      say(this.cells[name], value ?? "–");
      set(this.cells[name], "data-tone", tone);
    }
    if (holds.length) set(this.cells.holds.parentElement, "title", `${HELP.holds} So far: ${holds.map(([code, count]) => `${code} ${count}`).join(", ")}.`);
  }

  takeInstruction(stats) {
    this.told_to.hidden = !stats.reads_language && !stats.language_instruction;
    const text = stats.language_instruction || "";
    // Nobody's typing is overwritten; what somebody else told it meanwhile is shown when this one has left the field.
    if (document.activeElement !== this.instruction && this.instruction.dataset.told !== text) this.instruction.value = this.instruction.dataset.told = text;
  }

  takeRecording(recording) {
    this.isRecording = recording.state === "on";
    set(this.record, "aria-pressed", String(this.isRecording));
    say(this.record, this.isRecording ? "End recording" : "Record");
    // One that ended by itself is to be seen: a full disk stops the recording, never the robot.
    this.recorded.hidden = !recording.state || recording.state === "off";
    set(this.recorded, "data-tone", this.isRecording ? "info" : "bad");
    const size = recording.bytes ? `: ${number(recording.seconds, 0)} s, ${number(recording.bytes / 1e6)} MB` : "";
    say(this.recorded, this.isRecording ? `recording${size}` : "recording ended");
  }

  takeWarnings(stats) {
    const unmatched = (stats.safety || {}).unmatched || [];
    const warnings = Object.entries(stats.warnings || {}).map(([code, text]) => `${code}: ${text}`);
    const recording = stats.recording || {};
    if (recording.reason) warnings.push(`recording ended (${recording.state}): ${recording.reason}`);
    if (unmatched.length) warnings.push(`the limits file names ${unmatched.join(", ")}, which this session does not have`);
    this.warned.hidden = !warnings.length;
    say(this.warned, warnings.join("; "));
  }

  buildPlots(joints) {
    this.motion.clear();
    this.plots = joints.map((joint) => {
      const text = make("span", { class: "dim" }), canvas = make("canvas", { role: "img", "aria-label": `${joint.name} over the last seconds` });
      return { joint, text, canvas, scale: null, node: make("div", { class: "plot" }, make("div", { class: "over-plot" }, make("b", {}, joint.name), text), canvas) };
    });
    this.plotBox.replaceChildren(...(joints.length ? this.plots.map((plot) => plot.node) : [make("p", { class: "dim" }, "Joints are drawn from the first tick on.")]));
  }

  buildCamera(name) {
    const image = make("img", { alt: `Camera ${name}`, hidden: true }), blank = make("div", { class: "blank" }), over = make("div", { class: "over" }, "no picture yet"), text = make("span", {});
    const node = make("figure", {}, image, blank, over, make("figcaption", {}, make("span", {}, name), text));
    this.cameras[name] = { image, blank, over, text, node, url: null, age: null, fps: null, has: false };
    this.cameraBox.append(node);
  }

  takePicture(part) {
    const camera = this.cameras[part.camera];
    if (!camera) return;
    const url = URL.createObjectURL(new Blob([part.content], { type: "image/jpeg" }));
    if (camera.url) URL.revokeObjectURL(camera.url);
    camera.url = camera.image.src = url;
    camera.has = true;
  }

  markPictures() {
    for (const camera of Object.values(this.cameras)) {
      const isOld = camera.age === null || camera.age > STALE;
      camera.image.hidden = !camera.has;
      camera.blank.hidden = camera.has;
      const over = !camera.has ? "no picture yet" : !this.isLive ? "connection lost: not live" : isOld ? `not live: ${number(camera.age, 1)} s old` : "";
      camera.over.hidden = !over;
      say(camera.over, over);
      say(camera.text, this.isLive && typeof camera.fps === "number" ? `${number(camera.fps, 1)} per second` : "");
    }
  }

  setLive(isLive) {
    this.isLive = isLive;
    this.markPictures();
  }

  draw() {
    if (document.hidden || this.id === null) return;
    const now = this.motion.present(this.isLive);
    this.plots.forEach((plot, index) => {
      if (!this.motion.ticks.length && !this.motion.plan) return;
      plot.scale = drawJoint(plot.canvas, this.motion, index, plot.joint, now, this.ink, plot.scale);
      const { pose, command } = this.motion.newest(index);
      say(plot.text, `is ${number(pose)}, sent ${number(command)}`);
    });
    for (const one of Object.values(this.histograms || {})) drawHistogram(one.canvas, one.edges || [], one.counts, one.limit, this.ink);
  }
}
