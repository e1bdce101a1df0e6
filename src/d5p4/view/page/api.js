"use strict";
/* Talking to the server: the model's card, and runs as streams of drafts that end in a trace. */
D5P4.api = (() => {
  const KEY = "d5p4-key";
  /** The form's labels of fields that a request names differently. */
  const LABELS = { n: "k", max_tokens: "tokens" };
  let card = null;

  function headers() {
    const found = { "Content-Type": "application/json" };
    const key = sessionStorage.getItem(KEY);
    if (key) found.Authorization = `Bearer ${key}`;
    return found;
  }

  /** What went wrong, as a sentence for people; `status` 401 asks for a key. */
  class Refusal extends Error {
    constructor(message, status, param) {
      super(LABELS[param] ? `${LABELS[param]}: ${message}` : message);
      this.status = status;
    }
  }

  async function refusal(response) {
    let said = `the server answered with status ${response.status}`;
    let param = null;
    try {
      const body = await response.json();
      if (body && body.error && body.error.message) {
        said = body.error.message;
        param = body.error.param;
      }
    } catch (reason) {
      if (reason.name === "AbortError") throw reason;
      /* no JSON: the status has to do */
    }
    return new Refusal(said, response.status, param);
  }

  async function request(path, options = {}) {
    let response;
    try {
      response = await fetch(path, { headers: headers(), cache: "no-store", ...options });
    } catch (reason) {
      if (reason.name === "AbortError") throw reason;
      throw new Refusal("the server cannot be reached; is it still running?", 0);
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }

  /** The model the server has: {id, ...what it says of it}. */
  async function model() {
    const body = await (await request("v1/models")).json();
    const entry = body.data[0];
    card = { id: entry.id, ...entry.d5p4 };
    return card;
  }

  /** The objects of a stream of server-sent events. */
  async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let parts = []; // of a line that is not whole yet; a trace is a line of megabytes
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = value.split("\n");
      parts.push(lines.shift());
      for (const next of lines) {
        const line = parts.join("");
        parts = [next];
        const text = line.startsWith("data:") ? line.slice(5).trim() : "";
        if (text && text !== "[DONE]") yield JSON.parse(text);
      }
    }
  }

  /** The path and the JSON of a request with the form's fields, without those that are not set. */
  function asked({ prompt, ...rest }, more = {}) {
    const chat = card && card.chat;
    const start = chat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
    const path = chat ? "v1/chat/completions" : "v1/completions";
    return { path, text: JSON.stringify({ model: card && card.id, ...start, ...rest, ...more }) };
  }

  /** Shell commands that send the same requests. */
  function asCurl(bodies) {
    const quoted = (text) => `'${text.replace(/'/g, "'\\''")}'`;
    const key = sessionStorage.getItem(KEY) ? ` -H "Authorization: Bearer $D5P4_API_KEY"` : "";
    return bodies
      .map((body) => {
        const { path, text } = asked(body);
        const address = new URL(path, location.href.split("#")[0]);
        return `curl ${address} -H 'Content-Type: application/json'${key} -d ${quoted(text)}`;
      })
      .join("\n\n");
  }

  /** Python that decodes the same without a server. */
  function asPython(bodies) {
    const written = (value) => (typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value));
    const calls = bodies.map(({ prompt, ...rest }, i) => {
      const named = Object.entries(rest).filter(([, value]) => value !== undefined);
      const python = (name) => (name in card.options ? card.options[name].python : name);
      const options = named.map(([name, value]) => `${python(name)}=${written(value)}`);
      return `${"ab"[i]} = d5p4.generate(${[card.name, prompt].map(written).concat(options).join(", ")})`;
    });
    return `import d5p4\n\n${calls.join("\n")}`;
  }

  /** Decode and return the trace; `onDraft(step, steps, drafts)` gets the drafts. */
  async function run(body, onDraft, signal) {
    const { path, text } = asked(body, { stream: true, history: true, logprobs: card && card.chat ? true : 0 });
    const response = await request(path, { method: "POST", body: text, signal });
    let trace = null;
    for await (const event of events(response)) {
      if (event.error) throw new Refusal(event.error.message || "the run failed", response.status);
      const ours = event.d5p4 || {};
      if (ours.drafts) onDraft(ours.step, ours.steps, ours.drafts);
      if (ours.history) [trace] = ours.history;
    }
    if (!trace) throw new Refusal("the connection ended before the run was finished; try again", response.status);
    return trace;
  }

  const useKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

  return { model, run, asCurl, asPython, useKey, Refusal, card: () => card };
})();
