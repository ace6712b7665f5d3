// The fences, sorted by resource name, in pages.

import { get } from "./api.js";
import { lookUp } from "./dialogs.js";
import { pager } from "./pager.js";
import { element, name, number, time, token } from "./words.js";

const text = document.getElementById("fences-text");
const floors = document.getElementById("floors");

let prefix = "";

export const fences = pager("fences", {
  intervalMs: 5_000,
  async load(after) {
    const page = await get("fences", { prefix, after });
    if (floors.open) await drawFloors();
    return { items: page.fences, next: page.after, summary: summary(page, after) };
  },
  key: (fence) => fence.resource,
  add,
  update,
});

function summary(page, after) {
  const count = page.fences.length;
  const begin = prefix === "" ? "" : ` that start with “${prefix}”`;
  if (count > 0) return `${number(count)} on this page${begin}, sorted by name.`;
  if (after !== null || page.after !== null) return "None on this page.";
  return `No fences${begin && " of resources"}${begin}.`;
}

function add({ resource }) {
  const [highest, granted, used] = ["Highest stale token", "Last announced grant", "Last used"].map((label) =>
    element("td", { "data-label": label }),
  );
  const open = element("button", { type: "button", class: "small", "aria-label": `Look up ${resource}` }, "Look up");
  open.addEventListener("click", () => lookUp(resource));
  const made = element("tr", {}, element("th", { scope: "row" }, name(resource)), highest, granted, used, element("td", { class: "action" }, open));
  return { element: made, highest, granted, used };
}

function update(row, fence) {
  put(row.highest, fence.max_token, () => token(fence.max_token));
  put(row.granted, fence.announced, () =>
    fence.announced === null ? element("span", { class: "soft" }, "none") : token(fence.announced),
  );
  put(row.used, time(fence.idle_ms), () => `${time(fence.idle_ms)} ago`);
}

function put(cell, value, node) {
  if (cell.dataset.value === String(value)) return;
  cell.dataset.value = String(value);
  cell.replaceChildren(node());
}

async function drawFloors() {
  const all = await get("floors");
  const place = document.getElementById("floors-summary");
  place.textContent =
    all.length === 0
      ? "None of the 256 partitions has a floor: no row was ever removed."
      : `Partitions with a floor: ${all.length} of 256.`;
  const list = document.getElementById("floors-list");
  list.replaceChildren(
    ...all.map((floor) => element("li", {}, element("span", { class: "soft" }, `partition ${floor.partition}`), " ", token(floor.floor))),
  );
}

floors.addEventListener("toggle", fences.refresh);
document.getElementById("fences-search").addEventListener("submit", (event) => {
  event.preventDefault();
  if (event.submitter?.value === "begins") {
    prefix = text.value;
    fences.restart();
  } else if (text.value !== "") {
    lookUp(text.value);
  }
});
text.addEventListener("input", () => {
  if (text.value === "" && prefix !== "") {
    prefix = "";
    fences.restart();
  }
});
