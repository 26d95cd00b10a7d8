// Unpacks the embedded data and puts the page together.

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

function mean(values) {
  const there = values.filter((value) => value != null);
  return there.length ? there.reduce((a, b) => a + b, 0) / there.length : null;
}

function tiles(overview) {
  const root = document.getElementById("tiles"), { series, steps } = overview;
  const tenth = Math.max(1, Math.round(steps.length / 10));
  const add = (label, value, detail) => root.append(el("div", { class: "tile" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "detail" }, detail ?? "")));
  const recent = (label, name, unit, detail = "") => {
    if (!series[name]) return;
    const last = mean(series[name].slice(-tenth)), first = mean(series[name].slice(0, tenth));
    add(label, format(last, unit), detail || (steps.length > 2 && first != null ? `from ${format(first, unit)}` : ""));
  };
  recent("Reward", "reward/mean", "");
  const accuracy = ["eval/accuracy_sampled", "eval/accuracy_greedy"].find((name) => series[name]);
  if (accuracy) {
    const last = series[accuracy].findLastIndex((value) => value != null), low = series["eval/low"]?.[last], high = series["eval/high"]?.[last];
    const interval = low != null && high != null ? `${format(low, "percent")} to ${format(high, "percent")}` : `step ${steps[last]}`;
    add("Evaluation", format(series[accuracy][last], "percent"), interval);
  }
  recent("Completion length", "length/mean", "int");
  recent("Entropy", "loss/entropy", "");
  recent("Mismatch", "mismatch/mean_abs", "", "mean |Δ log-prob|");
  recent("Sampled tokens/s", "speed/sampled_tokens_s", "tok/s");
  recent("Step time", "time/step", "seconds");
  recent("Token reduction ρ", "pack/rho", "");
}

function charts(overview) {
  const root = document.getElementById("charts"), nav = document.getElementById("nav");
  const sections = new Map();
  for (const panel of overview.panels) {
    if (!sections.has(panel.section)) {
      const id = `section-${panel.section.toLowerCase().replace(/\W+/g, "-")}`, grid = el("div", { class: "grid" });
      root.append(el("section", { id }, el("h2", {}, panel.section), grid));
      nav.append(el("a", { href: `#${id}` }, panel.section));
      sections.set(panel.section, grid);
    }
    const chart = new Chart(panel, overview.series, overview.steps);
    cursor.charts.push(chart);
    sections.get(panel.section).append(chart.node);
  }
  if (overview.strip && sections.has("Speed")) {
    const strip = new Strip(overview.strip, overview.steps);
    cursor.charts.push(strip);
    sections.get("Speed").prepend(strip.node);
  }
  for (const [id, label] of [["rollouts", "Rollouts"], ["configuration", "Configuration"]]) if (document.getElementById(id)) nav.append(el("a", { href: `#${id}` }, label));
  return sections;
}

function tools(steps) {
  const slider = document.getElementById("smoothing"), theme = document.getElementById("theme");
  const weigh = () => {
    cursor.weight = +slider.value;
    document.getElementById("smoothing-value").textContent = cursor.weight ? cursor.weight.toFixed(2) : "off";
    cursor.redraw();
  };
  slider.addEventListener("input", weigh);
  if (steps.length > 600) slider.value = 0.9; // so many points are a smear
  weigh();
  document.getElementById("reset-zoom").addEventListener("click", () => { cursor.zoom = null; cursor.redraw(); });
  const set = (name) => {
    document.documentElement.dataset.theme = name;
    theme.textContent = name === "dark" ? "light" : "dark";
  };
  const asked = new URLSearchParams(location.hash.slice(1)).get("theme");
  set(asked ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  theme.addEventListener("click", () => set(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}

async function rollouts(overview) {
  const root = document.getElementById("rollouts");
  if (!overview.rollouts.length) {
    root.append(el("p", { class: "muted" }, overview.stored ? "This page was written without rollouts; they lie in the folder rollouts/ of the run." : "This run stored no rollouts."));
    return;
  }
  const kept = new Map(); // a few unpacked steps; a page may carry many
  const load = async (step) => {
    if (!kept.has(step)) kept.set(step, await unpack(`rollouts-${step}`));
    if (kept.size > 12) kept.delete(kept.keys().next().value);
    return kept.get(step) ?? unpack(`rollouts-${step}`);
  };
  const browser = new Browser(root, overview, load);
  cursor.onPick = async (step) => { await browser.goStep(step); root.scrollIntoView({ behavior: "smooth" }); };
  const asked = new URLSearchParams(location.hash.slice(1)); // report.html#step=40&group=3&view=tokens&find=word
  const step = asked.get("step");
  await (step == null ? browser.go(overview.rollouts.length - 1) : browser.goStep(+step));
  if (asked.get("view") === "tokens") browser.show("tokens");
  const group = browser.groups[+asked.get("group")];
  if (asked.has("group") && group) browser.pick(group.id);
  if (asked.has("find")) { browser.search.value = asked.get("find"); browser.find(); }
  if (step != null) root.scrollIntoView();
}

function configuration(rows) {
  const root = document.getElementById("configuration");
  if (!rows.length) return root.remove();
  root.append(el("dl", { class: "config" }, ...rows.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value)))));
}

async function start() {
  const overview = await unpack("overview"), { steps } = overview;
  tools(steps);
  const day = (seconds) => new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") + " UTC";
  document.getElementById("subtitle").textContent = `${steps.length.toLocaleString("en")} steps, ${steps[0].toLocaleString("en")} to ${steps.at(-1).toLocaleString("en")}${overview.started ? `, started ${day(overview.started)}` : ""}`;
  document.getElementById("footer").textContent = `Written ${day(overview.written)} by torchtune-ext report. Hover reads all curves at one step, dragging zooms, a double click shows the whole run, a click opens the rollouts of the step.`;
  document.getElementById("notices").append(...overview.notices.map((text) => el("li", {}, text)));
  cursor.steps = steps;
  tiles(overview);
  configuration(overview.config);
  const sections = charts(overview);
  await archive(overview, sections.get("Archive"));
  await rollouts(overview);
}

start().catch((error) => {
  const trouble = document.getElementById("trouble");
  trouble.hidden = false;
  trouble.textContent = typeof DecompressionStream === "undefined" ? "This browser is too old for this page (it lacks DecompressionStream, which browsers have since 2023)." : `The page could not be put together: ${error}`;
});
