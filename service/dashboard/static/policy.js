// Which policy a session runs, another revision of it, the one before, and what became of each update.

import { call, inSession } from "./api.js";
import { clock, make, say, twice } from "./dom.js";

const short = (commit) => (commit ? commit.slice(0, 9) : "–");

export class PolicyCard {
  constructor(id, act) {
    this.id = id;
    this.running = make("dd", {});
    this.staged = make("dd", {});
    this.before = make("dd", {});
    this.revision = make("input", { id: "revision", autocomplete: "off", spellcheck: "false", placeholder: "staged, else newest", maxlength: 256 });
    this.bring = make("button", { type: "button" }, "Bring it");
    this.back = make("button", { type: "button" }, "Roll back");
    const became = (told) => { this.list(); return { message: told.result ? `${told.result}: ${told.text}` : told.text }; };
    this.bring.onclick = act("Update", async () => became(await call("POST", inSession(id, "policy"), this.revision.value.trim() ? { revision: this.revision.value.trim() } : {})));
    twice(this.back, "Really roll back?", act("Rollback", async () => became(await call("POST", inSession(id, "rollback")))));
    this.rows = make("tbody", {});
    this.text = make("p", { class: "dim" }, "No update yet.");
    this.table = make("table", { hidden: true }, make("thead", {}, make("tr", {}, ...["When", "Revision", "By", "What became of it"].map((name) => make("th", { scope: "col" }, name)))), this.rows);
    const pair = (name, node) => make("div", {}, make("dt", {}, name), node);
    this.node = make("div", { class: "card" }, make("h3", {}, "Policy"),
      make("dl", { class: "numbers" }, pair("runs", this.running), pair("staged", this.staged), pair("before it", this.before)),
      make("div", { class: "row actions" }, make("label", { for: "revision" }, "Revision"), make("div", { class: "grow" }, this.revision), this.bring, this.back),
      make("div", { class: "wide" }, this.table, this.text));
    this.list();
  }

  enable(may) {
    for (const node of [this.revision, this.bring]) node.disabled = !may;
    this.back.disabled = !may || !this.has;
  }

  take(stats) {
    say(this.running, short(stats.policy_commit));
    say(this.staged, short(stats.policy_staged));
    say(this.before, short(stats.policy_before));
    this.has = Boolean(stats.policy_before);
    if (stats.policy_changes !== this.changes) { this.changes = stats.policy_changes; this.list(); }
  }

  async list() {
    let found;
    try {
      found = await call("GET", `deployments?limit=8&session_id=${encodeURIComponent(this.id)}`);
    } catch (error) {
      say(this.text, `Updates cannot be shown: ${error.message}`);
      return;
    }
    this.table.hidden = !found.length;
    this.text.hidden = Boolean(found.length);
    this.rows.replaceChildren(...found.map((one) => make("tr", {}, make("td", { class: "short" }, clock(one.at)), make("td", { class: one.sha && "short" }, make("code", {}, short(one.sha) === "–" ? one.ref || "–" : short(one.sha))),
      make("td", { class: "short" }, one.trigger), make("td", { class: "says" }, [one.result || "under way", one.reason, one.text].filter(Boolean).join(": ")))));
  }
}

// Commits that were refused or taken back, and the way out for who may.
export async function listQuarantine(node, mayRelease) {
  let found;
  try {
    found = await call("GET", "quarantine");
  } catch (error) {
    node.replaceChildren(make("p", { class: "dim" }, `The quarantine cannot be shown: ${error.message}`));
    return;
  }
  if (!found.length) { node.replaceChildren(make("p", { class: "dim" }, "No commit is in it.")); return; }
  const row = (one) => {
    const out = make("button", { type: "button", class: "small", disabled: !mayRelease, title: mayRelease ? null : "Wants an admin's key" }, "Let out"), why = [one.reason, one.text].filter(Boolean).join(": ");
    twice(out, "Really let out?", async () => {
      try { await call("DELETE", `quarantine/${one.sha}`); listQuarantine(node, mayRelease); } catch (error) { say(out, error.message); }
    });
    return make("tr", {}, make("td", { class: "short" }, clock(one.at)), make("td", {}, one.repo), make("td", { class: "short" }, make("code", {}, short(one.sha))), make("td", { class: "says" }, why), make("td", { class: "short" }, out));
  };
  node.replaceChildren(make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...["When", "Policy", "Commit", "Why", ""].map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...found.map(row)))));
}

export async function listEvents(node) {
  const root = new URL("..", import.meta.url).pathname.replace(/api\/$/, "");
  let found;
  try {
    found = await call("GET", `${root}webhooks/_events/?limit=20`);
  } catch (error) {
    const why = [401, 403].includes(error.status) ? "they name everybody's policies, so they are for an admin's key, or one made with --all" : error.message;
    node.replaceChildren(make("p", { class: "dim" }, `Events cannot be shown: ${why}`));
    return;
  }
  if (!found.length) { node.replaceChildren(make("p", { class: "dim" }, "Nothing came yet.")); return; }
  node.replaceChildren(make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...["When", "Repo", "What", "State", ""].map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...found.map((one) => make("tr", {}, make("td", { class: "short" }, clock(one.received_at)), make("td", {}, one.repo || "–"), make("td", {}, [one.scope, one.action].filter(Boolean).join(" ")),
      make("td", {}, one.status), make("td", { class: "bad" }, one.error || "")))))));
}
