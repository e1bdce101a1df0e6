"use strict";
/* The form: what to ask and how, drawn from the model's card. */
D5P4.form = (() => {
  const { el, find, whole } = D5P4.dom;
  const RUNS = ["a", "b"];
  const KNOBS = [
    { name: "beta", label: "β", low: -1, high: 4, help: "weight of difference" },
    { name: "alpha", label: "α", low: -1, high: 4, help: "weight of difference" },
    {
      name: "score_temperature",
      label: "score temperature",
      low: -2,
      high: 2,
      help: "higher: quality counts less",
    },
    { name: "lam", label: "λ", low: -1, high: 3, help: "higher: certainty counts more" },
  ];
  const NUMBERS = ["max_tokens", "steps", "temperature", "guidance", "spare"];
  let card = null;
  let knobs = { a: {}, b: {} }; // what was set by hand, by run and parameter

  const method = (run) => card.methods.find((one) => one.name === find(`method-${run}`).value);
  const knobOf = (run) => KNOBS.find((knob) => knob.name in method(run).parameters);

  /** Fill everything that depends on the model. */
  function build(found) {
    card = found;
    find("model-name").textContent = card.id || card.name;
    const facts = [
      card.architecture,
      card.parameters && `${short(card.parameters)} parameters`,
      card.max_length && `up to ${whole(card.max_length)} tokens`,
      card.chat && "chat",
    ];
    find("model-facts").textContent = facts.filter(Boolean).join(" · ");
    find("model-description").textContent = card.description || "";
    find("examples").replaceChildren(...(card.examples || []).map(example));
    for (const run of RUNS) {
      find(`method-${run}`).replaceChildren(
        ...card.methods.map((one) => el("option", { value: one.name, text: one.name })),
      );
    }
    choose("a", "independent");
    choose("b", "d5p4");
    const defaults = card.defaults || {};
    find("k").value = defaults.k || 4;
    find("w").value = defaults.w || 4;
    hint("max_tokens", defaults.length || defaults.gen_length);
    hint("temperature", defaults.temperature || 1);
    hint("guidance", defaults.guidance || 1);
    const order = card.default_order || defaults.order;
    find("order").options[0].textContent = order ? `the model's default (${order})` : "the model's default";
    if (card.examples && card.examples.length) use(card.examples[0]);
    poolNote();
  }

  function short(count) {
    const units = [
      [1e9, "B"],
      [1e6, "M"],
      [1e3, "k"],
    ];
    const unit = units.find(([size]) => count >= size);
    return unit ? `${(count / unit[0]).toPrecision(2)} ${unit[1]}` : String(count);
  }

  const hint = (id, value) => find(id).setAttribute("placeholder", value ?? "auto");

  function example(one) {
    return el("button", {
      type: "button",
      class: "chip",
      title: one.prompt,
      text: one.label || one.prompt,
      on: { click: () => use(one) },
    });
  }

  /** Take over an example with the settings it brings. */
  function use(one) {
    find("prompt").value = one.prompt;
    for (const name of NUMBERS) find(name).value = one[name] ?? "";
  }

  function choose(run, name) {
    const select = find(`method-${run}`);
    if ([...select.options].some((option) => option.value === name)) select.value = name;
    methodChanged(run);
  }

  /** The method's own line and its main knob. */
  function methodChanged(run) {
    const chosen = method(run);
    find(`summary-${run}`).textContent = chosen.summary;
    const knob = knobOf(run);
    const [slider, exact] = [find(`knob-${run}`), find(`exact-${run}`)];
    find(`knob-row-${run}`).classList.toggle("off", !knob);
    slider.disabled = exact.disabled = !knob;
    if (!knob) return;
    find(`knob-label-${run}`).textContent = knob.label;
    find(`knob-help-${run}`).textContent = knob.help;
    slider.min = knob.low;
    slider.max = knob.high;
    setKnob(run, knobs[run][knob.name] ?? chosen.parameters[knob.name], false);
  }

  function setKnob(run, value, byHand = true) {
    const knob = knobOf(run);
    if (!knob) return;
    if (byHand) knobs[run][knob.name] = value;
    find(`exact-${run}`).value = value;
    slide(run, value);
  }

  function slide(run, value) {
    const knob = knobOf(run);
    const slider = find(`knob-${run}`);
    slider.value = value > 0 ? Math.log10(value) : knob.low;
    slider.setAttribute("aria-valuetext", `${knob.label} ${value}`);
  }

  /** Take over what is typed beside the slider; what is no number stays there, for `read` to refuse. */
  function typed(run) {
    const value = text(`exact-${run}`);
    const { name } = knobOf(run);
    if (!value) delete knobs[run][name];
    else if (Number.isFinite(Number(value))) {
      knobs[run][name] = Number(value);
      slide(run, knobs[run][name]);
    }
  }

  function poolNote() {
    const size = (Number(find("k").value) + Number(find("spare").value)) * Number(find("w").value);
    const most = card && card.limits && card.limits.max_pool;
    const over = most && size > most;
    const spare = find("distinct").checked && !text("spare") ? "; up to twice as many to make the answers differ" : "";
    find("pool-note").textContent = Number.isFinite(size)
      ? `${whole(size)} candidates per step${over ? `; this server takes at most ${whole(most)}` : spare}`
      : "";
    find("pool-note").classList.toggle("over", !!over);
  }

  function text(id) {
    return find(id).value.trim();
  }

  /** An error about a field: `point` brings that one into view. */
  const refusal = (field, said) => Object.assign(new Error(said), { field });

  function point(field) {
    const folded = find(field).closest("details");
    if (folded) folded.open = true;
    find(field).focus();
  }

  function numberIn(id, name) {
    const value = text(id);
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
    const found = { prompt: find("prompt").value, k: numberIn("k", "k"), w: numberIn("w", "w"), seed };
    for (const name of NUMBERS) found[name] = numberIn(name, name.replace("_", " "));
    found.order = text("order") || undefined;
    found.distinct = find("distinct").checked;
    found.runs = RUNS.filter((run) => run === "a" || find("compare").checked).map((run) => {
      const knob = knobOf(run);
      const own = knob && numberIn(`exact-${run}`, knob.label) !== undefined ? knobs[run][knob.name] : undefined;
      return { method: method(run).name, parameters: own === undefined ? {} : { [knob.name]: own } };
    });
    return found;
  }

  /** Put values back, as from a link. */
  function write(found) {
    const put = (id, value) => (find(id).value = value ?? "");
    put("prompt", found.prompt);
    for (const name of ["k", "w"]) if (found[name] !== undefined) put(name, found[name]);
    for (const name of ["seed", "order", ...NUMBERS]) put(name, found[name]);
    find("distinct").checked = !!found.distinct;
    find("compare").checked = found.runs.length > 1;
    knobs = { a: {}, b: {} };
    found.runs.slice(0, 2).forEach((run, i) => {
      Object.assign(knobs[RUNS[i]], run.parameters);
      choose(RUNS[i], run.method);
    });
    if (["seed", "order", ...NUMBERS].some((name) => found[name] !== undefined)) find("more").open = true;
    compareChanged();
    poolNote();
  }

  function compareChanged() {
    find("run-b").classList.toggle("off", !find("compare").checked);
    for (const node of find("run-b").querySelectorAll("select, input:not(#compare)"))
      node.disabled = !find("compare").checked;
    if (find("compare").checked && card) methodChanged("b");
  }

  /** The bodies of the requests, one per run, all with the same seed. */
  function bodies(found, seed) {
    const { prompt, k, w, runs, max_tokens, steps, temperature, guidance, spare, order, distinct } = found;
    const shared = { prompt, n: k, w, max_tokens, steps, temperature, guidance, spare, order, distinct, seed };
    return runs.map((run) => ({ ...shared, method: run.method, ...run.parameters }));
  }

  function wire() {
    for (const run of RUNS) {
      find(`method-${run}`).addEventListener("change", () => methodChanged(run));
      find(`knob-${run}`).addEventListener("input", (event) => {
        setKnob(run, Number((10 ** Number(event.target.value)).toPrecision(2)));
      });
      find(`exact-${run}`).addEventListener("input", () => typed(run));
      find(`exact-${run}`).addEventListener("change", () => text(`exact-${run}`) || methodChanged(run));
    }
    find("compare").addEventListener("change", compareChanged);
    for (const id of ["k", "w", "spare", "distinct"]) find(id).addEventListener("input", poolNote);
  }

  return { wire, build, read, write, point, bodies };
})();
