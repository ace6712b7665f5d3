// Charts of the number of events of each kind in the last five minutes, with one bar for every five
// seconds.

import { element, number } from "./words.js";

const svg = "http://www.w3.org/2000/svg";
const BAR_SECONDS = 5;
const HEIGHT = 36;

const charts = [
  { title: "Admitted", kind: "admitted", what: "tokens of fenced requests", tone: "good" },
  { title: "Stale", kind: "stale", what: "refused: the token is stale", tone: "bad" },
  { title: "Forged", kind: "forged", what: "refused: invalid signature", tone: "bad" },
  { title: "Granted", kind: "granted", what: "leases", tone: "accent" },
  { title: "Queued", kind: "waiting", what: "requests that waited for a lease", tone: "warn" },
];

let kinds = [];
let keptSeconds = 300;
const seconds = new Map();

const drawn = charts.map((chart) => {
  const picture = document.createElementNS(svg, "svg");
  picture.setAttribute("preserveAspectRatio", "none");
  picture.setAttribute("role", "img");
  const bars = document.createElementNS(svg, "path");
  picture.append(bars);
  const count = element("strong", { class: "count" }, "0");
  const tile = element(
    "li",
    { class: "tile", "data-tone": chart.tone },
    element("span", { class: "label" }, chart.title),
    count,
    element("span", { class: "what" }, chart.what),
    picture,
  );
  return { ...chart, picture, bars, count, tile };
});
document.getElementById("counts").append(...drawn.map((chart) => chart.tile));

/** Sets the kinds that the process counts. Clears the counts if the process has changed. */
export function begin(hello) {
  kinds = hello.kinds;
  keptSeconds = hello.kept_seconds;
  if (!hello.goes_on) seconds.clear();
}

export function take(news) {
  for (const [second, counts] of news.seconds) seconds.set(second, counts);
  draw(news.second);
}

function draw(now) {
  // Bars start at multiples of five seconds, so that their heights do not change as they move.
  const end = Math.floor(now / BAR_SECONDS) + 1;
  const count = Math.floor(keptSeconds / BAR_SECONDS);
  const from = end - count;
  for (const second of seconds.keys()) {
    if (second < from * BAR_SECONDS) seconds.delete(second);
  }
  for (const chart of drawn) {
    const bars = new Array(count).fill(0);
    const place = kinds.indexOf(chart.kind);
    for (const [second, counts] of seconds) {
      const bar = Math.floor(second / BAR_SECONDS) - from;
      if (bar >= 0 && bar < count) bars[bar] += counts[place] ?? 0;
    }
    const all = bars.reduce((sum, one) => sum + one, 0);
    const peak = Math.max(...bars);
    const scale = HEIGHT / Math.max(peak, 1);
    const path = bars
      .map((one, at) => (one === 0 ? "" : `M${at * 4},${HEIGHT}v${-Math.max(one * scale, 2).toFixed(1)}h3V${HEIGHT}z`))
      .join("");
    chart.bars.setAttribute("d", path);
    chart.picture.setAttribute("viewBox", `0 0 ${count * 4} ${HEIGHT}`);
    chart.picture.setAttribute(
      "aria-label",
      `${chart.title}: ${all} in the last five minutes, at most ${peak} in five seconds`,
    );
    chart.tile.classList.toggle("none", all === 0);
    const text = number(all);
    if (chart.count.textContent !== text) chart.count.textContent = text;
  }
}
