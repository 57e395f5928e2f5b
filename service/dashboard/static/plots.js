// Moving plots and histograms on canvases. Times are the server's: the time of its last message, counted on from there.

const WINDOW = 8; // seconds shown before now
const AHEAD = 2; // seconds shown after now
const LEAST = 0.02; // share of a joint's range; a smaller motion is drawn as a flat line
const AXIS = 14; // height of the time axis in pixels

export class Motion {
  constructor() { this.clear(); }

  clear() { this.ticks = []; this.plan = null; this.now = 0; this.at = 0; }

  take(message, joints) {
    this.now = message.now;
    this.at = performance.now();
    for (const part of message.parts) {
      const values = part.kind === "ticks" || part.kind === "plan" ? new Float32Array(part.content) : null;
      if (part.kind === "ticks") this.addTicks(values, part.shape, message.now, joints);
      if (part.kind === "plan") this.plan = { values, steps: part.shape[0], width: part.shape[1], begins: message.now + part.begins, ends: message.now + part.ends };
    }
    const oldest = this.now - WINDOW - 1;
    let gone = 0;
    while (gone < this.ticks.length && this.ticks[gone].at < oldest) gone += 1;
    if (gone) this.ticks.splice(0, gone);
  }

  addTicks(values, [rows, columns], now, joints) {
    const width = (columns - 3) / 2;
    for (let row = 0; row < rows; row += 1) {
      const tick = values.subarray(row * columns, (row + 1) * columns);
      this.ticks.push({ at: now + tick[0], sent: tick[1] > 0, held: tick[2] > 0, command: tick.subarray(3, 3 + width), pose: tick.subarray(3 + width) });
    }
  }

  // The server's clock at this moment; it does not run on while nothing is heard.
  present(isLive) { return isLive ? this.now + Math.min((performance.now() - this.at) / 1000, 0.5) : this.now; }

  newest(joint) {
    const tick = this.ticks[this.ticks.length - 1];
    let command = null;
    for (let index = this.ticks.length - 1; index >= 0 && command === null; index -= 1) {
      if (Number.isFinite(this.ticks[index].command[joint])) command = this.ticks[index].command[joint];
    }
    return { pose: tick ? tick.pose[joint] : null, command };
  }
}

export function inks() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["measured", "sent", "planned", "hold", "line", "sunk", "dim", "text", "accent", "warn", "bad"].map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}

function sized(canvas) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const draw = canvas.getContext("2d");
  draw.setTransform(ratio, 0, 0, ratio, 0, 0);
  draw.clearRect(0, 0, width, height);
  return { draw, width, height };
}

function extent(motion, joint, range, before) {
  let low = Infinity, high = -Infinity;
  const take = (value) => { if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); } };
  for (const tick of motion.ticks) { take(tick.command[joint]); take(tick.pose[joint]); }
  if (motion.plan) for (let step = 0; step < motion.plan.steps; step += 1) take(motion.plan.values[step * motion.plan.width + joint]);
  if (low > high) return before || [range.low ?? -1, range.high ?? 1];
  const whole = range.low !== null && range.high !== null ? range.high - range.low : Math.max(Math.abs(low), Math.abs(high), 1);
  const middle = (low + high) / 2, half = Math.max((high - low) / 2, whole * LEAST) * 1.15;
  const wanted = [middle - half, middle + half];
  if (!before) return wanted;
  // The scale grows at once and shrinks slowly, so that a motion can be followed with the eye.
  return [Math.min(wanted[0], before[0] + (wanted[0] - before[0]) * 0.05), Math.max(wanted[1], before[1] + (wanted[1] - before[1]) * 0.05)];
}

export function drawJoint(canvas, motion, joint, range, now, ink, before) {
  const { draw, width, height: whole } = sized(canvas);
  const height = whole - AXIS;
  const scale = extent(motion, joint, range, before);
  const x = (at) => ((at - now + WINDOW) / (WINDOW + AHEAD)) * width;
  const y = (value) => height - 3 - ((value - scale[0]) / (scale[1] - scale[0])) * (height - 6);
  draw.fillStyle = ink.hold;
  let from = null;
  motion.ticks.forEach((tick, index) => {
    if (tick.held && from === null) from = tick.at;
    const isLast = index === motion.ticks.length - 1;
    if (from !== null && (!tick.held || isLast)) { draw.fillRect(x(from), 0, Math.max(x(tick.at) - x(from), 1), height); from = null; }
  });
  draw.strokeStyle = ink.line;
  draw.lineWidth = 1;
  draw.beginPath();
  for (let ago = WINDOW; ago > -AHEAD; ago -= 2) { draw.moveTo(x(now - ago), 0); draw.lineTo(x(now - ago), height); }
  draw.stroke();
  draw.font = "10px system-ui, sans-serif";
  draw.fillStyle = ink.dim;
  draw.textAlign = "center";
  for (const ago of [6, 4, 2]) draw.fillText(`−${ago} s`, x(now - ago), whole - 3);
  draw.fillText("now", x(now), whole - 3);
  draw.textAlign = "left";
  draw.strokeStyle = ink.bad;
  draw.setLineDash([2, 2]);
  draw.beginPath();
  for (const limit of [range.low, range.high]) if (limit !== null && limit >= scale[0] && limit <= scale[1]) { draw.moveTo(0, y(limit)); draw.lineTo(width, y(limit)); }
  draw.stroke();
  draw.setLineDash([]);
  const line = (points, colour, thick, dash = []) => {
    draw.strokeStyle = colour; draw.lineWidth = thick; draw.setLineDash(dash); draw.lineJoin = "round";
    draw.beginPath();
    let isDown = false, last = 0;
    for (const [at, value] of points) {
      if (!Number.isFinite(value) || (isDown && at - last > 0.5)) isDown = false;
      if (!Number.isFinite(value)) continue;
      isDown ? draw.lineTo(x(at), y(value)) : draw.moveTo(x(at), y(value));
      isDown = true; last = at;
    }
    draw.stroke();
    draw.setLineDash([]);
  };
  line(motion.ticks.map((tick) => [tick.at, tick.pose[joint]]), ink.measured, 1.5);
  const plan = motion.plan;
  if (plan && plan.ends > now - WINDOW) {
    const step = plan.steps > 1 ? (plan.ends - plan.begins) / (plan.steps - 1) : 0;
    line(Array.from({ length: plan.steps }, (_, index) => [plan.begins + index * step, plan.values[index * plan.width + joint]]), ink.planned, 1.5, [4, 3]);
  }
  line(motion.ticks.map((tick) => [tick.at, tick.sent ? tick.command[joint] : NaN]), ink.sent, 2);
  // What a dry run would have sent is not drawn as if it had been.
  line(motion.ticks.map((tick) => [tick.at, tick.sent ? NaN : tick.command[joint]]), ink.sent, 1, [1, 3]);
  draw.strokeStyle = ink.dim;
  draw.lineWidth = 1;
  draw.beginPath(); draw.moveTo(x(now), 0); draw.lineTo(x(now), height); draw.stroke();
  for (const [value, place] of [[scale[1], 11], [scale[0], height - 4]]) {
    const text = value.toFixed(1);
    draw.fillStyle = ink.sunk;
    draw.fillRect(0, place - 10, draw.measureText(text).width + 7, 13);
    draw.fillStyle = ink.dim;
    draw.fillText(text, 4, place);
  }
  return scale;
}

export function drawHistogram(canvas, edges, counts, limit, ink) {
  const { draw, width, height } = sized(canvas);
  if (!counts || !counts.length) return;
  const top = Math.max(...counts, 1), low = 16, each = width / counts.length;
  draw.font = "10px system-ui, sans-serif";
  draw.textAlign = "center";
  counts.forEach((count, index) => {
    // Square roots: a few late ones among thousands must be seen.
    const tall = count ? Math.max(Math.sqrt(count / top) * (height - low - 14), 2) : 0;
    const isOver = limit !== null && (index ? edges[index - 1] : 0) >= limit;
    draw.fillStyle = isOver ? ink.bad : ink.accent;
    draw.fillRect(index * each + 1, height - low - tall, each - 2, tall);
    draw.fillStyle = ink.dim;
    if (count && each > 17) draw.fillText(count > 999 ? (count / 1000).toFixed(1) + "k" : String(count), (index + 0.5) * each, height - low - tall - 3);
    if (index && each > 17) draw.fillText(String(edges[index - 1]), index * each, height - 4);
  });
  draw.strokeStyle = ink.line;
  draw.beginPath(); draw.moveTo(0, height - low + 0.5); draw.lineTo(width, height - low + 0.5); draw.stroke();
}
