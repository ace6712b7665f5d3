// The fences, sorted by resource name, in pages.

import { get } from "./api.js";
import { lookUp } from "./dialogs.js";
import { element, name, notice, number, time, token } from "./words.js";

const EVERY_MS = 5_000;

const body = document.getElementById("fences-rows");
const summary = document.getElementById("fences-summary");
const failed = document.getElementById("fences-error");
const back = document.getElementById("fences-back");
const next = document.getElementById("fences-next");
const text = document.getElementById("fences-text");
const floors = document.getElementById("floors");

/** For each page up to the current one, the resource after which it starts. */
let pages = [null];
let nextAfter = null;
let prefix = "";
let timer = null;
let asking = 0;

/** The rows on the page, by resource. Their elements are reused, so that the focus stays. */
const rows = new Map();

export async function refresh() {
  clearTimeout(timer);
  const asked = (asking += 1);
  try {
    const page = await get("fences", { prefix, after: pages.at(-1) });
    if (asked !== asking) return;
    draw(page);
    if (floors.open) await drawFloors();
    notice(failed, null);
  } catch (error) {
    if (asked !== asking) return;
    notice(failed, error);
  }
  if (!document.hidden) timer = setTimeout(refresh, EVERY_MS);
}

function draw(page) {
  const shown = new Set();
  let place = body.firstElementChild;
  for (const fence of page.fences) {
    shown.add(fence.resource);
    const row = rows.get(fence.resource) ?? add(fence.resource);
    put(row.dead, fence.max_token, () => token(fence.max_token));
    put(row.granted, fence.announced, () =>
      fence.announced === null ? element("span", { class: "soft" }, "none") : token(fence.announced),
    );
    put(row.used, time(fence.idle_ms), () => `${time(fence.idle_ms)} ago`);
    if (row.element === place) place = place.nextElementSibling;
    else body.insertBefore(row.element, place);
  }
  for (const [resource, row] of rows) {
    if (shown.has(resource)) continue;
    const hadFocus = row.element.contains(document.activeElement);
    row.element.remove();
    rows.delete(resource);
    if (hadFocus) document.getElementById("fences-title").focus();
  }
  nextAfter = page.after;
  back.disabled = pages.length === 1;
  next.disabled = nextAfter === null;
  const count = page.fences.length;
  const begin = prefix === "" ? "" : " that start with this";
  const said = count === 0 ? `No fences${begin && " of resources"}${begin}.` : `${number(count)} on this page${begin}, sorted by name.`;
  if (summary.textContent !== said) summary.textContent = said;
}

function put(cell, value, node) {
  if (cell.dataset.value === String(value)) return;
  cell.dataset.value = String(value);
  cell.replaceChildren(node());
}

function add(resource) {
  const [dead, granted, used] = ["Highest stale token", "Last announced grant", "Last used"].map((label) =>
    element("td", { "data-label": label }),
  );
  const open = element("button", { type: "button", class: "small", "aria-label": `Look up ${resource}` }, "Look up");
  open.addEventListener("click", () => lookUp(resource));
  const made = element("tr", {}, element("th", { scope: "row" }, name(resource)), dead, granted, used, element("td", { class: "action" }, open));
  const row = { element: made, dead, granted, used };
  rows.set(resource, row);
  return row;
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

floors.addEventListener("toggle", refresh);
back.addEventListener("click", () => {
  pages.pop();
  refresh();
});
next.addEventListener("click", () => {
  if (nextAfter === null) return;
  pages.push(nextAfter);
  refresh();
});
document.getElementById("fences-search").addEventListener("submit", (event) => {
  event.preventDefault();
  if (event.submitter?.value === "begins") {
    prefix = text.value;
    pages = [null];
    refresh();
  } else if (text.value !== "") {
    lookUp(text.value);
  }
});
text.addEventListener("input", () => {
  if (text.value === "" && prefix !== "") {
    prefix = "";
    pages = [null];
    refresh();
  }
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
