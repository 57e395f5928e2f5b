// The one socket: what happens comes in, what is looked at goes out; whether it is alive is never a guess.

import { BASE, Refused, call, key } from "./api.js";

const SILENCE = 1500; // ms without a message after which nothing shown is called live
const DEAD = 5000; // ms after which the connection is made anew

export function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let at = 4 + length;
  for (const part of head.parts) {
    part.content = buffer.slice(at, at + part.size);
    at += part.size + ((4 - (part.size % 4)) % 4);
  }
  return head;
}

export class Live extends EventTarget {
  constructor() {
    super();
    this.state = "connecting"; // live, lost, locked
    this.heardAt = 0;
    this.wait = 500;
    this.look = { session: null, pictures: false };
    setInterval(() => this.watch(), 250);
  }

  async open() {
    clearTimeout(this.timer);
    this.drop();
    const attempt = (this.attempt = Symbol());
    let query = "";
    try {
      query = "?ticket=" + encodeURIComponent((await call("POST", "tickets", undefined, { signal: AbortSignal.timeout(5000) })).ticket);
    } catch (error) {
      if (attempt !== this.attempt) return;
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        this.turn("locked", key.get() ? "The key was refused: " + error.message : "");
        return;
      }
      if (!(error instanceof Refused) || error.status !== 404) { this.again("the server does not answer"); return; }
    }
    if (attempt !== this.attempt) return;
    const url = new URL("ui/live" + query, BASE);
    url.protocol = url.protocol.replace("http", "ws");
    const socket = (this.socket = new WebSocket(url));
    socket.binaryType = "arraybuffer";
    socket.onopen = () => { this.openedAt = performance.now(); this.tellLook(); this.dispatchEvent(new Event("open")); };
    socket.onmessage = (event) => { if (socket === this.socket) this.take(event.data); };
    socket.onclose = (event) => { if (socket === this.socket) this.again(event.reason || "the connection was closed"); };
  }

  drop() {
    const socket = this.socket;
    this.socket = null;
    if (socket) { socket.onclose = socket.onmessage = null; socket.close(); }
  }

  again(why) {
    this.drop();
    this.turn("lost", why);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), this.wait);
    this.wait = Math.min(this.wait * 1.6, 4000);
  }

  take(data) {
    const message = unpack(data);
    this.heardAt = performance.now();
    if (message.stop) { this.dispatchEvent(new CustomEvent("stopped", { detail: message.stop })); return; }
    this.wait = 500;
    this.turn("live", "");
    this.dispatchEvent(new CustomEvent("message", { detail: message }));
    this.send({ type: "seen", number: message.number });
  }

  watch() {
    if (!this.socket) return;
    const silent = performance.now() - Math.max(this.heardAt, this.openedAt || 0);
    if (this.state === "live" && silent > SILENCE) this.turn("lost", "the server is silent");
    if (this.openedAt && silent > DEAD) { this.openedAt = 0; this.again("the server is silent"); }
  }

  turn(state, why) {
    if (state === this.state && why === this.why) return;
    this.state = state;
    this.why = why;
    this.dispatchEvent(new Event("state"));
  }

  send(message) {
    if (!this.socket || this.socket.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  show(session, pictures) {
    if (session === this.look.session && pictures === this.look.pictures) return;
    this.look = { session, pictures };
    this.tellLook();
  }

  tellLook() { this.send({ type: "look", ...this.look }); }
}
