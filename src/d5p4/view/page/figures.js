"use strict";
/* The runs in figures, side by side: what they found and what it cost. */
D5P4.figures = (() => {
  const { el, side, number, figure, whole } = D5P4.dom;

  /** Rows of the table: a name, a value of a trace, how it is written, and a bar where sizes compare. */
  const ROWS = [
    { name: "different answers", value: (r) => r.trace.distinct, of: (r) => r.trace.answers.length },
    { name: "near copies", value: (r) => r.trace.near_copies, of: (r) => r.trace.answers.length },
    { name: "different right answers", value: (r) => r.trace.right, of: (r) => r.trace.answers.length, graded: true },
    { name: "mean score", value: (r) => r.mean.score, write: figure },
    { name: "mean distance to the nearest answer", value: (r) => r.mean.distance, write: (v) => number(v, 3) },
    { name: "rows computed", value: (r) => r.trace.rows, of: (r) => r.trace.rows_nominal, shared: true },
    { name: "forward steps", value: (r) => r.trace.nfe },
    { name: "seconds", value: (r) => r.trace.seconds, write: (v) => number(v, 2), bar: true },
  ];

  function cell(row, replay, replays) {
    const value = row.value(replay);
    const text = row.write ? row.write(value) : whole(value);
    const children = [el("span", { text: row.of ? `${text} of ${whole(row.of(replay))}` : text })];
    const largest = (f) => Math.max(...replays.map(f));
    if (row.of || row.bar) {
      const most = row.of ? (row.shared ? largest(row.of) : row.of(replay)) : largest(row.value);
      const outer = row.of ? row.of(replay) / most : 1;
      children.push(
        el(
          "span",
          { class: "bar", "aria-hidden": "true", style: { "--of": outer.toFixed(4) } },
          el("span", { style: { "--part": (most ? value / most : 0).toFixed(4) } }),
        ),
      );
    }
    return el("td", {}, children);
  }

  /** The settings that differ between the runs, as a sentence. */
  function differences(replays) {
    const settings = replays.map(({ trace }) => ({ ...trace.settings, ...trace.parameters, method: null, params: null }));
    const names = [...new Set(settings.flatMap(Object.keys))].sort();
    const differ = names.filter((name) => new Set(settings.map((one) => JSON.stringify(one[name]))).size > 1);
    const values = (name) => settings.map((one) => one[name] ?? "–").join(", ");
    return differ.map((name) => `${name.replace(/_/g, " ")} ${values(name)}`).join("; ") || "none";
  }

  function table(replays) {
    const graded = replays.some((replay) => replay.trace.right !== null);
    const head = replays.map((replay, run) =>
      el("th", { scope: "col", class: `run-${side(run)}`, text: replay.trace.method }),
    );
    const rows = ROWS.filter((row) => !row.graded || graded).map((row) =>
      el(
        "tr",
        {},
        el("th", { scope: "row", text: row.name }),
        replays.map((replay, run) => {
          const made = cell(row, replay, replays);
          made.className = `run-${side(run)}`;
          return made;
        }),
      ),
    );
    const kind = replays[0].trace.score_kind;
    return el(
      "div",
      {},
      el("table", { class: "figures" }, el("thead", {}, el("tr", {}, el("td"), head)), el("tbody", {}, rows)),
      el("p", {
        class: "caption",
        text: `Score: ${kind}. Rows: different candidates that the model computed, out of all that the method needs.`,
      }),
      replays.length > 1 && el("p", { class: "caption", text: `Settings that differ: ${differences(replays)}.` }),
    );
  }

  return { table };
})();
