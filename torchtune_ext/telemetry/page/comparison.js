// Puts the page of several runs together.

function section(id, label) {
  document.getElementById("nav").append(el("a", { href: `#${id}` }, label));
  return document.getElementById(id);
}

function verdict(overview) {
  const root = section("verdict", "Which is better"), { settings, verdict: said, target, keys, values } = overview;
  const said_of = new Map(said.pairs.map((pair) => [pair.other, pair]));
  root.append(el("div", { class: "panel verdicts" }, el("p", { class: "headline" }, said.headline), ...said.notes.map((note) => el("p", { class: "note" }, note))));
  const there = settings.map(({ estimate }) => estimate).filter(Boolean);
  if (!target || there.length < 2) return false;
  const every = there.flatMap(({ value, low, high }) => [value, low ?? value, high ?? value]), axis = [Math.min(...every), Math.max(...every)];
  const words = { apart: "told apart", alike: "cannot be told apart", unknown: "cannot be said" };
  const compared = (row) => {
    const pair = said_of.get(row.setting);
    if (row.setting === said.best) return [el("span", { class: "chip good" }, "best")];
    return pair ? [el("span", { class: pair.told === "apart" ? "chip strong" : "chip" }, words[pair.told])] : ["–"];
  };
  const worth = ({ estimate }) => (estimate ? (target.higher ? -1 : 1) * estimate.value : Infinity);
  const rows = settings.map((setting, place) => ({ ...setting, setting: place })).sort((a, b) => worth(a) - worth(b) || a.setting - b.setting);
  const number = (label, title, value, cell) => ({ label, title, number: true, value, cell });
  const inside = keys.length && keys.length <= FEW_KEYS && values.every(Boolean);
  root.firstChild.append(sortable([
    { label: "", kind: "key", value: (row) => row.setting, cell: (row) => [named(row.setting, row.letter)] },
    ...(inside ? keyColumns(keys, values) : [{ label: "setting", kind: "words", value: (row) => row.label, cell: (row) => row.label }]),
    ...(settings.some(({ runs }) => runs.length > 1) ? [number("seeds", "runs of the same seed count as one", (row) => row.seeds, (row) => String(row.seeds))] : []),
    number(dotted(target.metric), target.words, (row) => row.estimate?.value, (row) => digits(row.estimate?.value)),
    number("95% interval", "of several runs: t-interval across seeds; of one: over held-out problems", (row) => row.estimate?.low, (row) => between(row.estimate?.low, row.estimate?.high)),
    { label: "", kind: "strip-cell", cell: (row) => (row.estimate ? [whisker(row.estimate, axis, look(row.setting).color)] : "") },
    ...(said.pairs.length ? [
      { label: "", value: (row) => words[said_of.get(row.setting)?.told], cell: compared },
      number("best minus it", "how far the best one is from it", (row) => said_of.get(row.setting)?.value, (row) => digits(said_of.get(row.setting)?.value, said_of.get(row.setting)?.high)),
      number("interval of the difference", "all of them hold together at 95%", (row) => said_of.get(row.setting)?.low, (row) => between(said_of.get(row.setting)?.low, said_of.get(row.setting)?.high)),
    ] : []),
  ], rows, "settings and what they came to", ROWS));
  return inside;
}

const ROWS = 12; // So many settings stand in the first table until it is asked for all.
const FEW_KEYS = 4; // So many have their columns beside the results; more have a table of their own.
const sorts = (text) => (text == null || text === "" || isNaN(text) ? text : +text);
const dotted = (key) => key.split(/(?<=[./_])/).flatMap((part, i) => (i ? [el("wbr"), part] : [part])); // it may break there
const keyColumns = (keys, values) => keys.map(([name], i) => ({ label: dotted(name), kind: "code", value: (row) => sorts(values[row.setting]?.[i]), cell: (row) => values[row.setting]?.[i] }));

function sweeps(overview) {
  const root = document.getElementById("sweep");
  if (!overview.sweeps.length) return root.remove();
  section("sweep", "Sweep");
  for (const sweep of overview.sweeps) {
    const counts = new Map();
    for (const { state } of sweep.points) counts.set(state, (counts.get(state) ?? 0) + 1);
    const best = sweep.points.find(({ id }) => id === sweep.best), failed = sweep.points.filter(({ state }) => state === "failed");
    const words = [...counts].map(([state, count]) => `${count} ${state.replace("_", " ")}`).join(", ");
    const values = best && Object.entries(best.parameters).map(([key, value]) => `${key} ${typeof value === "number" ? plain(value) : value}`).join(", ");
    root.append(el("h2", {}, "Sweep"), el("p", { class: "muted said-of" }, `${sweep.method}, ${sweep.goal} ${sweep.metric}; runs: ${words}. `,
      best ? `Best: ${best.id}, ${digits(best.value)}${values ? ` with ${values}; it has a ring` : ""}. ` : "No run has a value yet. ",
      sweep.points.some(({ low }) => low != null) ? "Bars: 95% intervals over held-out problems. " : "", failed.length ? "A cross: the run failed." : ""));
    const grid = el("div", { class: "grid" });
    grid.append(...sweep.axes.map((axis) => new Scatter(axis, sweep, overview).node));
    root.append(grid);
    balance(grid, 400);
    if (failed.length) root.append(el("ul", { class: "causes" }, ...failed.map((point) => el("li", {}, el("b", {}, point.id), " failed", point.cause ? `: ${point.cause}` : "."))));
  }
}

function curves(overview) {
  if (!overview.charts.length) return document.getElementById("curves").remove();
  section("curves", "Curves");
  legend(overview);
  const folded = new Map(), lead = document.getElementById("lead"), front = el("div", { class: "grid" });
  const seeds = overview.settings.some(({ runs }) => runs.length > 1), evaluated = overview.charts.some(({ metric, lines }) => metric === "eval/accuracy_sampled" && lines.some(({ low }) => low));
  const told = [seeds ? "Runs that differ in their seed alone are one curve: the line is their mean, the band goes from the lowest to the highest." : "",
    evaluated ? `Of held-out accuracy, the band of ${seeds ? "a setting with one run" : "a run"} is its 95% interval over problems.` : "",
    overview.drawn.length > BANDS && (seeds || evaluated) ? "Where more than four are drawn, only the one that is pointed at shows its band." : "",
    overview.steps_each > 1 ? `Each point is the mean of up to ${overview.steps_each} steps.` : "", "A number in a chart is the mean of the last tenth of the steps, of evaluations the newest."].filter(Boolean).join(" ");
  document.getElementById("legend").after(el("p", { class: "muted said-of" }, told));
  lead.after(front);
  overview.charts.forEach((chart, i) => {
    const node = new Overlay(chart, overview, i === 0);
    cursor.charts.push(node);
    if (i === 0) return lead.append(node.node);
    if (chart.section === overview.charts[0].section) return front.append(node.node);
    if (!folded.has(chart.section)) {
      const grid = el("div", { class: "grid" }), number = overview.charts.filter((other, i) => i && other.section === chart.section).length;
      document.getElementById("charts").append(el("details", { class: "section", id: sectionId(chart.section) },
        el("summary", {}, el("h2", {}, chart.section), el("span", { class: "muted" }, `${number} ${number === 1 ? "curve" : "curves"}`)), grid));
      balance(grid, 400);
      folded.set(chart.section, grid);
    }
    folded.get(chart.section).append(node.node);
  });
  balance(front, 400);
}

// Rows are what there is more of: settings or keys.
function differences({ keys, values, settings, more_keys: more }) {
  const root = document.getElementById("settings"), known = settings.map((setting, place) => ({ ...setting, setting: place, values: values[place] })).filter((row) => row.values);
  if (!keys.length) {
    root.append(el("p", { class: "muted" }, settings.length > 1 ? "Nothing is known to differ." : "The runs differ in their seed alone, if at all."));
    return section("settings", "Settings");
  }
  section("settings", "Settings");
  const key = (row) => [named(row.setting, row.letter)];
  if (keys.length <= known.length) {
    root.append(sortable([{ label: "", kind: "key", value: (row) => row.setting, cell: key }, ...keyColumns(keys, values)], known, "settings that differ"));
  } else {
    const rows = keys.map(([name], i) => ({ name, i }));
    root.append(sortable([{ label: "key", kind: "key code", value: (row) => row.name, cell: (row) => dotted(row.name) },
      ...known.map((setting) => ({ label: [named(setting.setting, setting.letter)], title: setting.label, kind: "code", cell: (row) => setting.values[row.i] }))], rows, "settings that differ", 2 * ROWS));
  }
  root.append(el("p", { class: "muted under" }, `What is the same in all runs is not shown, nor seeds and folders; “default” stands for a key that nobody wrote.${more ? ` ${more} keys more differ.` : ""}`));
}

function runs({ rows, settings, target }) {
  const root = section("runs", "Runs"), any = (name) => rows.some((row) => row[name] != null && row[name] !== 0 && row[name] !== "");
  const number = (label, title, value, cell) => ({ label, title, number: true, value, cell });
  const step = (at) => (at == null ? "–" : at.toLocaleString("en"));
  const standard = ["eval/accuracy_sampled", "reward/mean"].includes(target?.metric);
  const columns = [
    { label: "", kind: "key", value: (row) => row.setting, cell: (row) => (row.setting == null ? "" : [named(row.setting, settings[row.setting].letter)]) },
    { label: "run", kind: "words", value: (row) => row.name, cell: (row) => [row.name, ...(row.parameters ? [el("div", { class: "muted" }, row.parameters)] : [])] },
    any("seed") && number("seed", "", (row) => +row.seed, (row) => row.seed),
    { label: "state", kind: "words", value: (row) => row.state, cell: (row) => [el("span", { class: `badge ${row.state}`, title: row.state_text }, row.state.replace("_", " ")), ...(row.cause ? [el("div", { class: "why" }, row.cause)] : [])] },
    any("last") && number("last accuracy", "held-out, of the newest evaluation", (row) => row.last?.value, (row) => digits(row.last?.value)),
    any("last") && number("95% interval", "over held-out problems", (row) => row.last?.low, (row) => between(row.last?.low, row.last?.high)),
    any("best") && number("best accuracy", "the highest of all evaluations: the best of many flatters", (row) => row.best?.value, (row) => digits(row.best?.value)),
    any("best") && number("95% interval", "over held-out problems", (row) => row.best?.low, (row) => between(row.best?.low, row.best?.high)),
    any("best") && number("at step", "of the best evaluation", (row) => row.best_step, (row) => step(row.best_step)),
    !standard && any("target") && number(dotted(target.metric), target.words, (row) => row.target?.value, (row) => digits(row.target?.value)),
    any("reward") && number("reward", "mean of the last tenth of the steps", (row) => row.reward, (row) => digits(row.reward)),
    number("steps", "", (row) => row.steps, (row) => (row.steps ? step(row.steps) : "–")),
    any("seconds") && number("time", "of its steps; of a sweep, of its process", (row) => row.seconds, (row) => (row.seconds == null ? "–" : format(row.seconds, "seconds"))),
    any("tokens") && number("tokens", "sampled", (row) => row.tokens, (row) => (row.tokens == null ? "–" : row.tokens.toLocaleString("en"))),
  ].filter(Boolean);
  root.append(sortable(columns, rows, "runs and what they came to"));
}

class SideBySide {
  constructor(root, problems, overview) {
    this.problems = problems;
    this.overview = overview;
    this.place = 0;
    const cut = (text) => (text.length > 60 ? `${text.slice(0, 59)}…` : text);
    this.select = el("select", { "aria-label": "problem", onchange: () => this.go(+this.select.value) }, ...problems.map(({ step, id }, i) => el("option", { value: i }, `step ${step.toLocaleString("en")}: ${cut(id)}`)));
    this.pane = el("div", { class: "detail-pane" });
    root.append(el("div", { class: "browser" }, el("div", { class: "controls" }, el("button", { title: "problem before", onclick: () => this.go(this.place - 1) }, "‹"), this.select,
      el("button", { title: "next problem", onclick: () => this.go(this.place + 1) }, "›"), this.output = el("output", { class: "muted" })), this.pane));
    choice.listeners.push(() => this.show());
    this.show();
  }

  go(place) {
    if (!this.problems[place]) return;
    this.place = place;
    this.select.value = place;
    this.show();
  }

  show() {
    const problem = this.problems[this.place], { rows, settings } = this.overview;
    const setting = ({ run }) => rows.find((row) => row.run === run).setting, on = problem.runs.filter((each) => !choice.off.has(setting(each)));
    const largest = Math.max(1e-9, ...problem.runs.flatMap(({ samples }) => samples.map((sample) => Math.abs(sample.advantage ?? 0))));
    const prompt = el("div", { class: "prompt" }, ...promptOf(problem.messages, (text) => [text]));
    const off = problem.runs.length - on.length;
    this.output.textContent = `${on.length} runs${off ? `, ${off} more turned off in the legend` : ""}`;
    const one = (each) => {
      const row = rows.find(({ run }) => run === each.run), words = each.samples.length > 1 ? ["best", "worst"] : ["only one graded"];
      return el("div", { class: "of-run" }, el("div", { class: "run-head" }, named(row.setting, settings[row.setting].letter), el("b", { class: "id", title: row.name }, row.name),
        chip("mean reward", fixed(each.mean)), chip("samples", each.count)),
      ...each.samples.map((sample, i) => el("article", { class: sample.trained ? "sample" : "sample unused" }, el("div", { class: "verdict" }, words[i]), bar(sample, largest), el("pre", { class: "text" }, sample.text))));
    };
    this.pane.replaceChildren(el("h3", {}, problem.id), el("details", { class: "box", open: true }, el("summary", {}, "prompt"), prompt),
      el("details", { class: "box" }, el("summary", {}, "wanted answer"), el("pre", { class: "text" }, problem.answer)),
      on.length ? el("div", { class: "side-by-side" }, ...on.map(one)) : el("p", { class: "empty" }, "All runs of this problem are turned off in the legend of the curves."));
    clip(prompt, 200);
    for (const body of this.pane.querySelectorAll(".sample > .text")) clip(body, 260);
  }
}

async function start() {
  const overview = await unpack("overview"), finished = overview.rows.filter(({ state }) => state === "finished").length;
  document.body.append(el("div", { id: "tip", class: "tip", hidden: true }));
  document.getElementById("state").textContent = `${overview.rows.length} ${overview.rows.length === 1 ? "run" : "runs"}, ${finished} finished`;
  document.getElementById("footer").textContent = `Written ${day(overview.written)} by torchtune-ext report. Hover reads all curves at one step, dragging zooms, a double click shows all steps; a click in the legend turns a setting on or off, a double click shows it alone.`;
  document.getElementById("notices").append(...overview.notices.map((text) => el("li", {}, text)));
  cursor.steps = overview.steps;
  tools(overview.steps);
  [...new Set([...overview.shown, ...overview.drawn, ...overview.settings.keys()])].forEach((setting, rank) => ranks.set(setting, rank));
  const told = verdict(overview);
  sweeps(overview);
  curves(overview);
  if (told || !overview.settings.length) document.getElementById("settings").remove();
  else differences(overview);
  runs(overview);
  document.addEventListener("click", (event) => unfold(event.target.closest("a")?.getAttribute("href")));
  unfold(location.hash);
  const root = section("samples", "Samples"), problems = await unpack("problems");
  root.append(el("p", { class: "muted said-of" }, overview.samples));
  if (problems.length) new SideBySide(root, problems, overview);
  cursor.redraw();
}

begin(start);
