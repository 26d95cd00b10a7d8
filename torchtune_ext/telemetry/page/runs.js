// Several runs on one page: a table of their results, a line per run in every chart, and one legend.

const HUES = 8, DASHES = ["", "7 4", "2 4", "10 3 2 3", "14 3"]; // the best runs have solid lines
const SHOWN = 8; // runs drawn when the page opens; a click shows others

// The hidden runs.
const choice = {
  off: new Set(),
  set(off) {
    this.off = off;
    for (const button of document.querySelectorAll("#legend .setting")) button.setAttribute("aria-pressed", String(!off.has(+button.dataset.run)));
    cursor.redraw();
  },
};

function look({ rank }) {
  return { color: `var(--s${(rank % HUES) + 1})`, dash: DASHES[Math.floor(rank / HUES) % DASHES.length] };
}

// A sample of the line of a run, and its letter.
function named(run) {
  const root = svg("svg", { class: "swatch", viewBox: "0 0 22 10" }), { color, dash } = look(run);
  root.append(svg("line", { x1: 1, x2: 21, y1: 5, y2: 5, style: `stroke:${color}`, "stroke-dasharray": dash }));
  return el("span", { class: "named" }, root, el("b", {}, run.letter));
}

// Highlights the line of a run in all charts; null: no highlight.
function point(run) {
  for (const { root } of cursor.charts) {
    root?.classList.toggle("focused", run != null);
    for (const node of root?.querySelectorAll("[data-run]") ?? []) node.classList.toggle("hot", +node.dataset.run === run);
  }
}

// The table, and a button per run with curves: click to show or hide it, double-click to show only this run.
function compare({ runs, heads, rows, panels }) {
  const root = document.getElementById("runs"), legend = document.getElementById("legend");
  root.hidden = legend.hidden = false;
  const cells = (tag, row) => row.map((cell) => el(tag, {}, cell));
  root.prepend(el("div", { class: "table", tabindex: 0, role: "region", "aria-label": "runs and their results" },
    el("table", {}, el("thead", {}, el("tr", {}, ...cells("th", ["", ...heads]))),
      el("tbody", {}, ...rows.map(([place, ...row]) => el("tr", {}, el("td", {}, named(runs[place])), ...cells("td", row)))))));
  const drawn = rows.map(([place]) => place).filter((place) => panels.some(({ lines }) => lines.some(({ run }) => run === place)));
  const others = (off, place) => off.filter((other) => other !== place);
  const button = (place) => el("button", { class: "setting", "data-run": place, title: runs[place].name,
    onclick: () => choice.set(new Set(choice.off.has(place) ? others([...choice.off], place) : [...choice.off, place])),
    ondblclick: () => choice.set(new Set(others(drawn, place))),
    onpointerenter: () => point(place), onpointerleave: () => point(null) }, named(runs[place]), el("span", { class: "name" }, runs[place].label));
  const plain = (words, off) => el("button", { class: "plain", onclick: () => choice.set(new Set(off)) }, words);
  legend.append(...drawn.map(button), plain("all", []), plain("none", drawn));
  choice.set(new Set(drawn.length > SHOWN + 2 ? drawn.slice(SHOWN) : [])); // show one or two more rather than hide them
}
