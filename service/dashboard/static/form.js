// Form of a new session. The server checks the policy's needs before anything is created.

import { call } from "./api.js";
import { make, number, say, set } from "./dom.js";

const list = (text) => text.split(",").map((part) => part.trim()).filter(Boolean);

export class Create {
  constructor(form, made) {
    Object.assign(this, { form, made, touched: new Set(), asked: 0 });
    const field = (name, label, attributes = {}, note = "") => {
      const input = make("input", { id: `new-${name}`, name, autocomplete: "off", spellcheck: "false", ...attributes });
      input.addEventListener("input", () => this.touched.add(name));
      this[name] = input;
      return make("div", { class: "field" }, make("label", { for: `new-${name}` }, label), input, note ? make("p", { class: "note" }, note) : "");
    };
    const choice = (name, label, options) => {
      this[name] = make("select", { id: `new-${name}`, name }, ...options.map(([value, text]) => make("option", { value }, text)));
      return make("div", { class: "field" }, make("label", { for: `new-${name}` }, label), this[name]);
    };
    const tick = (name, label) => { this[name] = make("input", { type: "checkbox", id: `new-${name}`, name }); return make("label", { class: "check" }, this[name], label); };
    this.found = make("div", { class: "found", id: "new-found", role: "status", hidden: true });
    this.send = make("button", { class: "main" }, "Create session");
    this.look = make("button", { type: "button" }, "Check policy");
    this.told = make("p", { class: "bad", id: "new-told", role: "alert" });
    form.append(make("div", { class: "row" }, make("h2", {}, "New session")),
      make("div", { class: "fields" },
        field("session_id", "Session", { required: true, pattern: "[A-Za-z0-9_.\\-]{1,64}", maxlength: 64, placeholder: "arm-1", title: "1 to 64 letters, digits, _ . -" }),
        field("policy_path", "Policy", { required: true, placeholder: "folder, or owner/name" }),
        field("camera_names", "Cameras", { value: "front" }, "separated by commas; filled in from the policy"),
        field("language_instruction", "Instruction", { placeholder: "for policies that read one" }),
        field("transport_server_url", "Rooms", { value: new URL("..", import.meta.url).origin, required: true }, "address of a transport server, or direct: no rooms"),
        tick("dry_run", "Dry run: send nothing to the robot")),
      this.more = make("details", { id: "new-more" }, make("summary", {}, "More"), make("div", { class: "fields" },
        field("joint_names", "Joint names", { placeholder: "from the checkpoint" }, "in the order of the policy's actions, separated by commas"),
        field("revision", "Revision", { placeholder: "branch, tag or commit" }),
        field("policy_type", "Policy type", { value: "act" }),
        field("workspace_id", "Workspace", { placeholder: "a new one" }),
        field("rate", "Ticks per second", { inputmode: "decimal", placeholder: "the policy's own" }),
        field("max_relative_target", "Largest step per tick", { inputmode: "decimal", placeholder: "the server's limits" }),
        choice("overlap", "A new chunk", [["", "as the policy says"], ["replace", "replaces the plan"], ["weighted_average", "weighs 0.7 against it"], ["average", "weighs 0.5 against it"], ["conservative", "weighs 0.3 against it"], ["ensemble", "is averaged over time (ACT)"], ["crossfade", "leads over from it"], ["rtc", "continues it (RTC)"]]),
        choice("auto_update", "When the revision moves", [["off", "do nothing"], ["stage", "make the new one ready"], ["swap", "swap it in when it passes"]]),
        make("div", { class: "row" }, tick("record", "Record"), tick("degrade", "Infer less often instead of being refused")))),
      // Below the buttons: what appears above them would move them away from under the finger.
      make("div", { class: "row" }, this.send, this.look), this.told, this.found);
    form.addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    this.look.addEventListener("click", () => this.check());
    for (const name of ["policy_path", "revision"]) this[name].addEventListener("change", () => this.check());
    for (const name of ["camera_names", "policy_type", "rate", "joint_names"]) this[name].addEventListener("change", () => { if (this.policy_path.value.trim()) this.check(); });
  }

  open() { this.form.hidden = false; this.session_id.focus(); }

  say(tone, ...what) {
    this.found.hidden = false;
    set(this.found, "data-tone", tone);
    this.found.replaceChildren(...what);
  }

  // Resolves to whether it fits; undefined when another check began meanwhile.
  async check() {
    const path = this.policy_path.value.trim();
    if (!path) { this.found.hidden = true; return false; }
    const asked = ++this.asked;
    this.say("", "Looking at the policy ...");
    const body = { policy_path: path };
    if (this.revision.value.trim()) body.revision = this.revision.value.trim();
    if (this.touched.has("camera_names")) body.camera_names = list(this.camera_names.value);
    if (this.touched.has("policy_type")) body.policy_type = this.policy_type.value.trim();
    const joints = list(this.joint_names.value);
    if (joints.length) body.joint_names = joints;
    const rate = this.rateOf(this.rate);
    if (rate !== undefined) body.rate = rate;
    const instruction = this.language_instruction.value.trim();
    if (instruction) body.language_instruction = instruction;
    let found;
    try {
      found = await call("POST", "policies/check", body, { signal: AbortSignal.timeout(30000) });
    } catch (error) {
      if (asked === this.asked) this.say("bad", make("b", {}, "The policy cannot be used. "), error.message);
      return asked === this.asked ? false : undefined;
    }
    if (asked !== this.asked) return undefined;
    if (!this.touched.has("camera_names")) this.camera_names.value = found.camera_names.join(", ");
    if (!this.touched.has("policy_type")) this.policy_type.value = found.policy_type;
    const need = found.requirements;
    const cameras = found.camera_names.map((name) => `${name} ${found.camera_sizes[name].join("×")}`).join(", ") || "none";
    set(this.language_instruction, "placeholder", need.language ? "what it shall do, in words" : "for policies that read one");
    this.language_instruction.required = need.language;
    const facts = `${found.policy_type}: cameras ${cameras}; ${need.action} joints${found.joint_names ? ` (${found.joint_names.join(", ")})` : ""}; chunks of ${need.chunk}, ${need.action_steps} done of each; ${found.rate || need.rate ? number(found.rate || need.rate, 0) + " Hz" : "its own rate is not known"}${need.language ? "; it does what the instruction says" : ""}.`;
    if (found.fits) this.say("good", make("b", {}, "It fits. "), facts);
    else this.say("bad", make("b", {}, "It does not fit: "), make("ul", {}, ...found.misfits.map((text) => make("li", {}, text))), make("p", { class: "dim" }, facts));
    return found.fits;
  }

  rateOf(input) {
    const text = input.value.trim().replace(",", ".");
    return text === "" ? undefined : Number(text);
  }

  body() {
    const body = {
      session_id: this.session_id.value.trim(), policy_path: this.policy_path.value.trim(), transport_server_url: this.transport_server_url.value.trim(),
      camera_names: list(this.camera_names.value), policy_type: this.policy_type.value.trim() || "act", auto_update: this.auto_update.value,
      dry_run: this.dry_run.checked, record: this.record.checked, degrade: this.degrade.checked,
    };
    for (const name of ["revision", "workspace_id", "language_instruction", "overlap"]) if (this[name].value.trim()) body[name] = this[name].value.trim();
    if (list(this.joint_names.value).length) body.joint_names = list(this.joint_names.value);
    for (const name of ["rate", "max_relative_target"]) {
      const value = this.rateOf(this[name]);
      if (value !== undefined && !(value > 0)) throw new Error(`${name} is no number above 0`);
      if (value !== undefined) body[name] = value;
    }
    return body;
  }

  async submit() {
    say(this.told, "");
    this.send.disabled = true;
    try {
      const body = this.body();
      const fits = await this.check();
      if (!fits) { if (fits === false) say(this.told, "Not sent: the policy does not fit. Mend what is named above."); return; }
      this.made(body.session_id);
      await call("POST", "sessions", { ...body, camera_names: list(this.camera_names.value), policy_type: this.policy_type.value.trim() });
      this.form.hidden = true;
      this.made(body.session_id, true);
    } catch (error) {
      say(this.told, error.message);
      // The field that the server names may be under "More".
      if (/joint_names|revision|policy_type|workspace_id|rate|max_relative_target|overlap/.test(error.message)) this.more.open = true;
    } finally {
      this.send.disabled = false;
    }
  }
}
