// Of a sweep: a parameter against the result, a point for each run.

const FEW_VALUES = 8; // So many values of a parameter stand at equal distances, as those of a grid do.
const SPAN = 20; // Of more values, the axis is logarithmic where the largest is so many times the smallest.
const FAILED = 18; // pixels above the axis for runs without a result

function scatter(key, rows, { target, settings, best }) {
  const plot = el("div", { class: "plot" }), height = 230, bottom = height - BOTTOM, floor = bottom - FAILED;
  const valueOf = ({ parameters: { [key]: value } }) => (typeof value === "object" ? JSON.stringify(value) : value);
  const kinds = [...new Set(rows.map(valueOf))].sort((a, b) => (a > b) - (a < b));
  const even = kinds.length <= FEW_VALUES || kinds.some((value) => typeof value !== "number");
  const log = !even && kinds[0] > 0 && kinds.at(-1) > SPAN * kinds[0];
  const place = even ? (value) => kinds.indexOf(value) : log ? Math.log : (value) => value;
  const [x0, x1] = even ? [-0.5, kinds.length - 0.5] : [place(kinds[0]), place(kinds.at(-1))];
  const ticksX = even ? kinds : log ? logTicks(kinds[0], kinds.at(-1)) : linearTicks(x0, x1, 4);
  const ends = rows.flatMap(({ result }) => (result ? [result.value, result.low ?? result.value, result.high ?? result.value] : []));
  const pad = 0.1 * (Math.max(...ends) - Math.min(...ends)) || 0.1;
  const [y0, y1] = ends.length ? [Math.min(...ends) - pad, Math.max(...ends) + pad] : [0, 1];
  const y = (value) => floor - ((value - y0) / (y1 - y0)) * (floor - TOP);
  const text = (value) => (typeof value === "number" ? plain(value) : String(value));

  const draw = () => {
    const right = plot.clientWidth - RIGHT, x = (value) => LEFT + 10 + ((place(value) - x0) / (x1 - x0 || 1)) * (right - LEFT - 20);
    const viewBox = `0 0 ${plot.clientWidth} ${height}`, style = `height:${height}px`;
    const root = svg("svg", { viewBox, role: "img", "aria-label": `${target.metric} by ${key}`, style });
    const add = (tag, attributes, words) => {
      const node = root.appendChild(svg(tag, attributes));
      if (words != null) node.textContent = words;
      return node;
    };
    for (const tick of linearTicks(y0, y1, 4)) {
      add("line", { class: "gridline", x1: LEFT, x2: right, y1: y(tick), y2: y(tick) });
      add("text", { x: LEFT - 7, y: y(tick) + 4, "text-anchor": "end" }, format(tick, target.unit));
    }
    add("line", { class: "axis", x1: LEFT, x2: right, y1: bottom, y2: bottom });
    const room = Math.max(3, Math.floor((right - LEFT) / ticksX.length / 6.6));
    for (const tick of ticksX) add("text", { x: x(tick), y: bottom + 16, "text-anchor": "middle" }, text(tick).slice(0, room));
    for (const row of rows) {
      // Runs of one value stand beside each other.
      const beside = rows.filter((other) => valueOf(other) === valueOf(row) && !other.result === !row.result);
      const at = x(valueOf(row)) + (beside.indexOf(row) - (beside.length - 1) / 2) * Math.min(14, (0.7 * (right - LEFT)) / rows.length);
      const { result, setting, state } = row;
      if (!result) {
        const failed = state === "failed";
        add("text", { class: failed ? "failed" : "", x: at, y: bottom - 5, "text-anchor": "middle" }, failed ? "✕" : "○");
        continue;
      }
      const { letter } = settings[setting], { color } = look(setting);
      if (result.low != null) add("line", { class: "spread", x1: at, x2: at, y1: y(result.low), y2: y(result.high), style: `stroke:${color}` });
      if (setting === best) add("circle", { class: "best", cx: at, cy: y(result.value), r: 9 });
      if (rows.length <= 16) add("text", { class: "letter", x: at, y: y(result.high ?? result.value) - 11, "text-anchor": "middle", style: `fill:${color}` }, letter);
      const mark = add("circle", { cx: at, cy: y(result.value), r: 4.6, class: "point", style: `fill:${color}` });
      mark.addEventListener("pointerenter", () => choice.point(setting));
      mark.addEventListener("pointerleave", () => choice.point(null));
      const title = `${letter} ${row.name}, ${state}\n${key} ${text(valueOf(row))}\n${target.metric} ${digits(result.value)}`;
      mark.appendChild(svg("title")).textContent = title;
    }
    plot.replaceChildren(root);
  };
  let width = 0;
  onResize(plot, () => {
    if (plot.clientWidth && plot.clientWidth !== width) draw(width = plot.clientWidth);
  });
  return el("figure", { class: "panel" }, el("h3", {}, key, el("span", { class: "at" }, log ? "log axis" : "")), plot);
}
