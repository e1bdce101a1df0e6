"use strict";
/* Taking runs away and bringing them back: files of traces, and a picture. */
D5P4.save = (() => {
  const { el, find, toast } = D5P4.dom;

  function download(blob, name) {
    const address = URL.createObjectURL(blob);
    const link = el("a", { href: address, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  /** A file name that says what is in it. */
  function named(suffix) {
    const { trace } = D5P4.results.replays()[0];
    const words = (trace.prompt || "unconditional").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
    return `d5p4-${words.slice(0, 40) || "run"}-${trace.seed}.${suffix}`;
  }

  function json() {
    const traces = D5P4.results.replays().map((replay) => replay.trace);
    const text = JSON.stringify({ format: D5P4.trace.FORMAT, traces });
    download(new Blob([text], { type: "application/json" }), named("json"));
  }

  function png() {
    const canvas = D5P4.picture.draw(D5P4.results.replays(), D5P4.player.now());
    canvas.toBlob((blob) => {
      if (blob) download(blob, named("png"));
      else toast("the picture is too large for this browser");
    }, "image/png");
  }

  /** Show the traces of a file. */
  async function open(file, show) {
    try {
      show(D5P4.trace.read(JSON.parse(await file.text())));
      toast(`${file.name} opened`);
    } catch (reason) {
      const said = reason instanceof SyntaxError ? "the file is not JSON" : reason.message;
      toast(`${file.name} cannot be shown: ${said}`);
    }
  }

  function wire(show) {
    find("save-json").addEventListener("click", json);
    find("save-png").addEventListener("click", png);
    const picker = find("open-file");
    find("open").addEventListener("click", () => picker.click());
    picker.addEventListener("change", () => {
      if (picker.files.length) open(picker.files[0], show);
      picker.value = "";
    });
    const files = (event) => [...(event.dataTransfer ? event.dataTransfer.types : [])].includes("Files");
    document.addEventListener("dragover", (event) => {
      if (!files(event)) return;
      event.preventDefault();
      document.body.classList.add("dropping");
    });
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) document.body.classList.remove("dropping");
    });
    document.addEventListener("drop", (event) => {
      document.body.classList.remove("dropping");
      if (!files(event)) return;
      event.preventDefault();
      open(event.dataTransfer.files[0], show);
    });
  }

  return { wire };
})();
