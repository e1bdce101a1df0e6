"use strict";
/* The lineage on the page: pointer and keyboard move a focus over the candidates. */
D5P4.LineageView = (() => {
  const { el, number, place } = D5P4.dom;

  class LineageView {
    constructor(replay, name, height, goTo) {
      Object.assign(this, { replay, height, goTo, step: 0, focus: null, where: null });
      this.canvas = el("canvas", { "aria-hidden": "true" });
      this.card = el("div", { class: "card", role: "status", "aria-live": "polite", hidden: true });
      this.node = el(
        "div",
        {
          class: "lineage",
          tabindex: "0",
          role: "group",
          "aria-label":
            `Lineage of ${name}. Left: the parent. Right: a child. Up and down: other candidates of the step. ` +
            "Enter: show this step.",
          on: {
            pointermove: (event) => this.point(event),
            pointerleave: () => this.leave(),
            blur: () => this.leave(),
            click: (event) => this.click(event),
            keydown: (event) => this.key(event),
          },
        },
        this.canvas,
        this.card,
      );
    }

    show(step) {
      this.step = Math.min(step, this.replay.steps);
      this.redraw();
    }

    redraw() {
      const width = this.node.clientWidth;
      if (!width) return;
      const context = D5P4.colours.prepare(this.canvas, width, this.height);
      const { step, focus } = this;
      this.where = D5P4.lineage.draw(context, this.replay, width, this.height, {
        step,
        focus,
        colours: D5P4.colours.read(),
      });
    }

    /** The candidate nearest to a pointer, within reach. */
    at(event) {
      const box = this.canvas.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const step = Math.round((x - D5P4.lineage.LEFT) / this.where.pitch) + this.where.first;
      if (step < this.where.first || step > Math.min(this.where.last, this.replay.steps - 1)) return null;
      let best = null;
      for (let row = 0; row < this.replay.size(step); row += 1) {
        const far = Math.abs(this.where.y(step, row) - y);
        if (far < 14 && (!best || far < best.far)) best = { step, row, far };
      }
      return best && { step, row: best.row };
    }

    point(event) {
      if (!this.where || event.pointerType === "touch") return;
      const found = this.at(event);
      if (!found) return this.leave();
      const same = this.focus && this.focus.step === found.step && this.focus.row === found.row;
      if (!same) this.set(found);
      return place(this.card, event.clientX, event.clientY);
    }

    click(event) {
      if (!this.where) return;
      const box = this.canvas.getBoundingClientRect();
      const step = Math.round((event.clientX - box.left - D5P4.lineage.LEFT) / this.where.pitch) + this.where.first;
      if (event.pointerType === "touch") {
        const found = this.at(event);
        if (found) {
          this.set(found);
          place(this.card, event.clientX, event.clientY);
        }
      }
      this.goTo(Math.max(0, Math.min(this.replay.steps, step)));
    }

    leave() {
      this.card.hidden = true;
      if (!this.focus) return;
      this.focus = null;
      this.redraw();
    }

    key(event) {
      const { replay } = this;
      const at = this.focus || {
        step: Math.min(this.step, replay.steps - 1),
        row: replay.trace.answers[0].lineage[Math.min(this.step, replay.steps - 1)],
      };
      const moves = {
        ArrowLeft: () => (at.step ? { step: at.step - 1, row: replay.parent(at.step, at.row) } : at),
        ArrowRight: () => this.child(at),
        ArrowUp: () => ({ step: at.step, row: Math.max(0, at.row - 1) }),
        ArrowDown: () => ({ step: at.step, row: Math.min(replay.size(at.step) - 1, at.row + 1) }),
        Escape: () => null,
        Enter: () => at,
      };
      if (!moves[event.key]) return;
      event.preventDefault();
      event.stopPropagation();
      if (event.key === "Escape") return this.leave();
      if (event.key === "Enter") this.goTo(at.step);
      this.set(this.focus ? moves[event.key]() : at);
      const box = this.canvas.getBoundingClientRect();
      place(
        this.card,
        box.left + this.where.x(this.focus.step),
        box.top + this.where.y(this.focus.step, this.focus.row),
      );
    }

    /** The child of a candidate that lived on longest by being chosen; a dead end stays. */
    child(at) {
      const pool = this.replay.trace.pools[at.step];
      const first = pool.chosen.indexOf(at.row);
      if (first < 0 || at.step + 1 >= this.replay.steps) return at;
      const rows = Array.from({ length: pool.children }, (_, c) => first * pool.children + c);
      return { step: at.step + 1, row: rows.find((row) => this.replay.isChosen(at.step + 1, row)) ?? rows[0] };
    }

    set(focus) {
      this.focus = focus;
      this.card.replaceChildren(...describe(this.replay, focus));
      this.redraw();
    }
  }

  /** What is known of a candidate, as elements. */
  function describe(replay, { step, row }) {
    const pool = replay.trace.pools[step];
    const nearest = replay.nearest(step, row);
    const line = new D5P4.tokens.Line();
    line.show(replay.tokens(replay.row(step, row)));
    const leads = replay.lines[step].get(row);
    const parent = replay.parent(step, row);
    const facts = [
      pool.chosen.includes(row) ? "chosen" : "not chosen",
      leads && `leads to answer ${leads.map((rank) => rank + 1).join(", ")}`,
      `quality ${number(pool.quality[row])}`,
      nearest && `nearest: candidate ${nearest.row}, similarity ${number(nearest.value, 3)}`,
      parent === null ? "no parent" : `parent ${parent}`,
    ].filter(Boolean);
    return [
      el("p", { class: "card-title", text: `step ${step} · candidate ${row} · group ${pool.group[row]}` }),
      line.node,
      el("p", { class: "card-facts", text: facts.join(" · ") }),
    ];
  }

  return LineageView;
})();
