"use strict";
/* Tokens on the page: revealed ones coloured by confidence, masked ones as blocks. */
D5P4.tokens = (() => {
  const { el } = D5P4.dom;

  /** Text for cells ({piece, logprob, given} or null); a character of several tokens appears with its last one. */
  function spell(cells, pieces, ends) {
    let decoder = new TextDecoder();
    const found = [];
    for (const cell of cells) {
      const piece = cell ? pieces[cell.piece] : null;
      let text = "";
      if (Array.isArray(piece)) {
        text = decoder.decode(new Uint8Array(piece), { stream: true });
      } else {
        const rest = decoder.decode();
        if (rest && found.length) found[found.length - 1].text += rest;
        decoder = new TextDecoder();
        text = piece || "";
      }
      found.push(
        cell
          ? { text, chance: chance(cell.logprob), end: ends.has(cell.piece), given: !!cell.given, masked: false }
          : { text: "", chance: null, end: false, given: false, masked: true },
      );
    }
    const rest = decoder.decode();
    if (rest && found.length) found[found.length - 1].text += rest;
    return found;
  }

  function chance(logprob) {
    return logprob === null || logprob === undefined ? null : Math.min(1, Math.exp(logprob));
  }

  /** A probability in as few digits as tell it from 0 and 1. */
  function percent(value) {
    const digits = value > 0.995 || value < 0.01 ? 1 : 0;
    return value > 0.9995 ? "100 %" : value < 0.0005 ? "< 0.1 %" : `${(100 * value).toFixed(digits)} %`;
  }

  /** Where a probability lies on the ramp of colours; small ones are spread, for they are the many. */
  const shade = (value) => Math.sqrt(value);

  /** The tokens of a draft of the server. */
  function ofDraft(draft) {
    return draft.tokens.map((text, i) => ({
      text: text || "",
      masked: text === null,
      chance: chance(draft.logprobs[i]),
      end: false,
      given: false,
    }));
  }

  /** One token as an element. */
  function span(token, differs) {
    if (token.masked) return el("span", { class: "mask", "aria-hidden": "true" });
    if (token.given) return el("span", { class: "given", text: token.text });
    if (token.end) return el("span", { class: "end", text: "·", title: "end of text", "aria-hidden": "true" });
    const known = token.chance !== null;
    return el("span", {
      class: `token${differs ? " differs" : ""}${known ? "" : " unknown"}`,
      style: known ? { "--shade": shade(token.chance).toFixed(3) } : {},
      title: known ? `probability ${(100 * token.chance).toFixed(1)} %` : undefined,
      text: token.text,
    });
  }

  const key = (token, differs) =>
    token.masked ? "░" : `${token.text}\u0000${token.chance}\u0000${token.end}${token.given}${differs}`;

  /** A line of tokens that is changed in place, so that only what is new moves. */
  class Line {
    constructor() {
      this.node = el("p", { class: "line" });
      this.keys = [];
    }

    show(tokens, marks = []) {
      const keys = tokens.map((token, i) => key(token, marks[i]));
      keys.forEach((now, i) => {
        if (this.keys[i] === now) return;
        const fresh = span(tokens[i], marks[i]);
        if (this.keys[i] === "░") fresh.classList.add("new");
        if (i < this.node.childNodes.length) this.node.replaceChild(fresh, this.node.childNodes[i]);
        else this.node.append(fresh);
      });
      while (this.node.childNodes.length > tokens.length) this.node.lastChild.remove();
      this.keys = keys;
    }
  }

  /** Width of a block in characters: what a token of this vocabulary takes. */
  function blockWidth(pieces) {
    const lengths = pieces.filter((piece) => typeof piece === "string" && piece.length).map((piece) => piece.length);
    return lengths.length ? lengths.reduce((a, b) => a + b, 0) / lengths.length : 1;
  }

  return { spell, percent, shade, ofDraft, Line, blockWidth };
})();
