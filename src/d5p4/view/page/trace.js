"use strict";
/* A trace read back: the rows of every pool from what each has that its parent had not. */
D5P4.trace = (() => {
  const FORMAT = "d5p4-trace/3";

  /** The traces of a file or an answer of the server; throws a sentence where there are none. */
  function read(value) {
    const traces = Array.isArray(value) ? value : value && Array.isArray(value.traces) ? value.traces : [value];
    if (!traces.length) throw new Error("there is no trace in this file");
    for (const trace of traces) {
      if (!trace || trace.format !== FORMAT) throw new Error(`this file is not a d5p4 trace (format ${FORMAT})`);
      if (!Array.isArray(trace.pools) || !Array.isArray(trace.answers) || !Array.isArray(trace.pieces)) {
        throw new Error("this trace is damaged: pools, answers or pieces are missing");
      }
    }
    return traces.map((trace) => new Replay(trace));
  }

  class Replay {
    constructor(trace) {
      this.trace = trace;
      this.steps = trace.pools.length;
      this.length = trace.length;
      this.ends = new Set(trace.end);
      this.holes = trace.frame ? trace.frame.filter((piece) => piece === null).length : 0;
      this.timelines = trace.answers.map((answer) => this.timeline(this.steps, answer.row));
      this.lines = this.answersOfRows();
      this.tree = D5P4.tree.plant(this);
    }

    /** Whether rows are chosen before they are run; such a run has no candidates besides its beams. */
    get isTree() {
      return this.trace.pools[0].quality === null;
    }

    /** The pool before a step; after the last step, the final rows. */
    pool(step) {
      return step < this.steps ? this.trace.pools[step] : this.trace.final;
    }

    size(step) {
      return this.pool(step).parents.length;
    }

    get widest() {
      return Math.max(...this.trace.pools.map((pool) => pool.group.length));
    }

    /** The rows of a pool that lived on as beams; of a tree all, and after the last step all. */
    beams(step) {
      if (step < this.steps) return new Set(this.trace.pools[step].chosen);
      return this.trace.final.parents.keys();
    }

    /** The [step, row] that a row comes from; null in the first pool. */
    parent(step, row) {
      return this.pool(step).parents[row];
    }

    /** For each position of a row: [step it is there from, piece, logprob], or null where it is masked. */
    timeline(step, row) {
      const found = new Array(this.length).fill(null);
      for (let at = [step, row]; at; at = this.parent(...at)) {
        const changes = this.pool(at[0]).changes[at[1]];
        for (const [position, piece, logprob] of changes) found[position] = [at[0], piece, logprob];
      }
      return found;
    }

    /** An answer at a step (its ancestor in that pool; after the last step itself): [piece, logprob] or null. */
    answerRow(rank, step) {
      return this.timelines[rank].map((entry) => (entry && entry[0] <= step ? [entry[1], entry[2]] : null));
    }

    /** Any row of a pool. */
    row(step, row) {
      return this.timeline(step, row).map((entry) => entry && [entry[1], entry[2]]);
    }

    /** Where the text of a row ends: at its first end-of-text behind the holes. */
    endOf(row) {
      const end = row.findIndex((entry, position) => entry && position >= this.holes && this.ends.has(entry[0]));
      return end < 0 ? row.length : end;
    }

    isComplete(step, row) {
      const cells = this.row(step, row);
      return cells.slice(0, this.endOf(cells)).every(Boolean);
    }

    /** Per step: which answers descend from a row. */
    answersOfRows() {
      const lines = Array.from({ length: this.steps + 1 }, () => new Map());
      this.trace.answers.forEach((answer, rank) => {
        for (let at = [this.steps, answer.row]; at; at = this.parent(...at)) {
          const [step, row] = at;
          lines[step].set(row, [...(lines[step].get(row) || []), rank]);
        }
      });
      return lines;
    }

    /** The last step up to this one whose similarity matrix was kept; -1 where there is none. */
    keptStep(step) {
      let t = Math.min(step, this.steps - 1);
      while (t >= 0 && !this.trace.pools[t].similarity) t -= 1;
      return t;
    }

    similarity(step, i, j) {
      if (i === j) return 1;
      const [high, low] = i > j ? [i, j] : [j, i];
      return this.trace.pools[step].similarity[(high * (high - 1)) / 2 + low];
    }

    /** The most similar other row: {row, value}; null where it is not known. */
    nearest(step, row) {
      if (!this.pool(step).similarity) return null;
      let best = null;
      for (let other = 0; other < this.size(step); other += 1) {
        const value = other === row ? null : this.similarity(step, row, other);
        if (value !== null && (best === null || value > best.value)) best = { row: other, value };
      }
      return best;
    }

    /** A token by itself, as a label. */
    pieceText(piece) {
      if (this.ends.has(piece)) return "end";
      const text = this.trace.pieces[piece];
      if (Array.isArray(text)) return text.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
      return text.trim() || text.replace(/ /g, "␣").replace(/\n/g, "↵") || "∅";
    }

    /** What is shown of a row: [{text, chance, masked, end, given}] before the end of its text. */
    tokens(row) {
      const shown = row.slice(0, this.endOf(row));
      const cells = shown.map((entry) => (entry ? { piece: entry[0], logprob: entry[1] } : null));
      return D5P4.tokens.spell(this.framed(cells), this.trace.pieces, this.ends);
    }

    /** Window cells inside the text whose holes they fill. */
    framed(cells) {
      if (!this.trace.frame) return cells;
      const rest = cells.slice();
      const around = this.trace.frame.map((piece) => (piece === null ? rest.shift() || null : { piece, given: true }));
      return around.concat(rest);
    }

    text(row) {
      return this.tokens(row)
        .map((token) => (token.masked ? "░" : token.text))
        .join("");
    }

    get mean() {
      const average = (values) => {
        const known = values.filter((value) => value !== null && value !== undefined);
        return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
      };
      return {
        score: average(this.trace.answers.map((answer) => answer.score)),
        distance: average(this.trace.answers.map((answer) => answer.distance)),
      };
    }
  }

  return { FORMAT, Replay, read };
})();
