"""Parse a page, and open copies of it in one headless browser: narrow and wide, light and dark."""

import base64
import gzip
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

WIDTHS = (400, 900, 1600)
MISSING = shutil.which("chromium") is None

DEADLINE_S = 240.0  # for one start of the browser, on a machine that is busy

# Once it is drawn, each copy posts `probe`, the fields of an object, to the outer page. `before` runs first. The browser's
# virtual clock jumps while it is idle, although its other threads may still unpack or draw. So the probe polls, with some
# work between two polls, which takes real time.
_PROBE = """<script>
const faults = [];
addEventListener("error", (event) => faults.push(event.message));
addEventListener("unhandledrejection", (event) => faults.push(String(event.reason)));
const fits = (svg) => svg && Math.abs(svg.viewBox.baseVal.width - svg.clientWidth) < 2;
const drawn = () => document.documentElement.dataset.ready != null && [...document.querySelectorAll(".plot")].every((node) => node.closest("details:not([open])") || fits(node.querySelector("svg")));
const later = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const settled = async () => {
  for (let look = 0, work = 0; look < 300 && !drawn(); look++) {
    for (let i = 0; i < 3e6; i++) work += Math.sqrt(i);
    await later(20);
  }
  await later(100);
};
(async () => {
  await settled();
  const text = (where) => document.querySelector(where)?.textContent;
  %(before)s
  parent.postMessage({ faults, width: innerWidth, theme: document.documentElement.dataset.theme,
    over: document.documentElement.scrollWidth - innerWidth, trouble: document.getElementById("trouble").hidden, hash: location.hash, %(probe)s }, "*");
})();
</script></body>"""

_AROUND = """<body style="margin:0">{frames}<script>
const told = [];
addEventListener("message", (event) => {{
  told.push(event.data);
  if (told.length < {count}) return;
  const node = document.createElement("pre");
  node.id = "told";
  node.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(told))));
  document.body.append(node);
}});
</script></body>"""


def opened(page: Path, probe: str, before: str = "", place: str = "") -> tuple[dict[tuple[int, str], dict], str]:
    """Return the probe of each copy of `page`, by width and theme, and the browser's console output. The page is modified: it
    contains the probe. `place` is appended to its address."""
    page.write_text(
        page.read_text().replace("</body>", _PROBE % {"probe": probe.strip().rstrip(","), "before": before})
    )
    # All frames overlap, since a browser does not draw outside its window.
    frames = "".join(f'<iframe src="{page.name}#theme={theme}{place}" style="position:absolute;top:0;left:0;border:0;width:{width}px;height:1000px"></iframe>'
                     for width in WIDTHS for theme in ("light", "dark"))  # fmt: skip
    around = page.with_name(f"around_{page.name}")
    around.write_text(_AROUND.format(frames=frames, count=2 * len(WIDTHS)))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1600,1000",
               f"--user-data-dir={page.parent}/profile", "--virtual-time-budget=60000", "--enable-logging=stderr", "--dump-dom",
               f"file://{around}"]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    match = re.search(r'<pre id="told">([^<]*)</pre>', ended.stdout)
    assert match, ended.stderr
    return {(copy["width"], copy["theme"]): copy for copy in json.loads(base64.b64decode(match[1]))}, ended.stderr


class Scripts(HTMLParser):
    """The script elements and the title of a page, as a browser parses them."""

    def __init__(self, page):
        super().__init__()
        self.scripts, self.title, self.tag, self.tags = [], "", None, []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tag = tag
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append([dict(attrs).get("id"), ""])

    def handle_endtag(self, tag):
        self.tag = None

    def handle_data(self, data):
        if self.tag == "script":
            self.scripts[-1][1] += data
        if self.tag == "title":
            self.title += data

    def data(self):
        return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in self.scripts if name}
