// The page put together: one socket in, the public API out.

import { key } from "./api.js";
import { Detail } from "./detail.js";
import { Devices } from "./devices.js";
import { $, clock, make, say, set, twice } from "./dom.js";
import { Create } from "./form.js";
import { listEvents, listQuarantine } from "./policy.js";
import { Live } from "./socket.js";
import { Stop } from "./stop.js";
import { progressOf, reasonOf, toneOf, wordOf } from "./words.js";

const live = new Live();
const stop = new Stop($("stop"), $("report"), live);
const detail = new Detail($("detail"));
const page = { sessions: [], chosen: null, waitsFor: null, caller: null, heard: null, rows: new Map() };

// Colours: the system's, until somebody says otherwise.

const THEMES = ["auto", "light", "dark"];
function paint(theme) {
  theme === "auto" ? delete document.documentElement.dataset.theme : (document.documentElement.dataset.theme = theme);
  say($("theme"), `◐ ${theme}`);
  set($("theme"), "aria-label", `Colours: ${theme === "auto" ? "as the system" : theme}`);
  detail.recolour();
}
let theme = "auto";
try { theme = THEMES.includes(localStorage.getItem("robojax-theme")) ? localStorage.getItem("robojax-theme") : "auto"; } catch { /* not kept, then */ }
paint(theme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => detail.recolour());
$("theme").onclick = () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try { localStorage.setItem("robojax-theme", theme); } catch { /* not kept, then */ }
  paint(theme);
};

// Who looks.

$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  live.open();
});
$("sign-out").onclick = () => { key.set(null); location.reload(); };

// The connection: what is shown is live, or it is plainly said that it is not.

live.addEventListener("state", () => {
  const { state, why } = live;
  set($("link"), "data-state", state);
  say($("link-text"), { live: "live", lost: "connection lost", locked: "signed out", connecting: "connecting" }[state]);
  document.body.classList.toggle("lost", state !== "live");
  $("sign-in").hidden = state !== "locked";
  $("frame").hidden = state === "locked";
  $("sign-out").hidden = !key.get() || state === "locked";
  say($("sign-in-text"), state === "locked" ? why : "");
  if (state === "locked") $("key").focus();
  $("lost").hidden = state !== "lost";
  detail.setLive(state === "live");
  tellLost();
});
function tellLost() {
  if (live.state !== "lost") return;
  const since = page.heard ? ` What you see is of ${clock(page.heard)}.` : "";
  say($("lost"), `Connection lost: ${live.why}.${since} Robots may move on. STOP is still tried over HTTP.`);
}

live.addEventListener("message", (event) => {
  const message = event.detail;
  page.heard = message.clock;
  if (message.caller) {
    page.caller = message.caller;
    const isKnown = message.caller.name !== "anybody";
    $("who").hidden = !isKnown;
    say($("who"), `${message.caller.name} (${message.caller.role})`);
    detail.mayOperate = message.caller.role !== "viewer";
    $("new").disabled = !detail.mayOperate;
    set($("new"), "title", detail.mayOperate ? null : "A viewer's key may look and stop, nothing else");
  }
  if (message.sessions) { page.sessions = message.sessions; list(); }
  detail.take(message);
  stop.confirm(page.sessions);
});

// The sessions.

function choose(id, andShow = false) {
  page.chosen = id;
  list();
  if (andShow) $("detail").scrollIntoView({ block: "start" });
}

function list() {
  const lines = page.sessions;
  if (page.waitsFor !== null && lines.some((line) => line.id === page.waitsFor)) { page.chosen = page.waitsFor; page.waitsFor = null; }
  if (!lines.some((line) => line.id === page.chosen)) page.chosen = lines.length ? lines[0].id : null;
  $("none").hidden = lines.length > 0;
  const rows = new Map();
  for (const line of lines) {
    const row = page.rows.get(line.id) || newRow(line.id);
    rows.set(line.id, row);
    const reason = reasonOf(line), progress = progressOf(line), word = wordOf(line);
    if (row.word !== undefined && row.word !== word) say($("said"), `${line.id} is ${word}`);
    row.word = word;
    set(row.pill, "data-tone", toneOf(line));
    say(row.pill, word);
    say(row.why, progress ? progress.text : reason ? reason.text : line.policy);
    set(row.button, "aria-current", line.id === page.chosen ? "true" : null);
  }
  const nodes = [...rows.values()].map((row) => row.node);
  if (nodes.length !== $("sessions").children.length || nodes.some((node, index) => node !== $("sessions").children[index])) $("sessions").replaceChildren(...nodes);
  page.rows = rows;
  const chosen = lines.find((line) => line.id === page.chosen) || null;
  detail.show(chosen);
  $("reset-near").hidden = !chosen || !chosen.latched || !detail.mayOperate;
  look();
}

function newRow(id) {
  const pill = make("span", { class: "pill" }), why = make("span", { class: "why" });
  const button = make("button", { type: "button", onclick: () => choose(id, innerWidth < 832) }, make("span", { class: "name" }, id), pill, why);
  return { pill, why, button, node: make("li", {}, button) };
}

// On a phone the reset of the chosen session is next to STOP, within reach of the same thumb.
twice($("reset-near"), "Robot is safe: reset", () => detail.onReset());

// Pictures are made only while somebody can see them.
function look() { live.show(page.chosen, !document.hidden); }
document.addEventListener("visibilitychange", look);

const create = new Create($("create"), (id, isReady) => {
  page.waitsFor = id;
  if (isReady) set($("new"), "aria-expanded", "false");
  list();
});
$("new").onclick = () => {
  const isOpen = !$("create").hidden;
  set($("new"), "aria-expanded", String(!isOpen));
  isOpen ? ($("create").hidden = true) : create.open();
};
new Devices($("devices-list"));
$("quarantine").addEventListener("toggle", () => { if ($("quarantine").open) listQuarantine($("quarantine-list"), page.caller !== null && page.caller.role === "admin"); });
$("events").addEventListener("toggle", () => { if ($("events").open) listEvents($("events-list")); });

set(document.body, "data-ready", "true");
live.open();
