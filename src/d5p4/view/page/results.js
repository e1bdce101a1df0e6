"use strict";
/* Everything below the form: the runs, and the pictures of how they came about. */
D5P4.results = (() => {
  const { el, side, find } = D5P4.dom;
  const PANELS = ["tree", "similarity", "scatter", "figures"];
  let runs = [];
  let replays = [];
  let views = { tree: [], heat: [], scatter: null };
  const shown = { diff: true, chance: true };

  /** Columns for methods that are about to run. */
  function begin(methods) {
    clear();
    runs = methods.map((method, index) => new D5P4.answers.Run(index, method));
    runs.forEach((run) => run.wait("waiting"));
    find("runs").replaceChildren(...runs.map((run) => run.node));
    find("runs").dataset.count = runs.length;
    find("results").hidden = false;
    find("recorded").hidden = true;
    find("pictures").hidden = find("panel-tree").hidden = true;
    return runs;
  }

  function clear() {
    D5P4.player.hide();
    runs = [];
    replays = [];
    views = { tree: [], heat: [], scatter: null };
  }

  /** Show finished runs, at a step or at their end. */
  function finish(found, at) {
    replays = found;
    if (runs.length !== replays.length || runs.some((run, i) => run.method !== replays[i].trace.method)) {
      begin(replays.map((replay) => replay.trace.method));
      replays = found;
    }
    replays.forEach((replay, i) => runs[i].finish(replay));
    heading();
    pictures();
    const steps = Math.max(...replays.map((replay) => replay.steps));
    D5P4.player.start(steps, at === undefined ? steps : at);
  }

  function heading() {
    const { trace } = replays[0];
    find("score-kind").textContent = trace.score_kind;
    find("asked").textContent = trace.prompt === null ? "unconditional" : trace.prompt;
    const facts = [trace.model.name, `seed ${trace.seed}`, `k ${trace.k}`, `${trace.length} tokens`];
    find("asked-facts").textContent = facts.join(" · ");
  }

  function pictures() {
    find("pictures").hidden = find("panel-tree").hidden = false;
    views.tree = replays.map((replay) => new D5P4.tree.View(replay, replay.trace.method, D5P4.player.goTo));
    const lows = D5P4.heat.lows(replays);
    views.heat = replays.map((replay, i) => new D5P4.heat.View(replay, replay.trace.method, lows[i]));
    views.scatter = new D5P4.scatter.View(replays);
    const column = (view, i) =>
      el("div", { class: `run-${side(i)}` }, el("h4", { text: replays[i].trace.method }), view.node);
    find("tree").replaceChildren(...views.tree.map(column));
    find("similarity").replaceChildren(...views.heat.map(column));
    find("similarity").dataset.count = replays.length;
    find("scatter").replaceChildren(views.scatter.node);
    find("figures").replaceChildren(D5P4.figures.table(replays));
    views.scatter.redraw();
  }

  /** All views at a step. */
  function show(step) {
    runs.forEach((run) => run.show(step, shown.diff));
    if (!replays.length) return;
    views.tree.forEach((view) => view.show(step));
    views.heat.forEach((view, i) => view.show(Math.min(step, replays[i].steps)));
  }

  /** Draw again what depends on colours or on the width. */
  function redraw() {
    views.tree.forEach((view) => view.redraw());
    views.heat.forEach((view) => view.redraw());
    if (views.scatter) views.scatter.redraw();
  }

  function toggle(name, on) {
    shown[name] = on;
    find(name === "diff" ? "show-diff" : "show-chance").checked = on;
    find("runs").classList.toggle("no-chance", !shown.chance);
    find("legend").classList.toggle("off", !shown.chance);
    show(D5P4.player.now());
  }

  function wire() {
    find("show-diff").addEventListener("change", (event) => toggle("diff", event.target.checked));
    find("show-chance").addEventListener("change", (event) => toggle("chance", event.target.checked));
    PANELS.forEach((name) => find(`panel-${name}`).addEventListener("toggle", redraw));
    let pending = 0;
    const later = () => {
      cancelAnimationFrame(pending);
      pending = requestAnimationFrame(redraw);
    };
    new ResizeObserver(later).observe(find("results"));
    D5P4.theme.changed(redraw);
  }

  /** Open panels and marks, for a link. */
  const look = {
    read: () => ({
      panels: PANELS.filter((name) => find(`panel-${name}`).open),
      diff: shown.diff,
      chance: shown.chance,
    }),
    write: ({ panels, diff, chance }) => {
      if (panels) PANELS.forEach((name) => (find(`panel-${name}`).open = panels.includes(name)));
      if (diff !== undefined) toggle("diff", diff);
      if (chance !== undefined) toggle("chance", chance);
    },
  };

  return {
    begin,
    finish,
    show,
    redraw,
    wire,
    look,
    replays: () => replays,
    trees: () => views.tree,
  };
})();
