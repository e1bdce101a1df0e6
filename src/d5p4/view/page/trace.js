"use strict";
/* A trace read back: the rows of every pool from what each has that its parent had not. */
D5P4.trace = (() => {
  const FORMAT = "d5p4-trace/1";

  /** The traces of a file or an answer of the server; throws a sentence where there are none. */
  function read(value) {
    const traces = Array.isArray(value) ? value : value && Array.isArray(value.traces) ? value.traces : [value];
    if (!traces.length) throw new Error("there is no trace in this file");
    for (const trace of traces) {
      if (!trace || trace.format !== FORMAT) throw new Error(`this is no trace of d5p4 (format ${FORMAT})`);
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
      this.timelines = trace.answers.map((answer) => this.timeline(answer));
      this.lines = this.answersOfRows();
    }

    size(step) {
      return this.trace.pools[step].group.length;
    }

    get widest() {
      return Math.max(...this.trace.pools.map((pool) => pool.group.length));
    }

    /** Row of the pool before that a row comes from; null in the first pool. */
    parent(step, row) {
      if (step === 0) return null;
      const before = this.trace.pools[step - 1];
      return before.chosen[Math.floor(row / before.children)];
    }

    isChosen(step, row) {
      return this.trace.pools[step].chosen.includes(row);
    }

    /** For each position of an answer: [step it is there from, piece, logprob]. */
    timeline(answer) {
      const found = new Array(this.length).fill(null);
      answer.lineage.forEach((row, step) => {
        for (const [position, piece, logprob] of this.trace.pools[step].changes[row]) {
          found[position] = [step, piece, logprob];
        }
      });
      for (const [position, piece, logprob] of answer.changes) found[position] = [this.steps, piece, logprob];
      return found;
    }

    /** An answer at a step (its ancestor in that pool; after the last step itself): [piece, logprob] or null. */
    answerRow(rank, step) {
      return this.timelines[rank].map((entry) => (entry && entry[0] <= step ? [entry[1], entry[2]] : null));
    }

    /** Any row of a pool. */
    row(step, row) {
      const found = new Array(this.length).fill(null);
      for (let t = step, r = row; t >= 0; t -= 1) {
        for (const [position, piece, logprob] of this.trace.pools[t].changes[r]) {
          if (!found[position]) found[position] = [piece, logprob];
        }
        r = this.parent(t, r);
      }
      return found;
    }

    /** Per step: which answers descend from a row. */
    answersOfRows() {
      return this.trace.pools.map((_, step) => {
        const rows = new Map();
        this.trace.answers.forEach((answer, rank) => {
          const row = answer.lineage[step];
          if (!rows.has(row)) rows.set(row, []);
          rows.get(row).push(rank);
        });
        return rows;
      });
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
      if (!this.trace.pools[step].similarity) return null;
      let best = null;
      for (let other = 0; other < this.size(step); other += 1) {
        const value = other === row ? null : this.similarity(step, row, other);
        if (value !== null && (best === null || value > best.value)) best = { row: other, value };
      }
      return best;
    }

    /** What is shown of a row: [{text, chance, masked, end, given}], without the ends behind the text. */
    tokens(row) {
      let stop = row.length;
      while (stop > 0 && row[stop - 1] && this.ends.has(row[stop - 1][0])) stop -= 1;
      const cells = row.slice(0, stop).map((entry) => (entry ? { piece: entry[0], logprob: entry[1] } : null));
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
