// Tables whose rows are sorted by a click on a heading.

// columns: {label, title, number: align to the right, value: row -> what sorts it, cell: row -> what is shown}
// most: so many rows are shown at first.
function sortable(columns, rows, caption, most = Infinity) {
  const body = el("tbody"), heads = [], more = el("button", { class: "more", onclick: () => { most = Infinity; fill(); } }, `show all ${rows.length}`);
  let by = null, down = false;
  const lines = rows.map((row, i) => ({ row, i, node: el("tr", { "data-setting": row.setting }, ...columns.map((column) => {
    const shown = column.cell(row);
    const inside = Array.isArray(shown) ? shown : [shown ?? "–"];
    return el("td", { class: column.number ? "number" : column.kind ?? "" }, ...(column.kind === "code" ? [el("div", {}, ...inside)] : inside));
  })) }));
  const fill = () => {
    const key = (line) => columns[by].value(line.row), known = (value) => value != null && value === value;
    const order = by == null ? lines : [...lines].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (!known(x) || !known(y)) return known(y) - known(x) || a.i - b.i; // what has no value stays at the end
      return ((x > y) - (x < y)) * (down ? -1 : 1) || a.i - b.i;
    });
    body.replaceChildren(...order.slice(0, most).map((line) => line.node));
    more.hidden = order.length <= most;
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== by ? "none" : down ? "descending" : "ascending"));
  };
  columns.forEach((column, i) => {
    const pick = () => {
      if (by === i && down !== Boolean(column.number)) by = null; // a third click: the order of the page again
      else if (by === i) down = !down;
      else { by = i; down = Boolean(column.number); }
      fill();
    };
    const sorts = column.value && rows.length > 1;
    heads.push(el("th", { scope: "col", class: column.number ? "number" : column.kind ?? "", title: column.title }, ...(sorts ? [el("button", { onclick: pick }, ...[column.label].flat())] : [column.label].flat())));
  });
  fill();
  return el("div", { class: "table", tabindex: 0, role: "region", "aria-label": caption }, el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body), more);
}

// Numbers of one column have as many digits behind the point. `beside`: a number that stands beside it, whose size counts, too.
function digits(value, beside = 0) {
  if (value == null) return "–";
  const size = Math.max(Math.abs(value), Math.abs(beside ?? 0));
  if (size !== 0 && (size >= 100 || size < 1e-3)) return plain(value).replace("-", "−");
  if (value !== 0 && Math.abs(value) < 5e-4) return value > 0 ? "<0.001" : ">−0.001"; // beside zero, but not zero
  return value.toFixed(3).replace("-", "−");
}

const between = (low, high) => (low == null || high == null ? "–" : `${digits(low, high)} to ${digits(high, low)}`);

// An interval on the axis that all rows of a table share.
function whisker({ value, low, high }, [from, to], color) {
  const root = svg("svg", { class: "whisker", viewBox: "0 0 120 14" }), at = (x) => 6 + (108 * (x - from)) / (to - from || 1);
  root.append(svg("line", { class: "track", x1: 0, x2: 120, y1: 7, y2: 7 }));
  if (low != null && high != null) {
    root.append(svg("line", { class: "ends", x1: at(low), x2: at(high), y1: 7, y2: 7, style: `stroke:${color}` }));
    for (const end of [low, high]) root.append(svg("line", { class: "ends", x1: at(end), x2: at(end), y1: 3, y2: 11, style: `stroke:${color}` }));
  }
  root.append(svg("circle", { cx: at(value), cy: 7, r: 3.6, style: `fill:${color}` }));
  return root;
}
