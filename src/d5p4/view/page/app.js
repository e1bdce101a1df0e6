"use strict";
/* The page put together: with a server it asks and shows, as a file it shows what is in it. */
(() => {
  const { find, copy, toast, announce } = D5P4.dom;
  let abort = null; // of the run under way
  let asked = null; // the form of the runs that are shown
  let seedUsed = null;

  function complain(text) {
    find("error").textContent = text;
    find("error").hidden = !text;
  }

  const freshSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

  /** Where the results lie below the form, go there. */
  function reach() {
    const results = find("results");
    if (!D5P4.embedded && results.offsetTop > 300) results.scrollIntoView({ block: "start" });
  }

  /** Links and exports are of finished runs. */
  function sharing(on) {
    for (const id of ["save-json", "save-png", "copy-link"]) find(id).disabled = !on;
  }

  function busy(on) {
    find("run").hidden = on;
    find("stop").hidden = !on;
    document.body.classList.toggle("running", on);
  }

  /** At most one frame's drafts at a time: a fast server must not make a slow page. */
  function painter(run) {
    let latest = null;
    return (step, steps, drafts) => {
      if (!latest)
        requestAnimationFrame(() => {
          if (!run.ended && latest) run.showDrafts(...latest);
          latest = null;
        });
      latest = [step, steps, drafts];
    };
  }

  /** Run what the form says; afterwards go to a step. */
  async function run(step) {
    if (abort) return;
    complain("");
    let form;
    try {
      form = D5P4.form.read();
    } catch (reason) {
      complain(reason.message);
      if (reason.field) D5P4.form.point(reason.field);
      find("error").scrollIntoView({ block: "nearest" });
      return;
    }
    const seed = form.seed === undefined ? freshSeed() : form.seed;
    const bodies = D5P4.form.bodies(form, seed);
    const controller = new AbortController();
    abort = controller;
    busy(true);
    find("seed-used").textContent = `seed ${seed}`;
    find("asked").textContent = form.prompt;
    find("asked-facts").textContent = `seed ${seed}`;
    sharing(false);
    const columns = D5P4.results.begin(bodies.map((body) => body.method));
    reach();
    announce(`running ${bodies.map((body) => body.method).join(" and ")}`);
    try {
      const traces = await Promise.all(bodies.map((body, i) => one(body, columns[i], controller.signal)));
      [asked, seedUsed] = [form, seed];
      show(D5P4.trace.read(traces), step);
      reach();
    } catch (reason) {
      controller.abort(); // the other run is of no use without this one
      const stopped = reason.name === "AbortError";
      columns.forEach((column) => column.ended || column.fail("stopped", stopped ? "" : "the other run failed"));
      if (stopped) announce("stopped");
      else explain(reason);
    } finally {
      abort = null;
      busy(false);
    }
  }

  async function one(body, column, signal) {
    let trace;
    try {
      trace = await D5P4.api.run(body, painter(column), signal);
    } catch (reason) {
      if (reason.name !== "AbortError") column.fail("not finished", worded(reason));
      throw reason;
    }
    column.finish(new D5P4.trace.Replay(trace));
    column.show(Infinity, true);
    return trace;
  }

  const worded = (reason) => (reason.status === 401 ? "this server needs a key" : reason.message || String(reason));

  function explain(reason) {
    complain(worded(reason));
    if (reason.status === 401) find("key-dialog").showModal();
  }

  function show(replays, step) {
    D5P4.results.finish(replays, step);
    sharing(true);
    const found = replays.map(({ trace }) => {
      const right = trace.right === null ? "" : `, ${trace.right} of them right and different`;
      return `${trace.method}: ${trace.distinct} of ${trace.answers.length} answers differ${right}`;
    });
    announce(found.join(". "));
  }

  function showFile(replays, step) {
    [asked, seedUsed] = [null, null]; // no run of this server: a link could not bring it back
    show(replays, step);
  }

  async function copyLink() {
    const address = D5P4.link.write(asked, seedUsed);
    history.replaceState(null, "", `#${address.split("#")[1]}`);
    const done = await copy(address);
    const whole = asked || D5P4.embedded || !find("recorded").hidden;
    const what = whole ? "link copied" : "link copied; it has only theme and step, so the file must be opened again";
    toast(done ? what : "this browser does not allow copying; the link is in the address bar");
  }

  /** Card, form, and whatever the address asks for. */
  async function connect() {
    try {
      D5P4.form.build(await D5P4.api.model());
    } catch (reason) {
      explain(reason);
      if (reason.status === 503) setTimeout(connect, 1500); // the model is still being loaded
      return;
    }
    complain("");
    const { asked: wanted, step, look } = D5P4.link.read();
    D5P4.results.look.write(look);
    if (wanted) D5P4.form.write(wanted);
    else await showRecording(step);
    find("run").disabled = false;
    if (wanted) await run(step);
  }

  /** The first screen: a recorded run. */
  async function showRecording(step) {
    let replays;
    try {
      replays = D5P4.trace.read(await (await fetch("page/recording.json")).json());
    } catch {
      return; // the form is enough
    }
    if (D5P4.results.replays().length) return; // a file was opened before the recording came
    const { model, prompt, k } = replays[0].trace;
    const { id, name } = D5P4.api.card();
    const own = name === model.name;
    showFile(replays, step);
    find("recorded").hidden = false;
    find("recorded").textContent = own
      ? "A recorded run. Press Run to decode it again, or to decode a prompt of yours."
      : `An example, recorded with the model ${model.name}. Press Run to ask ${id}.`;
    const runs = replays.map(({ trace }) => ({ method: trace.method, options: {} }));
    if (own) D5P4.form.write({ prompt, k, runs });
  }

  function wireForm() {
    D5P4.form.wire();
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      run();
    });
    find("form").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        run();
      }
    });
    for (const id of ["more", "code"])
      find(id).addEventListener("toggle", () => find(id).scrollIntoView({ block: "nearest" }));
    find("stop").addEventListener("click", () => abort && abort.abort());
    find("keep-seed").addEventListener("click", () => {
      if (seedUsed !== null) find("seed").value = seedUsed;
    });
    find("key-dialog").addEventListener("close", () => {
      if (find("key-dialog").returnValue !== "ok") return;
      D5P4.api.useKey(find("key").value.trim());
      if (D5P4.api.card()) run();
      else connect();
    });
  }

  function start() {
    D5P4.player.wire(D5P4.results.show);
    D5P4.results.wire();
    D5P4.save.wire((replays) => showFile(replays));
    find("theme").addEventListener("click", D5P4.theme.toggle);
    find("copy-link").addEventListener("click", copyLink);
    window.addEventListener("hashchange", () => {
      if (location.hash.includes("=")) location.reload(); // another link in the same tab
    });
    const embedded = find("traces");
    D5P4.embedded = !!embedded;
    if (!embedded) {
      wireForm();
      connect();
      return;
    }
    document.body.classList.add("file");
    find("form-side").remove();
    const { step, look } = D5P4.link.read();
    D5P4.results.look.write(look);
    show(D5P4.trace.read(JSON.parse(embedded.textContent)), step);
  }

  start();
})();
