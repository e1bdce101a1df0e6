"use strict";
/* Elements made from data: text is always text, never markup. */
D5P4.dom = (() => {
  /** An element. Attributes: class, text, data, on (listeners), style (custom properties), others as they are. */
  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      if (name === "class") node.className = value;
      else if (name === "text") node.textContent = value;
      else if (name === "on") for (const [event, f] of Object.entries(value)) node.addEventListener(event, f);
      else if (name === "style") for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
    return node;
  }

  /** A small picture, drawn by the path of a 20 x 20 square. */
  function icon(path) {
    const name = "http://www.w3.org/2000/svg";
    const picture = document.createElementNS(name, "svg");
    picture.setAttribute("viewBox", "0 0 20 20");
    picture.setAttribute("aria-hidden", "true");
    const line = document.createElementNS(name, "path");
    line.setAttribute("d", path);
    picture.append(line);
    return picture;
  }

  /** The letter of a run's colours, of which there are four: 0 is the left run. */
  const side = (run) => "abcd"[run % 4];

  const find = (id) => document.getElementById(id);

  /** A number in a few digits, or a dash. */
  function number(value, digits = 2) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    return value.toFixed(digits).replace("-", "−");
  }

  /** A score: enough digits to tell it from its neighbours. */
  function figure(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const digits = value === 0 ? 2 : Math.min(6, Math.max(2, 1 - Math.floor(Math.log10(Math.abs(value)))));
    return number(value, digits);
  }

  const whole = (value) => (Number.isFinite(value) ? value.toLocaleString("en-US") : "–");
  const plural = (count, word, many = `${word}s`) => `${whole(count)} ${count === 1 ? word : many}`;

  /** Text into the clipboard; also where the page may not use it directly. */
  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const field = el("textarea", { "aria-hidden": "true", class: "offscreen" });
      field.value = text;
      document.body.append(field);
      field.select();
      const done = document.execCommand("copy");
      field.remove();
      return done;
    }
  }

  /** Say something to whoever listens with a screen reader. */
  function announce(text) {
    find("announce").textContent = text;
  }

  let toastTimer = 0;
  /** A short note at the edge of the page. */
  function toast(text) {
    const node = find("toast");
    node.textContent = text;
    node.classList.add("shown");
    clearTimeout(toastTimer);
    toastTimer = setTimeout(() => node.classList.remove("shown"), 2600);
    announce(text);
  }

  /** Show the card `node` beside a point of the window. */
  function place(node, x, y) {
    node.hidden = false;
    const box = node.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), window.innerWidth - box.width - 8);
    const top = y + 18 + box.height > window.innerHeight ? y - box.height - 12 : y + 18;
    node.style.setProperty("left", `${Math.max(8, left)}px`);
    node.style.setProperty("top", `${Math.max(8, top)}px`);
  }

  /** A question mark that opens a sentence; `name` is what the mark asks. */
  const hint = (name, text) =>
    el("details", { class: "hint" }, el("summary", { "aria-label": name, text: "?" }), el("p", { text }));

  /** Close the hints when something else is used. */
  function closeHints(event) {
    for (const open of document.querySelectorAll(".hint[open]")) {
      if (event.key === "Escape" || !open.contains(event.target)) open.open = false;
    }
  }
  document.addEventListener("click", closeHints);
  document.addEventListener("focusin", closeHints);
  document.addEventListener("keydown", (event) => event.key === "Escape" && closeHints(event));

  return { el, icon, hint, side, find, number, figure, whole, plural, copy, announce, toast, place };
})();
