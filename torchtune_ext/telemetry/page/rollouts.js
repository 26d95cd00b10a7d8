// Browser of groups and samples. All text of the run becomes text nodes and is never parsed as HTML.

const fixed = (value) => (value == null ? "–" : Math.abs(value) < 100 ? value.toFixed(3) : plain(value));

const chip = (label, value, kind = "") => el("span", { class: `chip ${kind}` }, `${label} `, el("b", {}, value));

function advantage(value, largest) {
  if (value == null) return null;
  const root = svg("svg", { viewBox: "-36 0 72 10" }), width = (34 * Math.abs(value)) / Math.max(1e-9, largest);
  root.append(svg("rect", { class: "track", x: -34, y: 4, width: 68, height: 2 }), svg("rect", { class: value < 0 ? "minus" : "plus", x: value < 0 ? -width : 0, y: 1, width, height: 8, rx: 1.5 }), svg("line", { x1: 0, x2: 0, y1: 0, y2: 10 }));
  return el("span", { class: "advantage", title: "advantage" }, root, `${value > 0 ? "+" : value < 0 ? "−" : ""}${fixed(Math.abs(value))}`);
}

// The facts about a sample in one line, and the grader's note below.
function bar(sample, largest) {
  const all = Object.entries(sample.parts), shown = all.length > 6 ? all.filter(([, value]) => value !== 0) : all; // of many parts, hide the zeros
  const parts = shown.map(([name, value]) => chip(name, format(value, "")));
  const kinds = { length: "warn", max_turns: "warn", context_overflow: "warn", abort: "bad", step_timeout: "bad", environment_failed: "bad" };
  const versions = sample.versions.length > 1 ? el("span", { class: "chip", title: sample.versions.map(([v, n]) => `version ${v}: ${n} tokens`).join("\n") }, `versions ${sample.versions[0][0]}–${sample.versions.at(-1)[0]}`) : null;
  return el("div", {},
    el("div", { class: "bar" }, el("span", { class: "reward", title: "reward" }, fixed(sample.reward)), advantage(sample.advantage, largest), ...parts,
      sample.outcome === "scored" ? null : el("span", { class: "chip bad" }, sample.outcome.replace("_", " ")),
      el("span", { class: `chip ${kinds[sample.finish] ?? ""}`, title: "finish reason" }, sample.finish.replace("_", " ")), versions,
      sample.turns ? el("span", { class: "chip" }, `${sample.turns.length} ${sample.turns.length === 1 ? "turn" : "turns"}`) : null,
      el("span", { class: "chip", title: sample.turns ? `sampled; plus ${sample.total - sample.count} environment tokens` : null }, `${sample.count} tokens`), el("span", { class: "chip", title: "mean log-prob of a token" }, `log-prob ${format(sample.logprob, "")}`),
      sample.trained ? null : el("span", { class: "chip" }, "not trained on")),
    sample.cause ? el("div", { class: "cause" }, sample.cause) : null,
    sample.note ? el("div", { class: "note" }, sample.note) : null);
}

const promptOf = (messages) => messages.flatMap((m) => [el("div", { class: "role" }, m.role), el("pre", { class: "text" }, m.content)]);

const BODIES = ".sample > .text, .sample > .turns";

// A conversation, turn by turn. Environment turns have another tint, because they were not sampled.
const conversation = (rows) => el("div", { class: "turns" }, ...rows.map(({ role, reward, body }) => el("div", { class: role === "assistant" ? "turn" : "turn answer" },
  el("div", { class: "role" }, role), body, reward == null ? null : el("div", { class: "earned", title: "reward of this turn" }, fixed(reward)))));

function textOf(sample) {
  const pre = (text) => el("pre", { class: "text" }, text);
  return sample.messages ? conversation(sample.messages.map(({ role, reward, content }) => ({ role, reward, body: pre(content) }))) : pre(sample.text);
}

// Shortens an element that is much higher than `height` pixels.
function clip(body, height) {
  if (body.scrollHeight <= height + 80) return;
  body.classList.add("clipped");
  body.style.maxHeight = `${height}px`;
  const more = el("button", { class: "more", onclick: () => { body.classList.remove("clipped"); body.style.maxHeight = ""; more.remove(); } }, "show all");
  body.after(more);
}

class Browser {
  constructor(root, overview, load) {
    this.index = overview.rollouts;
    this.load = load; // step -> promise of the step's groups
    this.place = 0; // in this.index
    this.groups = [];
    this.id = null; // id of the selected group
    this.turn = 0; // counts loads, so that a late result is dropped
    this.build(root, overview);
  }

  build(root, overview) {
    const stored = overview.stored === this.index.length ? "" : ` of ${overview.stored} stored`;
    this.output = el("output");
    this.slider = el("input", { type: "range", min: 0, max: this.index.length - 1, value: 0, "aria-label": "step", oninput: () => this.go(+this.slider.value) });
    const button = (label, title, action) => el("button", { title, onclick: action }, label);
    this.said = el("p", { class: "said", role: "status", hidden: true });
    this.side = el("div", { class: "groups" });
    this.pane = el("div", { class: "detail-pane" });
    root.append(el("div", { class: "browser" },
      el("div", { class: "controls" },
        el("div", { class: "step" }, button("‹", "previous step (←)", () => this.go(this.place - 1)), this.slider, button("›", "next step (→)", () => this.go(this.place + 1)), this.output)),
      this.said, el("div", { class: "columns" }, this.side, this.pane)),
      el("p", { class: "muted", style: "font-size:12.5px;margin-top:8px" },
        `This page has the rollouts of ${this.index.length}${stored} steps${stored && "; the others are in the folder rollouts/ of the run"}. Keys: ← → step, j k group.`));
    document.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input")) return;
    const around = (by) => {
      const shown = this.groups, place = shown.findIndex((group) => group.id === this.id);
      if (shown[place + by]) this.pick(shown[place + by].id);
    };
    const actions = { ArrowLeft: () => this.go(this.place - 1), ArrowRight: () => this.go(this.place + 1), j: () => around(1), k: () => around(-1) };
    if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  }

  async go(place, id = null) {
    if (!this.index[place]) return;
    this.place = place;
    this.slider.value = place;
    this.said.hidden = true;
    const { step, groups, signals } = this.index[place], turn = ++this.turn;
    this.output.textContent = `step ${step.toLocaleString("en")}`;
    const loaded = await this.load(step);
    if (turn !== this.turn) return;
    this.groups = loaded;
    this.total = groups;
    this.signals = signals;
    this.id = id ?? (loaded.some((group) => group.id === this.id) ? this.id : null);
    this.list();
  }

  // Opens the nearest step in the page; a message says if it is not the requested step.
  goStep(step, id = null) {
    let best = 0;
    this.index.forEach((entry, i) => { if (Math.abs(entry.step - step) < Math.abs(this.index[best].step - step)) best = i; });
    const going = this.go(best, id), shown = this.index[best].step;
    this.said.hidden = shown === step;
    this.said.textContent = `The rollouts of step ${step.toLocaleString("en")} are not in this page; step ${shown.toLocaleString("en")} is shown instead.`;
    return going;
  }

  list() {
    if (!this.groups.some((group) => group.id === this.id)) this.id = this.groups[0]?.id ?? null;
    const every = this.groups.flatMap((group) => group.rewards).filter((reward) => reward != null);
    const low = Math.min(0, ...every), high = Math.max(low + 1e-9, ...every);
    const part = this.groups.length < this.total ? `${this.groups.length} of the step's ${this.total} groups` : `${this.total} groups`;
    this.side.replaceChildren(el("div", { class: "head" }, `${part}; ${this.signals} of ${this.total} have different rewards, these come first`), ...this.groups.map((group) => this.entry(group, low, high)));
    this.detail();
  }

  entry(group, low, high) {
    const strip = svg("svg", { class: "strip" });
    strip.appendChild(svg("line", { class: "strip-line", x1: 0, x2: "100%", y1: 8, y2: 8 }));
    for (const reward of group.rewards) {
      if (reward != null) strip.appendChild(svg("circle", { class: "strip-dot", cx: `${(100 * (reward - low)) / (high - low)}%`, cy: 8, r: 5 }));
    }
    return el("button", { class: group.signal ? "group" : "group silent", "aria-pressed": String(group.id === this.id), "data-id": group.id, onclick: () => this.pick(group.id) },
      el("div", { class: "first" }, el("span", { class: "id", title: group.id }, group.id), el("span", { class: "mean" }, fixed(group.mean))), strip,
      el("div", { class: "second" }, el("span", {}, `± ${fixed(group.spread)}`), el("span", {}, `${group.count} samples`),
        !group.signal ? el("span", { class: "chip" }, "zero variance") : null, group.failed ? el("span", { class: "chip bad" }, `${group.failed} failed`) : null));
  }

  pick(id) {
    this.id = id;
    for (const node of this.side.querySelectorAll(".group")) {
      node.setAttribute("aria-pressed", String(node.dataset.id === id));
      if (node.dataset.id === id) node.scrollIntoView({ block: "nearest" });
    }
    this.detail();
  }

  detail() {
    const group = this.groups.find((other) => other.id === this.id);
    if (!group) return this.pane.replaceChildren(el("p", { class: "empty" }, "No group selected."));
    const also = this.index.flatMap((entry, place) => (place !== this.place && entry.ids.includes(group.id) ? [[place, entry.step]] : []));
    const prompt = el("div", { class: "prompt" }, ...promptOf(group.messages));
    const largest = Math.max(1e-9, ...group.samples.map((sample) => Math.abs(sample.advantage ?? 0)));
    const hidden = group.count - group.samples.length;
    const children = [
      el("h3", {}, group.id),
      el("div", { class: "facts" }, chip("mean reward", fixed(group.mean)), chip("spread", fixed(group.spread)), chip("samples", group.count), chip("trained on", group.trained),
        chip("prompt", `${group.prompt_tokens} tokens`), !group.signal ? el("span", { class: "chip warn" }, group.trained ? "zero variance: only KL and entropy" : "zero variance: not trained on") : null),
      also.length ? el("div", { class: "also" }, "same problem at step", ...also.slice(0, 30).map(([place, step]) => el("button", { onclick: () => this.go(place, group.id) }, step))) : null,
      el("details", { class: "box", open: true }, el("summary", {}, "prompt"), prompt),
      group.read ? el("details", { class: "box" }, el("summary", {}, "prompt as tokenized"), el("pre", { class: "text" }, group.read)) : null,
      el("details", { class: "box", open: group.answer.length < 400 && group.answer !== "null" }, el("summary", {}, "reference answer"), el("pre", { class: "text" }, group.answer)),
      ...this.folded(group.samples).map(([sample, count]) => this.sample(sample, largest, count)),
      hidden > 0 ? el("p", { class: "muted", style: "margin-top:10px" }, `${hidden} more samples of this group are in the folder rollouts/ of the run.`) : null];
    this.pane.replaceChildren(...children.filter((child) => child != null));
    clip(prompt, 200);
    for (const body of this.pane.querySelectorAll(BODIES)) clip(body, 340);
  }

  // Merges samples with equal text and reward, and counts them.
  folded(samples) {
    const of = new Map();
    for (const sample of samples) {
      const key = JSON.stringify([sample.text, sample.reward, sample.finish, sample.outcome, sample.trained]);
      of.set(key, [of.get(key)?.[0] ?? sample, (of.get(key)?.[1] ?? 0) + 1]);
    }
    return [...of.values()];
  }

  sample(sample, largest, count) {
    return el("article", { class: sample.trained ? "sample" : "sample unused" }, count > 1 ? el("div", { class: "verdict" }, `${count} ×`) : null, bar(sample, largest),
      textOf(sample));
  }
}
