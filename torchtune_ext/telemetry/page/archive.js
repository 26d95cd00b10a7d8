// The archive: for each problem and machine, sets of techniques by bands of speed. A program is written as a text node only.

const power = (band) => (band >= 0 ? 2 ** band : `1/${2 ** -band}`);

class Picture {
  constructor(data, stored, hint) {
    this.data = data;
    this.stored = stored; // the steps whose rollouts are in the page
    const fastest = data.cells.reduce((best, cell) => (cell.low > best.low ? cell : best));
    const logs = data.cells.map((cell) => Math.log2(cell.ratio)), slowest = Math.min(...logs), range = Math.max(...logs) - slowest;
    this.pane = el("div", { class: "program", "aria-live": "polite" });
    this.buttons = data.cells.map((cell, i) => this.button(cell, range ? (logs[i] - slowest) / range : 1));
    const grid = el("div", { class: "cells", role: "group", "aria-label": `${data.kernel} ${data.size}: programs by techniques and speed`,
      style: `--bands:${data.bands.length}` });
    grid.append(el("div", { class: "corner" }, "× naive"), ...data.bands.map((band) => el("div", { class: "band" }, `${power(band)}–${power(band + 1)}`)));
    const places = new Map(data.cells.map((cell, i) => [`${cell.row} ${cell.column}`, this.buttons[i]]));
    data.rows.forEach((words, row) => {
      grid.append(el("div", { class: "techniques" }, words));
      data.bands.forEach((_, column) => grid.append(places.get(`${row} ${column}`) ?? el("div", { class: "cell" })));
    });
    const ends = [slowest, slowest + range].map((log) => `${plain(2 ** log)} ×`);
    const count = data.cells.length === 1 ? "1 cell" : `${data.cells.length} cells`;
    this.node = el("figure", { class: "panel wide" }, el("h3", {}, `${data.kernel} ${data.size}`, el("span", { class: "at" }, count)),
      el("p", { class: "note" }, `${hint}Timed on ${data.machine}.`),
      el("div", { class: "legend" }, el("span", { class: "speeds" }, ends[0], el("i"), ends[1])),
      el("div", { class: "archive" }, grid, this.pane));
    this.show(fastest);
  }

  button(cell, speed) {
    const words = `${this.data.rows[cell.row]}: ${plain(cell.ratio)} × naive, found at step ${cell.found.toLocaleString("en")}`;
    return el("button", { class: "cell", style: `--speed:${speed.toFixed(3)}`, title: words, "aria-label": words,
      onclick: () => { this.show(cell); this.pane.scrollIntoView({ block: "nearest" }); } }, cell.found.toLocaleString("en"));
  }

  show(cell) {
    const { rows, cells } = this.data, step = cell.found.toLocaleString("en");
    this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(cells[i] === cell)));
    const rollouts = this.stored.has(cell.found) ? el("button", { onclick: () => cursor.onPick?.(cell.found) }, `rollouts of step ${step}`) : null;
    this.pane.replaceChildren(el("h3", {}, rows[cell.row]),
      el("div", { class: "facts" }, chip("speed", `${plain(cell.ratio)} × naive`), chip("95% interval", `${plain(cell.low)} to ${plain(cell.high)}`),
        chip("GFLOPS", plain(cell.gflops)), chip("found at step", step), ...[rollouts].filter(Boolean)),
      el("pre", { class: "text", tabindex: 0, "aria-label": "source of the program" }, cell.source));
  }
}

async function archive(overview, root) {
  if (!root || !document.getElementById("archive")) return;
  const stored = new Set(overview.rollouts.map(({ step }) => step));
  let hint = "A number is the step that found the program. A click opens it. ";
  for (const data of await unpack("archive")) {
    root.append(new Picture(data, stored, hint).node);
    hint = "";
  }
}
