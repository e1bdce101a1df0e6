"use strict";
/* The one name all scripts share, and the theme, which is set before anything is drawn. */
window.D5P4 = {};

D5P4.theme = (() => {
  const KEY = "d5p4-theme";
  const listeners = [];
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = new URLSearchParams(location.hash.slice(1)).get("theme") || remembered();

  function remembered() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage may be off
    }
  }

  /** Whether the page is dark: by choice, or else as the system wishes. */
  function dark() {
    return chosen === "dark" || (chosen !== "light" && system.matches);
  }

  function apply() {
    document.documentElement.dataset.theme = dark() ? "dark" : "light";
    listeners.forEach((listener) => listener());
  }

  function choose(theme) {
    chosen = theme;
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      /* then it lasts as long as the page */
    }
    apply();
  }

  system.addEventListener("change", apply);
  apply();

  return { dark, choose, toggle: () => choose(dark() ? "light" : "dark"), changed: (f) => listeners.push(f) };
})();
