"use strict";
/* The form: what to ask and how. Methods, options, defaults and help come from the model's card. */
D5P4.form = (() => {
  const { el, find, hint, whole } = D5P4.dom;
  const RUNS = ["a", "b"];
  const SHARED = ["n", "max_tokens", "method"]; // options that are not set for each run
  let card = null;
  const set = { a: {}, b: {} }; // the options that differ from the method's defaults, by run

  const method = (run) => card.methods.find((one) => one.name === find(`method-${run}`).value);
  /** What two runs share unless the form says otherwise: the order, the early stop, the reveal rule and its parameters. */
  const shared = (name) =>
    ["order", "early_stop", "reveal"].includes(name) || card.reveals.some((one) => one.own.includes(name));
  /** The run from which the other one takes what they share: the first tree, or A. */
  const lead = () => RUNS.find((run) => method(run).tree) || "a";
  function valueOf(run, name) {
    const from = find("compare").checked && shared(name) && !(name in set[run]) ? lead() : run;
    return set[from][name] ?? method(from).defaults[name] ?? method(run).defaults[name];
  }
  const rule = (run) => card.reveals.find((one) => one.name === valueOf(run, "reveal"));
  const isNumber = (name) => name in card.options && ["int", "float"].includes(card.options[name].kind);
  const fieldOf = (run, name) => find(`${run}-${name}`);

  /** The options of a method: the main ones, which are always seen, and the others. */
  function optionsOf(chosen) {
    const rules = card.reveals.flatMap((one) => one.own);
    const own = chosen.own.filter(isNumber);
    const main = ["temperature", "reveal", ...rules, ...own, "spare", "w", "distinct"];
    const basic = Object.keys(card.options).filter((name) => card.options[name].group === "basic");
    const more = [...basic, ...chosen.own].filter((name) => ![...main, ...SHARED].includes(name));
    const used = (name) => name in card.options && !chosen.unused.includes(name);
    return { main: main.filter(used), more: more.filter(used) };
  }

  /** Whether an option has a meaning together with the others. */
  function applies(run, name) {
    const { own, adaptive } = rule(run) || { own: [], adaptive: false };
    if (card.reveals.some((one) => one.own.includes(name))) return own.includes(name);
    if (name === "w" && method(run).tree) return Number(valueOf(run, "temperature")) === 0;
    return name !== "steps" || !adaptive;
  }

  /** Fill everything that depends on the model. */
  function build(found) {
    card = found;
    find("model-name").textContent = card.id || card.name;
    const facts = [
      card.architecture,
      card.parameters && `${short(card.parameters)} parameters`,
      card.max_length && `≤ ${whole(card.max_length)} tokens`,
      card.chat && "chat",
    ];
    find("model-facts").textContent = facts.filter(Boolean).join(" · ");
    find("model-description").textContent = card.description || "";
    find("examples").replaceChildren(...(card.examples || []).map(example));
    const names = card.methods.map((one) => one.name);
    for (const run of RUNS) {
      find(`method-${run}`).replaceChildren(...names.map((name) => el("option", { value: name, text: name })));
    }
    choose("a", card.default_method);
    choose("b", card.default_method === "independent" ? names[0] : "independent");
    const { n, max_tokens: length } = method("a").defaults;
    find("k").value = n || 4;
    find("max_tokens").setAttribute("placeholder", length || "auto");
    if (card.examples && card.examples.length) use(card.examples[0]);
  }

  function short(count) {
    const units = [
      [1e9, "B"],
      [1e6, "M"],
      [1e3, "k"],
    ];
    const unit = units.find(([size]) => count >= size);
    if (!unit) return String(count);
    const size = count / unit[0];
    return `${size < 100 ? size.toPrecision(2) : Math.round(size)} ${unit[1]}`;
  }

  function example(one) {
    const text = one.label || one.prompt;
    return el("button", { type: "button", class: "chip", title: one.prompt, text, on: { click: () => use(one) } });
  }

  /** Take over an example with the length and the options (such as a form) that it brings. */
  function use(one) {
    find("prompt").value = one.prompt;
    find("max_tokens").value = one.max_tokens ?? "";
    for (const run of RUNS) {
      const others = card.examples.flatMap((example) => Object.keys(example.options || {}));
      const own = Object.entries(set[run]).filter(([name]) => !others.includes(name));
      choose(run, method(run).name, { ...Object.fromEntries(own), ...one.options });
    }
  }

  /** Choose the method of a run, and some of its options. */
  function choose(run, name, options = {}) {
    const select = find(`method-${run}`);
    if ([...select.options].some((option) => option.value === name)) select.value = name;
    set[run] = { ...options };
    methodChanged(run);
  }

  /** Make the fields of the method's options. */
  function methodChanged(run) {
    const chosen = method(run);
    const { main, more } = optionsOf(chosen);
    for (const name of Object.keys(set[run])) if (![...main, ...more].includes(name)) delete set[run][name];
    find(`method-${run}`).title = chosen.summary;
    find(`fields-${run}`).replaceChildren(...main.map((name) => field(run, name)));
    find(`more-${run}`).replaceChildren(...more.map((name) => field(run, name)));
    changed();
  }

  function field(run, name) {
    const { help, kind } = card.options[name];
    const label = name.replace(/_/g, " ");
    const input = control(run, name);
    input.id = `${run}-${name}`;
    input.setAttribute("aria-label", `${label}, run ${run.toUpperCase()}`);
    input.addEventListener("input", () => {
      const value = kind === "bool" ? input.checked : input.value.trim();
      delete set[run][name];
      if (value !== "" && value !== valueOf(run, name)) set[run][name] = value;
      changed();
    });
    const own = method(run).own.includes(name) || card.reveals.some((one) => one.own.includes(name));
    return el(
      "div",
      { class: "field" },
      el("label", { for: input.id, title: help, text: label }),
      own ? hint(`what is ${label}?`, help) : null,
      input,
    );
  }

  function control(run, name) {
    const { kind, choices } = card.options[name];
    const value = valueOf(run, name);
    if (kind === "bool") {
      const box = el("input", { type: "checkbox" });
      box.checked = !!value;
      return box;
    }
    if (!choices.length) {
      const input = el("input", { type: "text", inputmode: { int: "numeric", float: "decimal" }[kind] || "text" });
      input.placeholder = value ?? "auto";
      input.value = set[run][name] ?? "";
      return input;
    }
    const refused = (one) => name === "order" && method(run).tree && drawsFirst(one);
    const options = choices.filter((one) => !refused(one)).map((one) => el("option", { value: one, text: one }));
    const select = el("select", {}, options);
    select.value = value;
    return select;
  }

  const drawsFirst = (order) => card.orders.some((one) => one.name === order && one.draws_first);

  /** Show the fields that apply, and the form as code. */
  function changed() {
    if (!card) return;
    for (const run of RUNS) {
      for (const name of Object.keys(card.options)) {
        const input = fieldOf(run, name);
        if (!input) continue;
        input.parentNode.hidden = !applies(run, name);
        if (name in set[run] || !shared(name)) continue;
        if (input.matches("select")) input.value = valueOf(run, name);
        else input.placeholder = valueOf(run, name) ?? "auto";
      }
      const off = run === "b" && !find("compare").checked;
      find(`run-${run}`).classList.toggle("off", off);
      const inputs = `#method-${run}, #fields-${run} *, #more-${run} *`;
      for (const node of document.querySelectorAll(inputs)) node.disabled = off;
    }
    showCode();
  }

  function showCode() {
    let asked;
    try {
      const form = read();
      asked = bodies(form, form.seed);
    } catch (reason) {
      find("python").textContent = find("curl").textContent = reason.message;
      return;
    }
    find("python").textContent = D5P4.api.asPython(asked);
    find("curl").textContent = D5P4.api.asCurl(asked);
  }

  /** An error about a field: `point` brings that one into view. */
  const refusal = (field, said) => Object.assign(new Error(said), { field });

  function point(id) {
    for (let node = find(id).closest("details"); node; node = node.parentNode.closest("details")) node.open = true;
    find(id).focus();
  }

  function numberIn(id, name) {
    const value = find(id).value.trim();
    if (find(id).validity.badInput) throw refusal(id, `${name} must be a number`);
    if (!value) return undefined;
    if (!Number.isFinite(Number(value))) throw refusal(id, `${name} must be a number, not “${value}”`);
    return Number(value);
  }

  /** All of the form as plain values; throws a sentence for what cannot be. */
  function read() {
    const seed = numberIn("seed", "the seed");
    if (seed !== undefined && !Number.isSafeInteger(seed))
      throw refusal("seed", "the seed must be a whole number below 2^53");
    const found = { prompt: find("prompt").value, k: numberIn("k", "k"), seed };
    found.max_tokens = numberIn("max_tokens", "tokens");
    found.runs = RUNS.filter((run) => run === "a" || find("compare").checked).map((run) => {
      const { main, more } = optionsOf(method(run));
      const options = {};
      for (const name of [...main, ...more].filter((one) => applies(run, one) && one in set[run])) {
        options[name] = isNumber(name) ? numberIn(`${run}-${name}`, name.replace(/_/g, " ")) : set[run][name];
      }
      const others = Object.keys(card.options).filter((one) => shared(one) && applies(run, one) && !(one in options));
      for (const name of others.filter((one) => !method(run).unused.includes(one))) {
        const value = valueOf(run, name);
        if (value !== undefined && value !== method(run).defaults[name]) options[name] = value;
      }
      return { method: method(run).name, options };
    });
    return found;
  }

  /** Put values back, as from a link. */
  function write(found) {
    for (const name of ["prompt", "max_tokens", "seed"]) find(name).value = found[name] ?? "";
    if (found.k !== undefined) find("k").value = found.k;
    find("compare").checked = found.runs.length > 1;
    found.runs.slice(0, 2).forEach((run, i) => choose(RUNS[i], run.method, run.options));
    RUNS.slice(0, found.runs.length).forEach((run) => {
      if (Object.keys(set[run]).some((name) => optionsOf(method(run)).more.includes(name))) find("more").open = true;
    });
    changed();
  }

  /** The bodies of the requests, one per run, all with the same seed. */
  function bodies({ prompt, k, max_tokens, runs }, seed) {
    return runs.map((run) => ({ prompt, method: run.method, n: k, max_tokens, ...run.options, seed }));
  }

  /** On a small screen the settings are folded, so that the answers come before them. */
  function fold() {
    const narrow = window.matchMedia("(max-width: 980px)");
    const follow = () => (find("settings").open = !narrow.matches);
    narrow.addEventListener("change", follow);
    follow();
  }

  function wire() {
    fold();
    for (const run of RUNS) find(`method-${run}`).addEventListener("change", () => methodChanged(run));
    for (const id of ["compare", "prompt", "k", "max_tokens", "seed"]) find(id).addEventListener("input", changed);
    for (const id of ["python", "curl"]) {
      find(`copy-${id}`).addEventListener("click", async () => {
        const done = await D5P4.dom.copy(find(id).textContent);
        D5P4.dom.toast(done ? `${id} copied` : "copying is not allowed");
      });
    }
  }

  return { wire, build, read, write, point, bodies };
})();
