"use strict";
/* The whole view in the part of the address behind #, which browsers keep to themselves. */
D5P4.link = (() => {
  const SHARED = ["k", "max_tokens", "seed"];
  const VIEW = ["prompt", "a", "b", "step", "theme", "panels", "differences", "confidence"];

  /** `asked`: the form of the run that is shown, or null; with its seed, step, theme and panels. */
  function write(asked, seed) {
    const found = new URLSearchParams();
    if (asked) {
      found.set("prompt", asked.prompt);
      asked.runs.forEach((run, i) => {
        found.set("ab"[i], run.method);
        for (const [name, value] of Object.entries(run.options)) found.set(`${"ab"[i]}.${name}`, value);
      });
      for (const name of ["k", "max_tokens"]) if (asked[name] !== undefined) found.set(name, asked[name]);
      found.set("seed", seed);
    }
    found.set("step", D5P4.player.now() >= D5P4.player.ofAll() ? "end" : D5P4.player.now());
    found.set("theme", D5P4.theme.dark() ? "dark" : "light");
    const look = D5P4.results.look.read();
    found.set("panels", look.panels.join(" "));
    if (!look.diff) found.set("differences", "0");
    if (!look.chance) found.set("confidence", "0");
    return `${location.href.split("#")[0]}#${found}`;
  }

  const asNumber = (text) => (text !== null && text !== "" && Number.isFinite(Number(text)) ? Number(text) : undefined);

  function asValue(name, text) {
    if (name === "distinct" || ["true", "false"].includes(text)) return text === "true" || text === "1";
    return asNumber(text) ?? text;
  }

  /** What the present address says: {asked (with seed) or null, step, look}. */
  function read() {
    const found = new URLSearchParams(location.hash.slice(1));
    const look = {
      panels: found.has("panels") ? found.get("panels").split(" ") : undefined,
      diff: found.get("differences") === "0" ? false : undefined,
      chance: found.get("confidence") === "0" ? false : undefined,
    };
    const step = asNumber(found.get("step"));
    if (!found.has("a") || !found.has("prompt")) return { asked: null, step, look };
    const asked = { prompt: found.get("prompt") };
    for (const name of SHARED) asked[name] = asNumber(found.get(name));
    asked.runs = ["a", "b"]
      .filter((run) => found.has(run))
      .map((run) => {
        const options = {};
        for (const [name, value] of found) {
          const own = name.replace(/^[ab]\./, ""); // an option without a run is one of both
          if ((own === name && ![...SHARED, ...VIEW].includes(name)) || name === `${run}.${own}`) {
            options[own] = asValue(own, value);
          }
        }
        return { method: found.get(run), options };
      });
    return { asked, step, look };
  }

  return { write, read };
})();
