// Curves of several runs: one line for each setting, with one legend for all charts, and one readout at the pointer.

const HUES = 8, DASHES = ["", "7 4", "2 4", "10 3 2 3", "14 3"], MANY = 8, BANDS = 4, END = 24, LINE = 12;

const ranks = new Map(); // setting -> its place among the looks: what is drawn at first has unbroken lines

function look(setting) {
  const rank = ranks.get(setting) ?? setting;
  return { color: `var(--s${(rank % HUES) + 1})`, dash: DASHES[Math.floor(rank / HUES) % DASHES.length] };
}

// A piece of the line of a setting, as the charts draw it.
function swatch(place) {
  const root = svg("svg", { class: "swatch", viewBox: "0 0 22 10" }), { color, dash } = look(place);
  root.append(svg("line", { x1: 1, x2: 21, y1: 5, y2: 5, style: `stroke:${color}${dash ? `;stroke-dasharray:${dash}` : ""}` }));
  return root;
}

const named = (place, letter) => el("span", { class: "named" }, swatch(place), el("b", {}, letter));

// Which settings are drawn, and which one is pointed at.
const choice = {
  off: new Set(), focus: null, listeners: [], // what else follows the legend
  set(off) {
    this.off = off;
    for (const then of this.listeners) then();
    cursor.redraw();
  },
  point(setting) {
    if (setting === this.focus) return;
    this.focus = setting;
    for (const chart of cursor.charts) chart.highlight();
    for (const button of document.querySelectorAll("#legend .setting")) button.classList.toggle("hot", setting != null && +button.dataset.setting === setting);
  },
};

class Overlay extends Chart {
  constructor(chart, overview, lead) {
    const lines = chart.lines.map(({ setting, mean, low, high, reading }) => {
      const place = overview.drawn[setting];
      return { setting: place, label: overview.settings[place].label, letter: overview.settings[place].letter, raw: mean, reading,
        sparse: isSparse(mean, overview.steps), band: low && [low, high], hidden: choice.off.has(place), ...look(place) };
    });
    super(chart, lines, overview.steps, lead);
    this.margin = RIGHT + END;
    this.tip = document.getElementById("tip");
  }

  keys() { return this.lines.map((line, i) => (line.key = el("span", {}, named(line.setting, line.letter), this.numbers[i]))); }

  draw() {
    for (const line of this.lines) line.hidden = choice.off.has(line.setting);
    super.draw();
    if (!this.width) return;
    this.ends();
    this.highlight();
  }

  drawLines(add, first, last) {
    super.drawLines(add, first, last);
    if (!this.shown.length) add("text", { x: (LEFT + this.width - this.margin) / 2, y: (TOP + this.height - BOTTOM) / 2, "text-anchor": "middle" }, "no setting that is turned on has it");
  }

  trace(add, values, first, last, line, name, dots) {
    // Behind more than a few smoothed lines, the raw ones would be a smear.
    if (!name.endsWith("raw") || this.shown.length <= BANDS) super.trace(add, values, first, last, line, name, dots && this.shown.length <= MANY);
  }

  // The letter of each line at its end, so that nobody has to tell colors apart. Letters that would overlap move apart.
  ends() {
    const [first, last] = this.span(), places = [];
    for (const line of this.shown) {
      const index = line.raw.findLastIndex((value, i) => value != null && i >= first && i <= last);
      if (index < 0 || (this.panel.scale === "log" && line.raw[index] <= 0)) continue;
      places.push({ line, x: this.x(this.steps[index]), y: this.y(smooth(line.raw, line.sparse ? 0 : cursor.weight)[index]) });
    }
    places.sort((a, b) => a.y - b.y);
    const floor = this.height - BOTTOM - 2, under = (x) => places.filter((place) => place.at != null && Math.abs(place.x - x) < END);
    for (const place of places) place.at = Math.max(place.y, TOP + LINE / 2, ...under(place.x).map((other) => other.at + LINE));
    for (const place of [...places].reverse()) {
      const below = places.slice(places.indexOf(place) + 1).filter((other) => Math.abs(other.x - place.x) < END);
      place.at = Math.min(place.at, floor, ...below.map((other) => other.at - LINE));
    }
    if (places.some(({ y, at }) => Math.abs(y - at) > 2 * LINE)) return; // so far from its line, a letter tells nothing
    for (const { line, x, at } of places) {
      const node = this.root.appendChild(svg("text", { class: "letter", x: x + 7, y: at + 4, style: `fill:${line.color}`, "data-setting": line.setting }));
      node.textContent = line.letter;
    }
  }

  highlight() {
    if (!this.root) return;
    const { focus } = choice;
    this.root.classList.toggle("crowded", this.shown.length > BANDS);
    this.root.classList.toggle("focused", focus != null && this.shown.some((line) => line.setting === focus));
    for (const node of this.root.querySelectorAll("[data-setting]")) node.classList.toggle("hot", +node.dataset.setting === focus);
  }

  // The value of a line at a step: of what is measured now and then, the newest one until there.
  valueAt(line, index) {
    if (!line.sparse) return line.raw[index];
    const last = line.raw.findLastIndex((value) => value != null);
    return index > last ? null : line.raw[line.raw.findLastIndex((value, i) => value != null && i <= index)];
  }

  point(index) {
    if (!this.marks) return;
    const shown = this.shown, few = shown.length <= MANY;
    this.at.textContent = index != null ? `step ${this.steps[index].toLocaleString("en")}` : few ? "at the end" : `${shown.length} settings`;
    this.marks.replaceChildren();
    const visible = index != null && this.steps[index] >= this.stepAt(LEFT) - 1e-9 && this.steps[index] <= this.stepAt(this.width - this.margin) + 1e-9;
    if (visible) {
      const x = this.x(this.steps[index]);
      this.marks.appendChild(svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM }));
    }
    this.lines.forEach((line, i) => {
      const value = index == null ? line.reading.last : this.valueAt(line, index);
      line.key.hidden = line.hidden || !few;
      line.key.title = index == null ? `${line.label}: ${averaged(line.reading)}` : line.label;
      this.numbers[i].textContent = format(value, this.panel.unit);
      if (line.hidden || !visible || value == null || (this.panel.scale === "log" && value <= 0)) return;
      const at = line.sparse ? line.raw.findLastIndex((other, i) => other != null && i <= index) : index;
      if (this.x(this.steps[at]) >= LEFT) this.marks.appendChild(svg("circle", { class: "dot", cx: this.x(this.steps[at]), cy: this.y(value), r: 3.4, style: `fill:${line.color}`, "data-setting": line.setting }));
    });
  }

  // All settings at the pointer's step, the highest first; the nearest line stands out in all charts.
  hover(event) {
    const index = cursor.index;
    if (index == null) return;
    const y = event.clientY - this.root.getBoundingClientRect().top;
    const there = this.shown.map((line) => ({ line, value: this.valueAt(line, index) })).filter(({ value }) => value != null && !(this.panel.scale === "log" && value <= 0));
    if (!there.length) return this.leave();
    const away = ({ value }) => Math.abs(this.y(value) - y), nearest = there.reduce((best, each) => (away(each) < away(best) ? each : best));
    choice.point(away(nearest) < 40 ? nearest.line.setting : null);
    const order = there.sort((a, b) => b.value - a.value), few = order.length <= 12 ? order : [...new Set([...order.slice(0, 11), nearest])];
    this.tip.replaceChildren(el("div", { class: "tip-head" }, `step ${this.steps[index].toLocaleString("en")}`),
      ...few.map(({ line, value }) => el("div", { class: line.setting === choice.focus ? "tip-row hot" : "tip-row" }, named(line.setting, line.letter),
        el("span", { class: "name" }, line.label), el("span", { class: "number" }, format(value, this.panel.unit)), this.range(line, index))),
      ...(few.length < order.length ? [el("div", { class: "tip-head" }, `and ${order.length - few.length} more`)] : []));
    showTip(this.tip, event);
  }

  range(line, index) {
    const at = line.sparse ? line.raw.findLastIndex((value, i) => value != null && i <= index) : index;
    if (!line.band || line.band[0][at] == null || line.band[1][at] == null) return null;
    return el("span", { class: "range" }, `${format(line.band[0][at], this.panel.unit)}–${format(line.band[1][at], this.panel.unit)}`);
  }

  leave() {
    this.tip.hidden = true;
    choice.point(null);
  }
}

function showTip(tip, event) {
  tip.hidden = false;
  const right = event.clientX + 16 + tip.offsetWidth < innerWidth - 8, below = event.clientY + 16 + tip.offsetHeight < innerHeight - 8;
  tip.style.left = `${right ? event.clientX + 16 : Math.max(8, event.clientX - 16 - tip.offsetWidth)}px`;
  tip.style.top = `${below ? event.clientY + 16 : Math.max(8, event.clientY - 16 - tip.offsetHeight)}px`;
}

// A button for each setting that has curves: a click turns it on or off, a double click leaves it alone.
function legend(overview) {
  const root = document.getElementById("legend"), { settings, drawn, shown } = overview;
  choice.off = new Set(settings.keys());
  for (const place of shown) choice.off.delete(place);
  const count = (place) => {
    const { runs, seeds } = settings[place];
    return runs.length > 1 ? el("span", { class: "muted" }, seeds === runs.length ? `${seeds} seeds` : `${runs.length} runs, ${seeds} ${seeds === 1 ? "seed" : "seeds"}`) : null;
  };
  const buttons = drawn.map((place) => el("button", { class: "setting", "data-setting": place, title: `${settings[place].label}\n${settings[place].runs.join("\n")}`,
    onclick: () => { const off = new Set(choice.off); if (!off.delete(place)) off.add(place); choice.set(off); },
    ondblclick: () => choice.set(new Set(drawn.filter((other) => other !== place))),
    onpointerenter: () => choice.point(place), onpointerleave: () => choice.point(null) }, named(place, settings[place].letter), el("span", { class: "name" }, settings[place].label), count(place)));
  const all = el("button", { class: "plain", onclick: () => choice.set(new Set()) }, "all"), none = el("button", { class: "plain", onclick: () => choice.set(new Set(drawn)) }, "none");
  const best = shown.length < drawn.length ? el("button", { class: "plain", onclick: () => choice.set(new Set(drawn.filter((place) => !shown.includes(place)))) }, `best ${shown.length}`) : null;
  root.append(...buttons, ...(drawn.length > 1 ? [el("span", { class: "sets" }, all, none, best ?? "")] : []));
  const mark = () => buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(!choice.off.has(drawn[i]))));
  choice.listeners.push(mark);
  mark();
}
