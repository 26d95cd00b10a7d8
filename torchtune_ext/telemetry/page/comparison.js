// Puts the page of several runs together.

const SHOWN = 8; // So many settings are drawn when the page opens; a click draws others.
const FEW_KEYS = 4; // So many keys have their columns before the results; more stand behind them.

function section(id, label) {
  document.getElementById("nav").append(el("a", { href: `#${id}` }, label));
  return document.getElementById(id);
}

const interval = (estimate) => between(estimate?.low, estimate?.high);
const dotted = (key) => key.split(/(?<=[./_])/).flatMap((part, i) => (i ? [el("wbr"), part] : [part])); // it may break there

function verdict({ settings, verdict: headline, target, best, ranking, keys }) {
  const root = section("verdict", "Which is better").firstElementChild;
  root.prepend(el("p", { class: "headline" }, headline));
  const rows = ranking.map((place) => ({ ...settings[place], setting: place })), there = rows.filter(({ mean }) => mean);
  if (there.length < 2 && !keys.length) return;
  const ends = there.flatMap(({ mean: { value, low, high } }) => [value, low ?? value, high ?? value]);
  const axis = [Math.min(...ends), Math.max(...ends)];
  const word = (row) => (row.setting === best ? "best" : row.close ? "may be as good" : "");
  const values = keys.map(([key, short], i) => {
    const value = (row) => row.values[i];
    return { label: dotted(short), title: key, kind: "code", value, cell: value };
  });
  const few = keys.length && keys.length <= FEW_KEYS, label = { label: "setting", kind: "words", value: (row) => row.label, cell: (row) => row.label };
  const results = there.length < 2 ? [] : [
    number("seeds", "runs of the same seed count as one", (row) => row.seeds, (row) => row.seeds),
    number(dotted(target.metric), target.words, (row) => row.mean?.value, (row) => digits(row.mean?.value)),
    number("95% interval", "of several seeds, or of one over held-out problems", (row) => row.mean?.low, (row) => interval(row.mean)),
    { label: "", kind: "strip-cell", cell: (row) => (row.mean ? [whisker(row.mean, axis, look(row.setting).color)] : "") },
    { label: "", value: word, cell: (row) => word(row) && [el("span", { class: row.setting === best ? "chip good" : "chip" }, word(row))] },
  ];
  const letter = { label: "", kind: "key", value: (row) => row.setting, cell: (row) => [named(row.setting, row.letter)] };
  const runs = { label: "runs", kind: "words", cell: (row) => row.runs.join(", ") };
  const columns = [letter, ...(few ? [...values, ...results] : [label, ...results, ...values]), runs];
  root.append(sortable(columns, rows, "settings and what they came to"));
}

function curves(overview) {
  const { charts, ranking } = overview;
  if (!charts.length) return document.getElementById("curves").remove();
  section("curves", "Curves");
  const drawn = ranking.filter((place) => charts.some(({ lines }) => lines.some(({ setting }) => setting === place)));
  legend(overview, drawn);
  const grids = new Map([["", document.getElementById("front")]]);
  charts.forEach((chart, i) => {
    const overlay = new Overlay(chart, overview, i === 0);
    cursor.charts.push(overlay);
    if (i === 0) return document.getElementById("lead").append(overlay.node);
    if (!grids.has(chart.section)) grids.set(chart.section, chartSection(chart.section, false));
    grids.get(chart.section).append(overlay.node);
  });
  choice.set(new Set(drawn.length > SHOWN + 2 ? drawn.slice(SHOWN) : [])); // one or two more are no reason to hide any
}

function start(overview) {
  document.getElementById("state").textContent = `${overview.runs} ${overview.runs === 1 ? "run" : "runs"}`;
  document.getElementById("notices").append(...overview.notices.map((text) => el("li", {}, text)));
  overview.ranking.forEach((place, rank) => { choice.ranks[place] = rank; });
  verdict(overview);
  curves(overview);
}

begin(start, "a click in the legend turns a setting on or off, a double click shows it alone.");
