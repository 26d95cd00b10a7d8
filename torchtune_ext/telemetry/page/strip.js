// What engine, graders and trainer did when. The axis is time; zoom and cursor are those of the curves, in steps.

const ROWS = ["engine", "graders", "trainer"], SHADES = 8, ROW = 42, GAP = 8;
const PHASE_COLORS = { sample: 1, pack: 2, train: 3, publish: 4, eval: 5, save: 6, log: 7 };

class Strip extends Chart {
  constructor(data, steps) {
    super({ title: "What ran when", series: [], note: "Engine and graders: the stronger the shade, the more groups they work on. Trainer: its phases, "
      + "and a gap where it is in none. A dotted line: the run was stopped here, and went on." }, [], steps);
    this.data = data;
    this.node.classList.add("wide");
    this.colors = new Map(Object.keys(data.phases).map((name, i) => [name, `var(--c${PHASE_COLORS[name] ?? (i % 7) + 1})`]));
    this.shares = new Map(["engine", "graders", ...this.colors.keys()].map((name) => [name, el("span", { class: "number" })]));
    const color = (name) => this.colors.get(name) ?? "var(--ink)";
    this.node.querySelector(".legend").append(...[...this.shares].map(([name, number]) => el("span", {},
      el("i", { class: "key", style: `background:${color(name)}` }), el("span", { class: "name" }, name), number)));
    this.stretches = new Map(); // step -> the bins from its first beginning to its last end: a resumed run makes a step twice
    for (const [step, first, end] of data.steps) {
      const known = this.stretches.get(step) ?? [first, end];
      this.stretches.set(step, [Math.min(first, known[0]), Math.max(end, known[1])]);
    }
  }

  // First bin, and the bin behind the last one.
  window() {
    const [low, high] = cursor.zoom ?? [-Infinity, Infinity];
    const inside = [...this.stretches].filter(([step]) => step >= low && step <= high).map(([, bins]) => bins);
    if (!cursor.zoom || !inside.length) return [0, this.data.bins];
    return [Math.min(...inside.map((bins) => bins[0])), Math.max(...inside.map((bins) => bins[1]))];
  }

  // Mean of a row over the bins of each pixel.
  columns(values, first = this.first, end = this.end, count = this.width - LEFT - RIGHT) {
    return Array.from({ length: count }, (_, i) => {
      const from = first + (i * (end - first)) / count, to = Math.max(first + ((i + 1) * (end - first)) / count, from + 1e-9);
      let sum = 0;
      for (let bin = Math.floor(from); bin < to; bin++) sum += (values[bin] ?? 0) * (Math.min(to, bin + 1) - Math.max(from, bin));
      return sum / (to - from);
    });
  }

  draw() {
    if (!this.width) return;
    [this.first, this.end] = this.window();
    const root = svg("svg", { viewBox: `0 0 ${this.width} ${HEIGHT}`, role: "img", "aria-label": this.panel.title, style: `height:${this.height}px` });
    const right = this.width - RIGHT, top = (row) => TOP + row * (ROW + GAP);
    this.x = (bin) => LEFT + ((bin - this.first) / (this.end - this.first)) * (right - LEFT);
    const away = ([, first, end], bin) => Math.max(first - bin, bin - end, 0);
    this.stepAt = (px) => {
      const bin = this.first + ((px - LEFT) / (right - LEFT)) * (this.end - this.first);
      return this.data.steps.reduce((best, stretch) => (away(stretch, bin) < away(best, bin) ? stretch : best))[0];
    };
    const add = (tag, attributes, text) => {
      const node = root.appendChild(svg(tag, attributes));
      if (text != null) node.textContent = text;
    };
    ROWS.forEach((name, row) => {
      add("text", { x: LEFT - 7, y: top(row) + ROW / 2 + 4, "text-anchor": "end" }, name);
      add("rect", { class: "lane", x: LEFT, y: top(row), width: right - LEFT, height: ROW });
    });
    ["engine", "graders"].forEach((name, row) => this.shade(add, this.columns(this.data.works[name]), top(row)));
    this.stack(add, top(2));
    for (const cut of this.data.cuts.filter((bin) => bin > this.first && bin < this.end)) {
      add("line", { class: "cut", x1: this.x(cut), x2: this.x(cut), y1: TOP - 4, y2: top(2) + ROW + 4 });
    }
    this.axis(add, top(2) + ROW);
    this.marks = root.appendChild(svg("g"));
    this.plot.replaceChildren(root);
    this.root = root;
    this.listen(root);
    this.point(cursor.index);
  }

  // A row in shades of one color: one path for each shade.
  shade(add, columns, y) {
    const levels = columns.map((value) => (value > 0 ? Math.max(1, Math.round((value / 100) * SHADES)) : 0));
    for (let level = 1; level <= SHADES; level++) {
      let d = "";
      for (let i = 0; i < levels.length; i++) {
        if (levels[i] !== level) continue;
        const from = i;
        while (levels[i + 1] === level) i++;
        d += `M${LEFT + from},${y}h${i - from + 1}v${ROW}h${from - i - 1}z`;
      }
      if (d) add("path", { d, style: "fill:var(--ink)", opacity: (0.9 * level) / SHADES });
    }
  }

  // The phases of the trainer upon each other, as high as their share of the column.
  stack(add, y) {
    const below = new Array(this.width - LEFT - RIGHT).fill(0);
    for (const [name, color] of this.colors) {
      let d = "";
      this.columns(this.data.phases[name]).forEach((value, i) => {
        const height = (Math.min(value, 100 - below[i]) / 100) * ROW;
        if (height < 0.2) return;
        d += `M${LEFT + i},${(y + ROW - (below[i] / 100) * ROW).toFixed(1)}h1v${(-height).toFixed(1)}h-1z`;
        below[i] += (height / ROW) * 100;
      });
      if (d) add("path", { d, style: `fill:${color}`, "shape-rendering": "crispEdges" });
    }
  }

  // Time since the run began.
  axis(add, y) {
    const { seconds } = this.data, [low, high] = [this.first * seconds, this.end * seconds];
    const base = high > 7200 ? 3600 : high > 120 ? 60 : 1, unit = { 3600: "h", 60: "min", 1: "s" }[base];
    for (const tick of linearTicks(low, high, Math.max(2, Math.floor(this.width / 110)), base)) {
      const x = this.x(tick / seconds), near = this.width - RIGHT - x < 16;
      add("line", { class: "axis", x1: x, x2: x, y1: y, y2: y + 4 });
      add("text", { x: near ? this.width - RIGHT : x, y: HEIGHT - 6, "text-anchor": near ? "end" : "middle" }, `${+(tick / base).toPrecision(6)} ${unit}`);
    }
  }

  point(index) {
    if (!this.marks) return;
    const step = index == null ? null : this.steps[index], bins = this.stretches.get(step);
    const [from, to] = bins ?? [this.first, this.end], { works, phases, most, seconds } = this.data;
    this.at.textContent = bins ? `step ${step.toLocaleString("en")}, ${format((to - from) * seconds, "seconds")}` : "";
    this.marks.replaceChildren();
    if (bins && to > this.first && from < this.end) {
      const [x0, x1] = [Math.max(this.x(from), LEFT), Math.min(this.x(to), this.width - RIGHT)];
      this.marks.appendChild(svg("rect", { class: "here", x: x0, y: TOP - 4, width: Math.max(x1 - x0, 1.5), height: ROWS.length * (ROW + GAP) }));
    }
    for (const [name, number] of this.shares) {
      const [mean] = this.columns(works[name] ?? phases[name], from, to, 1);
      number.textContent = name in works ? `${format((mean / 100) * most[name], "")} of ${format(most[name], "int")} groups` : mean && mean < 0.1 ? "<0.1%" : `${mean.toFixed(1)}%`;
    }
  }
}
