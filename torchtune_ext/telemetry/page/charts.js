// Curves as inline SVG. All charts share one cursor, one zoom and one smoothing.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190, LEAD_HEIGHT = 300, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 22;

// Calls `then` after a node was resized, and when a section opens, so that it is never shown empty. The call is deferred,
// because a resize inside the observer's callback is an error.
function onResize(node, then) {
  new ResizeObserver(() => setTimeout(then)).observe(node);
  document.addEventListener("toggle", then, true);
}

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child != null)); // strings become text nodes, never markup
  return node;
}

function svg(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

function plain(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(+value.toPrecision(size >= 100 ? 4 : 3));
}

function format(value, unit) {
  if (value == null) return "–";
  if (unit === "percent") return `${+(100 * value).toPrecision(3)}%`;
  if (unit === "seconds") return value >= 120 ? `${+(value / 60).toPrecision(3)} min` : value < 0.1 && value > 0 ? `${+(1000 * value).toPrecision(2)} ms` : `${+value.toPrecision(3)} s`;
  if (unit === "bytes") return value >= 2 ** 30 ? `${+(value / 2 ** 30).toPrecision(3)} GiB` : value >= 2 ** 20 ? `${+(value / 2 ** 20).toPrecision(3)} MiB` : `${+(value / 1024).toPrecision(3)} KiB`;
  if (unit === "gib") return `${+value.toPrecision(3)} GiB`;
  if (unit === "int" || unit === "tok/s") return value >= 20 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
  return plain(value);
}

function linearTicks(low, high, wanted, base = 1) {
  const rough = (high - low) / wanted / base, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).reduce((a, b) => (Math.abs(Math.log(b / rough)) < Math.abs(Math.log(a / rough)) ? b : a)) * base;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}

function logTicks(low, high) {
  if (high / low < 6) return linearTicks(low, high, 4);
  const ticks = [], decades = Math.log10(high / low), each = Math.max(1, Math.ceil(decades / 5));
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    if (decades >= 1.5 && e % each) continue;
    for (const m of decades < 1.5 ? [1, 2, 5] : [1]) ticks.push(m * 10 ** e);
  }
  return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

// Exponential moving average of the present values, corrected for the bias towards the first value.
function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value == null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// The steps that a reading averages.
function averaged({ since, until }) {
  return since === until ? `step ${until.toLocaleString("en")}` : `mean of steps ${since.toLocaleString("en")}–${until.toLocaleString("en")}`;
}

const cursor = {
  charts: [], steps: [], step: null, zoom: null, weight: 0, onPick: null,
  move(step) {
    if (step === this.step) return;
    this.step = step;
    for (const chart of this.charts) chart.point(step);
  },
  redraw() {
    document.getElementById("reset-zoom").hidden = !this.zoom;
    for (const chart of this.charts) chart.draw();
  },
};

// Whether fewer than half of the steps have a value, for instance because evaluations are rare.
const isSparse = (values, steps) => values.filter((value) => value != null).length < steps.length / 2;

// Lines of one run have a label and a color; lines of several runs have the number of their run.
function lineOf(line, { runs, steps }) {
  const own = line.run == null ? { color: `var(--c${line.color})` } : { ...look(runs[line.run]), label: runs[line.run].label };
  return { ...line, ...own, sparse: isSparse(line.raw, steps) };
}

class Chart {
  constructor(panel, overview, lead = false) {
    this.panel = panel;
    this.steps = overview.steps;
    this.runs = overview.runs;
    this.height = HEIGHT;
    this.lines = panel.lines.map((line) => lineOf(line, overview));
    this.at = el("span", { class: "at" });
    this.numbers = this.lines.map(() => el("span", { class: "number" }));
    this.plot = el("div", { class: "plot" });
    this.node = el("figure", { class: lead ? "panel lead" : "panel" }, el("h3", {}, panel.title, this.at),
      panel.note ? el("p", { class: "note" }, panel.note) : null, el("div", { class: "legend" }, ...this.keys()), this.plot);
    this.width = 0;
    onResize(this.plot, () => {
      const width = Math.round(this.plot.clientWidth);
      if (!width || width === this.width) return;
      this.width = width;
      if (lead) this.height = width < 600 ? 220 : LEAD_HEIGHT;
      this.draw();
    });
  }

  keys() {
    return this.lines.map((line, i) => (line.key = line.run == null
      ? el("span", {}, el("i", { class: "key", style: `background:${line.color}` }), el("span", { class: "name" }, line.label), this.numbers[i])
      : el("span", { title: `${line.label}: ${averaged(line.reading)}` }, named(this.runs[line.run]), this.numbers[i])));
  }

  get shown() { return this.lines.filter((line) => !line.hidden); }

  // First and last index inside the zoom.
  span() {
    if (!cursor.zoom) return [0, this.steps.length - 1];
    const [low, high] = cursor.zoom;
    return [this.steps.findIndex((s) => s >= low), this.steps.length - 1 - [...this.steps].reverse().findIndex((s) => s <= high)];
  }

  domainY(first, last) {
    const { scale, zero, baseline, style, unit } = this.panel;
    let low = Infinity, high = -Infinity;
    const take = (value) => {
      if (value == null || (scale === "log" && value <= 0)) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    };
    for (let i = first; i <= last; i++) {
      if (style === "stack") take(this.lines.reduce((sum, line) => sum + (line.raw[i] ?? 0), 0));
      else for (const line of this.shown) for (const values of [line.raw, ...(line.band ?? [])]) take(values[i]);
    }
    if (low > high) return [0, 1];
    if (baseline != null) take(baseline);
    if (scale === "log") return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
    if (zero) low = Math.min(0, low);
    if (low === high) return zero || unit === "percent" ? [0, high || 1] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
    const pad = 0.06 * (high - low), top = unit === "percent" && high <= 1 ? Math.min(1, high + pad) : high + pad;
    return [zero && low === 0 ? 0 : low - pad, top];
  }

  draw() {
    for (const line of this.lines) line.key.hidden = line.hidden = choice.off.has(line.run);
    if (!this.width) return;
    const [first, last] = this.span(), { scale, unit, style, baseline } = this.panel;
    const [x0, x1] = [this.steps[first], Math.max(this.steps[last], this.steps[first] + 1)];
    const [y0, y1] = this.domainY(first, last), bottom = this.height - BOTTOM, right = this.width - RIGHT;
    const warp = scale === "log" ? Math.log : (value) => value;
    this.x = (step) => LEFT + ((step - x0) / (x1 - x0)) * (right - LEFT);
    this.y = (value) => bottom - ((warp(value) - warp(y0)) / (warp(y1) - warp(y0))) * (bottom - TOP);
    this.stepAt = (px) => x0 + ((px - LEFT) / (right - LEFT)) * (x1 - x0);
    const root = svg("svg", { viewBox: `0 0 ${this.width} ${this.height}`, role: "img", "aria-label": this.panel.title, style: `height:${this.height}px` });
    const add = (tag, attributes, text) => {
      const node = root.appendChild(svg(tag, attributes));
      if (text != null) node.textContent = text;
    };
    const base = unit === "bytes" ? 1024 ** Math.floor(Math.log(Math.max(y1, 1)) / Math.log(1024)) : 1;
    const ticks = scale === "log" ? logTicks(y0, y1) : linearTicks(y0, y1, 4, base);
    const close = new Set(ticks.map((tick) => format(tick, unit))).size < ticks.length; // whether three digits cannot distinguish the ticks
    for (const tick of ticks) {
      if (unit === "int" && !Number.isInteger(tick)) continue;
      const y = this.y(tick);
      add("line", { class: "gridline", x1: LEFT, x2: right, y1: y, y2: y });
      add("text", { x: LEFT - 7, y: y + 4, "text-anchor": "end" }, close && unit === "" ? String(+tick.toPrecision(6)) : format(tick, unit));
    }
    for (const tick of linearTicks(x0, x1, Math.max(2, Math.floor(this.width / 90))).filter(Number.isInteger)) {
      const near = right - this.x(tick) < 16;
      add("text", { x: near ? right : this.x(tick), y: this.height - 6, "text-anchor": near ? "end" : "middle" }, tick.toLocaleString("en"));
    }
    add("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom });
    if (baseline != null) add("line", { class: "baseline", x1: LEFT, x2: right, y1: this.y(baseline), y2: this.y(baseline) });
    if (style === "stack") this.drawStack(add, first, last);
    else this.drawLines(add, first, last);
    this.clip(root);
    this.marks = root.appendChild(svg("g"));
    this.plot.replaceChildren(root);
    this.root = root;
    this.listen(root);
    this.point(cursor.step);
  }

  // A smoothed curve may leave the range of the visible raw values.
  clip(root) {
    const id = `clip-${cursor.charts.indexOf(this)}`, clip = root.appendChild(svg("clipPath", { id }));
    clip.appendChild(svg("rect", { x: LEFT - 3, y: 0, width: this.width - LEFT - RIGHT + 6, height: this.height - BOTTOM + 3 }));
    for (const path of root.querySelectorAll("path")) path.setAttribute("clip-path", `url(#${id})`);
  }

  drawLines(add, first, last) {
    for (const { band, color, run } of this.shown) {
      if (!band) continue;
      const high = this.points(band[1], first, last), low = this.points(band[0], first, last);
      if (high.length && low.length) add("path", { class: "band", d: `M${high.join("L")}L${low.reverse().join("L")}Z`, style: `fill:${color}`, "data-run": run ?? "" });
    }
    for (const line of this.shown) {
      const weight = line.sparse ? 0 : cursor.weight;
      if (weight) this.trace(add, line.raw, first, last, line, "series raw", false);
      this.trace(add, smooth(line.raw, weight), first, last, line, "series", true);
    }
  }

  trace(add, values, first, last, { color, dash, run }, name, dots) {
    const points = this.points(values, first, last);
    if (!points.length) return;
    add("path", { class: name, d: `M${points.join("L")}`, style: `stroke:${color}${dash ? `;stroke-dasharray:${dash}` : ""}`, "data-run": run ?? "" });
    if (dots && points.length <= 40) for (const [x, y] of points) add("circle", { cx: x, cy: y, r: 2.4, style: `fill:${color}`, "data-run": run ?? "" });
  }

  // Pixels of the present values; of many values, only the lowest and highest per pixel column.
  points(values, first, last) {
    const all = [];
    for (let i = first; i <= last; i++) {
      if (values[i] == null || (this.panel.scale === "log" && values[i] <= 0)) continue;
      all.push([+this.x(this.steps[i]).toFixed(1), +this.y(values[i]).toFixed(1)]);
    }
    if (all.length < 3 * this.width) return all;
    const columns = new Map();
    for (const point of all) {
      const column = Math.round(point[0]), kept = columns.get(column);
      if (!kept) columns.set(column, [point, point]);
      else if (point[1] < kept[0][1]) kept[0] = point;
      else if (point[1] > kept[1][1]) kept[1] = point;
    }
    return [...columns.values()].flat();
  }

  drawStack(add, first, last) {
    let below = this.steps.map(() => 0);
    const each = Math.max(1, Math.floor((last - first) / (2 * this.width)));
    while (first < last && this.lines.every((line) => line.raw[first] == null)) first++; // step 0 has only an evaluation
    for (const line of this.lines) {
      // Sparse values, such as evaluations, are not spread over the steps between.
      const own = line.sparse ? line.raw.map((value) => value ?? 0) : smooth(line.raw, cursor.weight).map((value) => value ?? 0);
      const above = below.map((value, i) => value + own[i]), up = [], down = [];
      for (let i = first; i <= last; i += each) {
        const x = this.x(this.steps[i]).toFixed(1);
        up.push(`${x},${this.y(above[i]).toFixed(1)}`);
        down.push(`${x},${this.y(below[i]).toFixed(1)}`);
      }
      add("path", { class: "area", d: `M${up.join("L")}L${down.reverse().join("L")}Z`, style: `fill:${line.color}` });
      below = above;
    }
  }

  // The steps that the numbers in the legend refer to, while the pointer is not in a chart.
  when(means) { return this.runs ? "at the end" : averaged((means[0] ?? this.lines[0]).reading); }

  // The index of the value nearest to a step, inside the zoom.
  nearest(step) {
    let [best, last] = this.span();
    for (let i = best; i <= last; i++) if (Math.abs(this.steps[i] - step) < Math.abs(this.steps[best] - step)) best = i;
    return best;
  }

  // Shows the values at one step, or (null) the readings that the tiles also show.
  point(step) {
    if (!this.marks) return;
    const index = step == null ? null : this.nearest(step);
    const means = this.lines.filter(({ reading }) => reading.since !== reading.until), mixed = !this.runs && means.length && means.length < this.lines.length;
    this.at.textContent = index == null ? this.when(means) : `step ${this.steps[index].toLocaleString("en")}`;
    this.marks.replaceChildren();
    const visible = index != null && this.steps[index] >= this.stepAt(LEFT) - 1e-9 && this.steps[index] <= this.stepAt(this.width - RIGHT) + 1e-9;
    if (visible) {
      const x = this.x(this.steps[index]);
      this.marks.appendChild(svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM }));
    }
    this.lines.forEach((line, i) => {
      const place = line.sparse ? line.raw.findLastIndex((value, i) => value != null && i <= index) : index;
      const value = index == null ? line.reading.last : line.raw[place];
      const alone = index == null && mixed && line.reading.since === line.reading.until ? ` at step ${line.reading.until.toLocaleString("en")}` : "";
      this.numbers[i].replaceChildren(format(value, this.panel.unit), ...(alone ? [el("span", { class: "name" }, alone)] : []));
      if (visible && !line.hidden && value != null && this.panel.style !== "stack" && !(this.panel.scale === "log" && value <= 0) && this.x(this.steps[place]) >= LEFT) {
        this.marks.appendChild(svg("circle", { class: "dot", cx: this.x(this.steps[place]), cy: this.y(value), r: 4, style: `fill:${line.color}` }));
      }
    });
  }

  listen(root) {
    let start = null, box = null;
    const at = (event) => event.clientX - root.getBoundingClientRect().left;
    const nearest = (px) => this.steps[this.nearest(this.stepAt(px))];
    root.addEventListener("pointermove", (event) => {
      cursor.move(nearest(at(event)));
      if (start == null || Math.abs(at(event) - start) < 6) return;
      box ??= this.root.appendChild(svg("rect", { class: "zoom", y: TOP, height: this.height - TOP - BOTTOM }));
      box.setAttribute("x", Math.min(start, at(event)));
      box.setAttribute("width", Math.abs(at(event) - start));
    });
    root.addEventListener("pointerdown", (event) => { start = at(event); if (event.pointerType === "mouse") root.setPointerCapture(event.pointerId); });
    root.addEventListener("pointerup", (event) => {
      const from = start, to = at(event);
      start = null;
      if (!box) { if (from != null && cursor.onPick) cursor.onPick(nearest(to)); return; }
      const range = [from, to].map(this.stepAt).sort((a, b) => a - b);
      box.remove();
      box = null;
      if (cursor.steps.filter((step) => step >= range[0] && step <= range[1]).length >= 2) { cursor.zoom = range; cursor.redraw(); }
    });
    root.addEventListener("pointerleave", () => { if (start == null) cursor.move(null); });
    root.addEventListener("dblclick", () => { cursor.zoom = null; cursor.redraw(); });
  }
}
