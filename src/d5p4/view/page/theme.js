"use strict";
/* The one name all scripts share, and the theme, which is set before anything is drawn. */
window.D5P4 = {};

D5P4.theme = (() => {
  const KEY = "d5p4-theme";
  const root = document.documentElement;
  const listeners = [];
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  function remembered() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage may be off, and files may have none
    }
  }

  function chosen() {
    return root.dataset.theme || null;
  }

  function dark() {
    return chosen() ? chosen() === "dark" : system.matches;
  }

  function choose(theme, remember = true) {
    if (theme !== "dark" && theme !== "light") return;
    root.dataset.theme = theme;
    if (remember) {
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        /* then it lasts as long as the page */
      }
    }
    tell();
  }

  function tell() {
    listeners.forEach((listener) => listener());
  }

  const inLink = new URLSearchParams(location.hash.slice(1)).get("theme");
  const first = inLink || remembered();
  if (first === "dark" || first === "light") root.dataset.theme = first;
  system.addEventListener("change", tell);

  return { chosen, dark, choose, toggle: () => choose(dark() ? "light" : "dark"), changed: (f) => listeners.push(f) };
})();
