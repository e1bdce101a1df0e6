"use strict";
/* Quality against difference: every answer of every run, score over the distance to its nearest neighbour. */
D5P4.scatter = (() => {
  const { el, side, number, figure, place } = D5P4.dom;
  const PAD = { left: 58, right: 16, top: 14, bottom: 38 };

  /** [{run, rank, x, y, right}] of the answers that have both numbers. */
  function points(replays) {
    return replays.flatMap((replay, run) =>
      replay.trace.answers
        .map((answer, rank) => ({
          run,
          rank,
          x: answer.distance,
          y: answer.score,
          right: answer.right,
          text: answer.text,
        }))
        .filter((point) => point.x !== null && point.y !== null),
    );
  }

  function scale(values, from, to, zero) {
    let low = zero ? 0 : Math.min(...values);
    let high = Math.max(...values);
    const room = (high - low || Math.abs(high) || 1) * 0.12;
    low -= zero ? room / 2 : room;
    high += room;
    return { low, high, at: (value) => from + ((value - low) / (high - low)) * (to - from) };
  }

  /** Round values between two bounds. */
  function ticks(low, high, count = 4) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    const found = [];
    for (let n = Math.ceil(low / step); n * step <= high; n += 1) found.push(n * step);
    return { values: found, digits: Math.max(0, -Math.floor(Math.log10(step))) };
  }

  /** Axes and markers; the markers that were drawn. */
  function draw(context, replays, width, height, colours) {
    const found = points(replays);
    if (!found.length) return [];
    const x = scale(
      found.map((point) => point.x),
      PAD.left,
      width - PAD.right,
      true,
    );
    const y = scale(
      found.map((point) => point.y),
      height - PAD.bottom,
      PAD.top,
      false,
    );
    context.font = `11px ${colours.font}`;
    context.fillStyle = colours.muted;
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    const horizontal = ticks(x.low, x.high);
    const vertical = ticks(y.low, y.high);
    context.textAlign = "center";
    context.textBaseline = "top";
    context.beginPath();
    for (const value of horizontal.values) {
      context.moveTo(x.at(value), PAD.top);
      context.lineTo(x.at(value), height - PAD.bottom);
      context.fillText(number(value, horizontal.digits), x.at(value), height - PAD.bottom + 6);
    }
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of vertical.values) {
      context.moveTo(PAD.left, y.at(value));
      context.lineTo(width - PAD.right, y.at(value));
      context.fillText(number(value, vertical.digits), PAD.left - 6, y.at(value));
    }
    context.stroke();
    context.textAlign = "center";
    context.textBaseline = "bottom";
    context.fillText("distance to the nearest other answer →", (PAD.left + width - PAD.right) / 2, height - 2);
    context.save();
    context.translate(11, (PAD.top + height - PAD.bottom) / 2);
    context.rotate(-Math.PI / 2);
    context.fillText("score →", 0, 4);
    context.restore();
    const placed = found.map((point) => ({ ...point, px: x.at(point.x), py: y.at(point.y) }));
    const area = { left: PAD.left, right: width, top: 0, bottom: height - PAD.bottom };
    const markers = D5P4.markers.arrange(context, placed, area, colours);
    D5P4.markers.draw(context, markers, colours);
    return markers;
  }

  class View {
    constructor(replays) {
      this.replays = replays;
      this.markers = [];
      this.canvas = el("canvas", {
        role: "img",
        "aria-label": "score of each answer over its distance to the nearest other answer",
      });
      this.card = el("div", { class: "card", hidden: true });
      this.alone = el("p", { class: "caption", text: "there is only one answer, so it has no distance to another" });
      this.canvas.addEventListener("pointermove", (event) => this.point(event));
      this.canvas.addEventListener("pointerleave", () => (this.card.hidden = true));
      const graded = replays.some((replay) => replay.trace.right !== null);
      const keys = replays.map((replay, run) =>
        el("span", { class: `key key-${side(run)}`, text: replay.trace.method }),
      );
      this.node = el(
        "figure",
        { class: "scatter" },
        this.canvas,
        this.alone,
        this.card,
        el(
          "figcaption",
          {},
          el("p", { class: "caption" }, keys, graded ? el("span", { text: "hollow markers are wrong answers" }) : ""),
          el("details", { class: "as-table" }, el("summary", { text: "as a table" }), this.table()),
        ),
      );
    }

    table() {
      const rows = this.replays.flatMap((replay) =>
        replay.trace.answers.map((answer, rank) =>
          el(
            "tr",
            {},
            el("th", { scope: "row", text: `${replay.trace.method} ${rank + 1}` }),
            el("td", { text: number(answer.distance, 3) }),
            el("td", { text: figure(answer.score) }),
            el("td", { text: answer.right === null ? "–" : answer.right ? "right" : "wrong" }),
          ),
        ),
      );
      const head = ["answer", "distance", "score", "graded"].map((text) => el("th", { scope: "col", text }));
      const table = el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows));
      return el(
        "div",
        { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "scores and distances" },
        table,
      );
    }

    redraw() {
      const width = Math.min(this.node.clientWidth, 560);
      if (!width) return;
      this.canvas.hidden = !points(this.replays).length;
      this.alone.hidden = !this.canvas.hidden;
      if (this.canvas.hidden) return;
      const height = Math.min(340, Math.max(240, width * 0.72));
      const context = D5P4.colours.prepare(this.canvas, width, height);
      this.markers = draw(context, this.replays, width, height, D5P4.colours.read());
    }

    point(event) {
      const box = this.canvas.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const near = D5P4.markers.at(this.markers, x, y);
      if (!near) {
        this.card.hidden = true;
        return;
      }
      const { method } = this.replays[near.run].trace;
      const [first] = near.points;
      this.card.replaceChildren(
        el("p", { class: "card-title", text: `${method}, answer ${near.label}` }),
        ...[...new Set(near.points.map((point) => point.text))].map((text) => el("p", { class: "line", text })),
        el("p", { class: "card-facts", text: `score ${figure(first.y)} · distance ${number(first.x, 3)}` }),
      );
      place(this.card, event.clientX, event.clientY);
    }
  }

  return { draw, View };
})();
