"use strict";
/* The lineage: every step's pool as a column, lines from parents to children, those that lead to answers coloured. */
D5P4.lineage = (() => {
  const TOP = 22;
  const LEFT = 12;
  const RIGHT = 30;
  const NARROWEST = 6.5; // pixels between two columns; longer runs show a part around the step
  const GAP = 0.7; // rows between two groups

  /** Where things are for a picture of this size. `around` is the step that has to be seen. */
  function plan(replay, width, height, around) {
    const columns = replay.steps + 1; // the last one is the answers
    const room = width - LEFT - RIGHT;
    const count = Math.min(columns, Math.max(2, Math.floor(room / NARROWEST) + 1));
    const first = Math.max(0, Math.min(columns - count, Math.round(around - (count - 1) / 2)));
    const pitch = room / (count - 1);
    const heights = [];
    for (let step = first; step < Math.min(first + count, replay.steps); step += 1) {
      heights[step] = rowHeights(replay.trace.pools[step].group, height - TOP - 8);
    }
    return {
      first,
      last: first + count - 1,
      pitch,
      x: (step) => LEFT + (step - first) * pitch,
      y: (step, row) => TOP + heights[step][row],
    };
  }

  function rowHeights(group, height) {
    const gaps = group.map((g, row) => (row && g !== group[row - 1] ? 1 : 0));
    const total = group.length + GAP * gaps.reduce((a, b) => a + b, 0);
    let at = 0.5;
    return group.map((_, row) => {
      at += gaps[row] * GAP + (row ? 1 : 0);
      return (at / total) * height;
    });
  }

  /** Heights of the answers in the last column: at their parents, pushed apart so that numbers can be read. */
  function answerHeights(replay, where, height) {
    const found = replay.trace.answers.map((answer, rank) => ({
      rank,
      y: where.last > replay.steps - 1 ? where.y(replay.steps - 1, answer.lineage[replay.steps - 1]) : 0,
    }));
    const space = Math.min(18, (height - TOP) / Math.max(1, found.length));
    found.sort((p, q) => p.y - q.y || p.rank - q.rank);
    found.forEach((item, i) => {
      if (i) item.y = Math.max(item.y, found[i - 1].y + space);
    });
    for (let i = found.length - 1; i >= 0; i -= 1) {
      const limit = i === found.length - 1 ? height - 10 : found[i + 1].y - space;
      found[i].y = Math.min(found[i].y, limit);
    }
    const heights = [];
    for (const item of found) heights[item.rank] = item.y;
    return heights;
  }

  function curve(context, x0, y0, x1, y1) {
    const middle = (x0 + x1) / 2;
    context.moveTo(x0, y0);
    context.bezierCurveTo(middle, y0, middle, y1, x1, y1);
  }

  /** Draw into a context. `focus`: {step, row} whose ancestors are stressed. */
  function draw(context, replay, width, height, { step, focus, colours }) {
    const where = plan(replay, width, height, focus ? focus.step : step);
    const { trace } = replay;
    const lastPool = Math.min(where.last, replay.steps - 1);
    const ends = answerHeights(replay, where, height);
    band(context, where, step, height, colours);
    axis(context, where, replay, colours);

    context.lineWidth = 1;
    context.strokeStyle = colours.faint;
    context.beginPath();
    for (let t = Math.max(1, where.first + 1); t <= lastPool; t += 1) {
      trace.pools[t].group.forEach((_, row) => {
        if (replay.lines[t].has(row)) return;
        curve(context, where.x(t - 1), where.y(t - 1, replay.parent(t, row)), where.x(t), where.y(t, row));
      });
    }
    context.stroke();

    context.lineWidth = 2;
    for (let t = where.first + 1; t <= where.last; t += 1) {
      trace.answers.forEach((answer, rank) => {
        const from = answer.lineage[t - 1];
        const shift = offset(replay.lines[t - 1].get(from), rank);
        const y =
          t < replay.steps
            ? where.y(t, answer.lineage[t]) + offset(replay.lines[t].get(answer.lineage[t]), rank)
            : ends[rank];
        context.strokeStyle = D5P4.colours.answer(colours, rank);
        context.beginPath();
        curve(context, where.x(t - 1), where.y(t - 1, from) + shift, where.x(t), y);
        context.stroke();
      });
    }

    nodes(context, where, replay, lastPool, colours);
    if (focus) path(context, where, replay, focus, colours);
    if (where.last === replay.steps) {
      trace.answers.forEach((_, rank) => label(context, where.x(replay.steps), ends[rank], rank, colours));
    }
    return where;
  }

  /** Answers that share a line lie side by side. */
  function offset(sharing, rank) {
    return sharing && sharing.length > 1 ? (sharing.indexOf(rank) - (sharing.length - 1) / 2) * 2.2 : 0;
  }

  function band(context, where, step, height, colours) {
    if (step < where.first || step > where.last) return;
    const half = Math.min(10, where.pitch / 2);
    context.fillStyle = colours.now;
    context.fillRect(where.x(step) - half, TOP - 8, 2 * half, height - TOP + 8);
  }

  function axis(context, where, replay, colours) {
    context.fillStyle = colours.muted;
    context.font = `11px ${colours.font}`;
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    const every = [1, 2, 5, 10, 20, 50, 100].find((n) => n * where.pitch > 34) || 200;
    for (let t = where.first; t <= where.last; t += 1) {
      const done = t === replay.steps;
      const close = replay.steps - t < 34 / where.pitch && where.last === replay.steps;
      if (done || (t % every === 0 && !close)) context.fillText(done ? "end" : String(t), where.x(t), 11);
    }
  }

  function nodes(context, where, replay, lastPool, colours) {
    for (let t = where.first; t <= lastPool; t += 1) {
      const size = replay.size(t);
      const small = size > 40 ? 1 : 1.6;
      const chosen = new Set(replay.trace.pools[t].chosen);
      for (let row = 0; row < size; row += 1) {
        const sharing = replay.lines[t].get(row);
        context.beginPath();
        context.fillStyle = sharing
          ? D5P4.colours.answer(colours, sharing[0])
          : chosen.has(row) && chosen.size < size
            ? colours.muted
            : colours.dot;
        const radius = sharing ? small + 1.5 : chosen.has(row) ? small + 0.8 : small;
        context.arc(where.x(t), where.y(t, row), radius, 0, 2 * Math.PI);
        context.fill();
      }
    }
  }

  function path(context, where, replay, focus, colours) {
    context.strokeStyle = colours.ink;
    context.lineWidth = 1.5;
    context.beginPath();
    for (let t = focus.step, row = focus.row; t > where.first && t <= where.last; t -= 1) {
      const parent = replay.parent(t, row);
      curve(context, where.x(t - 1), where.y(t - 1, parent), where.x(t), where.y(t, row));
      row = parent;
    }
    context.stroke();
    if (focus.step < where.first || focus.step > where.last) return;
    context.beginPath();
    context.arc(where.x(focus.step), where.y(focus.step, focus.row), 6, 0, 2 * Math.PI);
    context.stroke();
  }

  function label(context, x, y, rank, colours) {
    const right = x + 14;
    context.fillStyle = D5P4.colours.answer(colours, rank);
    context.beginPath();
    context.arc(right, y, 8, 0, 2 * Math.PI);
    context.fill();
    context.fillRect(x, y - 1, 8, 2);
    context.fillStyle = colours.surface;
    context.font = `bold 10px ${colours.font}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(String(rank + 1), right, y + 0.5);
  }

  /** One height for all runs, so that they compare. */
  function heightFor(replays) {
    const widest = Math.max(...replays.map((replay) => replay.widest));
    return Math.min(460, Math.max(170, widest * 13)) + TOP;
  }

  return { draw, heightFor, LEFT };
})();
