"use strict";
/* One run's answers: drafts while they denoise, then the ancestors of each answer at any step. */
D5P4.answers = (() => {
  const { el, icon, side, number, figure, plural, copy, toast } = D5P4.dom;
  const COPY =
    "M7 2h9a2 2 0 0 1 2 2v9h-2V4H7zM4 6h8a2 2 0 0 1 2 2v8a2 2 0 0 1-2 2H4a2 2 0 0 1-2-2V8a2 2 0 0 1 2-2zm0 2v8h8V8z";

  class Run {
    /** `index` 0 is the left run. */
    constructor(index, method) {
      this.index = index;
      this.letter = String.fromCharCode(65 + index);
      this.method = method;
      this.replay = null;
      this.ended = false;
      this.early = false; // whether a step before the end is shown
      this.items = [];
      this.title = el("h3", {}, el("span", { class: "letter", text: this.letter }), el("span", { text: method }));
      this.headline = el("p", { class: "headline" });
      this.facts = el("p", { class: "facts" });
      this.progress = el("progress", { max: 1, value: 0, "aria-label": `progress of ${method}` });
      this.list = el("ol", { class: "answers" });
      this.node = el(
        "section",
        { class: `run run-${side(index)}`, "aria-label": `run ${this.letter}: ${method}` },
        el("header", {}, this.title, this.headline, this.facts),
        this.progress,
        this.list,
      );
    }

    /** Before the first draft. */
    wait(text) {
      this.headline.textContent = text;
      this.node.classList.add("busy");
    }

    showDrafts(step, steps, drafts) {
      this.progress.value = step / steps;
      this.headline.textContent = `step ${step} of ${steps}`;
      this.resize(drafts.length);
      this.shape(drafts.flatMap((draft) => draft.tokens.filter(Boolean)));
      drafts.forEach((draft, i) => this.items[i].line.show(D5P4.tokens.ofDraft(draft)));
    }

    /** Blocks as wide as this vocabulary's tokens; a reading face where tokens are words. */
    shape(pieces) {
      const width = D5P4.tokens.blockWidth(pieces);
      document.documentElement.style.setProperty("--block", `${width.toFixed(1)}ch`);
      this.list.classList.toggle("prose", width > 1.2);
    }

    /** The run came to nothing; `why` is a sentence. */
    fail(text, why = "") {
      this.ended = true;
      this.node.classList.remove("busy");
      this.headline.textContent = text;
      this.facts.textContent = why;
    }

    /** The run is over; its trace can be looked through. */
    finish(replay) {
      const { trace } = replay;
      this.replay = replay;
      this.ended = true;
      this.node.classList.remove("busy");
      this.progress.value = 1;
      this.facts.textContent = [
        ...parameters(replay),
        `${D5P4.dom.whole(trace.rows)} of ${D5P4.dom.whole(trace.rows_nominal)} rows`,
        trace.seconds !== null && `${number(trace.seconds, trace.seconds < 10 ? 1 : 0)} s`,
      ]
        .filter(Boolean)
        .join(" · ");
      this.shape(trace.pieces);
      this.resize(trace.answers.length);
      this.describeAll(false);
    }

    /** Counts, grades and scores are those of the end; where a step before it is shown (`early`) they say so. */
    describeAll(early) {
      const { trace } = this.replay;
      this.early = early;
      this.node.classList.toggle("early", early);
      const near = trace.near_copies ? ` · ${plural(trace.near_copies, "near copy", "near copies")}` : "";
      const different = `${trace.distinct} of ${trace.answers.length} different${near}`;
      this.headline.replaceChildren(
        early ? "ends with " : "",
        el("strong", { text: trace.right === null ? different : plural(trace.right, "different right answer") }),
        trace.right === null ? "" : ` · ${different}`,
      );
      this.items.forEach((item, rank) => this.describe(item, rank));
    }

    /** As many items as there are answers. */
    resize(count) {
      while (this.items.length > count) this.items.pop().node.remove();
      while (this.items.length < count) {
        const item = makeItem(this.items.length);
        this.items.push(item);
        this.list.append(item.node);
      }
    }

    describe(item, rank) {
      const { answers } = this.replay.trace;
      const answer = answers[rank];
      const twin = answers.findIndex((other) => other.text === answer.text);
      const badge = (kind, mark, text) =>
        el("span", { class: `badge ${kind}`, text: `${this.early ? "" : mark}${text}` });
      item.notes.replaceChildren(
        ...[
          answer.right === true && badge("right", "✓ ", "right"),
          answer.right === false && badge("wrong", "✗ ", "wrong"),
          twin < rank && badge("same", "", `same as ${twin + 1}`),
          el("span", { class: "figure", title: this.replay.trace.score_kind, text: `score ${figure(answer.score)}` }),
          answer.distance !== null &&
            el("span", {
              class: "figure",
              title: "share of words that the nearest other answer lacks",
              text: `distance ${number(answer.distance)}`,
            }),
        ].filter(Boolean),
      );
      if (this.early) item.notes.firstChild.prepend(item.notes.firstChild.matches(".badge") ? "ends " : "ends with ");
      const button = el("button", {
        type: "button",
        class: "quiet copy",
        title: "copy",
        "aria-label": `copy answer ${rank + 1} of ${this.method}`,
        on: { click: async () => toast((await copy(answer.text)) ? "answer copied" : "copying is not allowed") },
      });
      button.append(icon(COPY));
      item.copy.replaceChildren(button);
    }

    /** Show the answers as they were before step `step`; from `replay.steps` on, finished. */
    show(step, differences) {
      if (!this.replay) return;
      const at = Math.min(step, this.replay.steps);
      if (this.early !== at < this.replay.steps) this.describeAll(!this.early);
      const rows = this.replay.trace.answers.map((_, rank) => this.replay.tokens(this.replay.answerRow(rank, at)));
      const plain = rows.map((row) => row.map((token) => (token.masked ? null : token.text)));
      rows.forEach((row, rank) => {
        const marks = differences && rank ? D5P4.diff.differing(plain[rank], plain[0]) : [];
        this.items[rank].line.show(row, marks);
      });
    }
  }

  function makeItem(rank) {
    const line = new D5P4.tokens.Line();
    const notes = el("p", { class: "notes" });
    const badge = el("span", { class: `rank answer-${(rank % 8) + 1}`, text: rank + 1, "aria-hidden": "true" });
    const copyPlace = el("div");
    return { line, notes, copy: copyPlace, node: el("li", {}, badge, el("div", {}, line.node, notes), copyPlace) };
  }

  /** What distinguishes the setting of a run, such as "w 4", "temperature 0" and "diversity 1". */
  function parameters(replay) {
    const { settings, parameters: own } = replay.trace;
    const branches = replay.isTree ? settings.temperature === 0 : replay.widest > settings.k + settings.spare;
    const numbers = Object.entries(own || {}).filter(([, value]) => typeof value === "number");
    return [
      branches && `w ${settings.w}`,
      settings.spare > 0 && `${settings.spare} spare`,
      `temperature ${settings.temperature}`,
      settings.reveal && settings.reveal !== "schedule" && settings.reveal,
      ...numbers.map(([name, value]) => `${name} ${value}`),
    ];
  }

  return { Run };
})();
