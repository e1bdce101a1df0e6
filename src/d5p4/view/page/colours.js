"use strict";
/* Colours for what is drawn on canvases, read from the style sheet so that themes live in one place. */
D5P4.colours = (() => {
  const ANSWERS = 8; // --answer-1 .. --answer-8

  /** The present theme: names without the leading dashes. */
  function read() {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(`--${name}`).trim();
    const found = { answers: [], font: value("sans"), mono: value("mono") };
    for (const name of [
      "bg",
      "surface",
      "ink",
      "muted",
      "line",
      "faint",
      "dot",
      "edge",
      "a",
      "b",
      "c",
      "d",
      "sure",
      "unsure",
      "mask",
      "right",
      "wrong",
      "now",
      "heat-low",
      "heat-high",
    ]) {
      found[name] = value(name);
    }
    for (let i = 1; i <= ANSWERS; i += 1) found.answers.push(value(`answer-${i}`));
    return found;
  }

  const answer = (colours, rank) => colours.answers[rank % colours.answers.length];

  function channels(hex) {
    return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  }

  /** Between two #rrggbb colours, 0 <= t <= 1. */
  function mix(from, to, t) {
    const [a, b] = [channels(from), channels(to)];
    return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * t)).join(",")})`;
  }

  /** A canvas of this size in CSS pixels, sharp on dense screens; its context, cleared. */
  function prepare(canvas, width, height) {
    const ratio = Math.max(1, window.devicePixelRatio || 1);
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
      canvas.style.setProperty("width", `${width}px`);
      canvas.style.setProperty("height", `${height}px`);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return context;
  }

  return { read, answer, mix, prepare };
})();
