"use strict";
/* The beams as a tree: steps run to the right, each beam is a line, and lines part where their tokens do. */
D5P4.tree = (() => {
  const { el, number, figure, place } = D5P4.dom;
  const TOP = 24;
  const LEFT = 12;
  const NARROW = 620; // below this width, the ends of the lines have numbers and no texts

  const key = (step, row) => `${step} ${row}`;

  /** The beams of a run as nodes with a lane each, so that no two lines meet. Made once per run. */
  function plant(replay) {
    const nodes = new Map();
    for (let step = 0; step <= replay.steps; step += 1) {
      for (const row of replay.beams(step)) {
        const parent = nodes.get(key(...(replay.parent(step, row) || []))) || null;
        const ranks = replay.lines[step].get(row) || [];
        const node = { step, row, parent, ranks, children: [], lane: 0, label: null, lives: false };
        if (parent) parent.children.push(node);
        nodes.set(key(step, row), node);
      }
    }
    const all = [...nodes.values()];
    for (const node of all.filter((one) => one.step === replay.steps)) {
      for (let at = node; at && !at.lives; at = at.parent) at.lives = true; // it has a line to the end
    }
    for (const node of all) nameBranches(replay, node);
    const lanes = arrange(all, inOrder(all.filter((node) => !node.parent)));
    for (const node of all) if (node.parent) node.lane += node.parent.lane; // parents come first
    const stops = replay.trace.settings.stop; // only then is a row complete before the last step
    for (const node of all) {
      node.complete = !!node.parent && (node.parent.complete || (!!stops && replay.isComplete(node.step, node.row)));
    }
    const named = all.filter((node) => node.label).sort((p, q) => p.lane - q.lane || p.step - q.step);
    return { all, named, find: (step, row) => nodes.get(key(step, row)), lanes };
  }

  /** Siblings get the token by which they differ. */
  function nameBranches(replay, node) {
    if (node.children.length < 2) return;
    const own = node.children.map((child) => new Map(replay.pool(child.step).changes[child.row].map((c) => [c[0], c])));
    node.children.forEach((child, i) => {
      const differing = [...own[i].values()].filter(([position, piece]) =>
        own.some((other) => other.has(position) && other.get(position)[1] !== piece),
      );
      differing.sort((p, q) => (p[2] ?? 0) - (q[2] ?? 0));
      if (!differing.length) return;
      const [, piece, logprob] = differing[0];
      child.label = { text: replay.pieceText(piece), chance: logprob === null ? null : Math.exp(logprob) };
    });
    inOrder(node.children);
  }

  /** Beams that live come first, then the likelier ones. The first one goes straight on. */
  function inOrder(nodes) {
    const chance = (node) => (node.label ? node.label.chance : 0);
    return nodes.sort((p, q) => q.lives - p.lives || chance(q) - chance(p));
  }

  /** Give every node a lane below its parent's, as near as its siblings allow. Returns the number of lanes. */
  function arrange(all, roots) {
    const below = new Map(); // per node, the lowest and the highest lane at each step, counted from the node's own
    const join = (into, child, offset, from) => {
      const { low, high } = below.get(child);
      for (let step = from; step < child.step; step += 1) low[step] = high[step] = 0;
      low.forEach((lane, step) => {
        into.low[step] = Math.max(into.low[step] ?? -1, lane + offset);
        into.high[step] = Math.min(into.high[step] ?? Infinity, high[step] + offset);
      });
    };
    const stack = (into, children, from) => {
      children.forEach((child, i) => {
        let offset = 0;
        const { high } = below.get(child);
        for (let step = from; i && step < child.step; step += 1) offset = Math.max(offset, (into.low[step] ?? -1) + 1);
        if (i) high.forEach((lane, step) => (offset = Math.max(offset, (into.low[step] ?? -1) + 1 - lane)));
        child.lane = offset;
        join(into, child, offset, from);
        below.delete(child);
      });
    };
    for (const node of [...all].reverse()) {
      const shape = node.children.length === 1 ? below.get(node.children[0]) : { low: [], high: [] };
      if (node.children.length === 1) {
        const [only] = node.children;
        for (let step = node.step + 1; step < only.step; step += 1) shape.low[step] = shape.high[step] = 0;
      } else stack(shape, node.children, node.step + 1);
      shape.low[node.step] = shape.high[node.step] = 0;
      below.set(node, shape);
    }
    const whole = { low: [], high: [] };
    stack(whole, roots, 0);
    return Math.max(...whole.low.filter((lane) => lane !== undefined)) + 1;
  }

  /** Where things are in a picture that is at least `width` wide. */
  function plan(replay, context, width, colours) {
    const { lanes } = replay.tree;
    const space = Math.max(8, Math.min(24, 420 / lanes));
    context.font = `12px ${colours.mono}`;
    const longest = Math.max(0, ...replay.trace.answers.map((answer) => context.measureText(answer.text).width));
    const leaf = width < NARROW ? 46 : 52 + Math.min(longest, 0.4 * width);
    const late = replay.tree.named.some((node) => node.step === replay.steps) ? 34 : 0; // room for the last labels
    const x = columns(replay, width - LEFT - late - leaf);
    const end = x[replay.steps] + late;
    return {
      space,
      leaf,
      end,
      width: end + leaf,
      height: TOP + lanes * space + 6,
      x: (step) => x[step],
      pitch: (step) => x[Math.min(step + 1, replay.steps)] - x[Math.min(step, replay.steps - 1)],
      y: (node) => Math.round(TOP + (node.lane + 0.6) * space),
      step: (at) => x.reduce((best, one, step) => (Math.abs(one - at) < Math.abs(x[best] - at) ? step : best), 0),
    };
  }

  /** The place of every step, in whole pixels. Where room is scarce, steps at which beams part get more of it. */
  function columns(replay, room) {
    const forks = new Set(replay.tree.named.map((node) => node.parent.step));
    const others = replay.steps - forks.size;
    const even = room / replay.steps;
    const wide = Math.max(24, even, Math.min(48, (room - 4 * others) / Math.max(1, forks.size)));
    const slim = even >= wide ? even : Math.max(4, (room - wide * forks.size) / Math.max(1, others));
    const x = [LEFT];
    for (let step = 0; step < replay.steps; step += 1) x.push(x[step] + (forks.has(step) ? wide : slim));
    return x.map(Math.round);
  }

  /** Draw into a context and return where things are. The ancestors of the node `focus` are stressed. */
  function draw(context, replay, width, { step, focus, colours }) {
    const where = plan(replay, context, width, colours);
    const { all } = replay.tree;
    band(context, where, step, colours);
    axis(context, where, replay, colours);
    for (const node of all) if (!node.lives) edge(context, where, node, colours);
    for (const node of all) if (node.lives) edge(context, where, node, colours);
    for (const node of all) ends(context, where, replay, node, colours);
    if (focus) path(context, where, focus, colours);
    if (where.space >= 15) labels(context, where, replay.tree.named, replay.steps, colours);
    leaves(context, where, replay, colours);
    return where;
  }

  function colourOf(node, colours) {
    if (node.ranks.length === 1) return D5P4.colours.answer(colours, node.ranks[0]);
    return node.ranks.length ? colours.ink : node.lives ? colours.edge : colours.dot;
  }

  function curve(context, where, node) {
    const [from, pitch] = [where.x(node.parent.step), where.pitch(node.parent.step)];
    const [y0, y1] = [where.y(node.parent), where.y(node)];
    const middle = from + pitch * 0.25;
    context.moveTo(from, y0);
    if (y0 !== y1) context.bezierCurveTo(middle, y0, middle, y1, from + pitch * 0.5, y1);
    context.lineTo(where.x(node.step), y1);
  }

  /** The line from a parent to its child: dotted where the child slept, thin where it was complete. */
  function edge(context, where, node, colours) {
    if (!node.parent) return;
    context.strokeStyle = colourOf(node, colours);
    context.lineWidth = node.parent.complete ? 1.2 : node.ranks.length ? 2.2 : 1.4;
    context.setLineDash(node.step > node.parent.step + 1 ? [2, 4] : []);
    context.beginPath();
    curve(context, where, node);
    if (node.ranks.length && !node.children.length) context.lineTo(where.end, where.y(node));
    context.stroke();
    context.setLineDash([]);
  }

  /** A cross where a beam dies, a ring where its text is complete. */
  function ends(context, where, replay, node, colours) {
    const [x, y] = [where.x(node.step), where.y(node)];
    const size = Math.min(3.5, where.space / 4);
    context.lineWidth = 1.4;
    if (!node.children.length && node.step < replay.steps) {
      context.strokeStyle = colours.muted;
      context.beginPath();
      context.moveTo(x - size, y - size);
      context.lineTo(x + size, y + size);
      context.moveTo(x - size, y + size);
      context.lineTo(x + size, y - size);
      context.stroke();
    } else if (node.complete && !node.parent.complete && node.step < replay.steps) {
      context.strokeStyle = colourOf(node, colours);
      context.fillStyle = colours.surface;
      context.beginPath();
      context.arc(x, y, size, 0, 2 * Math.PI);
      context.fill();
      context.stroke();
    }
  }

  /** Where beams part: the token and its probability, above the line, as far as there is room. */
  function labels(context, where, named, steps, colours) {
    const start = (node) => where.x(node.parent.step) + where.pitch(node.parent.step) * 0.5;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    named.forEach((node, i) => {
      const { text, chance } = node.label;
      const next = named[i + 1];
      const [left, bottom] = [start(node) + 1, where.y(node) - 4];
      const room = (next && next.lane === node.lane ? start(next) : Infinity) - left - 3;
      const dies = node.step < steps && !node.children.length; // then lines from above may pass behind its end
      context.font = `600 11px ${colours.mono}`;
      const short = text.length > 12 ? `${text.slice(0, 11)}…` : text;
      const wide = context.measureText(short).width + 6;
      if (wide > room) return;
      context.fillStyle = D5P4.colours.mix(colours.unsure, colours.sure, D5P4.tokens.shade(chance ?? 1));
      context.beginPath();
      context.roundRect(left, bottom - 11, wide, 13, 3);
      context.fill();
      context.fillStyle = colours.ink;
      context.fillText(short, left + 3, bottom);
      context.font = `10px ${colours.font}`;
      const percent = chance === null ? "" : D5P4.tokens.percent(chance);
      context.fillStyle = colours.muted;
      const most = dies ? Math.min(room, where.x(node.step) + 0.2 * where.pitch(node.parent.step) - left) : room;
      if (wide + context.measureText(percent).width + 4 <= most) context.fillText(percent, left + wide + 3, bottom);
    });
  }

  /** The answers at the ends of their lines, pushed apart where there are many lines. */
  function leaves(context, where, replay, colours) {
    const found = replay.trace.answers.map((answer, rank) => ({
      answer,
      rank,
      y: where.y(replay.tree.find(replay.steps, answer.row)),
    }));
    found.sort((p, q) => p.y - q.y);
    found.forEach((one, i) => i && (one.y = Math.max(one.y, found[i - 1].y + 15)));
    for (let i = found.length - 1, least = where.height - 9; i >= 0; i -= 1) {
      found[i].y = Math.min(found[i].y, least);
      least = found[i].y - 15;
    }
    const x = where.end;
    for (const { answer, rank, y } of found) {
      context.fillStyle = D5P4.colours.answer(colours, rank);
      context.beginPath();
      context.arc(x + 8, y, 8, 0, 2 * Math.PI);
      context.fill();
      context.fillStyle = colours.surface;
      context.font = `bold 10px ${colours.font}`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(String(rank + 1), x + 8, y + 0.5);
      context.textAlign = "left";
      if (answer.right !== null) {
        context.fillStyle = answer.right ? colours.right : colours.wrong;
        context.font = `bold 12px ${colours.font}`;
        context.fillText(answer.right ? "✓" : "✗", x + 21, y + 0.5);
      }
      if (where.leaf < 60) continue;
      context.fillStyle = colours.ink;
      context.font = `12px ${colours.mono}`;
      const left = answer.right === null ? 22 : 36;
      context.fillText(fitted(context, answer.text.replace(/\s+/g, " "), where.leaf - left - 10), x + left, y + 0.5);
    }
  }

  function fitted(context, text, width) {
    if (context.measureText(text).width <= width + 1) return text;
    const count = Math.floor(width / context.measureText("0").width) - 1;
    return `${text.slice(0, Math.max(0, count))}…`;
  }

  function band(context, where, step, colours) {
    const half = Math.min(10, where.pitch(step) / 2);
    context.fillStyle = colours.now;
    context.fillRect(where.x(step) - half, TOP - 8, 2 * half, where.height - TOP + 4);
  }

  /** The numbers of the steps, as many as there is room for. */
  function axis(context, where, replay, colours) {
    context.fillStyle = colours.muted;
    context.font = `11px ${colours.font}`;
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    const end = where.x(replay.steps);
    context.fillText("end", end, 11);
    context.fillText("step 0", 20, 11);
    const slimmest = Math.min(...Array.from({ length: replay.steps }, (_, step) => where.pitch(step)));
    const every = [1, 2, 5, 10, 20, 50, 100].find((n) => n * slimmest > 24) || 200;
    for (let step = 1, last = 26; step < replay.steps; step += 1) {
      const x = where.x(step);
      const round = step % every === 0 || where.pitch(step - 1) > 24;
      if (!round || x - last < 24 || end - x < 30) continue;
      context.fillText(step, x, 11);
      last = x;
    }
  }

  function path(context, where, focus, colours) {
    context.strokeStyle = colours.ink;
    context.lineWidth = 3;
    context.beginPath();
    for (let node = focus; node.parent; node = node.parent) curve(context, where, node);
    context.stroke();
    context.beginPath();
    context.arc(where.x(focus.step), where.y(focus), 6, 0, 2 * Math.PI);
    context.stroke();
  }

  /** The tree on the page: pointer and keyboard move a focus over the beams. */
  class View {
    constructor(replay, name, goTo) {
      Object.assign(this, { replay, goTo, step: 0, focus: null, where: null });
      this.canvas = el("canvas", { "aria-hidden": "true" });
      this.card = el("div", { class: "card", role: "status", "aria-live": "polite", hidden: true });
      this.node = el(
        "div",
        {
          class: "tree",
          tabindex: "0",
          role: "group",
          "aria-label":
            `Beams of ${name}. Left: the parent. Right: a child. Up and down: other beams of the step. ` +
            "Enter: show this step.",
          on: {
            pointermove: (event) => event.pointerType !== "touch" && this.point(event),
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
      if (!this.where) return;
      const [x, seen] = [this.where.x(this.step), this.node.clientWidth];
      const end = this.step === this.replay.steps ? this.where.width - x : 40;
      if (x + end > this.node.scrollLeft + seen) this.node.scrollLeft = x + end - seen;
      if (x - 40 < this.node.scrollLeft) this.node.scrollLeft = x - 40;
    }

    redraw() {
      const width = this.node.clientWidth;
      if (!width) return;
      const colours = D5P4.colours.read();
      const size = plan(this.replay, this.canvas.getContext("2d"), width, colours);
      const context = D5P4.colours.prepare(this.canvas, size.width, size.height);
      this.where = draw(context, this.replay, width, { step: this.step, focus: this.focus, colours });
    }

    /** The beam nearest to a pointer, within reach. */
    at(event) {
      const box = this.canvas.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const step = this.where.step(x);
      const far = (node) => Math.abs(this.where.y(node) - y);
      const near = this.column(step).filter((node) => far(node) < 14);
      return { step, node: near.sort((p, q) => far(p) - far(q))[0] || null };
    }

    /** The beams of a step, from top to bottom. */
    column(step) {
      return this.replay.tree.all.filter((node) => node.step === step).sort((p, q) => p.lane - q.lane);
    }

    point(event) {
      if (!this.where) return;
      const { node } = this.at(event);
      if (!node) this.leave();
      else {
        if (node !== this.focus) this.set(node);
        place(this.card, event.clientX, event.clientY);
      }
    }

    click(event) {
      if (!this.where) return;
      const { step, node } = this.at(event);
      if (node && event.pointerType === "touch") this.point(event);
      this.goTo(step);
    }

    leave() {
      this.card.hidden = true;
      if (!this.focus) return;
      this.focus = null;
      this.redraw();
    }

    key(event) {
      const { replay, focus } = this;
      const beside = (by) => {
        const column = this.column(focus.step);
        return column[Math.max(0, Math.min(column.length - 1, column.indexOf(focus) + by))];
      };
      const moves = {
        ArrowLeft: () => focus.parent || focus,
        ArrowRight: () => focus.children.find((child) => child.lives) || focus.children[0] || focus,
        ArrowUp: () => beside(-1),
        ArrowDown: () => beside(1),
        Escape: () => null,
        Enter: () => focus,
      };
      if (!moves[event.key] || !this.where) return;
      event.preventDefault();
      event.stopPropagation();
      if (event.key === "Escape") {
        this.leave();
        return;
      }
      if (focus && event.key === "Enter") this.goTo(focus.step);
      const first = () => this.column(this.step).find((node) => node.ranks.includes(0)) || this.column(this.step)[0];
      this.set(focus ? moves[event.key]() : first() || replay.tree.all[0]);
      const box = this.canvas.getBoundingClientRect();
      place(this.card, box.left + this.where.x(this.focus.step), box.top + this.where.y(this.focus));
    }

    set(focus) {
      this.focus = focus;
      this.card.replaceChildren(...describe(this.replay, focus));
      this.redraw();
    }
  }

  /** What is known of a beam, as elements. */
  function describe(replay, node) {
    const { step, row, ranks } = node;
    const pool = replay.pool(step);
    const nearest = replay.nearest(step, row);
    const line = new D5P4.tokens.Line();
    line.show(replay.tokens(replay.row(step, row)));
    const fresh = pool.changes[row].map(([, piece, logprob]) => {
      const chance = logprob === null ? "" : ` ${D5P4.tokens.percent(Math.exp(logprob))}`;
      return `“${replay.pieceText(piece)}”${chance}`;
    });
    const died = !node.children.length && step < replay.steps;
    const facts = [
      fresh.length > 0 && `revealed ${fresh.slice(0, 8).join(", ")}${fresh.length > 8 ? " …" : ""}`,
      ranks.length > 0 && `leads to answer ${ranks.map((rank) => rank + 1).join(", ")}`,
      died && "ends here",
      step === replay.steps && !ranks.length && "not among the answers",
      pool.score && `score ${figure(pool.score[row])}`,
      nearest && `similarity to the nearest beam ${number(nearest.value, 3)}`,
    ];
    return [
      el("p", { class: "card-title", text: step === replay.steps ? "end" : `step ${step}` }),
      line.node,
      el("p", { class: "card-facts", text: facts.filter(Boolean).join(" · ") }),
    ];
  }

  return { plant, plan, draw, View };
})();
