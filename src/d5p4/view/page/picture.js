"use strict";
/* The whole view as one picture: the tree, the answers and the similarity of every run, and the scatter. */
D5P4.picture = (() => {
  const { number, figure, whole } = D5P4.dom;
  const SCALE = 2;
  const PAD = 36;
  const COLUMN = 620;
  const LINE = 24;
  const HEAT = 300;

  /** Tokens broken into lines: [[{token, x, width}]]. */
  function lines(context, tokens, width, block) {
    const found = [[]];
    let x = 0;
    for (const token of tokens) {
      const text = token.masked ? "" : token.end ? "·" : token.text.replace(/\n/g, "↵");
      const wide = token.masked ? block : context.measureText(text).width;
      if (x + wide > width && x > 0) {
        found.push([]);
        x = 0;
      }
      found[found.length - 1].push({ token, text, x, width: wide });
      x += wide;
    }
    return found;
  }

  function writeTokens(context, rows, x, y, colours) {
    rows.forEach((row, i) => {
      const middle = y + i * LINE + LINE / 2;
      for (const { token, text, x: at, width } of row) {
        if (token.masked) {
          context.fillStyle = colours.mask;
          context.fillRect(x + at + 1, middle - 8, width - 2, 16);
        } else {
          if (token.chance !== null && !token.given && !token.end) {
            context.fillStyle = D5P4.colours.mix(colours.unsure, colours.sure, D5P4.tokens.shade(token.chance));
            context.fillRect(x + at, middle - 10, width, 20);
          }
          context.fillStyle = token.given || token.end ? colours.muted : colours.ink;
          context.fillText(text, x + at, middle + 1);
        }
      }
    });
  }

  /** The answers of a run from (x, y) on; the height they take. With `context` null they are only measured. */
  function answers(context, ruler, replay, step, x, y, colours) {
    const font = `15px ${colours.mono}`;
    ruler.font = font;
    const block = ruler.measureText("0").width * D5P4.tokens.blockWidth(replay.trace.pieces);
    let height = 0;
    replay.trace.answers.forEach((answer, rank) => {
      ruler.font = font;
      const tokens = replay.tokens(replay.answerRow(rank, Math.min(step, replay.steps)));
      const rows = lines(ruler, tokens, COLUMN - 150, block);
      if (context) {
        const middle = y + height + LINE / 2;
        const early = step < replay.steps;
        context.textBaseline = "middle";
        context.fillStyle = D5P4.colours.answer(colours, rank);
        context.beginPath();
        context.arc(x + 10, middle, 10, 0, 2 * Math.PI);
        context.fill();
        context.fillStyle = colours.surface;
        context.font = `bold 12px ${colours.font}`;
        context.textAlign = "center";
        context.fillText(String(rank + 1), x + 10, middle + 1);
        context.textAlign = "left";
        context.font = font;
        writeTokens(context, rows, x + 30, y + height, colours);
        context.font = `12px ${colours.font}`;
        context.textAlign = "right";
        const graded = !early && answer.right !== null;
        context.fillStyle = graded ? (answer.right ? colours.right : colours.wrong) : colours.muted;
        const mark = answer.right === null ? "" : answer.right ? "✓ " : "✗ ";
        context.fillText(`${early ? "ends " : ""}${mark}score ${figure(answer.score)}`, x + COLUMN - 4, middle);
        context.textAlign = "left";
      }
      height += rows.length * LINE + 10;
    });
    return height;
  }

  function title(context, text, x, y, colours, size = 15, colour = colours.ink) {
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.fillStyle = colour;
    context.font = `600 ${size}px ${colours.font}`;
    context.fillText(text, x, y);
  }

  /** Draw with another origin. */
  function shifted(context, x, y, f) {
    context.save();
    context.translate(x, y);
    f();
    context.restore();
  }

  function draw(replays, step) {
    const colours = D5P4.colours.read();
    const canvas = document.createElement("canvas");
    const context = canvas.getContext("2d");
    const tallest = Math.max(...replays.map((replay) => answers(null, context, replay, step, 0, 0, colours)));
    const wide = PAD + replays.length * (COLUMN + PAD);
    let width = Math.max(wide, 3 * PAD + HEAT + 400);
    const sizes = replays.map((replay) => D5P4.tree.plan(replay, context, wide - 2 * PAD, colours));
    width = Math.max(width, ...sizes.map((size) => size.width + 2 * PAD));
    const top = { answers: PAD + 92, trees: [] };
    top.heat = top.answers + tallest + 40;
    for (const size of sizes) {
      top.trees.push(top.heat);
      top.heat += size.height + 40;
    }
    const height = top.heat + HEAT + PAD + 10;
    canvas.width = width * SCALE;
    canvas.height = height * SCALE;
    context.scale(SCALE, SCALE);
    context.fillStyle = colours.surface;
    context.fillRect(0, 0, width, height);
    const { trace } = replays[0];
    title(
      context,
      trace.prompt === null ? "unconditional" : trace.prompt.replace(/\s+/g, " ").slice(0, 90),
      PAD,
      PAD + 12,
      colours,
      22,
    );
    const shownStep = step >= replays[0].steps ? "finished" : `step ${step}`;
    title(
      context,
      `${trace.model.name} · seed ${trace.seed} · k ${trace.k} · ${shownStep}`,
      PAD,
      PAD + 36,
      colours,
      13,
      colours.muted,
    );
    const lows = D5P4.heat.lows(replays);
    const matrices = replays.map((replay, i) => D5P4.heat.matrix(replay, Math.min(step, replay.steps), lows[i]));
    replays.forEach((replay, i) => {
      const x = PAD + i * (COLUMN + PAD);
      const colour = colours[D5P4.dom.side(i)];
      const right = replay.trace.right === null ? "" : ` · ${replay.trace.right} different right`;
      context.fillStyle = colour;
      context.fillRect(x, PAD + 52, COLUMN, 3);
      title(context, replay.trace.method, x, PAD + 78, colours, 16, colour);
      context.textAlign = "right";
      context.font = `13px ${colours.font}`;
      context.fillStyle = colours.muted;
      const different = `${replay.trace.distinct} of ${replay.trace.answers.length} different`;
      const ends = step < replay.steps ? "ends with " : "";
      context.fillText(`${ends}${different}${right} · ${whole(replay.trace.rows)} rows`, x + COLUMN, PAD + 78);
      answers(context, context, replay, step, x, top.answers, colours);
      const beams = { step: Math.min(step, replay.steps), focus: null, colours };
      title(context, `beams, ${replay.trace.method}`, PAD, top.trees[i] - 12, colours, 13, colour);
      shifted(context, PAD, top.trees[i], () => D5P4.tree.draw(context, replay, wide - 2 * PAD, beams));
      const left = PAD + i * (HEAT + PAD);
      title(context, `similarity, ${replay.trace.method}`, left, top.heat - 12, colours, 13, colour);
      const heat = () => D5P4.heat.draw(context, matrices[i], HEAT, colours);
      if (matrices[i]) shifted(context, left, top.heat, heat);
    });
    const rest = PAD + replays.length * (HEAT + PAD);
    title(context, "score over distance of the final answers", rest, top.heat - 12, colours, 13, colours.muted);
    shifted(context, rest, top.heat, () => D5P4.scatter.draw(context, replays, width - PAD - rest, HEAT, colours));
    return canvas;
  }

  return { draw };
})();
