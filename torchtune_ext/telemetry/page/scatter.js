// Of a sweep: each swept parameter against the metric, a point for each run.

const FAILED = 18; // pixels above the axis that belong to runs without a value

class Scatter {
  constructor(axis, sweep, overview) {
    this.axis = axis;
    this.sweep = sweep;
    this.overview = overview;
    this.unit = overview.target?.unit ?? "";
    this.points = sweep.points.filter(({ parameters }) => parameters[axis.key] != null);
    this.plot = el("div", { class: "plot" });
    this.tip = document.getElementById("tip");
    this.node = el("figure", { class: "panel" }, el("h3", {}, axis.label, el("span", { class: "at" }, axis.axis === "log" ? "log axis" : axis.axis === "category" ? "values" : "")), this.plot);
    this.width = 0;
    onResize(this.plot, () => {
      const width = Math.round(this.plot.clientWidth);
      if (!width || width === this.width) return;
      this.width = width;
      this.draw();
    });
  }

  draw() {
    const { axis, points } = this, height = 230, right = this.width - RIGHT, bottom = height - BOTTOM - 14;
    const root = svg("svg", { viewBox: `0 0 ${this.width} ${height}`, role: "img", "aria-label": `${this.sweep.metric} by ${axis.key}`, style: `height:${height}px` });
    const add = (tag, attributes, text) => {
      const node = root.appendChild(svg(tag, attributes));
      if (text != null) node.textContent = text;
      return node;
    };
    const valued = points.filter(({ value }) => value != null), floor = valued.length < points.length ? bottom - FAILED : bottom;
    const ends = valued.flatMap(({ value, low, high }) => [value, low ?? value, high ?? value]);
    let [y0, y1] = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
    const pad = 0.1 * (y1 - y0) || Math.abs(y1) * 0.1 || 1;
    [y0, y1] = [y0 - pad, y1 + pad];
    this.y = (value) => (value == null ? bottom - FAILED / 2 : floor - ((value - y0) / (y1 - y0)) * (floor - TOP));
    this.across(right);
    this.dodge();
    for (const tick of linearTicks(y0, y1, 4)) {
      add("line", { class: "gridline", x1: LEFT, x2: right, y1: this.y(tick), y2: this.y(tick) });
      add("text", { x: LEFT - 7, y: this.y(tick) + 4, "text-anchor": "end" }, format(tick, this.unit));
    }
    add("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom });
    let free = -Infinity;
    for (const [x, words] of this.ticks) {
      const wide = 3.2 * words.length, at = Math.min(Math.max(x, LEFT - 10 + wide), right + 8 - wide);
      if (at - wide < free) continue; // a label that would lie upon the one before it
      add("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 });
      add("text", { x: at, y: bottom + 17, "text-anchor": "middle" }, words);
      free = at + wide + 8;
    }
    add("text", { class: "axis-name", x: right, y: height - 3, "text-anchor": "end" }, axis.key.length > this.width / 8 ? axis.label : axis.key);
    for (const point of points) this.mark(add, point);
    this.plot.replaceChildren(root);
    root.addEventListener("pointermove", (event) => this.hover(event, root));
    root.addEventListener("pointerleave", () => { this.tip.hidden = true; choice.point(null); });
  }

  // Where a value of the parameter stands, and the ticks.
  across(right) {
    const { axis } = this, values = this.points.map(({ parameters }) => parameters[axis.key]), inner = [LEFT + 44, right - 44];
    if (axis.axis === "category") {
      const kinds = [...new Set(values.map(String))].sort((a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b)), each = (right - LEFT) / kinds.length;
      this.x = (value) => LEFT + (kinds.indexOf(String(value)) + 0.5) * each;
      const room = Math.max(3, Math.floor(each / 6.6));
      this.ticks = kinds.map((kind) => [this.x(kind), kind.length > room ? `${kind.slice(0, room - 1)}…` : kind]);
      return;
    }
    const warp = axis.axis === "log" ? Math.log : (value) => value, [low, high] = [Math.min(...values), Math.max(...values)];
    this.x = (value) => inner[0] + ((warp(value) - warp(low)) / (warp(high) - warp(low) || 1)) * (inner[1] - inner[0]);
    const kinds = [...new Set(values)].sort((a, b) => a - b);
    // A grid has ticks where its points are.
    const ticks = kinds.length <= 6 ? kinds : axis.axis === "log" ? logTicks(low, high) : linearTicks(low, high, 4);
    this.ticks = ticks.map((tick) => [this.x(tick), plain(tick)]);
  }

  // Points of one value of the parameter stand beside each other.
  dodge() {
    const columns = new Map();
    for (const point of this.points) {
      const key = `${this.x(point.parameters[this.axis.key])} ${point.value == null}`; // crosses have a row of their own
      columns.set(key, [...(columns.get(key) ?? []), point]);
    }
    const places = [...new Set([...columns.keys()].map(parseFloat))].sort((a, b) => a - b), near = Math.min(this.width / 2, ...places.slice(1).map((x, i) => x - places[i]));
    this.at = new Map([...columns].flatMap(([key, points]) => {
      const x = parseFloat(key);
      const each = Math.min(18, (0.8 * near) / points.length);
      return points.map((point, i) => [point, Math.min(Math.max(x + (i - (points.length - 1) / 2) * each, LEFT + 5), this.width - RIGHT - 5)]);
    }));
  }

  mark(add, point) {
    const x = this.at.get(point), y = this.y(point.value), color = point.setting == null ? "var(--faint)" : look(point.setting).color;
    if (point.value == null) {
      const size = 4, failed = point.state === "failed";
      if (failed) add("path", { class: "failed", d: `M${x - size},${y - size}L${x + size},${y + size}M${x - size},${y + size}L${x + size},${y - size}` });
      else add("circle", { class: "waiting", cx: x, cy: y, r: 4 });
      return;
    }
    if (point.low != null && point.high != null) add("line", { class: "spread", x1: x, x2: x, y1: this.y(point.low), y2: this.y(point.high), style: `stroke:${color}` });
    const best = point.id === this.sweep.best;
    if (best) add("circle", { class: "best", cx: x, cy: y, r: 9 });
    add("circle", { class: point.state === "finished" ? "point" : "point early", cx: x, cy: y, r: 4.6, style: `fill:${color}` });
    if (this.points.length <= 16 && point.setting != null) {
      const top = this.y(point.high ?? point.value) - (point.high == null ? 9 : 4);
      add("text", { class: "letter", x, y: Math.max(top, 9), "text-anchor": "middle", style: `fill:${color}` }, this.overview.settings[point.setting].letter);
    }
  }

  hover(event, root) {
    const box = root.getBoundingClientRect();
    const away = (point) => Math.hypot(this.at.get(point) - (event.clientX - box.left), this.y(point.value) - (event.clientY - box.top));
    const point = this.points.reduce((best, each) => (best == null || away(each) < away(best) ? each : best), null);
    this.tip.hidden = !point || away(point) > 30;
    choice.point(this.tip.hidden ? null : point.setting);
    if (this.tip.hidden) return;
    const { settings } = this.overview, range = point.low == null ? "" : `  ${between(point.low, point.high)}`;
    this.tip.replaceChildren(el("div", { class: "tip-head" }, ...(point.setting == null ? [] : [named(point.setting, settings[point.setting].letter), " "]), point.id, ` · ${point.state.replace("_", " ")}`),
      ...Object.entries(point.parameters).map(([key, value]) => el("div", { class: "tip-row" }, el("span", { class: "name" }, key), el("span", { class: "number" }, typeof value === "number" ? plain(value) : String(value)))),
      el("div", { class: "tip-row hot" }, el("span", { class: "name" }, this.sweep.metric), el("span", { class: "number" }, `${digits(point.value)}${range}`)),
      ...(point.cause ? [el("div", { class: "tip-head" }, point.cause)] : []));
    showTip(this.tip, event);
  }
}
