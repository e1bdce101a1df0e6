"use strict";
/* The similarity matrix of a pool as a heat map, as the method sees it, on one scale for all steps; after the last step,
 * that of the texts of the answers. */
D5P4.heat = (() => {
  const { el, number, place } = D5P4.dom;
  const EDGE = 16;
  const MOST_ROWS = 32; // of a table; larger pools list the chosen rows only

  /** What a heat map shows at a step: {size, value(i, j), low, by, chosen, group, names, kept}; null where nothing is
   * known. Its colours begin at the value `low`. */
  function matrix(replay, step, low) {
    const { trace } = replay;
    if (step >= replay.steps) {
      if (trace.answers.length < 2) return null;
      const answers = trace.answers.map((_, rank) => rank);
      return {
        size: answers.length,
        value: (i, j) => 1 - trace.distances[i][j],
        low: 0,
        by: "by words",
        chosen: new Set(),
        group: answers,
        names: answers.map((rank) => `answer ${rank + 1}`),
        final: true,
      };
    }
    const kept = replay.keptStep(step);
    if (kept < 0) return null;
    const pool = trace.pools[kept];
    return {
      size: pool.group.length,
      value: (i, j) => replay.similarity(kept, i, j),
      low,
      by: replay.isTree ? "by tokens" : "by hidden states",
      chosen: new Set(replay.isTree ? [] : pool.chosen),
      group: pool.group,
      names: pool.group.map((_, row) => `${replay.isTree ? "beam" : "candidate"} ${row}`),
      kept,
    };
  }

  /** The smallest value of a run over all its pools. */
  function lowest(replay) {
    const kept = replay.trace.pools.flatMap((pool) => pool.similarity || []);
    const low = kept.reduce((least, value) => (value === null ? least : Math.min(least, value)), 1);
    return low > 0.9995 ? 0.999 : Math.floor(low * 100) / 100;
  }

  /** Where the scale of each run begins: the same for all steps, and for all runs that are compared in the same way. */
  function lows(replays) {
    const alike = (one) => replays.filter((other) => other.isTree === one.isTree).map(lowest);
    return replays.map((replay) => Math.min(...alike(replay)));
  }

  function draw(context, found, side, colours) {
    const { low } = found;
    const cell = (side - EDGE) / found.size;
    for (let i = 0; i < found.size; i += 1) {
      for (let j = 0; j < found.size; j += 1) {
        const value = found.value(i, j);
        const t = value === null ? 0 : Math.max(0, Math.min(1, (value - low) / (1 - low)));
        context.fillStyle = D5P4.colours.mix(colours["heat-low"], colours["heat-high"], t);
        context.fillRect(
          EDGE + j * cell,
          EDGE + i * cell,
          Math.ceil(cell * 10) / 10 + 0.3,
          Math.ceil(cell * 10) / 10 + 0.3,
        );
      }
    }
    context.strokeStyle = colours.surface;
    context.lineWidth = found.size > 40 ? 1 : 2;
    context.beginPath();
    found.group.forEach((g, row) => {
      if (!row || g === found.group[row - 1]) return;
      const at = EDGE + row * cell;
      context.moveTo(EDGE, at);
      context.lineTo(side, at);
      context.moveTo(at, EDGE);
      context.lineTo(at, side);
    });
    context.stroke();
    marks(context, found, cell, colours);
  }

  /** Chosen rows at the edges; answers by their numbers. */
  function marks(context, found, cell, colours) {
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = `bold 11px ${colours.font}`;
    for (let row = 0; row < found.size; row += 1) {
      const at = EDGE + (row + 0.5) * cell;
      if (found.final) {
        context.fillStyle = D5P4.colours.answer(colours, row);
        if (cell > 9) context.fillText(String(row + 1), EDGE / 2, at);
        if (cell > 9) context.fillText(String(row + 1), at, EDGE / 2);
      } else if (found.chosen.has(row)) {
        const thick = Math.max(2, Math.min(6, cell * 0.7));
        context.fillStyle = colours.ink;
        context.fillRect(EDGE - 8, at - thick / 2, 6, thick);
        context.fillRect(at - thick / 2, EDGE - 8, thick, 6);
      }
    }
  }

  /** Why there is no matrix. */
  const missing = (replay) => (replay.widest < 2 ? "there is only one candidate" : "no similarities were kept");

  class View {
    constructor(replay, name, low) {
      Object.assign(this, { replay, step: 0, low, found: null, side: 0 });
      this.canvas = el("canvas", { role: "img", "aria-label": `similarity of the candidates of ${name}` });
      this.card = el("div", { class: "card", hidden: true });
      this.caption = el("p", { class: "caption" });
      this.kind = el("span");
      this.least = el("span", { class: "low" });
      this.body = el("div", {
        class: "table-scroll",
        tabindex: "0",
        role: "region",
        "aria-label": `similarities of ${name}`,
      });
      this.table = el(
        "details",
        { class: "as-table", on: { toggle: () => this.fillTable() } },
        el("summary", { text: "as a table" }),
        this.body,
      );
      this.canvas.addEventListener("pointermove", (event) => this.point(event));
      this.canvas.addEventListener("pointerleave", () => (this.card.hidden = true));
      this.node = el(
        "figure",
        { class: "heat" },
        el(
          "p",
          { class: "help" },
          this.kind,
          this.least,
          el("span", { class: "ramp heat-ramp", "aria-hidden": "true" }),
          "1",
        ),
        this.canvas,
        this.card,
        el("figcaption", {}, this.caption, this.table),
      );
    }

    show(step) {
      this.step = step;
      this.found = matrix(this.replay, step, this.low);
      this.redraw();
      this.fillTable();
    }

    redraw() {
      const width = this.node.clientWidth;
      if (!width) return;
      if (!this.found) {
        this.canvas.hidden = true;
        this.caption.textContent = missing(this.replay);
        return;
      }
      this.canvas.hidden = false;
      this.side = Math.min(width, 340);
      const context = D5P4.colours.prepare(this.canvas, this.side, this.side);
      draw(context, this.found, this.side, D5P4.colours.read());
      const { size, kept, final, low, by } = this.found;
      this.kind.textContent = `${by} `;
      this.least.textContent = number(low, low > 0.99 ? 3 : 2);
      const late = kept === this.step ? "" : " (the last matrix that was kept)";
      this.caption.textContent = final
        ? "similarity of the answers to each other"
        : `pool of ${size} at step ${kept}${late}${this.replay.isTree ? "" : "; bars mark chosen candidates"}`;
    }

    point(event) {
      if (!this.found) return;
      const box = this.canvas.getBoundingClientRect();
      const cell = (this.side - EDGE) / this.found.size;
      const j = Math.floor((event.clientX - box.left - EDGE) / cell);
      const i = Math.floor((event.clientY - box.top - EDGE) / cell);
      if (i < 0 || j < 0 || i >= this.found.size || j >= this.found.size) {
        this.card.hidden = true;
        return;
      }
      const names = `${this.found.names[i]} and ${this.found.names[j]}`;
      this.card.replaceChildren(el("p", { text: `${names}: ${number(this.found.value(i, j), 3)}` }));
      place(this.card, event.clientX, event.clientY);
    }

    /** The same numbers for whoever reads tables; made only when it is open. */
    fillTable() {
      if (!this.table.open || !this.found) return;
      const { found } = this;
      const all = Array.from({ length: found.size }, (_, row) => row);
      const rows = found.size <= MOST_ROWS ? all : all.filter((row) => found.chosen.has(row));
      const head = el(
        "tr",
        {},
        el("td"),
        rows.map((row) => el("th", { scope: "col", text: found.names[row] })),
      );
      const body = rows.map((i) =>
        el(
          "tr",
          {},
          el("th", { scope: "row", text: `${found.names[i]}${found.chosen.has(i) ? " (chosen)" : ""}` }),
          rows.map((j) => el("td", { text: number(found.value(i, j), 3) })),
        ),
      );
      this.body.replaceChildren(el("table", {}, el("thead", {}, head), el("tbody", {}, body)));
    }
  }

  return { matrix, lows, draw, View };
})();
