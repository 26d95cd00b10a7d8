// Renders the page of one run or of several.

function head(overview) {
  const { state, facts = [] } = overview, badge = document.getElementById("state");
  badge.textContent = state.text;
  badge.classList.add(state.kind);
  document.getElementById("about").append(...facts.map(([label, value, note]) =>
    el("div", {}, el("dt", {}, label), el("dd", {}, value), note ? el("dd", { class: "note" }, note) : null)));
  document.getElementById("notices").append(...overview.notices.map(({ text, section }) => {
    const [, first, rest] = text.match(/^(.*?\.(?= ))? ?(.*)$/s), link = section ? el("a", { href: `#${sectionId(section)}` }, section) : null;
    return el("li", {}, ...(first ? [el("details", {}, el("summary", {}, first, link), rest)] : [rest, link]));
  }));
}

function tiles(overview) {
  const root = document.getElementById("tiles");
  for (const { label, metric, reading, unit, note } of overview.tiles) {
    const first = format(reading.first, unit), last = format(reading.last, unit);
    root.append(el("div", { class: "tile", "data-metric": metric, title: `from ${first} to ${last}` }, el("div", { class: "label" }, label),
      el("div", { class: "value" }, overview.steps.length > 1 ? el("span", { class: "from" }, el("span", { class: "unseen" }, "from "), first, " ", el("span", { "aria-hidden": "true" }, "→"),
        el("span", { class: "unseen" }, " to ")) : null, el("b", {}, last)),
      el("div", { class: "note" }, averaged(reading), note ? el("span", {}, ` · ${note}`) : null)));
  }
}

function charts(overview) {
  const nav = document.getElementById("nav"), sections = new Map([["", document.getElementById("front")]]);
  const lead = overview.panels.find((panel) => panel.lead);
  for (const panel of overview.panels) {
    const chart = new Chart(panel, overview, panel === lead);
    cursor.charts.push(chart);
    if (panel !== lead && !sections.has(panel.section)) {
      const number = overview.panels.filter((other) => other !== lead && other.section === panel.section).length;
      const closed = overview.folded.includes(panel.section), unusual = closed && !overview.runs ? "nothing unusual, " : "";
      sections.set(panel.section, chartSection(panel.section, !closed, `${unusual}${number} ${number === 1 ? "curve" : "curves"}`));
      nav.append(el("a", { href: `#${sectionId(panel.section)}` }, panel.section));
      if (sections.size === 2 && !overview.runs) {
        document.getElementById("charts").append(document.getElementById("rollouts")); // after the sections about learning
        nav.append(el("a", { href: "#rollouts" }, "Rollouts"));
      }
    }
    (panel === lead ? document.getElementById("lead") : sections.get(panel.section)).append(chart.node);
  }
}

// The samples of one group with the highest and the lowest advantage, so that a reader sees texts before curves. The groups of
// a step are sorted by falling spread of rewards.
function pair(step, groups, open) {
  for (const group of groups) {
    const [good, ...others] = group.samples.filter(({ reward }) => reward != null).sort((a, b) => b.advantage - a.advantage), bad = others.at(-1);
    if (!(good?.advantage > bad?.advantage)) continue;
    const root = document.getElementById("pair"), largest = Math.max(Math.abs(good.advantage), Math.abs(bad.advantage));
    const prompt = el("div", { class: "prompt" }, ...promptOf(group.messages));
    const one = (kind, sample, words) => el("article", { class: `sample ${kind}` }, el("div", { class: "verdict" }, words), bar(sample, largest), textOf(sample));
    root.hidden = false;
    root.append(el("h2", {}, "A good and a bad sample"), el("div", { class: "panel" },
      el("div", { class: "pair-head" }, el("span", {}, "Highest and lowest advantage of one group, ", el("b", {}, group.id), `, at step ${step.toLocaleString("en")}`),
        el("button", { onclick: () => open(step, group.id) }, "rollouts of this step")),
      prompt, el("div", { class: "two" }, one("good", good, "highest advantage"), one("bad", bad, "lowest advantage"))));
    clip(prompt, 170);
    for (const body of root.querySelectorAll(BODIES)) clip(body, 260);
    return;
  }
}

async function rollouts(overview) {
  const root = document.getElementById("rollouts");
  if (!overview.rollouts.length) {
    root.append(el("p", { class: "muted" }, "This run stored no rollouts."));
    return;
  }
  const kept = new Map(); // cache of a few unpacked steps; a page may have many
  const load = async (step) => {
    if (!kept.has(step)) kept.set(step, await unpack(`rollouts-${step}`));
    if (kept.size > 12) kept.delete(kept.keys().next().value);
    return kept.get(step) ?? unpack(`rollouts-${step}`);
  };
  const browser = new Browser(root, overview, load);
  cursor.onPick = async (step, id) => { await browser.goStep(step, id); root.scrollIntoView({ behavior: "smooth" }); };
  const newest = overview.rollouts.findLast(({ signals }) => signals);
  if (newest) pair(newest.step, await load(newest.step), cursor.onPick);
  const asked = new URLSearchParams(location.hash.slice(1)); // report.html#step=40&group=3
  const step = asked.get("step")?.trim() ? Number(asked.get("step")) : NaN;
  await (Number.isNaN(step) ? browser.go(overview.rollouts.length - 1) : browser.goStep(step));
  const group = browser.groups[+asked.get("group")];
  if (asked.has("group") && group) browser.pick(group.id);
  if (!Number.isNaN(step)) root.scrollIntoView();
}

function configuration({ made, config }) {
  const root = document.getElementById("configuration");
  if (!made.length && !config.length) return root.remove();
  const list = (rows) => el("dl", { class: "config" }, ...rows.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value))));
  if (made.length) root.append(list(made));
  if (config.length) root.append(list(config));
}

async function start(overview) {
  head(overview);
  if (overview.runs) {
    for (const id of ["rollouts", "configuration"]) document.getElementById(id).remove();
    charts(overview);
    return compare(overview);
  }
  tiles(overview);
  configuration(overview);
  charts(overview);
  if (document.getElementById("configuration")) document.getElementById("nav").append(el("a", { href: "#configuration" }, "Configuration"));
  await rollouts(overview);
}

begin(start);
