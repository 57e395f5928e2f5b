// Words and colours of stages. Each stage has a word and a tone, so that no state is only a colour.

import { clock } from "./dom.js";

const SILENT = 3; // seconds without a frame or a joint value after which no robot counts as connected

const TONES = {
  running: "good", ready: "info", initializing: "info", stopped: "", degraded: "warn", reconnecting: "warn",
  timeout: "warn", interrupted: "warn", error: "bad",
};

// When the last input of the robot arrived, in Unix seconds, if that was too long ago; null while input arrives.
export function silentSince(line, now) {
  const isLoaded = ["ready", "running", "stopped", "degraded", "reconnecting", "timeout"].includes(line.stage);
  return isLoaded && line.silent_s > SILENT ? now - line.silent_s : null;
}

export const isMoving = (line) => ["running", "degraded", "reconnecting"].includes(line.stage);

export function toneOf(line) {
  if (line.latched) return "latched";
  if (line.hold_code && line.stage === "running") return "warn";
  return TONES[line.stage] ?? "";
}

export function wordOf(line) {
  if (line.latched) return `${line.stage} · latched`;
  if (line.hold_code && line.stage === "running") return "running · held";
  return line.stage;
}

function duration(seconds) {
  return seconds < 90 ? `${Math.max(Math.round(seconds), 1)} s` : `${Math.round(seconds / 60)} min`;
}

export function progressOf(line) {
  if (line.stage !== "initializing") return null;
  const spent = typeof line.progress_s === "number" ? line.progress_s : null, left = typeof line.progress_left_s === "number" ? line.progress_left_s : null;
  let text = line.progress || "waiting";
  if (typeof line.progress_percent === "number") text += `, ${line.progress_percent} %`;
  if (spent !== null) text += `, for ${duration(spent)}`;
  if (left !== null) text += left < 1 ? ", nearly there" : `, about ${duration(left)} left`;
  return { text, part: spent !== null && left !== null && spent + left > 0 ? spent / (spent + left) : null };
}

// Why the robot does not move: the kind of reason, and its text.
export function reasonOf(line) {
  if (line.latched) return { of: "Emergency stop", text: line.reason || "no reason given", tone: "latched" };
  const silent = silentSince(line, Date.now() / 1000);
  if (silent !== null) return { of: "Robot not connected", text: `no picture and no joint value since ${clock(silent)}`, tone: "warn" };
  if (line.hold) return { of: `Held (${line.hold_code})`, text: line.hold, tone: "warn" };
  if (line.reason) return { of: { error: "Error", timeout: "Timeout" }[line.stage] || line.stage, text: line.reason, tone: toneOf(line) };
  return null;
}
