// Everything on the page is made here, as text nodes: nothing that a server says is ever read as HTML.

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Writing what is there already would make screen readers say it again, and lose a selection.
export function say(node, text) {
  text = text === null || text === undefined ? "" : String(text);
  if (node.textContent !== text) node.textContent = text;
}

export function set(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value === true ? "" : value)) node.setAttribute(name, value === true ? "" : value);
}

export function number(value, digits = 1) {
  return typeof value === "number" && Number.isFinite(value) ? value.toFixed(digits) : "–";
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

// A button that must be pressed twice: for what cannot be undone, or moves something nobody expects.
export function twice(button, question, act) {
  let label = button.textContent, timer = 0;
  const calm = () => { if (!timer) return; clearTimeout(timer); timer = 0; button.classList.remove("sure"); say(button, label); };
  button.addEventListener("click", () => {
    if (timer) { calm(); act(); return; }
    label = button.textContent;
    button.classList.add("sure");
    say(button, question);
    timer = setTimeout(calm, 4000);
  });
  button.addEventListener("blur", calm);
}
