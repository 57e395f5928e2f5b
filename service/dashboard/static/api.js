// The public API, with the key of this tab.

// The page answers at /ui, and behind a proxy at /prefix/ui.
export const BASE = new URL("..", import.meta.url);
const KEY = "robojax-key";

// What a server refused, or that it did not answer.
export class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

export const key = {
  get: () => { try { return sessionStorage.getItem(KEY); } catch { return null; } },
  set: (value) => { try { value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY); } catch { /* private mode: asked for again */ } },
};

function reason(body, status) {
  const detail = body && body.detail;
  if (Array.isArray(detail)) return detail.map((one) => `${(one.loc || []).slice(1).join(".")}: ${one.msg}`.replace(/^: /, "")).join("\n");
  return (typeof detail === "string" && detail) || (body && typeof body.error === "string" && body.error) || `the server answered ${status}`;
}

export async function call(method, path, body, options = {}) {
  const headers = { accept: "application/json" };
  if (body !== undefined) headers["content-type"] = "application/json";
  if (key.get()) headers["x-api-key"] = key.get();
  // For a proxy in front of several servers, which cannot look into the body.
  if (method === "POST" && path === "sessions" && body) headers["x-robojax-session"] = encodeURIComponent(body.session_id);
  let answer;
  try {
    answer = await fetch(new URL(path, BASE), {
      method, headers, body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store", redirect: "error", credentials: "omit", ...options,
    });
  } catch (error) {
    throw new Refused(0, error.name === "TimeoutError" ? "the server did not answer in time" : "the server cannot be reached");
  }
  let found = null;
  try { found = await answer.json(); } catch { /* told by its status */ }
  if (!answer.ok) throw new Refused(answer.status, reason(found, answer.status));
  return found;
}

export const inSession = (id, what = "") => `sessions/${encodeURIComponent(id)}${what && "/" + what}`;
