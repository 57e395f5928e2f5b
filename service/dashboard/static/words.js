// How stages are called and coloured: a word and a tone, always both.

const TONES = {
  running: "good", ready: "info", initializing: "info", stopped: "", degraded: "warn", reconnecting: "warn",
  timeout: "warn", interrupted: "warn", error: "bad",
};

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

// Why it stands where it stands, with what it is a reason of.
export function reasonOf(line) {
  if (line.latched) return { of: "Emergency stop", text: line.reason || "no reason given", tone: "latched" };
  if (line.hold) return { of: `Held (${line.hold_code})`, text: line.hold, tone: "warn" };
  if (line.reason) return { of: { error: "Error", timeout: "Timeout" }[line.stage] || line.stage, text: line.reason, tone: toneOf(line) };
  return null;
}
