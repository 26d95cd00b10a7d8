// Puts the page of several runs together.

const SHOWN = 8; // So many settings are drawn when the page opens; a click draws others.
const FEW_KEYS = 4; // So many keys have their columns before the results; more stand behind them.

function section(id, label) {
  document.getElementById("nav").append(el("a", { href: `#${id}` }, label));
  return document.getElementById(id);
}

const interval = (estimate) => between(estimate?.low, estimate?.high);
const dotted = (key) => key.split(/(?<=[./_])/).flatMap((part, i) => (i ? [el("wbr"), part] : [part])); // it may break there

function verdict({ settings, verdict: headline, target, best, ranking, keys, sweeps, rows: all }) {
  const root = section("verdict", "Which is better").firstElementChild;
  root.prepend(el("p", { class: "headline" }, headline));
  sweeps.forEach(({ name, method }, place) => {
    const states = all.filter(({ sweep }) => sweep === place).map(({ state }) => state.replace("_", " "));
    const counts = [...new Set(states)].map((state) => `${states.filter((other) => other === state).length} ${state}`);
    root.append(el("p", { class: "note" }, `Sweep ${name}: ${method}; runs: ${counts.join(", ")}. A click on a parameter sorts the intervals by it.`));
  });
  const rows = ranking.map((place) => ({ ...settings[place], setting: place })), there = rows.filter(({ mean }) => mean);
  if (there.length < 2 && !keys.length) return;
  const ends = there.flatMap(({ mean: { value, low, high } }) => [value, low ?? value, high ?? value]);
  const axis = [Math.min(...ends), Math.max(...ends)];
  const word = (row) => (row.setting === best ? "best" : row.word);
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
    number("worse by", "how far the best one is from it", (row) => row.lead?.value, (row) => digits(row.lead?.value)),
    number("interval of that", "all of them hold together at 95%", (row) => row.lead?.low, (row) => interval(row.lead)),
  ];
  const letter = { label: "", kind: "key", value: (row) => row.setting, cell: (row) => [named(row.setting, row.letter)] };
  const columns = [letter, ...(few ? [...values, ...results] : [label, ...results, ...values])];
  root.append(sortable(columns, rows, "settings and what they came to"));
}

function curves(overview) {
  const { charts, ranking, rows } = overview;
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

function runs({ rows, settings, target }) {
  const root = section("runs", "Runs"), any = (name) => rows.some((row) => row[name]);
  // Of a run that has no setting yet, as it did not come to its first step.
  const parameters = (row) => (row.setting == null ? Object.entries(row.parameters).map(([key, value]) => `${key} ${value}`).join(", ") : "");
  const count = (value) => value?.toLocaleString("en"), letter = ({ setting }) => (setting == null ? "" : [named(setting, settings[setting].letter)]);
  const badge = (row) => el("span", { class: `badge ${row.state}`, title: row.state_text }, row.state.replace("_", " "));
  const columns = [
    { label: "", kind: "key", value: (row) => row.setting, cell: letter },
    { label: "run", kind: "words", value: (row) => row.name, cell: (row) => [row.name, el("div", { class: "muted" }, parameters(row))] },
    number("seed", "", (row) => row.seed, (row) => row.seed),
    { label: "state", kind: "words", value: (row) => row.state, cell: (row) => [badge(row), el("div", { class: "why" }, row.cause)] },
    any("result") && number(dotted(target.metric), target.words, (row) => row.result?.value, (row) => digits(row.result?.value)),
    any("result") && number("95% interval", "over held-out problems", (row) => row.result?.low, (row) => interval(row.result)),
    any("steps") && number("steps", "", (row) => row.steps, (row) => count(row.steps)),
    any("seconds") && number("time", "of its steps; of a sweep, of its process", (row) => row.seconds, (row) => format(row.seconds, "seconds")),
    any("tokens") && number("tokens", "sampled", (row) => row.tokens, (row) => count(row.tokens)),
  ].filter(Boolean);
  root.append(sortable(columns, rows, "runs and what they came to"));
}

function start(overview) {
  const { length } = overview.rows;
  document.getElementById("state").textContent = `${length} ${length === 1 ? "run" : "runs"}`;
  document.getElementById("notices").append(...overview.notices.map((text) => el("li", {}, text)));
  overview.ranking.forEach((place, rank) => { choice.ranks[place] = rank; });
  verdict(overview);
  curves(overview);
  runs(overview);
}

begin(start, "a click in the legend turns a setting on or off, a double click shows it alone.");
