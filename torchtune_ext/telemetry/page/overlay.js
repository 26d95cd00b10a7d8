// Curves of several runs: a line for each setting, and one legend for all charts.

const HUES = 8, DASHES = ["", "7 4", "2 4", "10 3 2 3", "14 3"]; // the best settings have unbroken lines
const BANDS = 4; // Where more settings are drawn, only the one that is pointed at has its band.
const END = 24, LINE = 12; // pixels for the letters at the ends of the lines

// Which settings are drawn, which one is pointed at, and how each looks.
const choice = {
  off: new Set(), focus: null, ranks: [],
  set(off) {
    this.off = off;
    for (const button of this.buttons()) button.setAttribute("aria-pressed", String(!off.has(+button.dataset.setting)));
    cursor.redraw();
  },
  point(setting) {
    if (setting === this.focus) return;
    this.focus = setting;
    for (const chart of cursor.charts) chart.highlight();
    for (const button of this.buttons()) button.classList.toggle("hot", +button.dataset.setting === setting);
  },
  buttons: () => document.querySelectorAll("#legend .setting"),
};

function look(setting) {
  const rank = choice.ranks[setting];
  return { color: `var(--s${(rank % HUES) + 1})`, dash: DASHES[Math.floor(rank / HUES) % DASHES.length] };
}

// A piece of the line of a setting, and its letter.
function named(place, letter) {
  const root = svg("svg", { class: "swatch", viewBox: "0 0 22 10" }), { color, dash } = look(place);
  root.append(svg("line", { x1: 1, x2: 21, y1: 5, y2: 5, style: `stroke:${color}`, "stroke-dasharray": dash }));
  return el("span", { class: "named" }, root, el("b", {}, letter));
}

class Overlay extends Chart {
  constructor(chart, { settings, steps }, lead) {
    const lines = chart.lines.map(({ setting, mean, band, reading }) => {
      const { label, letter } = settings[setting];
      return { setting, label, letter, raw: mean, band, reading, sparse: isSparse(mean, steps), ...look(setting) };
    });
    super(chart, lines, steps, lead);
    this.margin = RIGHT + END;
  }

  keys() {
    return this.lines.map((line, i) => {
      const title = `${line.label}: ${averaged(line.reading)}`;
      return (line.key = el("span", { title }, named(line.setting, line.letter), this.numbers[i]));
    });
  }

  when() { return "at the end"; }

  draw() {
    for (const line of this.lines) line.key.hidden = line.hidden = choice.off.has(line.setting);
    super.draw();
    if (!this.width) return;
    this.ends();
    this.highlight();
  }

  // The letter of each line beside its end, so that nobody has to tell colors apart. Letters that would overlap move apart.
  ends() {
    const [first, last] = this.span(), places = [];
    for (const line of this.shown) {
      const index = line.raw.findLastIndex((value, i) => value != null && i >= first && i <= last);
      if (index < 0 || (this.panel.scale === "log" && line.raw[index] <= 0)) continue;
      places.push({ line, y: this.y(smooth(line.raw, line.sparse ? 0 : cursor.weight)[index]) });
    }
    places.sort((a, b) => a.y - b.y);
    places.forEach((place, i) => { place.y = Math.max(place.y, i ? places[i - 1].y + LINE : TOP); });
    places.reverse().forEach((place, i) => { place.y = Math.min(place.y, i ? places[i - 1].y - LINE : this.height - BOTTOM); });
    for (const { line, y } of places) {
      const x = this.width - this.margin + 7, style = `fill:${line.color}`;
      const node = this.root.appendChild(svg("text", { class: "letter", x, y: y + 4, style, "data-setting": line.setting }));
      node.textContent = line.letter;
    }
  }

  highlight() {
    if (!this.root) return;
    this.root.classList.toggle("crowded", this.shown.length > BANDS);
    this.root.classList.toggle("focused", this.shown.some((line) => line.setting === choice.focus));
    for (const node of this.root.querySelectorAll("[data-setting]")) node.classList.toggle("hot", +node.dataset.setting === choice.focus);
  }
}

// A button for each setting that has curves: a click turns it on or off, a double click shows it alone.
function legend({ settings }, drawn) {
  const button = (place) => {
    const { letter, label, runs } = settings[place];
    const toggle = () => {
      const off = new Set(choice.off);
      if (!off.delete(place)) off.add(place);
      choice.set(off);
    };
    return el("button", { class: "setting", "data-setting": place, title: `${label}\n${runs.join("\n")}`, onclick: toggle,
      ondblclick: () => choice.set(new Set(drawn.filter((other) => other !== place))),
      onpointerenter: () => choice.point(place), onpointerleave: () => choice.point(null) },
    named(place, letter), el("span", { class: "name" }, label), runs.length > 1 ? el("span", { class: "muted" }, `${runs.length} runs`) : null);
  };
  const plain = (words, off) => el("button", { class: "plain", onclick: () => choice.set(new Set(off)) }, words);
  document.getElementById("legend").append(...drawn.map(button), plain("all", []), plain("none", drawn));
}
