"use strict";
/* The scrubber: which step is shown, by hand, by keys or playing. */
D5P4.player = (() => {
  const { find, announce } = D5P4.dom;
  const SECONDS = 6; // a whole run, about
  let steps = 0;
  let step = 0;
  let timer = 0;
  let listener = () => {};

  const parts = () => ({ node: find("player"), range: find("scrub"), label: find("scrub-label"), play: find("play") });

  function worded() {
    return step >= steps ? `finished, after ${steps} steps` : `before step ${step + 1} of ${steps}`;
  }

  function show() {
    const { range, label } = parts();
    range.max = steps;
    range.value = step;
    range.setAttribute("aria-valuetext", worded());
    range.style.setProperty("--at", steps ? step / steps : 1);
    label.textContent = step >= steps ? `end · ${steps} steps` : `step ${step} of ${steps}`;
    listener(step);
  }

  function goTo(wanted) {
    const next = Math.max(0, Math.min(steps, Math.round(wanted)));
    if (next === step) return;
    step = next;
    show();
  }

  function stop() {
    if (!timer) return;
    clearInterval(timer);
    timer = 0;
    const { play } = parts();
    play.classList.remove("playing");
    play.setAttribute("aria-label", "play");
  }

  function toggle() {
    if (timer) {
      stop();
      announce(worded());
      return;
    }
    if (step >= steps) goTo(0);
    const { play } = parts();
    play.classList.add("playing");
    play.setAttribute("aria-label", "pause");
    timer = setInterval(
      () => {
        goTo(step + 1);
        if (step >= steps) stop();
      },
      Math.max(40, (1000 * SECONDS) / Math.max(1, steps)),
    );
  }

  /** A new run: so many steps, shown from `at` (the end by default). */
  function start(count, at = count) {
    stop();
    steps = count;
    step = Math.max(0, Math.min(count, Math.round(at)));
    parts().node.hidden = false;
    show();
  }

  function hide() {
    stop();
    parts().node.hidden = true;
  }

  function wire(listen) {
    listener = listen;
    const { range } = parts();
    range.addEventListener("input", () => {
      stop();
      goTo(Number(range.value));
    });
    const moves = { first: () => 0, previous: () => step - 1, next: () => step + 1, last: () => steps };
    for (const [id, where] of Object.entries(moves)) {
      find(id).addEventListener("click", () => {
        stop();
        goTo(where());
        announce(worded());
      });
    }
    find("play").addEventListener("click", toggle);
    document.addEventListener("keydown", (event) => {
      const busy = event.target.closest("input, textarea, select, button, summary, [tabindex], dialog");
      if (busy || event.ctrlKey || event.metaKey || event.altKey || parts().node.hidden) return;
      const keys = { ArrowLeft: moves.previous, ArrowRight: moves.next, Home: moves.first, End: moves.last };
      if (keys[event.key]) {
        event.preventDefault();
        stop();
        goTo(keys[event.key]());
      } else if (event.key === " ") {
        event.preventDefault();
        toggle();
      }
    });
  }

  return { wire, start, hide, goTo, now: () => step, ofAll: () => steps };
})();
